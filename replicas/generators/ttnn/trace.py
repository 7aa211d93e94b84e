"""Capture of a call's device commands and their replay; the only user of ttnn's traces.

A captured call reads and writes the same device memory in every replay: its inputs are refreshed in
place before, and its outputs are valid until the next replay of any trace of the device. Memory
freed during the capture is used by replays. So after the first capture nothing that must outlive a
replay may be allocated on the device, and every program must have been compiled before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import ttnn

if TYPE_CHECKING:
    from collections.abc import Callable

    Output = TypeVar("Output")

_QUEUE = 0
"""Command queue of captures and replays; shared with all other commands, to keep their order."""


class Tracer(Protocol):
    """Factory and owner of traces."""

    def capture(self, device: ttnn.MeshDevice, call: Callable[[], Output]) -> Callable[[], Output]:
        """Record the commands that ``call`` sends to ``device``.

        Args:
            device: The lane.
            call: A call that only uses tensors on the device and compiled programs.

        Returns:
            A function that replays the commands without waiting, and returns the outputs of
            ``call``.
        """
        ...

    def release(self) -> None:
        """Free every trace; none may be replayed afterwards. May be called again."""
        ...


class NoTrace:
    """Tracer that records nothing; a replay is the call itself."""

    def capture(self, device: ttnn.MeshDevice, call: Callable[[], Output]) -> Callable[[], Output]:
        """Return ``call``."""
        return call

    def release(self) -> None:
        """Do nothing, as there are no traces."""


class TtnnTracer:
    """Traces in the device's trace region. Owner: the traces, until ``release``."""

    def __init__(self) -> None:
        self._traces: list[tuple[ttnn.MeshDevice, ttnn.MeshTraceId]] = []

    def capture(self, device: ttnn.MeshDevice, call: Callable[[], Output]) -> Callable[[], Output]:
        """Record a call; a failed call leaves no capture open. See ``Tracer.capture``."""
        trace_id = ttnn.begin_trace_capture(device, cq_id=_QUEUE)
        self._traces.append((device, trace_id))
        try:
            outputs = call()
        finally:
            ttnn.end_trace_capture(device, trace_id, cq_id=_QUEUE)

        def replay() -> Output:
            ttnn.execute_trace(device, trace_id, cq_id=_QUEUE, blocking=False)
            return outputs

        return replay

    def release(self) -> None:
        """Free every trace; none may be replayed afterwards. May be called again."""
        while self._traces:
            ttnn.release_trace(*self._traces.pop())


if TYPE_CHECKING:  # fails type checking when the classes and the protocol part ways
    _tracers: tuple[type[Tracer], ...] = (NoTrace, TtnnTracer)

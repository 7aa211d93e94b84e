"""Capture a call's device commands once, then replay them: the one seam to ttnn's traces.

A captured call reads and writes the same device memory in every replay: its inputs are refreshed
in place before, and its outputs stay where they are until the next replay of any trace of the
device. What was freed during the capture belongs to the replay; so nothing that has to outlive one
may be allocated on the device after the first capture, and every program must have been compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import ttnn

if TYPE_CHECKING:
    from collections.abc import Callable

    Output = TypeVar("Output")

_QUEUE = 0
"""Command queue of captures and replays: the one that all other commands use, so that they keep
their order."""


class Tracer(Protocol):
    """Makes traces and owns them."""

    def capture(self, device: ttnn.MeshDevice, call: Callable[[], Output]) -> Callable[[], Output]:
        """Record what ``call`` sends to ``device``.

        Args:
            device: The lane.
            call: Touches only tensors that are on the device; its programs are compiled.

        Returns:
            Replays the commands, does not wait for them, and returns the outputs of ``call``.
        """
        ...

    def release(self) -> None:
        """Free every trace; none may be replayed afterwards. May be called again."""
        ...


class NoTrace:
    """Records nothing: a replay is the call itself."""

    def capture(self, device: ttnn.MeshDevice, call: Callable[[], Output]) -> Callable[[], Output]:
        """Return ``call``."""
        return call

    def release(self) -> None:
        """There is nothing to free."""


class TtnnTracer:
    """Traces in the device's trace region. Owner: the traces, until ``release``."""

    def __init__(self) -> None:
        self._traces: list[tuple[ttnn.MeshDevice, ttnn.MeshTraceId]] = []

    def capture(self, device: ttnn.MeshDevice, call: Callable[[], Output]) -> Callable[[], Output]:
        """See ``Tracer.capture``; a call that fails leaves no capture open."""
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
        """See ``Tracer.release``."""
        while self._traces:
            ttnn.release_trace(*self._traces.pop())


if TYPE_CHECKING:  # fails type checking when the classes and the protocol part ways
    _tracers: tuple[type[Tracer], ...] = (NoTrace, TtnnTracer)

"""Executor: the engine core's only access to its workers.

Today there is one worker, in this process. Several processes for tensor and pipeline parallelism
would get the same calls, which is why arguments and results are plain values.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from replicas.engine.worker import Worker
from replicas.faults import NO_FAULTS, PlanClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import zmq

    from kv_transfer.connector import TransportFactory
    from replicas.config import EngineConfig
    from replicas.generators.simulated.device import Slowdown


@dataclass(frozen=True, kw_only=True)
class EngineHooks:
    """Surroundings of an engine process that a simulation replaces, see `replicas.simulation`.

    Attributes:
        unix_now_s: Wall clock, by which tickets expire.
        make_transport: Makes the KV transport; None is the connector's own.
        device_faults: Slow and hung periods of a simulated mesh.
        plan_clock: Converts the monotonic clock to that of `device_faults`.
        client_sockets: Returns the input and the output socket to use in place of the given ones.
        ignores_sigterm: Returns whether orders to end are ignored now.
        beside: Makes a context that is open while the engine starts and runs.
    """

    unix_now_s: Callable[[], float] = time.time
    make_transport: TransportFactory | None = None
    device_faults: Slowdown = NO_FAULTS
    plan_clock: PlanClock = field(default_factory=PlanClock)
    client_sockets: Callable[
        [zmq.Socket[bytes], zmq.Socket[bytes]], tuple[zmq.Socket[bytes], zmq.Socket[bytes]]
    ] = lambda hears, speaks: (hears, speaks)
    ignores_sigterm: Callable[[], bool] = lambda: False
    beside: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


NO_HOOKS = EngineHooks()
"""The surroundings of an engine outside simulations."""


class Executor(Protocol):
    """Access to the workers; every worker gets every call."""

    def collective_rpc(self, method: str, *args: object) -> list[Any]:
        """Call a method of every worker and return their results in rank order.

        Args:
            method: Name of a public method of `Worker`.
            *args: Its arguments.
        """
        ...


class UniProcExecutor:
    """An executor that runs one worker on the caller's thread.

    Args:
        config: The engine's configuration.
        incarnation: Random id of this start.
        notify: Called from any thread when a step is due although no message came.
        progress: Called with (stage, fraction done) while the model loads.
        hooks: What a simulation replaces.
    """

    def __init__(
        self,
        config: EngineConfig,
        incarnation: str = "local",
        notify: Callable[[], None] = lambda: None,
        progress: Callable[[str, float], None] = lambda _stage, _fraction: None,
        hooks: EngineHooks = NO_HOOKS,
    ) -> None:
        self._worker = Worker(config, incarnation, notify, progress, hooks)

    def collective_rpc(self, method: str, *args: object) -> list[Any]:
        """Call a method of the worker and return its result in a list."""
        return [getattr(self._worker, method)(*args)]

"""What a simulation may replace around an engine."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from replicas.faults import NO_FAULTS, PlanClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import zmq

    from kv_transfer.connector import TransportFactory
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

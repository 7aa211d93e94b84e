"""Messages between an engine process and its parent: arguments, start-up progress, orders.

Separate from `replicas.engine.process`, so that a parent need not import the engine's compute
libraries, which would delay the start of an actor or a driver by seconds.
"""

from __future__ import annotations

import msgspec

from replicas.config import EngineConfig, Role
from replicas.messages import EngineDescription

STOP_S = 5.0
"""Seconds that an engine without a mesh may take to end."""

DRAIN_LINE = b"drain"
"""Order on stdin of a ready engine: accept no more requests, and report when none is left."""
HAND_OVER_LINE = b"hand over"
"""Order after a drain: ask clients to move running requests elsewhere, as the timeout is near."""

ROLE_LINES: dict[bytes, Role] = {b"role prefill": "prefill", b"role decode": "decode"}
"""Orders to change to another role once no request of this one is left, and to report the change.
Only to the roles of disaggregated pools."""

PROBE_LINE = b"probe"
"""Order to run a step, even without a request; beats show whether it ends."""


class EngineArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The line of JSON on stdin.

    Attributes:
        config: The engine's configuration.
        incarnation: Random id of this start.
        host: Address to bind the two client sockets to, on free ports.
        ready_fd: Inherited descriptor for `EngineReport` lines.
        dump_fd: Inherited file that stacks are written to at `DUMP_SIGNAL`; with None the signal
            ends the process.
        stop_timeout_s: Seconds that the process may take to end.
    """

    config: EngineConfig
    incarnation: str
    host: str
    ready_fd: int
    dump_fd: int | None = None
    stop_timeout_s: float = STOP_S


class EngineReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line on the ready descriptor; exactly one of stage, ready, failed and beat is set.

    Attributes:
        stage: Stage of the start.
        fraction: Finished part of the stage, 0 to 1.
        ready: Description of the engine, which is ready.
        warm_up_s: With `ready`: seconds of the warm-up.
        failed: Why the engine has failed, as text.
        is_drained: The engine drains, has no request left and no block lent.
        role: The engine accepts requests in this role, after an order to change.
        beat: Progress of the core thread, see `Pulse.count`.
        doing: With a beat of a stalled core: its present turn and remaining work, as text.
    """

    stage: str | None = None
    fraction: float = 0.0
    ready: EngineDescription | None = None
    warm_up_s: float = 0.0
    failed: str | None = None
    is_drained: bool = False
    role: Role | None = None
    beat: int | None = None
    doing: str = ""

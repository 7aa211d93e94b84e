"""Messages between an engine process and its parent: arguments, start-up progress, orders.

Separate from `replicas.engine.process`, so that a parent need not import the engine's compute
libraries, which would delay the start of an actor or a driver by seconds.
"""

from __future__ import annotations

import msgspec

from replicas.config import EngineConfig, Role
from replicas.messages import EngineDescription

STOP_S = 5.0
"""How long an engine without a mesh may take to end."""

DRAIN_LINE = b"drain"
"""A line on stdin, once the engine runs: take no more requests, and say when none is left."""
HAND_OVER_LINE = b"hand over"
"""A later one: ask clients to go elsewhere with what runs here, as there is little time left."""

ROLE_LINES: dict[bytes, Role] = {b"role prefill": "prefill", b"role decode": "decode"}
"""Take another role once nothing is left of this one, and say so: of those between which pools are
told apart."""

PROBE_LINE = b"probe"
"""Take a step, also without a request: one that does not end is seen in the beats."""


class EngineArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The line of JSON on stdin.

    Attributes:
        config: The engine's configuration.
        incarnation: Random id of this start.
        host: Address to bind the two client sockets to, on free ports.
        ready_fd: Inherited descriptor for `EngineReport` lines.
        dump_fd: Inherited file that stacks are written to at `DUMP_SIGNAL`; None: that ends it.
        stop_timeout_s: How long it may take to end.
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
        stage: What is being done, with `fraction` done of it.
        fraction: 0 to 1.
        ready: The engine runs; its warm-up took `warm_up_s`.
        warm_up_s: Seconds.
        failed: It does not, or no longer: why, for a person.
        is_drained: It was told to drain, and has no request left and no block lent.
        role: It takes requests in this role now, after it was told to change it.
        beat: What the core thread does, see `Pulse.count`.
        doing: With a beat: what it is in and what is left, for a person, as long as it stalls.
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

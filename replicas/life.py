"""Life cycle of a replica: four states, each entered at most once and in order. Pure.

- STARTING: its engine loads and warms up, or has not been discovered yet.
- READY: it accepts requests.
- DRAINING: it accepts no more requests and finishes those that it has.
- DEAD: its process is gone. Any state may be followed by DEAD; a successor is a new replica.

A replica that changes its role stays READY. Ingresses see it as draining until its engine accepts
requests again (`replicas.engine.requests`).
"""

from __future__ import annotations

from enum import Enum

from replicas.errors import EngineError


class LifeError(EngineError):
    """Attempt to leave the order of states: back, or from STARTING past READY."""


class LifeState(str, Enum):
    """State of a replica; the values appear in status output."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


_NEXT = {
    LifeState.STARTING: {LifeState.READY, LifeState.DEAD},
    LifeState.READY: {LifeState.DRAINING, LifeState.DEAD},
    LifeState.DRAINING: {LifeState.DEAD},
    LifeState.DEAD: set(),
}


class Life:
    """State machine of one replica. Owner: the code that starts and stops it.

    Attributes:
        state: The current state.
    """

    def __init__(self) -> None:
        self.state = LifeState.STARTING

    def __repr__(self) -> str:
        return f"Life({self.state.value})"

    def become(self, state: LifeState) -> None:
        """Enter the next state.

        Raises:
            LifeError: The state does not follow the current one.
        """
        if state not in _NEXT[self.state]:
            raise LifeError(f"a replica that is {self.state.value} cannot become {state.value}")
        self.state = state

"""The life of a replica, in four states that are lived once each and in order. Pure.

STARTING: its engine loads and warms up, or nobody has heard of it yet. READY: it takes requests.
DRAINING: it takes no more, and ends those that it has. DEAD: nothing of it is left. Any of them may
be followed by DEAD; nothing comes back, a successor is another replica.

A replica that changes its role stays READY; to ingresses it looks like one that drains, until its
engine takes requests again (`replicas.engine.duty`).
"""

from __future__ import annotations

from enum import Enum

from replicas.errors import EngineError


class LifeError(EngineError):
    """A replica was to go back to a state that it has left, or to skip being ready."""


class LifeState(str, Enum):
    """See the module docstring; the values are what people read."""

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
    """Where a replica is in its life. Owner: whoever starts and ends it.

    Attributes:
        state: Where it is.
    """

    def __init__(self) -> None:
        self.state = LifeState.STARTING

    def __repr__(self) -> str:
        return f"Life({self.state.value})"

    def become(self, state: LifeState) -> None:
        """Go on to a state.

        Raises:
            LifeError: It does not follow on the one before.
        """
        if state not in _NEXT[self.state]:
            raise LifeError(f"a replica that is {self.state.value} cannot become {state.value}")
        self.state = state

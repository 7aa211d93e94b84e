"""Which semaphores a collective takes, so that none waits for what another one was sent. Pure."""

from __future__ import annotations

NUM_SETS = 3
"""Sets of semaphores among which the collectives of a kind go round."""


class Turns:
    """Numbers of sets, one for each collective of a kind.

    A chip that begins a collective may be ahead of one that still resets the semaphores of the last
    one, never of one that resets those of the one before: the last one has ended only with what
    every chip gave to it. So no set is taken twice in a row. Nor is one between two calls, of which
    a captured one takes the same sets at every replay, whatever was replayed before: each begins
    with a set that it does not end with.
    """

    def __init__(self) -> None:
        self._num_taken = 0

    def begin(self) -> None:
        """A call begins; whatever is captured, is captured as whole calls."""
        assert self._num_taken != 1, (
            "a call of one collective ends with the set that all begin with"
        )
        self._num_taken = 0

    def take(self) -> int:
        """Return the set of the next collective, below `NUM_SETS`."""
        taken = self._num_taken
        self._num_taken += 1
        return 0 if taken == 0 else 1 + taken % 2

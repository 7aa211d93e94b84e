"""Rotation of semaphore sets, so that collectives do not see each other's signals. Pure."""

from __future__ import annotations

NUM_SETS = 3
"""Number of semaphore sets over which the collectives of a kind rotate."""


class Turns:
    """Sequence of semaphore sets, one for each collective of a kind.

    A chip that begins a collective may be ahead of a chip that still resets the semaphores of the
    previous one, but never of a chip that resets those of the one before that, as the previous one
    ended only with input from every chip. So no set may be used twice in a row. That must also hold
    between two calls, where a captured call uses the same sets at every replay, in any order of
    replays: each call begins with a set that it does not end with.
    """

    def __init__(self) -> None:
        self._num_taken = 0

    def begin_call(self) -> None:
        """Begin a call. Captures must contain whole calls."""
        assert self._num_taken != 1, (
            "a call of one collective ends with the set that all begin with"
        )
        self._num_taken = 0

    def next_set(self) -> int:
        """Return the set of the next collective, below `NUM_SETS`."""
        taken = self._num_taken
        self._num_taken += 1
        return 0 if taken == 0 else 1 + taken % 2

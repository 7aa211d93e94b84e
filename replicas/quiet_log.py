"""Log what others can make happen as often as they like, but only now and then.

Owner of when each was said last: a `QuietLog`, which belongs to one thread.
"""

from __future__ import annotations

import logging

INTERVAL_S = 10.0
"""At most one line of a kind in so long."""


class QuietLog:
    """Lines of one kind.

    Args:
        logger: Where they go.
        level: How bad it is, as `logging` takes it.
        interval_s: At most one line in so long.
    """

    def __init__(
        self,
        logger: logging.Logger,
        level: int = logging.WARNING,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._logger = logger
        self._level = level
        self._interval_s = interval_s
        self._next_s = float("-inf")
        self._num_left_out = 0

    def say(self, now_s: float, text: str, *args: object) -> None:
        """Log it, or count it for the next line.

        Args:
            now_s: Monotonic clock.
            text: As `logging` takes it.
            *args: What stands in it.
        """
        if now_s < self._next_s:
            self._num_left_out += 1
            return
        if self._num_left_out:
            text, args = f"{text} (and %d more)", (*args, self._num_left_out)
        self._logger.log(self._level, text, *args)
        self._next_s = now_s + self._interval_s
        self._num_left_out = 0

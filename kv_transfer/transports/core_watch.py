"""Watch that tells a hanging core thread from one that has nothing to do.

When the core of an engine hangs in a device call, its I/O thread lives on. It would keep renewing
leases and answering for blocks that are never computed. So it asks the core from time to time, and
sends nothing while the core does not answer. To every peer the engine then looks frozen, for which
there are deadlines. Pure.
"""


class CoreWatch:
    """Signs of life of a core thread, as its I/O thread knows them.

    Owner: the I/O thread; the core thread only stores the time of its latest answer.
    """

    def __init__(self, ask_s: float, silent_s: float) -> None:
        """Start with a core that is alive.

        Args:
            ask_s: Seconds without an answer after which the core is asked.
            silent_s: Seconds after the question after which it counts as hanging.
        """
        self._ask_s = ask_s
        self._silent_s = silent_s
        self._answered_s = 0.0
        self._asked_s: float | None = None

    def answer(self, now_s: float) -> None:
        """Record a sign of life; called on the core thread."""
        self._answered_s = now_s
        self._asked_s = None

    def must_ask(self, now_s: float) -> bool:
        """Return whether to wake the core now, so that it answers; True at most once per answer."""
        if self._asked_s is not None or now_s - self._answered_s < self._ask_s:
            return False
        self._asked_s = now_s
        return True

    def is_silent(self, now_s: float) -> bool:
        """Return whether the core hangs."""
        asked_s = self._asked_s
        return asked_s is not None and now_s - asked_s >= self._silent_s

"""Tell a core thread that hangs from one that has nothing to do.

An I/O thread lives on when the core of its engine hangs in a device call, and would go on promising
what nobody keeps: renewing leases, answering for blocks that are never computed. So it asks the
core from time to time, and falls silent when the core does not answer; to every peer the engine
then looks frozen, for which there are deadlines. Pure.
"""


class CoreWatch:
    """What the I/O thread knows of its core.

    Owner: the I/O thread; the core thread only stores the time of its latest answer.
    """

    def __init__(self, ask_s: float, silent_s: float) -> None:
        """Begin with a core that is alive.

        Args:
            ask_s: A core that has not been heard of for so long is asked.
            silent_s: One that does not answer for so long hangs.
        """
        self._ask_s = ask_s
        self._silent_s = silent_s
        self._answered_s = 0.0
        self._asked_s: float | None = None

    def answer(self, now_s: float) -> None:
        """Note that the core lives; on its thread."""
        self._answered_s = now_s
        self._asked_s = None

    def must_ask(self, now_s: float) -> bool:
        """Tell whether the core is to be woken, so that it can show that it lives."""
        if self._asked_s is not None or now_s - self._answered_s < self._ask_s:
            return False
        self._asked_s = now_s
        return True

    def is_silent(self, now_s: float) -> bool:
        """Tell whether the core hangs."""
        asked_s = self._asked_s
        return asked_s is not None and now_s - asked_s >= self._silent_s

"""Clocks without real waits."""

from __future__ import annotations


class FakeClock:
    """A clock that moves only when time is spent."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.time_s = now_s
        self.spent: list[float] = []

    def now_s(self) -> float:
        return self.time_s

    def spend(self, seconds: float) -> None:
        self.spent.append(seconds)
        self.time_s += max(seconds, 0.0)


class NullClock:
    """A clock on which nothing takes any time."""

    def now_s(self) -> float:
        return 0.0

    def spend(self, seconds: float) -> None:
        del seconds

"""Who of several tenants is next: whoever is furthest behind in slot-seconds. Pure.

Owner: of what each tenant has had, and of who waits; one ingress's event loop. A tenant that comes
back begins where those stand that were served meanwhile, so that nobody saves up while he is away.
Between two tenants that both have somebody waiting all the time, what they have had by weight never
differs by more than what one request of each takes.

Source: virtual time by tenant as in Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024, counted in seconds of slots instead of tokens.
"""

from __future__ import annotations

import bisect
import heapq
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Waiting(Protocol):
    """What a line needs of those who wait in it."""

    @property
    def tenant(self) -> str:
        """On whose account."""

    @property
    def key(self) -> tuple[float, ...]:
        """Its place among the same tenant's, priority first: the lowest is next."""


W = TypeVar("W", bound=Waiting)

MAX_AWAY = 1024
"""Accounts that are kept of tenants who have nothing here: names may come from clients."""


class FairLine(Generic[W]):
    """Those who wait, by tenant, each tenant's in order.

    Args:
        weight: Of a tenant: how much more than others it gets.
    """

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._lines: dict[str, list[W]] = {}
        self._had_s: dict[str, float] = {}
        self._now_s = 0.0
        self._active: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[W]:
        for line in self._lines.values():
            yield from line

    def had_s(self, tenant: str) -> float:
        """Slot-seconds that a tenant has had, by weight, on the scale of all."""
        return max(self._had_s.get(tenant, 0.0), 0.0 if self._active.get(tenant) else self._now_s)

    def enter(self, waiter: W) -> None:
        """Let somebody wait."""
        self.hold(waiter.tenant)
        bisect.insort(self._lines.setdefault(waiter.tenant, []), waiter, key=lambda w: w.key)

    def leave(self, waiter: W) -> bool:
        """Let somebody wait no longer; says whether he did. His tenant stays active."""
        line = self._lines.get(waiter.tenant, [])
        if waiter not in line:
            return False
        line.remove(waiter)
        if not line:
            del self._lines[waiter.tenant]
        return True

    def first(self, may_go: Callable[[W], bool] = lambda _: True) -> W | None:
        """Who of those that may is next: the best priority, the tenant furthest behind, the key."""
        firsts = (next(filter(may_go, line), None) for line in self._lines.values())
        heads = [waiter for waiter in firsts if waiter is not None]
        return min(heads, key=lambda w: (w.key[0], self.had_s(w.tenant), w.key), default=None)

    def last(self) -> W:
        """Who came last of the tenant that has most waiting, by weight."""
        most = max(self._lines, key=self.num_waiting)
        return self._lines[most][-1]

    def num_waiting(self, tenant: str) -> float:
        """How many of a tenant's wait, by weight."""
        return len(self._lines.get(tenant, ())) / self._weight(tenant)

    def has_most(self, tenant: str) -> bool:
        """Whether no other tenant has as many waiting, by weight, as this one with one more."""
        mine = self.num_waiting(tenant) + 1 / self._weight(tenant)
        return all(self.num_waiting(other) <= mine for other in self._lines if other != tenant)

    def before(self, waiter: W, cost_s: Callable[[W], float]) -> float:
        """Costs of those who will go before one who would enter now.

        Of another tenant's as much as goes before one's own in turn.
        """
        own = self._lines.get(waiter.tenant, [])
        own_s = sum(cost_s(w) for w in own if w.key < waiter.key)
        share_s = (own_s + cost_s(waiter)) / self._weight(waiter.tenant)
        total_s = own_s
        for tenant, line in self._lines.items():
            if tenant == waiter.tenant:
                continue
            equal_s = 0.0
            for other in line:
                if other.key[0] < waiter.key[0]:
                    total_s += cost_s(other)
                elif other.key[0] == waiter.key[0]:
                    equal_s += cost_s(other)
            total_s += min(equal_s, share_s * self._weight(tenant))
        return total_s

    def charge(self, tenant: str, seconds: float) -> None:
        """Put slot-seconds on a tenant's account: negative ones where it had less than charged."""
        self._had_s[tenant] = self.had_s(tenant) + seconds / self._weight(tenant)

    def serve(self, waiter: W, seconds: float) -> None:
        """Somebody waits no longer, and is expected to take so many slot-seconds."""
        self._now_s = max(self._now_s, self.had_s(waiter.tenant))
        self.leave(waiter)
        self.charge(waiter.tenant, seconds)

    def hold(self, tenant: str) -> None:
        """One more of a tenant's requests is there."""
        if not self._active.get(tenant):
            self._had_s[tenant] = self.had_s(tenant)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def release(self, tenant: str) -> None:
        """One of a tenant's requests is gone."""
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
            if len(self._had_s) > len(self._active) + MAX_AWAY:
                self._forget()

    def num_requests(self, tenant: str) -> int:
        """How many of a tenant's requests are there, waiting or not."""
        return self._active.get(tenant, 0)

    @property
    def num_accounts(self) -> int:
        """Tenants whose slot-seconds are known, here or not."""
        return len(self._had_s)

    def _forget(self) -> None:
        """Keep of those who are away the half that is furthest ahead; the others begin anew.

        Who has had no more than others meanwhile is as one who never came.
        """
        ahead = [t for t, s in self._had_s.items() if s > self._now_s and t not in self._active]
        kept = heapq.nlargest(MAX_AWAY // 2, ahead, key=self._had_s.__getitem__)
        self._had_s = {t: self._had_s[t] for t in (*self._active, *kept)}

"""Fair order between tenants: next is the tenant that has had the fewest slot-seconds. Pure.

Owner: one ingress's event loop; of each tenant's account and of the queued requests. A tenant that
comes back starts at the level of those served meanwhile, so absence saves up no credit. Between two
tenants that always have requests waiting, weighted slot-seconds never differ by more than one
request of each costs.

Source: virtual time by tenant as in Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024, counted in seconds of slots instead of tokens.
"""

from __future__ import annotations

import bisect
import heapq
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Waiting(Protocol):
    """The interface of an item in a `FairLine`."""

    @property
    def tenant(self) -> str:
        """The tenant whose account it runs on."""

    @property
    def key(self) -> tuple[float, ...]:
        """Order among its tenant's items, priority first; the lowest is next."""


W = TypeVar("W", bound=Waiting)

MAX_AWAY = 1024
"""Accounts that are kept for tenants without requests: clients may choose the names."""


class FairLine(Generic[W]):
    """A queue with one line per tenant and fair order between them.

    Args:
        weight: Returns the weight of a tenant: its share relative to others.
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
        """Return the weighted slot-seconds of a tenant, on the scale of all tenants."""
        return max(self._had_s.get(tenant, 0.0), 0.0 if self._active.get(tenant) else self._now_s)

    def enter(self, waiter: W) -> None:
        """Add an item to its tenant's line."""
        self.hold(waiter.tenant)
        bisect.insort(self._lines.setdefault(waiter.tenant, []), waiter, key=lambda w: w.key)

    def leave(self, waiter: W) -> bool:
        """Remove an item; return whether it was queued. Its tenant stays active until `release`."""
        line = self._lines.get(waiter.tenant, [])
        if waiter not in line:
            return False
        line.remove(waiter)
        if not line:
            del self._lines[waiter.tenant]
        return True

    def first(self, may_go: Callable[[W], bool] = lambda _: True) -> W | None:
        """Return the next item that `may_go`: by priority, by tenant furthest behind, by key."""
        firsts = (next(filter(may_go, line), None) for line in self._lines.values())
        heads = [waiter for waiter in firsts if waiter is not None]
        return min(heads, key=lambda w: (w.key[0], self.had_s(w.tenant), w.key), default=None)

    def last(self) -> W:
        """Return the last item of the tenant with the most waiting, by weight."""
        most = max(self._lines, key=self.num_waiting)
        return self._lines[most][-1]

    def num_waiting(self, tenant: str) -> float:
        """Return the number of a tenant's queued items, divided by its weight."""
        return len(self._lines.get(tenant, ())) / self._weight(tenant)

    def has_most(self, tenant: str) -> bool:
        """Return whether a tenant with one item more would have as many waiting as any other."""
        mine = self.num_waiting(tenant) + 1 / self._weight(tenant)
        return all(self.num_waiting(other) <= mine for other in self._lines if other != tenant)

    def before(self, waiter: W, cost_s: Callable[[W], float]) -> float:
        """Return the total cost of the items that would go before one that entered now.

        Of another tenant's items of equal priority, it counts at most the cost that fairness grants
        before this item's turn.
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
        """Add slot-seconds to a tenant's account; negative ones give back an overcharge."""
        self._had_s[tenant] = self.had_s(tenant) + seconds / self._weight(tenant)

    def serve(self, waiter: W, seconds: float) -> None:
        """Remove an item and charge its tenant the slot-seconds it is expected to take."""
        self._now_s = max(self._now_s, self.had_s(waiter.tenant))
        self.leave(waiter)
        self.charge(waiter.tenant, seconds)

    def hold(self, tenant: str) -> None:
        """Count one more request of a tenant."""
        if not self._active.get(tenant):
            self._had_s[tenant] = self.had_s(tenant)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def release(self, tenant: str) -> None:
        """Count one request of a tenant less."""
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
            if len(self._had_s) > len(self._active) + MAX_AWAY:
                self._forget()

    def num_requests(self, tenant: str) -> int:
        """Return the number of a tenant's requests, queued or not."""
        return self._active.get(tenant, 0)

    @property
    def num_accounts(self) -> int:
        """Number of tenants whose slot-seconds are kept, active or not."""
        return len(self._had_s)

    def _forget(self) -> None:
        """Keep, of inactive tenants, the half that is furthest ahead; drop the other accounts.

        A tenant that is not ahead of the current level is treated like a new one anyway.
        """
        ahead = [t for t, s in self._had_s.items() if s > self._now_s and t not in self._active]
        kept = heapq.nlargest(MAX_AWAY // 2, ahead, key=self._had_s.__getitem__)
        self._had_s = {t: self._had_s[t] for t in (*self._active, *kept)}

"""Counts of tenants' requests and tokens against their limits, at one ingress or for all. Pure.

Requests and tokens of a minute are allowances that refill steadily, so that a client that has been
refused knows exactly when the next request is admitted. A request is admitted while the allowance
of tokens is not used up, and its prompt and output are taken from it as they come. So one request
may use more than is left; what it owes is refilled before the next one is admitted. The same holds
for the further prompts of one HTTP request, each of which counts as a request.

Open requests are counted by ingress (`holder`). Each ingress reports its own count as a whole, and
its tokens as a total since its start, so a lost or repeated report corrects itself.

Owner: a `QuotaBook` belongs to the event loop of one ingress. `cluster.edge.quota_service` decides
which ingress's book counts for a tenant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from cluster.config.schema import TenantLimits

_MINUTE_S = 60.0
_BUSY_RETRY_S = 1.0
"""Time to retry when too many requests are open, because their ends cannot be predicted."""


class Allowance:
    """An allowance per minute that refills steadily, up to one minute's worth.

    Args:
        per_minute: The allowance; infinite without a limit.
        now_s: The time; the allowance starts full.
    """

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Return what is left; below 0 if more was taken than there was."""
        if math.isinf(self.per_minute):
            return self.per_minute
        gained = max(now_s - self._at_s, 0.0) * self.per_minute / _MINUTE_S
        return min(self._level + gained, self.per_minute)

    def set_level(self, level: float, now_s: float) -> None:
        """Replace what is left."""
        self._level, self._at_s = min(level, self.per_minute), now_s

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount, also if less is left."""
        self.set_level(self.level(now_s) - amount, now_s)

    def change_limit(self, per_minute: float, now_s: float) -> None:
        """Change the limit; what was taken of the old one counts against the new one."""
        if per_minute == self.per_minute:
            return
        taken = 0.0 if math.isinf(self.per_minute) else self.per_minute - self.level(now_s)
        self.per_minute = per_minute
        self.set_level(per_minute - taken, now_s)

    def wait_s(self, level: float, now_s: float) -> float:
        """Return the seconds until at least a level is left."""
        missing = level - self.level(now_s)
        return 0.0 if missing <= 0.0 else missing * _MINUTE_S / self.per_minute


class Refusal(NamedTuple):
    """Why a request is not admitted, and the seconds after which it would be."""

    reason: str
    retry_after_s: float


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Requests of a tenant that are to be admitted together.

    Attributes:
        num: How many.
        is_further: They are the further prompts of an admitted request, which only open requests
            limit: allowances are taken from, also if less is left, as tokens are.
    """

    num: int = 1
    is_further: bool = False


ONE = Ask()


@dataclass(slots=True)
class Account:
    """One tenant's counts.

    Attributes:
        max_open: Most open requests; infinite without a limit.
        requests: Allowance of requests.
        tokens: Allowance of tokens.
        open_of: Open requests by holder.
        tokens_of: Tokens since each holder's start, as far as they were taken from the allowance.
    """

    max_open: float
    requests: Allowance
    tokens: Allowance
    open_of: dict[str, int] = field(default_factory=dict)
    tokens_of: dict[str, int] = field(default_factory=dict)

    @property
    def num_open(self) -> int:
        """Open requests of all holders."""
        return sum(self.open_of.values())

    def is_idle(self, now_s: float) -> bool:
        """Return whether a new account would be the same."""
        return not self.num_open and all(
            allowance.level(now_s) >= allowance.per_minute
            for allowance in (self.requests, self.tokens)
        )

    def refusal(self, ask: Ask, now_s: float) -> Refusal | None:
        """Return why requests are not admitted now; None if they are."""
        if self.num_open + ask.num > self.max_open:
            reason = f"{self.num_open} requests of this tenant are open, of {self.max_open:.0f}"
            return Refusal(reason, _BUSY_RETRY_S)
        if ask.is_further:
            return None
        for allowance, unit in ((self.requests, "requests"), (self.tokens, "tokens")):
            wait_s = allowance.wait_s(1.0, now_s)
            if wait_s > 0.0:
                limit = f"{allowance.per_minute:.0f} {unit} a minute of this tenant"
                return Refusal(f"the {limit} are used up", wait_s)
        return None


class QuotaBook:
    """The accounts of all tenants with limits.

    Accounts are made when they are needed, and dropped when a new one would be the same.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def account(self, tenant: str, limits: TenantLimits, now_s: float) -> Account:
        """Return the account of a tenant, with its current limits."""
        max_open = _or_infinite(limits.max_requests)
        per_minute = [
            _or_infinite(limit) for limit in (limits.requests_per_minute, limits.tokens_per_minute)
        ]
        account = self._accounts.get(tenant)
        if account is None:
            requests, tokens = (Allowance(limit, now_s) for limit in per_minute)
            account = self._accounts[tenant] = Account(max_open, requests, tokens)
        account.max_open = max_open
        account.requests.change_limit(per_minute[0], now_s)
        account.tokens.change_limit(per_minute[1], now_s)
        return account

    def admit(
        self, tenant: str, limits: TenantLimits, holder: str, now_s: float, ask: Ask = ONE
    ) -> Refusal | None:
        """Count more open requests of a holder, unless a limit is reached."""
        account = self.account(tenant, limits, now_s)
        refusal = account.refusal(ask, now_s)
        if refusal is None:
            account.requests.take(ask.num, now_s)
            account.open_of[holder] = account.open_of.get(holder, 0) + ask.num
        return refusal

    def set_open(self, account: Account, holder: str, num_open: int) -> None:
        """Replace the count of a holder's open requests."""
        if num_open:
            account.open_of[holder] = num_open
        else:
            account.open_of.pop(holder, None)

    def drop_idle(self, now_s: float) -> None:
        """Drop the accounts that say nothing."""
        self._accounts = {t: a for t, a in self._accounts.items() if not a.is_idle(now_s)}


def rate_headers(account: Account, now_s: float) -> list[tuple[bytes, bytes]]:
    """Return the rate-limit headers that OpenAI's clients read; none for what has no limit."""
    headers: list[tuple[bytes, bytes]] = []
    for allowance, unit in ((account.requests, b"requests"), (account.tokens, b"tokens")):
        if math.isinf(allowance.per_minute):
            continue
        left = max(math.floor(allowance.level(now_s)), 0)
        full_s = allowance.wait_s(allowance.per_minute, now_s)
        headers += [
            (b"x-ratelimit-limit-" + unit, b"%d" % allowance.per_minute),
            (b"x-ratelimit-remaining-" + unit, b"%d" % left),
            (b"x-ratelimit-reset-" + unit, duration(full_s).encode()),
        ]
    return headers


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it, such as 20ms, 1.5s or 6m0s, rounded up."""
    milliseconds = math.ceil(seconds * 1e3)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1e3:g}s" if minutes else f"{rest / 1e3:g}s"


def _or_infinite(limit: int | None) -> float:
    return math.inf if limit is None else float(limit)

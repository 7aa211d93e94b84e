"""State of tenants' limits at one ingress: reports and times in, decisions out. Pure.

Each tenant has an owner, the ingress whose book decides: the one with the highest hash of its id
and the tenant's name, of those that answered the last exchange. The other ingresses ask it for each
request. At most one exchange of an ingress is under way; requests that arrive meanwhile go into the
next one. An exchange also reports the open requests and tokens of this ingress, and brings back
what is left.

If the owner does not answer in time, an ingress decides by its own book, which has its own requests
and what the owner said last. So while an ingress cannot reach the owner, while any of them hangs,
and for about a second after one has come or gone, each may admit a tenant up to its limits.

In a rolling update ingresses of two versions exchange reports. New fields of these messages come
last and have defaults, so that each version reads the other's.

Owner: a `QuotaMachine` owns the `QuotaBook` of one ingress. `cluster.edge.quota_service` carries
its exchanges to the other ingresses.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cluster.config.schema import TenantLimits
from cluster.edge.quotas import ONE, Ask, QuotaBook, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.edge.quotas import Account

_LOST_S = 5.0
"""Time without a report after which an ingress's open requests no longer count."""
_PAUSE_S = 2.0
"""Time for which no request waits for an owner, after an exchange that failed or was slow."""
_SLOW_S = 0.25


class TenantReport(msgspec.Struct, frozen=True, array_like=True):
    """One tenant's counts at the ingress that reports them.

    Attributes:
        tenant: The tenant's name.
        owner: Id of the ingress that is to count it; others ignore the report.
        limits: The tenant's limits.
        num_open: Its open requests.
        num_tokens: Its tokens since the start of the ingress.
        levels: What is left of its requests and tokens, as far as the ingress knows; None without
            a limit.
        asks: Requests that wait to be admitted.
    """

    tenant: str
    owner: str
    limits: TenantLimits
    num_open: int
    num_tokens: int
    levels: tuple[float | None, float | None]
    asks: list[Ask]


class Exchange(msgspec.Struct, frozen=True, array_like=True):
    """The reports of one ingress, the sender."""

    sender: str
    reports: list[TenantReport]


class TenantAnswer(msgspec.Struct, frozen=True, array_like=True):
    """An owner's answer to one report.

    Attributes:
        num_admitted: How many of the report's asks are admitted, the first ones.
        reason: Why the others are not.
        retry_after_s: When one would be.
        levels: What is left then, as in `TenantReport`.
    """

    tenant: str
    num_admitted: int
    reason: str
    retry_after_s: float
    levels: tuple[float | None, float | None]


class ExchangeAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answers of one ingress, for the tenants that it owns."""

    ingress: str
    answers: list[TenantAnswer]


@dataclass(slots=True, eq=False)
class QuotaRequest:
    """Requests of a tenant that are to be admitted together.

    Attributes:
        tenant: The tenant's name.
        limits: Its limits.
        ask: What is to be admitted.
        is_decided: Whether they were admitted or refused.
        refusal: Why they were refused; None: they were admitted, and count as open.
        is_cancelled: Whether nothing waits for the decision any more.
    """

    tenant: str
    limits: TenantLimits
    ask: Ask = ONE
    is_decided: bool = False
    refusal: Refusal | None = None
    is_cancelled: bool = False


class EndedExchange(NamedTuple):
    """Effects of an exchange.

    Attributes:
        decided: Requests that are decided now.
        num_silent: Tenants whose owner did not answer.
    """

    decided: list[QuotaRequest]
    num_silent: int


class QuotaMachine:
    """The limits of tenants at one ingress, and for the tenants that it owns at all of them.

    Every method that changes something takes the time, in seconds of a steady clock.

    Args:
        ingress: Id of this ingress.

    Attributes:
        ingress: Id of this ingress.
        book: The accounts of all tenants with limits.
    """

    def __init__(self, ingress: str) -> None:
        self.ingress = ingress
        self.book = QuotaBook()
        self._members = frozenset({ingress})
        self._heard_s: dict[str, float] = {}
        self._limits: dict[str, TenantLimits] = {}
        self._num_tokens: defaultdict[str, int] = defaultdict(int)
        self._waiting: dict[str, list[QuotaRequest]] = {}
        self._asks_from_s = -math.inf

    @property
    def is_waiting(self) -> bool:
        """Return whether requests wait for an exchange."""
        return bool(self._waiting)

    @property
    def num_tenants(self) -> int:
        """Return the number of tenants of which something is known."""
        return len(self._limits)

    def owner(self, tenant: str) -> str:
        """Return the id of the ingress that counts a tenant."""
        if len(self._members) == 1:
            return next(iter(self._members))
        return max(
            self._members,
            key=lambda member: hashlib.blake2b(f"{member} {tenant}".encode()).digest(),
        )

    # --- requests of this ingress -----------------------------------------------------------------

    def begin(self, request: QuotaRequest, now_s: float) -> None:
        """Decide on requests at once, or let them wait for the next exchange."""
        tenant = request.tenant
        self._limits[tenant] = request.limits
        if self.owner(tenant) == self.ingress or now_s < self._asks_from_s:
            self._decide_alone(request, now_s)
        else:
            self._waiting.setdefault(tenant, []).append(request)

    def adopt(self, tenant: str, limits: TenantLimits) -> None:
        """Report a tenant from now on, of whose requests another ingress has admitted one."""
        self._limits[tenant] = limits

    def cancel(self, request: QuotaRequest, now_s: float) -> None:
        """Let nothing wait for requests any more; admitted ones are no longer open."""
        if not request.is_decided:
            # It keeps its place: an owner's answer counts the asks of its report.
            request.is_cancelled = True
        elif request.refusal is None:
            self.end(request, now_s)

    def end(self, request: QuotaRequest, now_s: float) -> None:
        """Count admitted requests as no longer open."""
        self.count_open(request.tenant, request.limits, -request.ask.num, now_s)

    def count_open(self, tenant: str, limits: TenantLimits, num: int, now_s: float) -> None:
        """Add to the open requests of a tenant at this ingress."""
        account = self.book.account(tenant, limits, now_s)
        self.book.set_open(account, self.ingress, account.open_of.get(self.ingress, 0) + num)

    def charge(self, tenant: str, limits: TenantLimits, num_tokens: int, now_s: float) -> None:
        """Take tokens from a tenant's allowance; a negative number gives them back."""
        self._num_tokens[tenant] += num_tokens
        self.book.account(tenant, limits, now_s).tokens.take(num_tokens, now_s)

    # --- exchanges --------------------------------------------------------------------------------

    def begin_exchange(self, now_s: float) -> tuple[Exchange, list[QuotaRequest]]:
        """Return the reports for the other owners, and the requests that are decided now."""
        owners = {tenant: self.owner(tenant) for tenant in self._limits}
        own = [tenant for tenant in self._waiting if owners[tenant] == self.ingress]
        decided = self._settle_alone(own, now_s)
        reports = [
            self._report(tenant, owner, now_s)
            for tenant, owner in owners.items()
            if owner != self.ingress
        ]
        return Exchange(self.ingress, reports), decided

    def end_exchange(
        self, exchange: Exchange, answers: Sequence[ExchangeAnswer], begun_s: float, now_s: float
    ) -> EndedExchange:
        """Take over the answers of the ingresses.

        Args:
            exchange: What they were asked.
            answers: Their answers, this ingress's own included.
            begun_s: The time at which they were asked.
            now_s: The time.
        """
        self._members = frozenset(each.ingress for each in answers) or frozenset({self.ingress})
        decided: list[QuotaRequest] = []
        silent = {report.tenant: report for report in exchange.reports}
        for answer in answers:
            for of_tenant in answer.answers:
                report = silent.pop(of_tenant.tenant, None)
                if report is not None:
                    decided += self._settle(of_tenant, report, now_s)
        is_slow = now_s - begun_s > _SLOW_S
        self._asks_from_s = now_s + _PAUSE_S if silent or is_slow else -math.inf
        decided += self._settle_alone(silent, now_s)
        # The owner knows of no open request of these.
        quiet = {each.tenant for each in exchange.reports if not (each.num_open or each.asks)}
        self._forget(quiet - silent.keys(), now_s)
        return EndedExchange(decided, len(silent))

    def fail_exchange(self, now_s: float) -> list[QuotaRequest]:
        """Decide without the other ingresses for a while; return the requests decided now."""
        self._asks_from_s = now_s + _PAUSE_S
        return self._settle_alone(list(self._waiting), now_s)

    def answer(self, exchange: Exchange, now_s: float) -> ExchangeAnswer:
        """Answer another ingress's exchange, or this one's own."""
        answers = []
        if exchange.sender != self.ingress:
            self._heard_s[exchange.sender] = now_s
            mine = [report for report in exchange.reports if report.owner == self.ingress]
            answers = [self._count(report, exchange.sender, now_s) for report in mine]
        return ExchangeAnswer(self.ingress, answers)

    def _report(self, tenant: str, owner: str, now_s: float) -> TenantReport:
        account = self._account(tenant, now_s)
        num_open = account.open_of.get(self.ingress, 0)
        limits, num_tokens = self._limits[tenant], self._num_tokens[tenant]
        asks = [request.ask for request in self._waiting.get(tenant, ())]
        levels = _levels(account, now_s)
        return TenantReport(tenant, owner, limits, num_open, num_tokens, levels, asks)

    def _count(self, report: TenantReport, sender: str, now_s: float) -> TenantAnswer:
        """Take over a report, and admit what it asks for, as the owner of its tenant."""
        self._limits[report.tenant] = report.limits
        account = self._account(report.tenant, now_s)
        self.book.set_open(account, sender, report.num_open)
        known = account.tokens_of.get(sender)
        account.tokens_of[sender] = report.num_tokens
        if known is None:
            # This ingress has become the owner: what the others know is as good.
            _take_over(account, report.levels, now_s, keeps_lower=True)
        else:
            account.tokens.take(report.num_tokens - known, now_s)
        refusal, num_admitted = None, 0
        for ask in report.asks:
            refusal = self.book.admit(report.tenant, report.limits, sender, now_s, ask)
            if refusal is not None:
                break
            num_admitted += 1
        reason, retry_after_s = refusal or ("", 0.0)
        levels = _levels(account, now_s)
        return TenantAnswer(report.tenant, num_admitted, reason, retry_after_s, levels)

    def _settle(
        self, answer: TenantAnswer, report: TenantReport, now_s: float
    ) -> list[QuotaRequest]:
        """Take over an owner's answer; return the requests that it decides."""
        tenant = answer.tenant
        account = self._account(tenant, now_s)
        _take_over(account, answer.levels, now_s, keeps_lower=False)
        account.tokens.take(self._num_tokens[tenant] - report.num_tokens, now_s)
        waiting = self._waiting.pop(tenant, [])
        asked, later = waiting[: len(report.asks)], waiting[len(report.asks) :]
        if later:
            self._waiting[tenant] = later
        for i, request in enumerate(asked):
            # One whose client has left is not counted: the next report corrects the owner.
            if request.is_cancelled:
                continue
            request.is_decided = True
            if i < answer.num_admitted:
                self.count_open(tenant, self._limits[tenant], request.ask.num, now_s)
            else:
                request.refusal = Refusal(answer.reason, answer.retry_after_s)
        return [request for request in asked if request.is_decided]

    def _settle_alone(self, tenants: Iterable[str], now_s: float) -> list[QuotaRequest]:
        """Decide on all waiting requests of tenants by this ingress's own book."""
        decided = []
        for tenant in tenants:
            for request in self._waiting.pop(tenant, []):
                if not request.is_cancelled:
                    self._decide_alone(request, now_s)
                    decided.append(request)
        return decided

    def _decide_alone(self, request: QuotaRequest, now_s: float) -> None:
        limits = self._limits[request.tenant]
        request.refusal = self.book.admit(request.tenant, limits, self.ingress, now_s, request.ask)
        request.is_decided = True

    def _forget(self, quiet: set[str], now_s: float) -> None:
        """Drop what ingresses that are gone reported, and accounts that say nothing.

        Args:
            quiet: Tenants whose owner knows that this ingress has no open request of theirs.
            now_s: The time.
        """
        lost = {sender for sender, at_s in self._heard_s.items() if now_s - at_s > _LOST_S}
        for sender in lost:
            del self._heard_s[sender]
        for tenant in list(self._limits):
            account = self._account(tenant, now_s)
            for sender in lost:
                account.open_of.pop(sender, None)
                account.tokens_of.pop(sender, None)
            is_known = tenant in quiet or self.owner(tenant) == self.ingress
            if is_known and account.is_idle(now_s) and tenant not in self._waiting:
                del self._limits[tenant]
        self.book.drop_idle(now_s)

    def _account(self, tenant: str, now_s: float) -> Account:
        return self.book.account(tenant, self._limits[tenant], now_s)


def _levels(account: Account, now_s: float) -> tuple[float | None, float | None]:
    requests, tokens = (
        None if math.isinf(allowance.per_minute) else allowance.level(now_s)
        for allowance in (account.requests, account.tokens)
    )
    return requests, tokens


def _take_over(
    account: Account, levels: tuple[float | None, float | None], now_s: float, *, keeps_lower: bool
) -> None:
    """Replace the levels of an account by those of another ingress."""
    for allowance, level in zip((account.requests, account.tokens), levels, strict=True):
        if level is not None and not math.isinf(allowance.per_minute):
            own = allowance.level(now_s) if keeps_lower else math.inf
            allowance.set_level(min(own, level), now_s)

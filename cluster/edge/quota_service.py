"""Tenants' limits over all ingresses: admits requests, and counts their tokens.

Each tenant has an owner, the ingress whose book decides: the one with the highest hash of its id
and the tenant's name, of those that answered the last exchange. The other ingresses ask it for each
request. At most one exchange of an ingress is under way; requests that arrive meanwhile go into the
next one. An exchange also reports the open requests and tokens of this ingress, and brings back
what is left.

If the owner does not answer in time, an ingress decides by its own book, which has its own requests
and what the owner said last. So while an ingress cannot reach the owner, while any of them hangs,
and for about a second after one has come or gone, each may admit a tenant up to its limits.

Owner: a `TenantQuotas` owns the `QuotaBook` of one ingress, on its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import secrets
import time
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cluster.config.schema import TenantLimits
from cluster.edge.peers import NoPeers
from cluster.edge.quotas import ONE, Ask, QuotaBook, Refusal, rate_headers
from cluster.errors import BadRequestError, QuotaError

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Callable,
        Coroutine,
        Iterable,
        Iterator,
        MutableMapping,
    )
    from contextlib import AbstractAsyncContextManager
    from typing import Any, TypeAlias

    from cluster.edge.openai import Emit, Usage
    from cluster.edge.peers import Peers
    from cluster.edge.quotas import Account
    from cluster.edge.tenants import Tenant
    from replicas.output_processor import OutputDelta

    Generate: TypeAlias = Callable[[Emit], Coroutine[Any, Any, Usage]]

logger = logging.getLogger(__name__)

QUESTION = "quotas"
INTERVAL_S = 1.0
"""Time between two exchanges without requests that have to ask."""
_LOST_S = 5.0
"""Time without a report after which an ingress's open requests no longer count."""
_PAUSE_S = 2.0
"""Time for which no request waits for an owner, after an exchange that failed or was slow."""
_SLOW_S = 0.25
_TIMEOUT_S = 0.5
_SCOPE_KEY = "ttserve.quota"
_UNLIMITED = contextlib.nullcontext()


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


class _Waiting(NamedTuple):
    """Requests that wait for their tenant's owner."""

    ask: Ask
    decided: asyncio.Future[Refusal | None]


_EXCHANGES = msgspec.msgpack.Decoder(Exchange)
_ANSWERS = msgspec.msgpack.Decoder(ExchangeAnswer)


class TenantQuotas:
    """The limits of tenants at one ingress, and for the tenants that it owns at all of them.

    Args:
        peers: All ingresses.
        clock: Returns seconds of a steady clock.
    """

    def __init__(
        self, peers: Peers | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._peers = peers or NoPeers()
        self._clock = clock
        self._book = QuotaBook()
        self._id = secrets.token_hex(8)
        self._members = frozenset({self._id})
        self._heard_s: dict[str, float] = {}
        self._limits: dict[str, TenantLimits] = {}
        self._num_tokens: defaultdict[str, int] = defaultdict(int)
        self._waiting: dict[str, list[_Waiting]] = {}
        self._wake = asyncio.Event()
        self._asks_from_s = -math.inf
        self._num_unreadable = 0

    def hold(
        self, tenant: Tenant, scope: MutableMapping[str, Any]
    ) -> AbstractAsyncContextManager[None]:
        """Admit a request if its tenant has limits, and count it as open meanwhile.

        Args:
            tenant: The request's tenant.
            scope: The request's scope, which gets its lease, a refused request's too.

        Raises:
            QuotaError: A limit is reached.
        """
        return (
            _UNLIMITED if tenant.limits is None else self._hold(tenant.name, tenant.limits, scope)
        )

    @contextlib.asynccontextmanager
    async def _hold(
        self, tenant: str, limits: TenantLimits, scope: MutableMapping[str, Any]
    ) -> AsyncIterator[None]:
        scope[_SCOPE_KEY] = QuotaLease(self, tenant, limits)
        async with self.hold_open(tenant, limits, ONE):
            yield

    @contextlib.asynccontextmanager
    async def hold_open(self, tenant: str, limits: TenantLimits, ask: Ask) -> AsyncIterator[None]:
        """Admit requests of a tenant, and count them as open meanwhile.

        Raises:
            QuotaError: A limit is reached.
        """
        self._limits[tenant] = limits
        now_s = self._clock()
        if self.owner(tenant) == self._id or now_s < self._asks_from_s:
            refusal = self._book.admit(tenant, limits, self._id, now_s, ask)
        else:
            refusal = await self._ask(tenant, limits, ask)
        if refusal is not None:
            raise QuotaError(
                f"{refusal.reason}; try again later",
                retry_after_s=max(math.ceil(refusal.retry_after_s), 1),
            )
        try:
            yield
        finally:
            self.count_open(tenant, limits, -ask.num)

    def owner(self, tenant: str) -> str:
        """Return the id of the ingress that counts a tenant."""
        if len(self._members) == 1:
            return next(iter(self._members))
        return max(
            self._members,
            key=lambda member: hashlib.blake2b(f"{member} {tenant}".encode()).digest(),
        )

    def count_open(self, tenant: str, limits: TenantLimits, num: int) -> None:
        """Add to the open requests of a tenant at this ingress."""
        account = self._book.account(tenant, limits, self._clock())
        self._book.set_open(account, self._id, account.open_of.get(self._id, 0) + num)

    def charge(self, tenant: str, limits: TenantLimits, num_tokens: int) -> None:
        """Take tokens from a tenant's allowance; a negative number gives them back."""
        self._num_tokens[tenant] += num_tokens
        now_s = self._clock()
        self._book.account(tenant, limits, now_s).tokens.take(num_tokens, now_s)

    def headers(self, tenant: str, limits: TenantLimits) -> list[tuple[bytes, bytes]]:
        """Return the rate-limit headers of an answer."""
        now_s = self._clock()
        return rate_headers(self._book.account(tenant, limits, now_s), now_s)

    # --- exchanges --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Exchange reports with the other ingresses, for ever."""
        while True:
            self._wake.clear()
            try:
                await self.exchange()
            except Exception:
                logger.exception("counting tenants' requests without the other ingresses")
                self._asks_from_s = self._clock() + _PAUSE_S
                self._settle_alone(list(self._waiting))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), INTERVAL_S)

    async def exchange(self) -> None:
        """Report to the owners once, and settle the requests that wait for them."""
        asked = {tenant: [w.ask for w in waiting] for tenant, waiting in self._waiting.items()}
        owners = {tenant: self.owner(tenant) for tenant in self._limits}
        self._settle_alone(tenant for tenant in asked if owners[tenant] == self._id)
        now_s = self._clock()
        reports = [
            self._report(tenant, owner, asked.get(tenant, []), now_s)
            for tenant, owner in owners.items()
            if owner != self._id
        ]
        payload = msgspec.msgpack.encode(Exchange(self._id, reports))
        begun_s = self._clock()
        found = await self._peers.ask_all(QUESTION, payload, _TIMEOUT_S)
        answers = self._decoded(found)
        self._members = frozenset(answer.ingress for answer in answers) or frozenset({self._id})
        now_s = self._clock()
        silent = {report.tenant: report for report in reports}
        for answer in answers:
            for of_tenant in answer.answers:
                report = silent.pop(of_tenant.tenant, None)
                if report is not None:
                    self._settle(of_tenant, report, now_s)
        is_slow = now_s - begun_s > _SLOW_S
        self._asks_from_s = now_s + _PAUSE_S if silent or is_slow else -math.inf
        if silent:
            logger.warning("the ingresses that count %d tenants do not answer", len(silent))
            self._settle_alone(silent)
        # The owner knows of no open request of these.
        quiet = {report.tenant for report in reports if not (report.num_open or report.asks)}
        self._forget(quiet - set(silent), now_s)

    def answer(self, payload: bytes) -> bytes:
        """Answer another ingress's exchange, or this one's own."""
        exchange, now_s = _EXCHANGES.decode(payload), self._clock()
        answers = []
        if exchange.sender != self._id:
            self._heard_s[exchange.sender] = now_s
            mine = [report for report in exchange.reports if report.owner == self._id]
            answers = [self._count(report, exchange.sender, now_s) for report in mine]
        return msgspec.msgpack.encode(ExchangeAnswer(self._id, answers))

    def _decoded(self, found: list[bytes]) -> list[ExchangeAnswer]:
        """Return the answers that can be read; another version's, or a starting one's, may not."""
        answers: list[ExchangeAnswer] = []
        for raw in found:
            with contextlib.suppress(msgspec.DecodeError):
                answers.append(_ANSWERS.decode(raw))
        num_unreadable = len(found) - len(answers)
        if num_unreadable and num_unreadable != self._num_unreadable:
            logger.warning(
                "cannot read the answers of %d ingresses about tenants' limits; counting without "
                "them, which have another version or are starting",
                num_unreadable,
            )
        self._num_unreadable = num_unreadable
        return answers

    async def _ask(self, tenant: str, limits: TenantLimits, ask: Ask) -> Refusal | None:
        """Return the decision of the tenant's owner; admitted requests are counted as open."""
        future: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, []).append(_Waiting(ask, future))
        self._wake.set()
        try:
            return await future
        except asyncio.CancelledError:
            # Cancelled between its admission, which counted it, and the turn of its task.
            if not future.cancelled() and future.result() is None:
                self.count_open(tenant, limits, -ask.num)
            raise

    def _report(self, tenant: str, owner: str, asks: list[Ask], now_s: float) -> TenantReport:
        account = self._account(tenant)
        num_open = account.open_of.get(self._id, 0)
        limits, num_tokens = self._limits[tenant], self._num_tokens[tenant]
        levels = _levels(account, now_s)
        return TenantReport(tenant, owner, limits, num_open, num_tokens, levels, asks)

    def _count(self, report: TenantReport, sender: str, now_s: float) -> TenantAnswer:
        """Take over a report, and admit what it asks for, as the owner of its tenant."""
        self._limits[report.tenant] = report.limits
        account = self._account(report.tenant)
        self._book.set_open(account, sender, report.num_open)
        known = account.tokens_of.get(sender)
        account.tokens_of[sender] = report.num_tokens
        if known is None:
            # This ingress has become the owner: what the others know is as good.
            _take_over(account, report.levels, now_s, keeps_lower=True)
        else:
            account.tokens.take(report.num_tokens - known, now_s)
        refusal, num_admitted = None, 0
        for ask in report.asks:
            refusal = self._book.admit(report.tenant, report.limits, sender, now_s, ask)
            if refusal is not None:
                break
            num_admitted += 1
        reason, retry_after_s = refusal or ("", 0.0)
        levels = _levels(account, now_s)
        return TenantAnswer(report.tenant, num_admitted, reason, retry_after_s, levels)

    def _settle(self, answer: TenantAnswer, report: TenantReport, now_s: float) -> None:
        """Take over an owner's answer, and wake the requests that waited for it."""
        tenant = answer.tenant
        account = self._account(tenant)
        _take_over(account, answer.levels, now_s, keeps_lower=False)
        account.tokens.take(self._num_tokens[tenant] - report.num_tokens, now_s)
        for i, (ask, future) in enumerate(self._pop_waiting(tenant, len(report.asks))):
            # One whose client has left is not counted: the next report corrects the owner.
            if future.done():
                continue
            if i < answer.num_admitted:
                self.count_open(tenant, self._limits[tenant], ask.num)
                future.set_result(None)
            else:
                future.set_result(Refusal(answer.reason, answer.retry_after_s))

    def _settle_alone(self, tenants: Iterable[str]) -> None:
        """Decide by this ingress's own book."""
        now_s = self._clock()
        for tenant in tenants:
            for ask, future in self._pop_waiting(tenant, None):
                if not future.done():
                    limits = self._limits[tenant]
                    future.set_result(self._book.admit(tenant, limits, self._id, now_s, ask))

    def _pop_waiting(self, tenant: str, count: int | None) -> list[_Waiting]:
        waiting = self._waiting.pop(tenant, [])
        first, rest = (waiting, []) if count is None else (waiting[:count], waiting[count:])
        if rest:
            self._waiting[tenant] = rest
            self._wake.set()
        return first

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
            account = self._account(tenant)
            for sender in lost:
                account.open_of.pop(sender, None)
                account.tokens_of.pop(sender, None)
            is_known = tenant in quiet or self.owner(tenant) == self._id
            if is_known and account.is_idle(now_s) and tenant not in self._waiting:
                del self._limits[tenant]
        self._book.drop_idle(now_s)

    def _account(self, tenant: str) -> Account:
        return self._book.account(tenant, self._limits[tenant], self._clock())


class QuotaLease:
    """One request of a tenant with limits; that of a refused one only gives headers."""

    def __init__(self, quotas: TenantQuotas, tenant: str, limits: TenantLimits) -> None:
        self._quotas = quotas
        self._tenant = tenant
        self._limits = limits

    @contextlib.asynccontextmanager
    async def hold_further(self, num: int) -> AsyncIterator[None]:
        """Admit the further prompts of the request, and count them as open meanwhile.

        Raises:
            QuotaError: With them the tenant would have too many open requests.
            BadRequestError: There are so many that this would always be so.
        """
        most = self._limits.max_requests
        if most is not None and num >= most:
            raise BadRequestError(
                f"prompt has {num + 1} entries, but this tenant may have {most} open requests; "
                "send more requests with fewer prompts",
                param="prompt",
            )
        async with self._quotas.hold_open(self._tenant, self._limits, Ask(num, is_further=True)):
            yield

    def charge(self, num_tokens: int) -> None:
        """Take tokens from the tenant's allowance; a negative number gives them back."""
        self._quotas.charge(self._tenant, self._limits, num_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the rate-limit headers of the answer."""
        return self._quotas.headers(self._tenant, self._limits)

    @contextlib.contextmanager
    def extend(self) -> Iterator[None]:
        """Count one more open request, for work that continues after the answer."""
        self._quotas.count_open(self._tenant, self._limits, 1)
        try:
            yield
        finally:
            self._quotas.count_open(self._tenant, self._limits, -1)

    def count_tokens(self, generate: Generate, num_prompt_tokens: int) -> Generate:
        """Return a `generate` that charges its prompts, and the tokens that it emits as they come.

        If it fails before any output, as for lack of capacity, the prompts are given back; not if
        the client disconnects, because they may have been computed.
        """

        async def counted(emit: Emit) -> Usage:
            has_output = False

            async def count(delta: OutputDelta) -> None:
                nonlocal has_output
                has_output = True
                self.charge(len(delta.token_ids))
                await emit(delta)

            self.charge(num_prompt_tokens)
            try:
                return await generate(count)
            except Exception:
                if not has_output:
                    self.charge(-num_prompt_tokens)
                raise

        return counted


def lease_of(scope: MutableMapping[str, Any]) -> QuotaLease | None:
    """Return the lease in a request's scope; None if its tenant has no limits."""
    lease: QuotaLease | None = scope.get(_SCOPE_KEY)
    return lease


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

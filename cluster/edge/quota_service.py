"""Tenants' limits over all ingresses: admits requests, and counts their tokens.

Owner: a `TenantQuotas` carries the decisions of its `QuotaMachine` to the waiting tasks of one
event loop, and its exchanges to the other ingresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from typing import TYPE_CHECKING

import msgspec

from cluster.edge.peers import NoPeers
from cluster.edge.quota_machine import Exchange, ExchangeAnswer, QuotaMachine, QuotaRequest
from cluster.edge.quotas import ONE, Ask, rate_headers
from cluster.errors import BadRequestError, QuotaError

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Callable,
        Coroutine,
        Iterator,
        MutableMapping,
    )
    from contextlib import AbstractAsyncContextManager
    from typing import Any, TypeAlias

    from cluster.config.schema import TenantLimits
    from cluster.edge.openai import Emit, Usage
    from cluster.edge.peers import Peers
    from cluster.edge.tenants import Tenant
    from replicas.output_processor import OutputDelta

    Generate: TypeAlias = Callable[[Emit], Coroutine[Any, Any, Usage]]

logger = logging.getLogger(__name__)

QUESTION = "quotas"
INTERVAL_S = 1.0
"""Time between two exchanges without requests that have to ask."""
_TIMEOUT_S = 0.5
_SCOPE_KEY = "ttserve.quota"
_UNLIMITED = contextlib.nullcontext()


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
        self._machine = QuotaMachine(secrets.token_hex(8))
        # Of the requests that wait for an exchange.
        self._decisions: dict[QuotaRequest, asyncio.Future[None]] = {}
        self._wake = asyncio.Event()
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
        request = QuotaRequest(tenant, limits, ask)
        self._machine.begin(request, self._clock())
        if not request.is_decided:
            await self._decision(request)
        if request.refusal is not None:
            raise QuotaError(
                f"{request.refusal.reason}; try again later",
                retry_after_s=max(math.ceil(request.refusal.retry_after_s), 1),
            )
        try:
            yield
        finally:
            self._machine.end(request, self._clock())

    def lease(self, tenant: Tenant) -> QuotaLease | None:
        """Return a lease for a request that another ingress has admitted; None without limits."""
        if tenant.limits is None:
            return None
        self._machine.adopt(tenant.name, tenant.limits)
        return QuotaLease(self, tenant.name, tenant.limits)

    def count_open(self, tenant: str, limits: TenantLimits, num: int) -> None:
        """Add to the open requests of a tenant at this ingress."""
        self._machine.count_open(tenant, limits, num, self._clock())

    def charge(self, tenant: str, limits: TenantLimits, num_tokens: int) -> None:
        """Take tokens from a tenant's allowance; a negative number gives them back."""
        self._machine.charge(tenant, limits, num_tokens, self._clock())

    def headers(self, tenant: str, limits: TenantLimits) -> list[tuple[bytes, bytes]]:
        """Return the rate-limit headers of an answer."""
        now_s = self._clock()
        return rate_headers(self._machine.book.account(tenant, limits, now_s), now_s)

    # --- exchanges --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Exchange reports with the other ingresses, for ever."""
        while True:
            self._wake.clear()
            try:
                await self.exchange()
            except Exception:
                logger.exception("counting tenants' requests without the other ingresses")
                self._release(self._machine.fail_exchange(self._clock()))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), INTERVAL_S)

    async def exchange(self) -> None:
        """Report to the owners once, and settle the requests that wait for them."""
        begun_s = self._clock()
        exchange, decided = self._machine.begin_exchange(begun_s)
        self._release(decided)
        payload = msgspec.msgpack.encode(exchange)
        answers = self._decoded(await self._peers.ask_all(QUESTION, payload, _TIMEOUT_S))
        ended = self._machine.end_exchange(exchange, answers, begun_s, self._clock())
        if ended.num_silent:
            logger.warning("the ingresses that count %d tenants do not answer", ended.num_silent)
        self._release(ended.decided)
        if self._machine.is_waiting:
            self._wake.set()

    def answer(self, payload: bytes) -> bytes:
        """Answer another ingress's exchange, or this one's own."""
        answer = self._machine.answer(_EXCHANGES.decode(payload), self._clock())
        return msgspec.msgpack.encode(answer)

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

    async def _decision(self, request: QuotaRequest) -> None:
        """Wait until the next exchange has decided on requests."""
        future = self._decisions[request] = asyncio.get_running_loop().create_future()
        self._wake.set()
        try:
            await future
        except asyncio.CancelledError:
            # Perhaps between its admission, which counted it, and the turn of its task.
            self._machine.cancel(request, self._clock())
            raise
        finally:
            self._decisions.pop(request, None)

    def _release(self, decided: list[QuotaRequest]) -> None:
        """Wake the tasks of requests that are decided."""
        for request in decided:
            future = self._decisions.pop(request, None)
            if future is not None and not future.done():
                future.set_result(None)


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

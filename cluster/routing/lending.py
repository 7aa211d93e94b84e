"""A stream's KV on its way from the engine that hands it over to the one that goes on with it.

Owner: the request's `HandOver`. The engine that has the stream decodes on while full blocks of what
it has are fetched; what comes to be meanwhile, and whatever does not come, the other one computes.
So the stream stands still only for the few tokens of a transfer's time, however long it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.routing.leg import Leg
    from cluster.routing.pools import PoolState
    from cluster.routing.tickets import TicketOffice
    from replicas.messages import Accepted, EngineDescription, EngineRequest


class LendingContext(Protocol):
    """What lending needs of the router that placed its request."""

    tickets: TicketOffice


class Lending:
    """See the module docstring.

    Args:
        context: What this ingress places requests with.
        pools: Where the engines are described.
        request: Whose stream.
        new_epoch: Numbers the transfers of the request.

    Attributes:
        request: See there.
        kv: How the engine that was asked last comes by the KV, see `Seam.kv`.
    """

    def __init__(
        self,
        context: LendingContext,
        pools: PoolState,
        request: EngineRequest,
        new_epoch: Callable[[], int],
    ) -> None:
        self._context = context
        self._pools = pools
        self.request = request
        self._new_epoch = new_epoch
        self._epoch: int | None = None
        self.kv = "recomputed"

    @property
    def is_under_way(self) -> bool:
        """Whether the engine that hands over is still needed for its KV."""
        return self._epoch is not None

    def begin(self, lender: Leg, heir: Leg, accepted: Accepted, num_tokens: int) -> bool:
        """Let the heir fetch; False if there is nothing that it could.

        Args:
            lender: Has the stream.
            heir: Is to go on with it, and has accepted.
            accepted: What it said.
            num_tokens: Tokens that it knows of, prompt included.
        """
        self.stop()
        to = self._pools.member(heir.incarnation)
        member = self._pools.member(lender.incarnation)
        if to is None or member is None or not lender.has_tokens:
            return False
        num_full = _num_in_full_blocks(num_tokens, member.description)
        if accepted.num_cached_tokens >= num_full:
            self.kv = "cached" if accepted.num_cached_tokens else "recomputed"
            return False
        if not (member.description.kv_endpoints and to.description.kv_endpoints):
            return False
        epoch = self._epoch = self._new_epoch()
        transfer = self._context.tickets.begin(self.request, epoch, member.description, num_full)
        ticket = self._context.tickets.seal(transfer, heir.incarnation)
        lender.lend(ticket, epoch)
        heir.load(ticket, epoch)
        return True

    def ended(self, epoch: int, failure: str | None) -> bool:
        """One of both engines has said how a transfer ended; whether it was the one under way."""
        if epoch != self._epoch:
            return False
        self._epoch = None
        self.kv = "moved" if failure is None else "recomputed"
        return True

    def stop(self) -> None:
        """Nobody waits for it any more. Idempotent."""
        self._epoch = None
        self.kv = "recomputed"


def _num_in_full_blocks(num_tokens: int, lender: EngineDescription) -> int:
    """How many of so many tokens are in blocks that their engine writes to no more.

    The last one is not among them: its KV is computed with the next one.
    """
    size = max(kv_group.block_size for kv_group in lender.kv_groups)
    return (num_tokens - 1) // size * size

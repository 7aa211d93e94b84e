"""Transfers a stream's KV from the engine that drains to the one that takes the stream over.

Owner: the request's `HandOver`. The first engine continues to decode while the second fetches the
full blocks that it has. The second engine computes the KV of later tokens, and of those that did
not arrive. So a stream of any length pauses only for the few tokens decoded during a transfer.
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
    """The parts of the router that `Lending` uses."""

    tickets: TicketOffice


class Lending:
    """The transfer of one stream's KV between decode engines.

    Args:
        context: Parts of the router.
        pools: Descriptions of the engines.
        request: The request of the stream.
        new_epoch: Numbers the transfers of the request.

    Attributes:
        request: As given.
        kv: How the last successor gets the KV; see `Seam.kv`.
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
        """Whether the first engine is still needed for its KV."""
        return self._epoch is not None

    def begin(self, lender: Leg, heir: Leg, accepted: Accepted, num_tokens: int) -> bool:
        """Start the transfer; return False if there is nothing that the successor could fetch.

        The KV of several choices is computed again.

        Args:
            lender: The leg that has the stream.
            heir: The leg that takes it over, and has accepted.
            accepted: Its engine's answer.
            num_tokens: Tokens of prompt and output that the successor knows of.
        """
        self.stop()
        to = self._pools.member(heir.incarnation)
        member = self._pools.member(lender.incarnation)
        if to is None or member is None or not lender.has_tokens or self.request.sampling.n > 1:
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
        """Record the end of a transfer; return whether it was the current one."""
        if epoch != self._epoch:
            return False
        self._epoch = None
        self.kv = "moved" if failure is None else "recomputed"
        return True

    def stop(self) -> None:
        """Stop waiting for the transfer. Idempotent."""
        self._epoch = None
        self.kv = "recomputed"


def _num_in_full_blocks(num_tokens: int, lender: EngineDescription) -> int:
    """Return how many tokens are in full blocks, to which their engine writes no more.

    The last token is not counted: its KV is computed with the next one.
    """
    size = max(kv_group.block_size for kv_group in lender.kv_groups)
    return (num_tokens - 1) // size * size

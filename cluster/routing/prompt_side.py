"""Decides whether a prefill engine or the decode engine computes the prompt of one request.

Owner: the request's `Run`. The costs of both ways are predicted by `ConditionalPrefill`, or decided
by admission where it is configured; this class keeps the decision for one request. The decision is
made when a slot is wanted, and checked again for the slot that was found, as loads may have
changed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cluster.config.schema import RouterConfig
    from cluster.routing.admission_waits import Pass
    from cluster.routing.conditional_prefill import ConditionalPrefill
    from cluster.routing.leg import Legs
    from cluster.routing.placement import Placement
    from cluster.routing.pools import PoolState
    from cluster.routing.progress import Progress
    from replicas.messages import RequestMode


class PromptSideContext(Protocol):
    """The parts of the router that a `PromptSide` uses."""

    config: RouterConfig
    conditional: ConditionalPrefill | None


class PromptSide:
    """The choice of the engine that computes one request's prompt.

    Args:
        context: Parts of the router.
        pools: The engines that compute prompts.
        legs: The legs of the request, and its demand.
        progress: Knows whether the prompt has been computed.

    Attributes:
        let_in: The request's admission pass, which contains the decision; None without admission.
        is_refused: Whether prefill engines were asked before there was a slot, and gave nothing.
    """

    def __init__(
        self, context: PromptSideContext, pools: PoolState, legs: Legs, progress: Progress
    ) -> None:
        self._context = context
        self._pools = pools
        self._legs = legs
        self._progress = progress
        self.let_in: Pass | None = None
        self.is_refused = False
        # The place whose decode engine should compute the prompt.
        self._here: Placement | None = None

    def __repr__(self) -> str:
        return f"PromptSide({self._here}, {self.is_refused=})"

    @property
    def is_remote(self) -> bool:
        """Whether the prompt goes to a prefill engine because no decode engine is better."""
        return self._may_move and self._best_here() is None

    def look(self) -> set[Placement]:
        """Choose the side again; return places that the slot should avoid if it can."""
        here = self._here = self._best_here()
        if self.let_in is not None:
            return self.let_in.to_spare()
        if here is None:
            return set()
        return {place for place in self._pools.decode_views().placements if place != here}

    def mode_at(self, placement: Placement) -> RequestMode:
        """Return the mode of the decode leg at a place.

        "decode" is a reservation that waits to be activated, "local" computes the prompt at once.
        """
        if self._progress.has_tokens:
            return "decode"
        if self._is_best_here(placement):
            return "local"
        snapshot = self._pools.snapshot(placement.incarnation)
        is_decode = snapshot is not None and snapshot.role == "decode"
        return "decode" if is_decode and not self.is_refused and self._may_move else "local"

    def asked(self, placement: Placement, mode: RequestMode) -> None:
        """Record that a decode engine is asked to run the request in this mode."""
        conditional = self._context.conditional if self.let_in is None else None
        if conditional is not None and mode == "local" and self._may_move:
            conditional.give(self._legs.demand, placement, asyncio.get_running_loop().time())

    def over(self) -> None:
        """Record that no decode engine has the prompt to compute any more. Idempotent."""
        if self._context.conditional is not None:
            now_s = asyncio.get_running_loop().time()
            self._context.conditional.drop(self._legs.demand.request_id, now_s)

    @property
    def _may_move(self) -> bool:
        """Whether a prefill engine takes prompts and this one is long enough to move."""
        fewest = self._context.config.min_remote_prefill_tokens or 0
        return self._legs.demand.num_prompt_tokens >= fewest and self._pools.can_prefill

    def _best_here(self) -> Placement | None:
        """Return the place whose decode engine should compute the prompt; None for prefill."""
        if self.let_in is not None:
            return self.let_in.helper
        conditional = self._context.conditional
        if conditional is None or self._progress.has_tokens or self._legs.prefill is not None:
            return None
        if not self._may_move:
            return None
        return conditional.place(self._legs.demand, asyncio.get_running_loop().time())

    def _is_best_here(self, placement: Placement) -> bool:
        """Return whether the prompt should be computed at the place of its slot."""
        if placement == self._here or self.let_in is not None:
            return placement == self._here
        here = self._best_here()
        return here is not None and here.incarnation == placement.incarnation

"""Layer of experts, each of which computes some of the tokens.

The experts of a layer may be distributed over the ranks of a gang. A rank then sends each row to
the rank with its expert and gets the product back: one result for each expert of each token, which
it weights and sums itself, in the experts' order. So a token is the same sum of the same products
for any number of ranks. Every call is a collective of all ranks, including those without tokens of
their own.

Dimensions: T tokens, K experts of each token, E experts of a layer, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replicas.generators.layer_specs import ExpertsConfig
    from replicas.generators.protocol import Exchange
    from replicas.generators.torch.linear import LinearLayer

    Mlp: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class Experts:
    """The experts of one layer, and which of them compute a token.

    Owner: the weights of the router and of this rank's experts; nothing changes them.

    Args:
        config: The model's experts.
        router: hidden -> E.
        own: The experts of this rank, each (T, D) -> (T, D): all of them, or its share in order.
        exchange: Communication with the other ranks, if the experts are distributed.
        shared: MLP of all tokens, which every rank has, or None.
        shared_gate: hidden -> 1: the sigmoid of its product is a factor of the shared result.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        router: LinearLayer,
        own: Sequence[Mlp],
        exchange: Exchange | None = None,
        *,
        shared: Mlp | None = None,
        shared_gate: LinearLayer | None = None,
    ) -> None:
        self._config = config
        self._router = router
        self._own = tuple(own)
        self._exchange = exchange
        self._shared = shared
        self._shared_gate = shared_gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, D) -> (T, D); T may be 0."""
        routed = self._routed(x)
        if self._shared is None:
            return routed
        shared = self._shared(x)
        if self._shared_gate is not None:
            shared = self._shared_gate(x).sigmoid() * shared
        return routed + shared

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        experts, shares = self._route(x)
        num_per_token = self._config.num_per_token
        # A place for each expert of each token, brought together by expert.
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=self._config.num_experts)
        rows = x.index_select(0, order // num_per_token)
        places = torch.empty_like(rows)
        places[order] = self._compute(rows, counts)
        parts = (places.view(len(x), num_per_token, x.shape[1]) * shares.unsqueeze(-1)).to(x.dtype)
        total = torch.zeros_like(x)
        for part in parts.unbind(1):
            total += part
        return total

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's experts, int64 (T, K), ascending, and their weights (T, K)."""
        # As transformers does; float64 is for oracles, which round nothing.
        precise = torch.float64 if x.dtype == torch.float64 else torch.float32
        likely = torch.softmax(self._router(x).to(precise), dim=-1)
        shares, experts = likely.topk(self._config.num_per_token, dim=-1)
        if self._config.is_normalised:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        if self._config.rounds_shares:
            shares = shares.to(x.dtype)
        experts, order = experts.sort(dim=-1)
        return experts, shares.gather(1, order)

    def _compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return products of rows ordered by expert, with `counts` (E,) rows per expert."""
        if self._exchange is None:
            return self._run(rows, counts.tolist())
        by_rank = (self._exchange.size, len(self._own))
        asked = self._exchange.counts(counts).view(by_rank)
        sent, received = counts.view(by_rank).sum(1).tolist(), asked.sum(1).tolist()
        arrived = self._exchange.rows(rows, sent, received)
        # By rank, and for each rank by expert; the experts want theirs together.
        expert_of = torch.arange(len(self._own)).repeat(self._exchange.size)
        order = expert_of.repeat_interleave(asked.flatten()).argsort(stable=True)
        computed = torch.empty_like(arrived)
        computed[order] = self._run(arrived.index_select(0, order), asked.sum(0).tolist())
        return self._exchange.rows(computed, received, sent)

    def _run(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        parts = zip(self._own, torch.split(rows, list(counts)), strict=True)
        return torch.cat([expert(part) if len(part) else part for expert, part in parts])


def own_experts(num_experts: int, exchange: Exchange | None) -> range:
    """Return which experts of a layer are this rank's."""
    if exchange is None:
        return range(num_experts)
    share = num_experts // exchange.size
    return range(exchange.rank * share, (exchange.rank + 1) * share)

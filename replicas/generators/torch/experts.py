"""Layer of experts, each of which computes some of the tokens.

The experts of a layer may be distributed over the ranks of a gang. A rank then sends each row to
a rank with its expert and gets the product back: one result for each expert of each token, which
it weights and sums itself, in the experts' order. So a token is the same sum of the same products
for any number of ranks and any placement. Every call is a collective of all ranks, including those
without tokens of their own.

Dimensions: T tokens, K experts of each token, E experts of a layer, D hidden, P places: the experts
that ranks hold, by rank and for each rank ascending, with as many places for every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replicas.generators.expert_placement import ExpertPlacement
    from replicas.generators.layer_specs import ExpertsConfig
    from replicas.generators.protocol import Exchange
    from replicas.generators.torch.linear import LinearLayer

    Mlp: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
    _Run: TypeAlias = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


class ExpertDispatch:
    """The way of rows from this rank to the ranks with their experts, and back.

    Args:
        placement: Which ranks hold which experts.
        exchange: Communication with the other ranks.

    Attributes:
        own: The experts of this rank, ascending.
        num_places: P.
    """

    def __init__(self, placement: ExpertPlacement, exchange: Exchange) -> None:
        self._exchange = exchange
        held = [placement.experts_of(rank) for rank in range(exchange.size)]
        self.own = held[exchange.rank]
        self._width = max(map(len, held))
        self.num_places = exchange.size * self._width
        first = exchange.rank
        # The ranks that this rank asks for an expert: itself, or in turn all that hold it. Ranks
        # begin with different ones, as each may have a single token for the expert.
        asked = [
            (first,) if first in ranks else _rotated(ranks, first) for ranks in placement.ranks
        ]
        most = max(map(len, asked))
        self._num_choices = torch.tensor([len(ranks) for ranks in asked])
        self._choices = torch.zeros((len(asked), most), dtype=torch.int64)
        for expert, ranks in enumerate(asked):
            for index, rank in enumerate(ranks):
                place = rank * self._width + held[rank].index(expert)
                self._choices[expert, index] = place

    def places(self, experts: torch.Tensor) -> torch.Tensor:
        """Return the place, int64, in which each of some experts computes its row."""
        if self._choices.shape[1] == 1:
            return self._choices[:, 0][experts]
        order = experts.argsort(stable=True)
        by_expert = experts[order]
        counts = torch.bincount(experts, minlength=len(self._choices))
        first = counts.cumsum(0) - counts
        nth = torch.empty_like(experts)
        nth[order] = torch.arange(len(experts)) - first[by_expert]
        return self._choices[experts, nth % self._num_choices[experts]]

    def compute(self, rows: torch.Tensor, counts: torch.Tensor, run: _Run) -> torch.Tensor:
        """Return the products of rows that are ordered by place.

        Args:
            rows: (sum of counts, D).
            counts: int64 (P,), rows of each place.
            run: Computes the rows of this rank's experts, ordered by expert, from their counts.
        """
        by_rank = (self._exchange.size, self._width)
        asked = self._exchange.counts(counts).view(by_rank)
        sent, received = counts.view(by_rank).sum(1).tolist(), asked.sum(1).tolist()
        arrived = self._exchange.rows(rows, sent, received)
        # By rank, and for each rank by expert; the experts want theirs together.
        expert_of = torch.arange(self._width).repeat(self._exchange.size)
        order = expert_of.repeat_interleave(asked.flatten()).argsort(stable=True)
        computed = torch.empty_like(arrived)
        of_own = asked.sum(0)[: len(self.own)].tolist()
        computed[order] = run(arrived.index_select(0, order), of_own)
        return self._exchange.rows(computed, received, sent)


def _rotated(ranks: tuple[int, ...], by: int) -> tuple[int, ...]:
    return ranks[by % len(ranks) :] + ranks[: by % len(ranks)]


class Experts:
    """The experts of one layer, and which of them compute a token.

    Owner: the weights of the router and of this rank's experts, which nothing changes, and the
    counts of their load.

    Args:
        config: The model's experts.
        router: hidden -> E.
        own: The experts of this rank, each (T, D) -> (T, D): all of them, or `dispatch.own`.
        dispatch: The way to the other ranks, if the experts are distributed.
        shared: MLP of all tokens, which every rank has, or None.
        shared_gate: hidden -> 1: the sigmoid of its product is a factor of the shared result.
        correction: (E,), added to scores for the choice of experts alone, or None.

    Attributes:
        num_tokens: int64 (E,): this rank's tokens that each expert has had, wherever it is.
        num_rows: Rows that this rank's experts have computed, its own and those of other ranks.
    """

    def __init__(  # noqa: PLR0913 - the parts of a layer of experts
        self,
        config: ExpertsConfig,
        router: LinearLayer,
        own: Sequence[Mlp],
        dispatch: ExpertDispatch | None = None,
        *,
        shared: Mlp | None = None,
        shared_gate: LinearLayer | None = None,
        correction: torch.Tensor | None = None,
    ) -> None:
        self._config = config
        self._router = router
        self._own = tuple(own)
        self._dispatch = dispatch
        self._shared = shared
        self._shared_gate = shared_gate
        self._correction = correction
        self.forget_load()

    def forget_load(self) -> None:
        """Set the counts of the load to zero."""
        self.num_tokens = torch.zeros(self._config.num_experts, dtype=torch.int64)
        self.num_rows = 0

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
        # A row for each expert of each token, brought together by expert.
        places, num_places = experts.flatten(), self._config.num_experts
        tokens = torch.bincount(places, minlength=num_places)
        self.num_tokens += tokens
        if self._dispatch is not None:
            places, num_places = self._dispatch.places(places), self._dispatch.num_places
        order = places.argsort(stable=True)
        rows = x.index_select(0, order // num_per_token)
        products = torch.empty_like(rows)
        if self._dispatch is None:
            products[order] = self._run(rows, tokens.tolist())
        else:
            counts = torch.bincount(places, minlength=num_places)
            products[order] = self._dispatch.compute(rows, counts, self._run)
        products = products.view(len(x), num_per_token, x.shape[1])
        parts = (products * shares.unsqueeze(-1)).to(x.dtype)
        total = torch.zeros_like(x)
        for part in parts.unbind(1):
            total += part
        return total

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's experts, int64 (T, K), ascending, and their weights (T, K)."""
        # As transformers does; float64 is for oracles, which round nothing.
        config, precise = self._config, torch.promote_types(x.dtype, torch.float32)
        products = self._router(x.to(precise) if config.routes_wide else x).to(precise)
        is_softmax = config.scoring == "softmax"
        likely = torch.softmax(products, dim=-1) if is_softmax else products.sigmoid()
        wanted = likely if self._correction is None else likely + self._correction
        if config.num_groups > 1:
            wanted = self._of_best_groups(wanted)
        experts = wanted.topk(config.num_per_token, dim=-1).indices
        shares = likely.gather(1, experts)
        if config.is_normalised:
            # As transformers: sigmoids of far negative products may all be zero.
            shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
        shares = shares * config.scale
        if config.rounds_shares:
            shares = shares.to(x.dtype)
        experts, order = experts.sort(dim=-1)
        return experts, shares.gather(1, order)

    def _of_best_groups(self, wanted: torch.Tensor) -> torch.Tensor:
        """Return scores (T, E) that are minus infinity outside of each token's best groups."""
        num_groups = self._config.num_groups
        groups = wanted.view(len(wanted), num_groups, self._config.num_experts // num_groups)
        num_best = 1 if self._correction is None else 2
        best = groups.topk(num_best, dim=-1).values.sum(-1)
        chosen = best.topk(self._config.groups_per_token, dim=-1).indices
        others = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, value=False)
        return groups.masked_fill(others.unsqueeze(-1), -torch.inf).flatten(1)

    def _run(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the products of rows that are ordered by this rank's experts."""
        self.num_rows += len(rows)
        if not self._own:
            return rows
        parts = zip(self._own, torch.split(rows, list(counts)), strict=True)
        return torch.cat([expert(part) if len(part) else part for expert, part in parts])

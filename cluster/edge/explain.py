"""Explanations of placements: GET /debug/routes/{request_id}, and their short form. Pure.

Only the ingress that ran a request has its record, and the others ask it. Clients need the
request's id; ids are not listed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.routing.explain import Made, Route, RouteFigures
    from cluster.routing.placement import Placement

    NameOf = Callable[[str], str]

ROUTE_HEADER = "x-debug-route"
"""A request with this header, unless it is 0, gets the short form back under the same name."""
_SUFFIX_DIGITS = 16


def engine_request_id(request_id: str, random_hex: str) -> str:
    """Return the engines' id of a request: unique, even if a client repeats its own id.

    `cluster.routing.explain.client_id` returns the client's id.
    """
    return f"{request_id}-{random_hex[:_SUFFIX_DIGITS]}"


class CandidateView(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate place of a placement.

    Attributes:
        dp_group: DP group; null for a whole engine.
        snapshot_seq: Sequence number of the replica's snapshot that was used.
        cost: Cost of the place; the least is chosen. Null if the request does not fit there, or if
            no costs were compared.
        terms: Contribution of each of the policy's terms, level by level.
        uncached_tokens: Prompt tokens to compute there; null if the policy did not need them.
    """

    replica: str
    dp_group: int | None
    snapshot_seq: int
    cost: float | None
    terms: dict[str, float]
    uncached_tokens: float | None


class PlacementView(msgspec.Struct, frozen=True, kw_only=True):
    """One placement.

    Attributes:
        side: decode (a slot), prefill (a prefill engine for the prompt) or prompt (a decode engine
            that computes the prompt itself).
        placed_s: Seconds from the request's arrival to the placement.
        num_places: Places on that side.
        num_fitting: Places that the request fits in.
        num_refused: Places that had refused the request.
        num_avoided: Places left out because others are better for the prompt, or because the
            request was lost there.
        prefill_engine_cost_s: For prompt: cost of the best prefill engine.
        candidates: The chosen place, then the next cheapest ones.
    """

    side: str
    placed_s: float
    num_places: int
    num_fitting: int
    num_refused: int
    num_avoided: int
    prefill_engine_cost_s: float | None
    candidates: list[CandidateView]


class FiguresView(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted or measured figures of a request; see `cluster.routing.explain.RouteFigures`."""

    ttft_s: float | None
    tpot_s: float | None
    cached_tokens: int | None


class RouteView(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        age_s: Seconds since its arrival.
        outcome: running, finished, abort or the code of its error.
        ttft_s: Seconds from its arrival to its first token.
    """

    policy: str
    age_s: float
    outcome: str
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float | None
    predicted: FiguresView
    actual: FiguresView
    placements: list[PlacementView]


class RoutesView(msgspec.Struct, frozen=True, kw_only=True):
    """Records of the requests with one client id.

    Attributes:
        routes: The kept records, the latest first.
        num_dropped: Earlier records with this id that are no longer kept.
    """

    routes: list[RouteView]
    num_dropped: int


def route_view(route: Route, name_of: NameOf, *, policy: str, now_s: float) -> RouteView:
    """Return the record of a request.

    Args:
        route: The request's route.
        name_of: Maps an incarnation to its replica's name.
        policy: Name of the placement policy.
        now_s: Current time, on the route's clock.
    """
    return RouteView(
        policy=policy,
        age_s=round(now_s - route.arrived_s, 6),
        outcome=route.outcome,
        num_prompt_tokens=route.num_prompt_tokens,
        num_output_tokens=route.num_tokens,
        ttft_s=_seconds(None if route.first_s is None else route.first_s - route.arrived_s),
        predicted=_figures(route.predicted),
        actual=_figures(route.actual),
        placements=[_placement_view(made, route.arrived_s, name_of) for made in route.made],
    )


def short_form(route: Route, name_of: NameOf) -> str:
    """Return the header's value, a dictionary of RFC 9651: places, predictions and outcomes."""
    fields = []
    for side in ("decode", "prefill", "prompt"):
        made = route.last_of(side)
        if made is not None:
            choice = made.choice
            name = _place_name(choice.chosen, name_of)
            fields.append(f'{side}="{name}";of={choice.num_fitting};snapshot={choice.seqs[0]}')
    fields.append(f"placements={len(route.made)}")
    for kind, figures in (("predicted", route.predicted), ("actual", route.actual)):
        if figures.ttft_s is not None:
            fields.append(f"{kind}-ttft-ms={1e3 * figures.ttft_s:.3f}")
        if figures.cached_tokens is not None:
            fields.append(f"{kind}-cached-tokens={figures.cached_tokens}")
    return ", ".join(fields)


def _place_name(placement: Placement, name_of: NameOf) -> str:
    group = f"/{placement.dp_group}" if placement.dp_group >= 0 else ""
    return name_of(placement.incarnation) + group


def _figures(figures: RouteFigures) -> FiguresView:
    return FiguresView(
        ttft_s=_seconds(figures.ttft_s),
        tpot_s=_seconds(figures.token_s),
        cached_tokens=figures.cached_tokens,
    )


def _seconds(value: float | None) -> float | None:
    """Round to microseconds; further digits are rounding errors."""
    return None if value is None else round(value, 6)


def _placement_view(made: Made, arrived_s: float, name_of: NameOf) -> PlacementView:
    choice = made.choice
    missed = choice.missed_tokens
    candidates = []
    for rank, placement in enumerate(choice.places):
        cost = math.inf if choice.costs is None else float(choice.costs[rank])
        if rank == 0 or cost < math.inf:
            candidates.append(
                CandidateView(
                    replica=name_of(placement.incarnation),
                    dp_group=placement.dp_group if placement.dp_group >= 0 else None,
                    snapshot_seq=choice.seqs[rank],
                    cost=cost if cost < math.inf else None,
                    terms=choice.terms(rank),
                    uncached_tokens=(
                        missed
                        if missed is None or isinstance(missed, float)
                        else float(missed[rank])
                    ),
                )
            )
    return PlacementView(
        side=made.side,
        placed_s=round(made.made_s - arrived_s, 6),
        num_places=choice.num_places,
        num_fitting=choice.num_fitting,
        num_refused=choice.num_refused,
        num_avoided=choice.num_spared,
        prefill_engine_cost_s=choice.elsewhere_s,
        candidates=candidates,
    )

"""Chooses where a request runs: the place of least cost. Policies are the weights of its terms.

A policy is a list of levels. A level is a sum of weighted terms, and the least sum wins; each next
level decides among equal places, and after the last one they take turns. No I/O and no clock.
Random numbers come from a seeded generator: simulations repeat, ingresses choose differently.

A placement is a proposal. Views are the replicas' last snapshots, less what this ingress has sent
since; the replica stays the authority and may refuse.
"""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from cluster.routing.affinity import affinities
from cluster.routing.choice import Choice, Parts, Whole
from cluster.routing.linear import Linear, Product, Sum, Times
from cluster.routing.views import Column, Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy.typing as npt

    from cluster.config.schema import PolicyName
    from cluster.routing.choice import Notes, Side, Weighed
    from cluster.routing.demand import Demand
    from cluster.routing.placement import Placement
    from cluster.routing.views import Views

    Numbers = npt.NDArray[np.float64]
    Term = Callable[["Scene"], Numbers | float]
    Terms = tuple[tuple[float, Term], ...]
    Level = Linear | Terms
    CachedTokens = Callable[[Demand], Mapping[Placement, int]]


class PlacementPolicy(Protocol):
    """A policy for one side of one ingress, with its own memory."""

    def place(
        self,
        demand: Demand,
        views: Views,
        refused: Collection[Placement] = (),
        spared: Collection[Placement] = (),
    ) -> Placement | None:
        """Return the best place that can take the request, or None if it fits nowhere.

        Args:
            demand: The request.
            views: All candidates of one side.
            refused: Places that have just refused this request, or were lost with it.
            spared: Places that it should not get for other reasons.
        """
        ...


class Policies(NamedTuple):
    """The policies of one ingress: for decode slots, and for prompts on prefill engines."""

    decode: PlacementPolicy
    prefill: PlacementPolicy


class Scene:
    """A request and all places, as terms see them.

    Args:
        demand: The request.
        views: The places.
        fitting: Which of them can take it.
        cached_tokens: Returns how many prompt tokens are known to be cached at a place; 0 where
            unknown. Called only by terms that need it, because it hashes the prompt.
        turn: Index of the place whose turn it is.
        draw: Random generator, for policies that need one.

    Attributes:
        num_fitting: Number of places that can take it.
        weighed: Levels that were computed.
        costs: Costs of the first level whose costs differ between places.
    """

    def __init__(
        self,
        demand: Demand,
        views: Views,
        fitting: npt.NDArray[np.bool_],
        cached_tokens: CachedTokens,
        turn: int = 0,
        draw: random.Random | None = None,
    ) -> None:
        self.demand = demand
        self.views = views
        self.fitting = fitting
        self.num_fitting = int(np.count_nonzero(fitting))
        self.turn = turn
        self.draw = draw
        self.num_output_tokens = min(demand.expected_output_tokens, MAX_OUTPUT_TOKENS)
        self.weighed: list[Weighed] = []
        self.costs: Numbers | None = None
        self._cached_tokens = cached_tokens
        # Computed at first use. Not cached_property, which takes a lock in Python 3.11.
        self._missed: Numbers | float | None = None

    def product(self, level: Linear) -> Product:
        """Return a linear level with the rates of this request."""
        demand, views = self.demand, self.views
        if level.asks_for_prompts:
            views.add_prompt(demand.num_prompt_tokens, self.missed_tokens)
        if level.asks_what_is_added:
            views.add(demand.num_choices, demand.num_first_tokens)
        times = 1.0, views.mean_rows, float(self.num_output_tokens)
        return Product(level, times, views.rates)

    @property
    def missed_if_asked(self) -> Numbers | float | None:
        """`missed_tokens`, or None if no term has used it."""
        return self._missed

    @property
    def missed_tokens(self) -> Numbers | float:
        """Prompt tokens that each place has to compute; a whole engine may use any cache."""
        if self._missed is None:
            length, cached = float(self.demand.num_prompt_tokens), self._cached_tokens(self.demand)
            self._missed = length - self.views.most_of(cached) if cached else length
        return self._missed


class CostPolicy:
    """A policy that minimises the cost of its levels.

    Args:
        levels: Its levels.
        cached_tokens: Returns the cached tokens of a prompt by place.
        seed: Seed of its random numbers.
        side: The side that it places on.
        notes: Receives every choice; None to keep none.

    Attributes:
        turn: Index of the place whose turn it is.
    """

    def __init__(
        self,
        levels: tuple[Level, ...],
        cached_tokens: CachedTokens,
        seed: int,
        side: Side = "decode",
        notes: Notes | None = None,
    ) -> None:
        self._levels = levels
        self._cached_tokens = cached_tokens
        self._side: Side = side
        self._notes = notes
        self.turn = 0
        self._draw = random.Random(seed)

    def place(
        self,
        demand: Demand,
        views: Views,
        refused: Collection[Placement] = (),
        spared: Collection[Placement] = (),
    ) -> Placement | None:
        """Return the best place that can take the request; see `PlacementPolicy.place`."""
        fitting = views.fitting(demand)
        for placement in (*refused, *spared):
            index = views.index_of(placement)
            if index is not None:
                fitting[index] = False
        scene = Scene(demand, views, fitting, self._cached_tokens, self.turn, self._draw)
        if not scene.num_fitting:
            return None
        index = int(fitting.argmax()) if scene.num_fitting == 1 else self._least(scene)
        if self._notes is not None:
            whole = _whole(scene) if self._notes.keeps_whole else None
            choice = Choice(scene, index, len(refused), whole, num_spared=len(spared))
            self._notes.note(self._side, demand.request_id, choice)
        self.turn = index + 1
        return views.placements[index]

    def _least(self, scene: Scene) -> int:
        """Return the index of the cheapest place; places equal on all levels take turns."""
        best, is_all = scene.fitting, scene.num_fitting == len(scene.fitting)
        for level in self._levels:
            costs = cost(level, scene)
            if isinstance(costs, float):
                continue
            if not is_all:
                costs = np.where(best, costs, np.inf)
            is_all = False
            if scene.costs is None:
                scene.costs = costs
            index = int(costs.argmin())
            least = float(costs[index])
            best = costs <= least + ROUNDING * abs(least)
            if np.count_nonzero(best) == 1:
                return index
        return next_in_turn(best, scene.turn)


def next_in_turn(best: npt.NDArray[np.bool_], turn: int) -> int:
    """Return the first of the `best` places from `turn` on; after the last place start again."""
    next_one = int(best[turn:].argmax()) + turn if turn < len(best) else 0
    return next_one if best[next_one] else int(best.argmax())


def cost(level: Level, scene: Scene) -> Numbers | float:
    """Return a level's cost of every place, or one number if it is the same for all."""
    if isinstance(level, Linear):
        product = scene.product(level)
        scene.weighed.append(product)
        return product.total()
    names, weights = _names_and_weights(level)
    parts = [
        term(scene) if weight is None else weight * term(scene)
        for weight, (_, term) in zip(weights, level, strict=True)
    ]
    scene.weighed.append(Parts(names, parts))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@functools.cache
def _names_and_weights(level: Terms) -> tuple[tuple[str, ...], tuple[Numbers | None, ...]]:
    """Return the names of a level's terms, and their weights; None for a weight of 1."""
    names = tuple(term.__name__.removeprefix("_") for _, term in level)
    return names, tuple(None if weight == 1.0 else np.array(weight) for weight, _ in level)


def _whole(scene: Scene) -> Whole:
    """Return everything that another policy would need to choose again."""
    views, demand = scene.views, scene.demand
    return Whole(
        views.placements,
        [summary.seq for summary in views.summaries],
        views.copy(),
        scene.fitting,
        scene.missed_if_asked,
        demand.session,
        scene.turn,
    )


# --- terms --------------------------------------------------------------------------------------


def _column(column: Column) -> Term:
    def of_views(scene: Scene) -> Numbers:
        return scene.views.column(column)

    of_views.__name__ = column.name.lower()
    return of_views


_empty_slots = _column(Column.EMPTY_SLOTS)
_free_tokens = _column(Column.FREE_TOKENS)
_held_tokens = _column(Column.HELD_TOKENS)
_active = _column(Column.ACTIVE)
_waiting = _column(Column.WAITING)
_queued_tokens = _column(Column.QUEUED_TOKENS)


def _name(scene: Scene) -> Numbers:
    """Return the rank of each place's name, which does not depend on the order of the views."""
    return scene.views.ranks


def _drawn(scene: Scene) -> Numbers:
    """Return 0 for one random place that fits, and 1 for all others."""
    return _not_among(scene, 1)


def _two_drawn(scene: Scene) -> Numbers:
    """Return 0 for two random places that fit, and 1 for all others."""
    return _not_among(scene, 2)


def _not_among(scene: Scene, count: int) -> Numbers:
    assert scene.draw is not None, "a policy that draws needs a random generator"
    fitting = np.flatnonzero(scene.fitting).tolist()
    costs = np.ones(len(scene.views))
    costs[scene.draw.sample(fitting, min(count, len(fitting)))] = 0.0
    return costs


def _missed_tokens(scene: Scene) -> Numbers | float:
    """Return the prompt tokens that each place would have to compute."""
    return scene.missed_tokens


def _missed_where_balanced(scene: Scene) -> Numbers | float:
    """Return the missed tokens; 0 if loads are unbalanced or no place has enough cached."""
    missed = scene.missed_tokens
    if isinstance(missed, float):
        return missed
    most_cached = scene.demand.num_prompt_tokens - missed[scene.fitting].min()
    is_little = most_cached <= MIN_CACHED_SHARE * scene.demand.num_prompt_tokens
    return 0.0 if is_little or _is_unbalanced(scene) else missed


def _away_where_balanced(scene: Scene) -> Numbers | float:
    """Return `_away`; 0 if loads are unbalanced."""
    return 0.0 if _is_unbalanced(scene) else _away(scene)


def _is_unbalanced(scene: Scene) -> bool:
    active = scene.views.column(Column.ACTIVE)[scene.fitting]
    least, most = active.min(), active.max()
    return bool(most - least > IMBALANCE and most > IMBALANCE_RATIO * least)


def _away(scene: Scene) -> Numbers | float:
    """Return 1 minus the session's affinity to each place; 0 without a session."""
    if not scene.demand.session:
        return 0.0
    return 1.0 - affinities(scene.demand.session, scene.views.keys)


_ADDED = (Rate.ADDED_ROWS_S, Rate.ADDED_CONTEXT_S, Rate.ADDED_LENGTH_S)

FIRST_TOKEN_S = Sum("first_token_s", Times.ONCE, (Rate.QUEUE_S, Rate.ADDED_PROMPT_S))
"""Seconds to its first token there: of earlier prompts, and those that its own adds."""
_TRANSFER_S = Sum("transfer_s", Times.ONCE, (Rate.TRANSFER_S,))
"""Seconds to fetch KV there from a prefill engine."""
PROMPT_HARM_S = Sum("prompt_harm_s", Times.ONCE, (Rate.ROWS_ADDED_PROMPT_S,))
"""Seconds for which its prompt stops decoding, summed over the sequences there."""
_WORK_S = Sum("work_s", Times.MEAN_ROWS, (Rate.WHOLE_PROMPT_S,))
"""Seconds that its prompt takes from later requests, assumed to be as many as there are now.

They find the engine busy wherever the request is placed, so the mean number of rows over all
engines counts. The whole prompt counts even where it is computed beside others, because a later
request could have had that place.
"""
_OUTPUT_S = Sum("output_s", Times.OUTPUT_TOKENS, (Rate.STEP_S, *_ADDED))
"""Seconds of its output there, plus the seconds that it adds to the sequences there."""


ROUNDING = 1e-12
"""Costs with a smaller relative difference are equal: equal sums may differ in their last bits."""
MAX_OUTPUT_TOKENS = 512
"""Largest limit of output tokens that counts: beyond it, a limit is seldom an expected length."""
IMBALANCE = 64
IMBALANCE_RATIO = 1.5
MIN_CACHED_SHARE = 0.3
"""Constants of `prefix_aware`: by how many requests and by what factor the busiest place may exceed
the idlest, and the smallest cached share of a prompt that counts. Source: the defaults of
`cache_aware` in SGLang's gateway."""


# --- policies ------------------------------------------------------------------------------------

_AT_HOME: Level = ((1.0, _away),)
_BY_NAME: Level = ((1.0, _name),)
_LEAST_ACTIVE: Level = ((1.0, _active),)


def _both(*levels: Level) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    return levels, levels


OUTPUT_WEIGHT = 0.1
"""Weight of a second spread over a request's output, relative to one before its first token."""
WORK_WEIGHT = 0.3
"""Weight of a second of later requests: uncached prompts cost more if there are many of these."""
_LEAST_DELAY = Linear(
    (1.0, FIRST_TOKEN_S),
    (1.0, _TRANSFER_S),
    (OUTPUT_WEIGHT, PROMPT_HARM_S),
    (WORK_WEIGHT, _WORK_S),
    (OUTPUT_WEIGHT, _OUTPUT_S),
)
# Every request on a prefill engine waits for a prompt. So long prompts go where few requests wait,
# and short ones where little work does.
_LEAST_PROMPT_DELAY = Linear((1.0, FIRST_TOKEN_S), (0.5, PROMPT_HARM_S), (1.0, _WORK_S))

PRESETS: dict[PolicyName, tuple[tuple[Level, ...], tuple[Level, ...]]] = {
    "least_delay": (
        (_LEAST_DELAY, _AT_HOME, _LEAST_ACTIVE),
        (_LEAST_PROMPT_DELAY, _AT_HOME, _LEAST_ACTIVE),
    ),
    "most_empty_slots": (
        (((-1.0, _empty_slots),), ((-1.0, _free_tokens),), _BY_NAME),
        (((1.0, _queued_tokens),), _LEAST_ACTIVE, _BY_NAME),
    ),
    "round_robin": _both(),
    "random": _both(((1.0, _drawn),)),
    "least_loaded": _both(_LEAST_ACTIVE),
    "power_of_two": _both(((1.0, _two_drawn),), _LEAST_ACTIVE),
    "prefix_aware": _both(
        ((1.0, _missed_where_balanced),), ((1.0, _away_where_balanced),), _LEAST_ACTIVE
    ),
    # `active` includes the waiting ones.
    "waiting_and_running": _both(((3.0, _waiting), (1.0, _active))),
    "cache_and_load": _both(
        ((1.0, _queued_tokens), (1.0, _missed_tokens), (1.0, _held_tokens)), _AT_HOME
    ),
}
"""Levels of each policy, for decode slots and for prompts; `PolicyName` documents the policies."""


CACHE_AWARE_POLICIES: frozenset[PolicyName] = frozenset(
    {"least_delay", "prefix_aware", "cache_and_load"}
)
"""Policies whose terms use the cached tokens of a prompt."""


def no_cached_tokens(demand: Demand) -> Mapping[Placement, int]:
    """Return no cached tokens, for policies that do not follow the caches."""
    del demand
    return {}


def make_policies(
    name: PolicyName,
    cached_tokens: CachedTokens = no_cached_tokens,
    seed: int = 0,
    notes: Notes | None = None,
) -> Policies:
    """Return new policies of this name, without any memory.

    Args:
        name: Name of the policy.
        cached_tokens: Returns the cached prompt tokens of a request by place.
        seed: Seed of random numbers; the ingresses of a cluster should have different ones.
        notes: Receives every choice; None to keep none.
    """
    decode, prefill = PRESETS[name]
    return Policies(
        CostPolicy(decode, cached_tokens, seed, "decode", notes),
        CostPolicy(prefill, cached_tokens, seed, "prefill", notes),
    )

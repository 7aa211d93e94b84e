"""Choose where a request runs: one cost, summed from terms, whose weights are the policies.

A policy is a list of levels; a level is a sum of weighted terms, and the least sum wins. The next
level decides among those that are equal, and turns after the last. No I/O and no clock. Random
numbers come from a generator whose seed is given: simulations repeat, ingresses choose differently.

A placement is a proposal. Views are what replicas last said, less what this ingress has sent since;
the replica stays the authority and may refuse.
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
    """Says where a request goes; what it remembers belongs to one side of one ingress."""

    def place(
        self,
        demand: Demand,
        views: Views,
        refused: Collection[Placement] = (),
        spared: Collection[Placement] = (),
    ) -> Placement | None:
        """Pick the best place that can take the request.

        Args:
            demand: The request.
            views: Every candidate, of one side.
            refused: Those that have refused this request just now, or died on it.
            spared: Those that it should not get for other reasons.

        Returns:
            Where it should go, or None when it fits nowhere.
        """
        ...


class Policies(NamedTuple):
    """How one ingress places: decode slots, and prompts on prefill engines."""

    decode: PlacementPolicy
    prefill: PlacementPolicy


class Scene:
    """A request before all places: what terms look at.

    Args:
        demand: The request.
        views: The places.
        fitting: Which of them can take it.
        cached_tokens: Says how many prompt tokens are known to be cached at a place; 0 where
            unknown. Asked by policies alone that look at them: a prompt has to be hashed for that.
        turn: Index of the place whose turn it is.
        draw: Draws numbers, for policies that do.

    Attributes:
        num_fitting: How many places can take it.
        weighed: Levels that were looked at.
        costs: What the first of them said that tells places apart.
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
        # Made when it is asked for; no cached_property, which takes a lock in Python 3.11.
        self._missed: Numbers | float | None = None

    def product(self, level: Linear) -> Product:
        """A linear level, and what all places are weighed by."""
        demand, views = self.demand, self.views
        if level.asks_for_prompts:
            views.add_prompt(demand.num_prompt_tokens, self.missed_tokens)
        if level.asks_what_is_added:
            views.add(demand.num_choices, demand.num_first_tokens)
        times = 1.0, views.mean_rows, float(self.num_output_tokens)
        return Product(level, times, views.rates)

    @property
    def missed_if_asked(self) -> Numbers | float | None:
        """`missed_tokens`, unless no term has looked at it."""
        return self._missed

    @property
    def missed_tokens(self) -> Numbers | float:
        """Prompt tokens that a place has to compute; an engine as a whole may use any group."""
        if self._missed is None:
            length, cached = float(self.demand.num_prompt_tokens), self._cached_tokens(self.demand)
            self._missed = length - self.views.most_of(cached) if cached else length
        return self._missed


class CostPolicy:
    """The one policy; see the module docstring.

    Args:
        levels: Its weights.
        cached_tokens: Says where how much of a prompt is cached.
        seed: Of what it draws.
        side: What it chooses.
        notes: Takes every choice; None: nobody does.

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
        """See `PlacementPolicy`."""
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
        """Which place costs least; of those that are equal on all levels, whose turn it is."""
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
    """Which of some places is next from the one whose turn it is; then a new round begins."""
    next_one = int(best[turn:].argmax()) + turn if turn < len(best) else 0
    return next_one if best[next_one] else int(best.argmax())


def cost(level: Level, scene: Scene) -> Numbers | float:
    """What one level says of every place, one number if that is the same; the least is best."""
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
    """What its terms are called, and what each is multiplied by; None: by nothing."""
    names = tuple(term.__name__.removeprefix("_") for _, term in level)
    return names, tuple(None if weight == 1.0 else np.array(weight) for weight, _ in level)


def _whole(scene: Scene) -> Whole:
    """What another policy would choose among."""
    views, demand = scene.views, scene.demand
    return Whole(
        views.placements,
        [told.seq for told in views.told],
        views.copy(),
        scene.fitting,
        scene.missed_if_asked,
        demand.session,
        scene.turn,
    )


# --- terms: what a place has, or would have, of something ----------------------------------------


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
    """Its rank among all names, which no order of the views changes."""
    return scene.views.ranks


def _drawn(scene: Scene) -> Numbers:
    """0 for one of those that fit, each as likely, and 1 for all others."""
    return _not_among(scene, 1)


def _two_drawn(scene: Scene) -> Numbers:
    """0 for two of those that fit, each pair as likely, and 1 for all others."""
    return _not_among(scene, 2)


def _not_among(scene: Scene, count: int) -> Numbers:
    assert scene.draw is not None, "a policy that draws needs a random generator"
    fitting = np.flatnonzero(scene.fitting).tolist()
    costs = np.ones(len(scene.views))
    costs[scene.draw.sample(fitting, min(count, len(fitting)))] = 0.0
    return costs


def _missed_tokens(scene: Scene) -> Numbers | float:
    """Prompt tokens that it would have to compute."""
    return scene.missed_tokens


def _missed_where_balanced(scene: Scene) -> Numbers | float:
    """Missed tokens, unless the load is out of balance, or nobody has much of the prompt."""
    missed = scene.missed_tokens
    if isinstance(missed, float):
        return missed
    most_cached = scene.demand.num_prompt_tokens - missed[scene.fitting].min()
    is_little = most_cached <= MIN_CACHED_SHARE * scene.demand.num_prompt_tokens
    return 0.0 if is_little or _is_unbalanced(scene) else missed


def _away_where_balanced(scene: Scene) -> Numbers | float:
    """How little it is at home there, unless the load is out of balance."""
    return 0.0 if _is_unbalanced(scene) else _away(scene)


def _is_unbalanced(scene: Scene) -> bool:
    active = scene.views.column(Column.ACTIVE)[scene.fitting]
    least, most = active.min(), active.max()
    return bool(most - least > IMBALANCE and most > IMBALANCE_RATIO * least)


def _away(scene: Scene) -> Numbers | float:
    """How little a place is the home of the request's session; the same everywhere without one."""
    if not scene.demand.session:
        return 0.0
    return 1.0 - affinities(scene.demand.session, scene.views.keys)


_ADDED = (Rate.ADDED_ROWS_S, Rate.ADDED_CONTEXT_S, Rate.ADDED_LENGTH_S)

FIRST_TOKEN_S = Sum("first_token_s", Times.ONCE, (Rate.QUEUE_S, Rate.ADDED_PROMPT_S))
"""Seconds to its first token there: of the prompts before it, and those that its own adds."""
_TRANSFER_S = Sum("transfer_s", Times.ONCE, (Rate.TRANSFER_S,))
"""Seconds of the KV that has to come there from a prefill engine."""
PROMPT_HARM_S = Sum("prompt_harm_s", Times.ONCE, (Rate.ROWS_ADDED_PROMPT_S,))
"""Seconds for which its prompt keeps the sequences there from decoding, all together."""
_WORK_S = Sum("work_s", Times.MEAN_ROWS, (Rate.WHOLE_PROMPT_S,))
"""Seconds that its prompt takes from those who will come, who are as many as are there now.

They find the engine before whom it is: it is everybody's time, wherever it is spent. All of it,
also where it is computed beside others: one of them could have had that place.
"""
_OUTPUT_S = Sum("output_s", Times.OUTPUT_TOKENS, (Rate.STEP_S, *_ADDED))
"""Seconds of its output there, and those that this adds to the sequences there, together."""


ROUNDING = 1e-12
"""Costs that differ by no more are equal: what adds up to the same may differ in its last bits."""
MAX_OUTPUT_TOKENS = 512
"""A request's limit of output is looked at up to here: what is beyond is a limit, seldom a wish."""
IMBALANCE = 64
IMBALANCE_RATIO = 1.5
MIN_CACHED_SHARE = 0.3
"""Of `prefix_aware`: by how many requests and how many times the busiest place may exceed the
idlest, and the share of a prompt that is worth following. Source: SGLang's gateway, `cache_aware`,
its defaults."""


# --- policies ------------------------------------------------------------------------------------

_AT_HOME: Level = ((1.0, _away),)
_BY_NAME: Level = ((1.0, _name),)
_LEAST_ACTIVE: Level = ((1.0, _active),)


def _both(*levels: Level) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    return levels, levels


OUTPUT_WEIGHT = 0.1
"""A second that is spread over a request's output weighs so much of one before its first token."""
WORK_WEIGHT = 0.3
"""And one of those who will come: what is not cached costs more where many are about."""
_LEAST_DELAY = Linear(
    (1.0, FIRST_TOKEN_S),
    (1.0, _TRANSFER_S),
    (OUTPUT_WEIGHT, PROMPT_HARM_S),
    (WORK_WEIGHT, _WORK_S),
    (OUTPUT_WEIGHT, _OUTPUT_S),
)
# Whoever is on a prefill engine waits for a prompt. Long prompts go where few wait, short ones
# where little does.
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
    # Waiting ones are active, too.
    "waiting_and_running": _both(((3.0, _waiting), (1.0, _active))),
    "cache_and_load": _both(
        ((1.0, _queued_tokens), (1.0, _missed_tokens), (1.0, _held_tokens)), _AT_HOME
    ),
}
"""Weights of each policy, for decode slots and for prompts; `PolicyName` says what they mean."""


LOOK_AT_CACHES: frozenset[PolicyName] = frozenset({"least_delay", "prefix_aware", "cache_and_load"})
"""Those whose terms ask what of a prompt is cached."""


def nothing_known(demand: Demand) -> Mapping[Placement, int]:
    """Cached tokens where nobody follows the caches."""
    del demand
    return {}


def make_policies(
    name: PolicyName,
    cached_tokens: CachedTokens = nothing_known,
    seed: int = 0,
    notes: Notes | None = None,
) -> Policies:
    """New policies of this name, with nothing to remember yet.

    Args:
        name: Which.
        cached_tokens: Prompt tokens of a request that are cached, by the place that has them.
        seed: Of what they draw; ingresses of one cluster should not draw the same.
        notes: Takes every choice; None: nobody does.
    """
    decode, prefill = PRESETS[name]
    return Policies(
        CostPolicy(decode, cached_tokens, seed, "decode", notes),
        CostPolicy(prefill, cached_tokens, seed, "prefill", notes),
    )

"""Which decode engine computes a prompt itself, as no prefill engine has it sooner. Pure.

Owner: one ingress's event loop; of the prompts that it has given to decode engines and that have
given no token yet. Either way is weighed in seconds: those of the prompt to its first token, and
those that it takes from others. On a prefill engine whoever comes while it is busy waits for it, as
many as are there now. On a decode engine the sequences there stand still; that is spread over their
outputs, and so weighs less. Prompts that an engine has not begun are computed beside each other,
one in each DP group: one that joins them takes from nobody what they take already.

What a prompt takes is learned from steps. Before decode engines have shown any it is taken to be
what it takes prefill engines, for prompts that are no longer than the mean: too little, perhaps,
but that is soon known better, and never would be if it were feared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cluster.routing.cost import FIRST_TOKEN_S, OUTPUT_WEIGHT, PROMPT_HARM_S, Scene
from cluster.routing.linear import Linear
from cluster.routing.views import Column

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cluster.routing.cost import CachedTokens
    from cluster.routing.demand import Demand
    from cluster.routing.placement import Placement
    from cluster.routing.pools import PoolState
    from cluster.routing.traffic import Traffic
    from cluster.routing.views import Views

MOST_PLACES = 32
"""DP groups of decode engines that are looked at: those where a prompt holds up the least."""
_DELAY = Linear((1.0, FIRST_TOKEN_S), (1.0, PROMPT_HARM_S))
"""Of the request, and of everybody who stands still for its prompt."""


class Given(NamedTuple):
    """A prompt that a decode engine was given.

    Attributes:
        dp_group: Where it is there.
        seconds: What it was expected to take.
    """

    dp_group: int
    seconds: float


class _Engine:
    """Prompts that one decode engine was given; it has begun some and does the others next."""

    def __init__(self) -> None:
        self.began_s = 0.0
        self.begun: dict[str, Given] = {}
        self.waiting: dict[str, Given] = {}

    def give(self, request_id: str, given: Given, now_s: float) -> None:
        self.waiting[request_id] = given
        self._begin(now_s)

    def drop(self, request_id: str, now_s: float) -> None:
        self.begun.pop(request_id, None)
        self.waiting.pop(request_id, None)
        self._begin(now_s)

    def left_s(self, now_s: float) -> float:
        """How long what it has begun takes yet."""
        return max(self.began_s + _together_s(self.begun.values()) - now_s, 0.0)

    def _begin(self, now_s: float) -> None:
        if not self.begun:
            self.begun, self.waiting, self.began_s = self.waiting, {}, now_s


_IDLE = _Engine()


class ConditionalPrefill:
    """See the module docstring.

    Args:
        pools: What is known of the engines, and what their steps cost.
        cached_tokens: Says where how much of a prompt is cached.
        traffic: How long prompts and answers are in the mean.
    """

    def __init__(self, pools: PoolState, cached_tokens: CachedTokens, traffic: Traffic) -> None:
        self._pools = pools
        self._traffic = traffic
        self._cached_tokens = cached_tokens
        self._engines: dict[str, _Engine] = {}
        self._asked: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"ConditionalPrefill({self._asked})"

    def place(self, demand: Demand, now_s: float) -> Placement | None:
        """Where a prompt is better computed than on any prefill engine; None: nowhere."""
        views = self._pools.prefill_views()
        if not len(views):
            return None
        away = Scene(demand, views, views.fitting(demand), self._cached_tokens)
        costs = away.product(_DELAY).total()
        here = min(self._weighed(demand, now_s), default=None)
        if here is None or here[0] >= costs.min():
            return None
        return self._pools.decode_views().placements[here[1]]

    def give(self, demand: Demand, placement: Placement, now_s: float) -> None:
        """A decode engine is asked to compute a prompt."""
        views = self._pools.decode_views()
        index = views.index_of(placement)
        if index is not None:
            scene = Scene(demand, views, views.fitting(demand), self._cached_tokens)
            given = Given(placement.dp_group, self._prompt_s(scene, index))
            self._asked[demand.request_id] = placement.incarnation
            engine = self._engines.setdefault(placement.incarnation, _Engine())
            engine.give(demand.request_id, given, now_s)

    def drop(self, request_id: str, now_s: float) -> None:
        """It has computed the prompt, or will not any more. Idempotent."""
        incarnation = self._asked.pop(request_id, None)
        if incarnation is not None:
            engine = self._engines[incarnation]
            engine.drop(request_id, now_s)
            if not engine.begun:
                del self._engines[incarnation]

    def check_empty(self) -> None:
        """Nobody has a prompt."""
        assert not self._asked, f"{self!r}"
        assert not self._engines, f"{self!r}"

    def _weighed(self, demand: Demand, now_s: float) -> Iterator[tuple[float, int]]:
        """What a prompt costs on decode engines, and the index of the place."""
        views = self._pools.decode_views()
        scene = Scene(demand, views, views.fitting(demand), self._cached_tokens)
        rows, queue_s = views.column(Column.ROWS), views.column(Column.QUEUE_S)
        output_s = self._mean_output * views.column(Column.STEP_S)
        is_long = demand.num_prompt_tokens * self._traffic.came > self._traffic.came_tokens
        for index in _nearest(scene, views):
            incarnation, dp_group = views.placements[index]
            prompt_s = self._prompt_s(scene, index)
            if not prompt_s or (is_long and not self._pools.knows_prompts(incarnation)):
                continue
            engine = self._engines.get(incarnation, _IDLE)
            before_s = _together_s(engine.waiting.values())
            after_s = _together_s([*engine.waiting.values(), Given(dp_group, prompt_s)])
            # What its snapshot says of prompts and was not asked from here came from others.
            own_s = _together_s(engine.begun.values()) + before_s
            wait_s = engine.left_s(now_s) + max(float(queue_s[index]) - own_s, 0.0)
            harm_s = float(rows[index]) * _harm_s(after_s - before_s, output_s[index])
            yield wait_s + after_s + harm_s, index

    @property
    def _mean_output(self) -> float:
        """Tokens of an answer; what is missing in one that has not ended is not known."""
        return self._traffic.output_tokens / max(self._traffic.ended, 1.0)

    def _prompt_s(self, scene: Scene, index: int) -> float:
        """What a prompt takes a decode engine."""
        missed = scene.missed_tokens
        num_tokens = missed if isinstance(missed, float) else float(missed[index])
        num_pairs = (scene.demand.num_prompt_tokens - 0.5 * num_tokens) * num_tokens
        costs = self._pools.costs(scene.views.placements[index].incarnation)
        return costs.prompts_s(1, num_tokens, num_pairs)


def _harm_s(stop_s: float, output_s: float) -> float:
    """What it is worth to a sequence not to stand still, in seconds before a first token."""
    share = stop_s / output_s if output_s else 1.0
    return min(max(share, OUTPUT_WEIGHT), 1.0) * stop_s


def _nearest(scene: Scene, views: Views) -> list[int]:
    """Places with room: those first where fewer rows wait for fewer tokens, or more are free."""
    fitting = np.flatnonzero(scene.fitting)
    harm = (views.column(Column.ROWS) + 1.0) * scene.missed_tokens
    order = np.lexsort((-views.column(Column.EMPTY_SLOTS)[fitting], harm[fitting]))
    nearest: list[int] = fitting[order[:MOST_PLACES]].tolist()
    return nearest


def _together_s(prompts: Iterable[Given]) -> float:
    """Seconds of prompts of one engine: those of one DP group one after the other."""
    each_s: dict[int, float] = {}
    for dp_group, seconds in prompts:
        each_s[dp_group] = each_s.get(dp_group, 0.0) + seconds
    return max(each_s.values(), default=0.0)

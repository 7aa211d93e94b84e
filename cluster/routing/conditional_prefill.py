"""Which decode engine computes a prompt itself, as no prefill engine has it sooner.

Owner: one ingress's event loop; of the prompts that it has given to decode engines and that have
given no token yet. Either way is weighed in seconds: those of the prompt to its first token, and
those that it takes from others. On a prefill engine whoever comes while it is busy waits for it, as
many as are there now, and its KV has to be fetched from there. On a decode engine the sequences
there stand still; that is spread over their outputs, and so weighs less. Prompts that an engine has
not begun are computed beside each other, one in each DP group: one that joins them takes from
nobody what they take already. Of places that are equal one after the other gets a prompt.

What a prompt takes is learned from steps. Before decode engines have shown any it is taken to be
what it takes prefill engines, for prompts that are no longer than the mean: too little, perhaps,
but that is soon known better, and never would be if it were feared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cluster.routing.choice import Choice, Parts
from cluster.routing.cost import (
    FIRST_TOKEN_S,
    OUTPUT_WEIGHT,
    PROMPT_HARM_S,
    ROUNDING,
    Scene,
    next_in_turn,
)
from cluster.routing.linear import Linear
from cluster.routing.views import Column

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from cluster.routing.choice import Notes
    from cluster.routing.cost import CachedTokens
    from cluster.routing.demand import Demand
    from cluster.routing.forecast import Lengths
    from cluster.routing.placement import Placement
    from cluster.routing.pools import PoolState
    from cluster.routing.views import Views

    Numbers = npt.NDArray[np.float64]

_DELAY = Linear((1.0, FIRST_TOKEN_S), (1.0, PROMPT_HARM_S))
"""Of the request, and of everybody who stands still for its prompt."""
_TERMS = "wait_s", "prompt_s", "stands_still_s"
"""Until it is begun, until it is done, and what it is worth to the others not to stand still."""


class _EnginePrompts:
    """Prompts that one decode engine was given; it has begun some and does the others next.

    Attributes:
        begun: By request the DP group and what it was expected to take, in seconds.
        waiting: Likewise.
    """

    def __init__(self) -> None:
        self.began_s = 0.0
        self.begun: dict[str, tuple[int, float]] = {}
        self.waiting: dict[str, tuple[int, float]] = {}

    def give(self, request_id: str, dp_group: int, seconds: float, now_s: float) -> None:
        self.waiting[request_id] = dp_group, seconds
        self._begin(now_s)

    def drop(self, request_id: str, now_s: float) -> None:
        self.begun.pop(request_id, None)
        self.waiting.pop(request_id, None)
        self._begin(now_s)

    def left_s(self, now_s: float) -> float:
        """How long what it has begun takes yet."""
        return max(self.began_s + _together_s(self.begun) - now_s, 0.0)

    def waiting_s(self, num_groups: int) -> Numbers:
        """What waits in each DP group."""
        seconds = np.zeros(num_groups)
        for dp_group, prompt_s in self.waiting.values():
            seconds[dp_group] += prompt_s
        return seconds

    def _begin(self, now_s: float) -> None:
        if not self.begun:
            self.begun, self.waiting, self.began_s = self.waiting, {}, now_s


class ConditionalPrefill:
    """See the module docstring.

    Args:
        pools: What is known of the engines, and what their steps cost.
        cached_tokens: Says where how much of a prompt is cached.
        lengths: How long prompts and answers are in the mean.
        notes: Takes every choice that a decode engine computes a prompt; None: nobody does.
    """

    def __init__(
        self,
        pools: PoolState,
        cached_tokens: CachedTokens,
        lengths: Lengths,
        notes: Notes | None = None,
    ) -> None:
        self._pools = pools
        self._lengths = lengths
        self._cached_tokens = cached_tokens
        self._engines: dict[str, _EnginePrompts] = {}
        self._asked: dict[str, str] = {}
        self._notes = notes
        # Of who has no slot yet: it may be chosen for them once more.
        self._choices: dict[str, Choice] = {}
        # Of which views, and how many pools that had shown what prompts take: `_unknown`.
        self._asked_of: tuple[Views | None, int] = None, 0
        self._unknown: list[int] = []
        self._turn = 0

    def __repr__(self) -> str:
        return f"ConditionalPrefill({self._asked})"

    def place(self, demand: Demand, now_s: float) -> Placement | None:
        """Where a prompt is better computed than on any prefill engine; None: nowhere."""
        prefill, decode = self._pools.prefill_views(), self._pools.decode_views()
        if not len(prefill) or not len(decode):
            return None
        away, scene = self._scene(demand, prefill), self._scene(demand, decode)
        fetched_s = decode.fetched_s(scene.missed_tokens).min(where=scene.fitting, initial=np.inf)
        there_s = float(away.product(_DELAY).total().min() + fetched_s)
        wait_s, after_s, harm_s = parts = self._parts(scene, now_s)
        here_s = wait_s + after_s + harm_s
        least_s = float(here_s.min())
        if least_s >= there_s:
            return None
        index = next_in_turn(here_s <= least_s + ROUNDING * abs(least_s), self._turn)
        if self._notes is not None:
            scene.weighed.append(Parts(_TERMS, list(parts)))
            scene.costs = here_s
            ttft_s = float(wait_s[index] + after_s[index])
            self._choices[demand.request_id] = Choice(
                scene, index, 0, None, ttft_s=ttft_s, elsewhere_s=there_s
            )
        return decode.placements[index]

    def give(self, demand: Demand, placement: Placement, now_s: float) -> None:
        """A decode engine is asked to compute a prompt."""
        choice = self._choices.pop(demand.request_id, None)
        if choice is not None and self._notes is not None:
            self._notes.note("prompt", demand.request_id, choice)
        views = self._pools.decode_views()
        index = views.index_of(placement)
        if index is not None:
            # Not before: it is looked for more than once for one request.
            self._turn = index + 1
            scene = self._scene(demand, views)
            prompt_s = float(
                views.own_prompts_s(demand.num_prompt_tokens, scene.missed_tokens)[index]
            )
            self._asked[demand.request_id] = placement.incarnation
            engine = self._engines.setdefault(placement.incarnation, _EnginePrompts())
            engine.give(demand.request_id, placement.dp_group, prompt_s, now_s)

    def drop(self, request_id: str, now_s: float) -> None:
        """It has computed the prompt, or will not any more. Idempotent."""
        self._choices.pop(request_id, None)
        incarnation = self._asked.pop(request_id, None)
        if incarnation is not None:
            engine = self._engines[incarnation]
            engine.drop(request_id, now_s)
            if not engine.begun:
                del self._engines[incarnation]

    def check_empty(self) -> None:
        """Nobody has a prompt."""
        assert not self._asked, f"{self!r}"
        assert not self._choices, f"{self._choices}"
        assert not self._engines, f"{self!r}"

    def _scene(self, demand: Demand, views: Views) -> Scene:
        return Scene(demand, views, views.fitting(demand), self._cached_tokens)

    def _parts(self, scene: Scene, now_s: float) -> tuple[Numbers, Numbers, Numbers]:
        """What a prompt costs in each place of decode engines: see `_TERMS`.

        It waits for ever where it is not to be.
        """
        demand, views = scene.demand, scene.views
        prompt_s = views.own_prompts_s(demand.num_prompt_tokens, scene.missed_tokens)
        wait_s = views.column(Column.QUEUE_S).copy()
        after_s, stop_s = prompt_s.copy(), prompt_s.copy()
        for incarnation, engine in self._engines.items():
            first, snapshot = views.engines.get(incarnation), self._pools.snapshot(incarnation)
            if first is None or snapshot is None:
                continue
            places = slice(first, first + len(snapshot.groups))
            waiting_s = engine.waiting_s(len(snapshot.groups))
            before_s = float(waiting_s.max())
            # What its snapshot says of prompts and was not asked from here came from others.
            others_s = wait_s[places] - (_together_s(engine.begun) + before_s)
            wait_s[places] = engine.left_s(now_s) + np.maximum(others_s, 0.0)
            after_s[places] = np.maximum(waiting_s + prompt_s[places], before_s)
            stop_s[places] = after_s[places] - before_s
        output_s = self._lengths.outputs.value * views.column(Column.STEP_S)
        harm_s = views.column(Column.ROWS) * _harm_s(stop_s, output_s)
        wait_s[~scene.fitting | (prompt_s == 0.0)] = np.inf
        if demand.num_prompt_tokens > self._lengths.prompts.value:
            wait_s[self._places_unknown(views)] = np.inf
        return wait_s, after_s, harm_s

    def _places_unknown(self, views: Views) -> list[int]:
        """Places whose engines' pools have not shown yet what prompts take there."""
        num_known = self._pools.num_pools_that_know_prompts
        if self._asked_of[0] is not views or self._asked_of[1] != num_known:
            self._asked_of = views, num_known
            self._unknown = [
                index
                for index, placement in enumerate(views.placements)
                if not self._pools.knows_prompts(placement.incarnation)
            ]
        return self._unknown


def _harm_s(stop_s: Numbers, output_s: Numbers) -> Numbers:
    """What it is worth to a sequence not to stand still, in seconds before a first token."""
    share = np.divide(stop_s, output_s, out=np.ones_like(stop_s), where=output_s > 0.0)
    harm_s: Numbers = np.minimum(np.maximum(share, OUTPUT_WEIGHT), 1.0) * stop_s
    return harm_s


def _together_s(prompts: Mapping[str, tuple[int, float]]) -> float:
    """Seconds of prompts of one engine: those of one DP group one after the other."""
    each_s: dict[int, float] = {}
    for dp_group, seconds in prompts.values():
        each_s[dp_group] = each_s.get(dp_group, 0.0) + seconds
    return max(each_s.values(), default=0.0)

"""Decides when a decode engine computes a prompt itself because no prefill engine is faster.

Owner: one ingress's event loop; of the prompts given to decode engines that have given no token
yet.

Both ways are compared in seconds: from now to the first token, and those taken from other requests.

- On a prefill engine, later requests wait for this prompt, assumed to be as many as are there now.
  Its KV has to be fetched from there.
- On a decode engine, the sequences there stop meanwhile. This is spread over their outputs, and so
  weighs less. Prompts that the engine has not begun are computed side by side, one in each DP
  group, so a prompt that joins others costs only the time by which it is longer. Equal places take
  turns.

Costs of prompts are learned from steps. Before decode engines have computed any prompt, a prompt
that is not longer than the mean is assumed to cost what it costs prefill engines. This may be too
little, but only trying it shows the real cost.
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
"""Delay of the request, and of all requests that wait for its prompt."""
_TERMS = "wait_s", "prompt_s", "stands_still_s"
"""Seconds until the prompt is begun; of the prompt; and the weighted harm to stopped sequences."""


class _EnginePrompts:
    """Prompts given to one decode engine: those that it has begun, and those that come next.

    Attributes:
        begun: For each request the DP group and the expected seconds of its prompt.
        waiting: The same for prompts that it has not begun.
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
        """Return the remaining seconds of the prompts that it has begun."""
        return max(self.began_s + _together_s(self.begun) - now_s, 0.0)

    def waiting_s(self, num_groups: int) -> Numbers:
        """Return the seconds of waiting prompts in each DP group."""
        seconds = np.zeros(num_groups)
        for dp_group, prompt_s in self.waiting.values():
            seconds[dp_group] += prompt_s
        return seconds

    def _begin(self, now_s: float) -> None:
        if not self.begun:
            self.begun, self.waiting, self.began_s = self.waiting, {}, now_s


class ConditionalPrefill:
    """Prompts on decode engines, and the decision for more.

    Args:
        pools: The engines and the costs of their steps.
        cached_tokens: Returns the cached tokens of a prompt by place.
        lengths: Mean lengths of prompts and answers.
        notes: Receives the choice when a decode engine computes a prompt; None to keep none.
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
        # Choices for requests without a slot: they may be chosen again.
        self._choices: dict[str, Choice] = {}
        # Views and number of pools with known prompt costs for which `_unknown` was computed.
        self._asked_of: tuple[Views | None, int] = None, 0
        self._unknown: list[int] = []
        self._turn = 0

    def __repr__(self) -> str:
        return f"ConditionalPrefill({self._asked})"

    def place(self, demand: Demand, now_s: float) -> Placement | None:
        """Return the place that computes a prompt better than any prefill engine, or None."""
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
        """Record that a decode engine is asked to compute a prompt."""
        choice = self._choices.pop(demand.request_id, None)
        if choice is not None and self._notes is not None:
            self._notes.note("prompt", demand.request_id, choice)
        views = self._pools.decode_views()
        index = views.index_of(placement)
        if index is not None:
            # The turn advances here and not in `place`, which may be called several times for one
            # request.
            self._turn = index + 1
            scene = self._scene(demand, views)
            prompt_s = float(
                views.own_prompts_s(demand.num_prompt_tokens, scene.missed_tokens)[index]
            )
            self._asked[demand.request_id] = placement.incarnation
            engine = self._engines.setdefault(placement.incarnation, _EnginePrompts())
            engine.give(demand.request_id, placement.dp_group, prompt_s, now_s)

    def drop(self, request_id: str, now_s: float) -> None:
        """Forget a prompt that a decode engine has computed, or will not compute. Idempotent."""
        self._choices.pop(request_id, None)
        incarnation = self._asked.pop(request_id, None)
        if incarnation is not None:
            engine = self._engines[incarnation]
            engine.drop(request_id, now_s)
            if not engine.begun:
                del self._engines[incarnation]

    def check_empty(self) -> None:
        """Assert that no prompt is outstanding."""
        assert not self._asked, f"{self!r}"
        assert not self._choices, f"{self._choices}"
        assert not self._engines, f"{self!r}"

    def _scene(self, demand: Demand, views: Views) -> Scene:
        return Scene(demand, views, views.fitting(demand), self._cached_tokens)

    def _parts(self, scene: Scene, now_s: float) -> tuple[Numbers, Numbers, Numbers]:
        """Return the costs of a prompt in each place of decode engines; see `_TERMS`.

        The wait is infinite where the prompt must not go.
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
            # Prompts in its snapshot that this ingress did not ask for came from other ingresses.
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
        """Return the places whose pools have not shown the cost of prompts yet."""
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
    """Return the harm to a sequence that stops, in seconds before a first token."""
    share = np.divide(stop_s, output_s, out=np.ones_like(stop_s), where=output_s > 0.0)
    harm_s: Numbers = np.minimum(np.maximum(share, OUTPUT_WEIGHT), 1.0) * stop_s
    return harm_s


def _together_s(prompts: Mapping[str, tuple[int, float]]) -> float:
    """Return the seconds of an engine's prompts: one by one within a group, groups in parallel."""
    each_s: dict[int, float] = {}
    for dp_group, seconds in prompts.values():
        each_s[dp_group] = each_s.get(dp_group, 0.0) + seconds
    return max(each_s.values(), default=0.0)

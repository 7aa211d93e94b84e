"""Predicts when each engine has computed the prompts that it was asked for. Pure.

Owner: one ingress's event loop; of the prompts that this ingress has asked for and that have given
no first token yet. It assumes that an engine computes prompts in the order in which they were
asked. Completed prompts teach the forecast how long later ones take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from cluster.routing.forecast import Forecast


AHEAD_S = 0.1
"""An engine gets its next prompt this long before it is expected to finish the ones it has."""


class PromptEngine(NamedTuple):
    """An engine that computes prompts.

    Attributes:
        num_queued_tokens: Prompt tokens that are queued there, or on their way from here.
        step_tokens: Tokens that one of its steps can compute.
    """

    num_queued_tokens: int
    step_tokens: int


@dataclass(slots=True)
class _Work:
    """The outstanding and completed prompts of one engine.

    Attributes:
        asked: Outstanding requests in order: prompt tokens, time of the question, and tokens that
            other ingresses had queued before it.
        free_s: When the last prompt was completed.
        began_s: When the prompts in `done` were begun.
        done: Lengths of the prompts completed at `free_s`. They are learned later, as more prompts
            may complete at the same time.
    """

    asked: dict[str, tuple[int, float, int]] = field(default_factory=dict)
    free_s: float = -math.inf
    began_s: float = 0.0
    done: list[int] = field(default_factory=list)


class Backlog:
    """Outstanding prompts by engine.

    Args:
        forecast: Predicts how long prompts take, and learns from completed ones.
    """

    def __init__(self, forecast: Forecast) -> None:
        self._forecast = forecast
        self._work: dict[str, _Work] = {}

    def __repr__(self) -> str:
        return f"Backlog({self._work})"

    def ask(
        self,
        engine: str,
        request_id: str,
        num_tokens: int,
        now_s: float,
        num_queued_tokens: int = 0,
    ) -> None:
        """Record that an engine was asked for a prompt; `num_queued_tokens` includes it."""
        asked = self._work.setdefault(engine, _Work()).asked
        num_own = sum(n for n, *_ in asked.values()) + num_tokens
        asked[request_id] = num_tokens, now_s, max(num_queued_tokens - num_own, 0)

    def forget(self, engine: str, request_id: str) -> None:
        """Drop a prompt that the engine will not compute. Idempotent."""
        work = self._work.get(engine)
        if work is not None:
            work.asked.pop(request_id, None)

    def done(self, engine: str, request_id: str, now_s: float) -> None:
        """Record that an engine has computed a prompt, and learn from earlier ones."""
        work = self._work[engine]
        num_tokens, asked_s, _ = work.asked.pop(request_id)
        if work.done and now_s > work.free_s:
            self._forecast.saw_prompts(work.done, work.free_s - work.began_s)
            work.done = []
        if not work.done:
            work.began_s = max(asked_s, work.free_s)
        work.done.append(num_tokens)
        work.free_s = now_s

    def keep(self, engines: Collection[str]) -> None:
        """Forget engines that are gone and have no outstanding prompts."""
        if len(self._work) > len(engines):
            kept = self._work.items()
            self._work = {e: work for e, work in kept if work.asked or e in engines}

    def num_tokens(self, engine: str, load: PromptEngine) -> int:
        """Return the tokens that an engine has to compute, from all ingresses, as far as known."""
        work = self._work.get(engine)
        num_own = sum(n for n, *_ in work.asked.values()) if work is not None else 0
        return max(num_own, load.num_queued_tokens)

    def num_nearly_free(
        self, engines: Mapping[str, PromptEngine], num_tokens: int, now_s: float
    ) -> int:
        """Return how many engines should get one more prompt of this length now.

        An engine qualifies if it has nothing, or if the prompt still fits into one step and the
        engine is free within `AHEAD_S`. Less would let it idle while the news of its last prompt
        travels.
        """
        count = 0
        for free_s, (engine, load) in zip(
            self.free_s(engines, now_s), engines.items(), strict=True
        ):
            num_queued = self.num_tokens(engine, load)
            has_room = num_queued + num_tokens <= load.step_tokens
            count += not num_queued or (has_room and free_s - now_s <= AHEAD_S)
        return count

    def free_s(self, engines: Mapping[str, PromptEngine], now_s: float) -> list[float]:
        """Return when each engine is expected to be free, `now_s` at the earliest."""
        return [self._free_s(engine, load, now_s) for engine, load in engines.items()]

    def _free_s(self, engine: str, load: PromptEngine, now_s: float) -> float:
        ends = [*self._ends_s(engine, now_s)]
        free_s = ends[-1][1] if ends else now_s
        num_own = sum(n for _, _, n, _ in ends)
        # Queued tokens that this ingress did not ask for came from other ingresses.
        return free_s + max(load.num_queued_tokens - num_own, 0) * self._forecast.token_s

    def begins_s(self, engine: str, num_queued_tokens: int, now_s: float) -> dict[str, float]:
        """Return, by request, when an engine is expected to begin each prompt asked from here."""
        ends = list(self._ends_s(engine, now_s))
        # Tokens of other ingresses that are still queued there.
        num_others = max(num_queued_tokens - sum(n for _, _, n, _ in ends), 0)
        begins_s = {}
        free_s = now_s
        for request_id, end_s, _, before in ends:
            begins_s[request_id] = free_s + min(before, num_others) * self._forecast.token_s
            free_s = end_s
        return begins_s

    def _ends_s(self, engine: str, now_s: float) -> Iterator[tuple[str, float, int, int]]:
        """Yield when each prompt of this ingress ends, if no other ingress used the engine.

        Each item is (request, end, prompt tokens, tokens that others had queued before it).
        """
        work = self._work.get(engine)
        if work is None or not work.asked:
            return
        end_s = max(next(iter(work.asked.values()))[1], work.free_s)
        for request_id, (num_tokens, _, num_others) in work.asked.items():
            end_s = max(end_s + self._forecast.prompt_s(num_tokens), now_s)
            yield request_id, end_s, num_tokens, num_others

    def check_empty(self) -> None:
        """Assert that no prompt is outstanding."""
        assert not any(work.asked for work in self._work.values()), f"{self!r}"


def level(free_s: list[float], work_s: float) -> float:
    """Return when the next prompt begins if this much work fills the engines that are free first.

    Args:
        free_s: When each engine is free.
        work_s: Seconds of work to be done before.
    """
    free_s = sorted(free_s)
    total_s = 0.0
    for count, next_s in enumerate(free_s[1:], 1):
        total_s += free_s[count - 1]
        if next_s * count - total_s >= work_s:
            return (total_s + work_s) / count
    return (sum(free_s) + work_s) / len(free_s)

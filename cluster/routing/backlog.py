"""Prompts of one ingress on the engines that compute them: when each of these will be free. Pure.

Owner: of what this ingress has asked and not heard of; one ingress's event loop. An engine works
off what it is asked in order, as far as one can tell from here, and what is done teaches how long
the next one takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from cluster.routing.forecast import Forecast


AHEAD_S = 0.1
"""An engine gets the next prompt so long before it is done with those that it has."""


class PromptEngine(NamedTuple):
    """An engine that computes prompts.

    Attributes:
        num_queued_tokens: Prompt tokens that wait there, or are on their way from here.
        step_tokens: Tokens that one of its steps takes.
    """

    num_queued_tokens: int
    step_tokens: int


@dataclass(slots=True)
class _Work:
    """What one engine was asked.

    Attributes:
        asked: By request, the tokens of its prompt, when it was asked, and tokens that others had
            asked of the engine before; in order.
        free_s: When it was last done with a prompt.
        began_s: When it began the prompts of `done`.
        done: Lengths of those that it was done with at `free_s`, which nobody has learned of yet:
            there may be more.
    """

    asked: dict[str, tuple[int, float, int]] = field(default_factory=dict)
    free_s: float = -math.inf
    began_s: float = 0.0
    done: list[int] = field(default_factory=list)


class Backlog:
    """See the module docstring.

    Args:
        forecast: Says how long prompts take, and learns it.
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
        """An engine was asked for a prompt, which is among those that wait there."""
        asked = self._work.setdefault(engine, _Work()).asked
        num_own = sum(n for n, *_ in asked.values()) + num_tokens
        asked[request_id] = num_tokens, now_s, max(num_queued_tokens - num_own, 0)

    def forget(self, engine: str, request_id: str) -> None:
        """It will not compute that prompt. Idempotent."""
        work = self._work.get(engine)
        if work is not None:
            work.asked.pop(request_id, None)

    def done(self, engine: str, request_id: str, now_s: float) -> None:
        """It has computed a prompt."""
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
        """Forget engines that are gone, once nothing is asked of them any more."""
        if len(self._work) > len(engines):
            kept = self._work.items()
            self._work = {e: work for e, work in kept if work.asked or e in engines}

    def num_tokens(self, engine: str, load: PromptEngine) -> int:
        """Tokens that an engine has to compute, whoever asked for them, as far as one knows."""
        work = self._work.get(engine)
        num_own = sum(n for n, *_ in work.asked.values()) if work is not None else 0
        return max(num_own, load.num_queued_tokens)

    def num_nearly_free(
        self, engines: Mapping[str, PromptEngine], num_tokens: int, now_s: float
    ) -> int:
        """How many engines should get a further prompt of this length now.

        More than a step takes waits there, and less would leave the engine idle for as long as news
        takes.
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
        """When each engine will have done what it has now, now at the earliest."""
        return [self._free_s(engine, load, now_s) for engine, load in engines.items()]

    def _free_s(self, engine: str, load: PromptEngine, now_s: float) -> float:
        ends = [*self._ends_s(engine, now_s)]
        free_s = ends[-1][1] if ends else now_s
        num_own = sum(n for _, _, n, _ in ends)
        # What waits there and was not asked from here came from other ingresses.
        return free_s + max(load.num_queued_tokens - num_own, 0) * self._forecast.token_s

    def begins_s(self, engine: str, num_queued_tokens: int, now_s: float) -> dict[str, float]:
        """When an engine will begin each prompt that was asked from here, by request."""
        ends = list(self._ends_s(engine, now_s))
        # What others had asked before, as far as it is still there.
        num_others = max(num_queued_tokens - sum(n for _, _, n, _ in ends), 0)
        begins_s = {}
        free_s = now_s
        for request_id, end_s, _, before in ends:
            begins_s[request_id] = free_s + min(before, num_others) * self._forecast.token_s
            free_s = end_s
        return begins_s

    def _ends_s(self, engine: str, now_s: float) -> Iterator[tuple[str, float, int, int]]:
        """Of each prompt of ours, by request, when it is done if nobody else has any there.

        With its tokens, and those that others had asked of the engine before.
        """
        work = self._work.get(engine)
        if work is None or not work.asked:
            return
        end_s = max(next(iter(work.asked.values()))[1], work.free_s)
        for request_id, (num_tokens, _, num_others) in work.asked.items():
            end_s = max(end_s + self._forecast.prompt_s(num_tokens), now_s)
            yield request_id, end_s, num_tokens, num_others

    def check_empty(self) -> None:
        """Nothing is asked of anybody."""
        assert not any(work.asked for work in self._work.values()), f"{self!r}"


def level(free_s: list[float], work_s: float) -> float:
    """When engines that are free at these times begin what comes after so much work.

    The work fills whoever is free first.
    """
    free_s = sorted(free_s)
    total_s = 0.0
    for count, next_s in enumerate(free_s[1:], 1):
        total_s += free_s[count - 1]
        if next_s * count - total_s >= work_s:
            return (total_s + work_s) / count
    return (sum(free_s) + work_s) / len(free_s)

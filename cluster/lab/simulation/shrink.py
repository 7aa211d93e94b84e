"""Shrinks a failing scenario: removes everything that the failure does not need.

Delta debugging over requests, faults and aborts, then over sizes. The caller decides whether a
smaller scenario fails in the same way. The time is bounded.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from cluster.lab.simulation.network import NetworkConfig
from cluster.lab.simulation.options import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cluster.lab.simulation.scenario import Scenario


class Shrinker:
    """The shrinking of one scenario.

    Args:
        fails: Returns whether a scenario still shows the failure.
        budget_s: Real seconds after which shrinking stops with the smallest scenario so far.

    Attributes:
        num_runs: Number of scenarios tried.
    """

    def __init__(
        self,
        fails: Callable[[Scenario], bool],
        budget_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_runs = 0
        self._fails = fails
        self._clock = clock
        self._end_s = clock() + budget_s

    def shrink(self, scenario: Scenario) -> Scenario:
        """Return the smallest scenario found in time that still fails."""
        while self._is_in_time():
            smaller = self._pass(scenario)
            if smaller == scenario:
                break
            scenario = smaller
        return scenario

    def _pass(self, scenario: Scenario) -> Scenario:
        scenario = self._fewer(scenario, "requests")
        scenario = self._fewer(scenario, "faults")
        scenario = self._fewer(scenario, "pauses")
        for candidates in (_without_aborts, _smaller_pools, _simpler_settings, _smaller_requests):
            scenario = self._first_of_each(scenario, candidates)
        return scenario

    def _fewer(self, scenario: Scenario, field: str) -> Scenario:
        """Remove ever smaller parts of a list, as long as the scenario still fails."""
        items: Sequence[Any] = getattr(scenario, field)
        size = max(len(items) // 2, 1)
        while items and self._is_in_time():
            start = 0
            while start < len(items):
                fewer = (*items[:start], *items[start + size :])
                smaller = msgspec.structs.replace(scenario, **{field: fewer})
                if self._try(smaller):
                    scenario, items = smaller, fewer
                else:
                    start += size
            if size == 1:
                break
            size = max(size // 2, 1)
        return scenario

    def _first_of_each(
        self, scenario: Scenario, candidates: Callable[[Scenario], Iterator[Scenario]]
    ) -> Scenario:
        """Apply simplifications with which the scenario still fails, until none is left."""
        is_new = True
        while is_new and self._is_in_time():
            is_new = False
            for smaller in candidates(scenario):
                if smaller != scenario and self._try(smaller):
                    scenario, is_new = smaller, True
                    break
        return scenario

    def _try(self, scenario: Scenario) -> bool:
        if not self._is_in_time() or not scenario.requests:
            return False
        self.num_runs += 1
        return self._fails(scenario)

    def _is_in_time(self) -> bool:
        return self._clock() < self._end_s


def _without_aborts(scenario: Scenario) -> Iterator[Scenario]:
    for i, request in enumerate(scenario.requests):
        if request.abort_s is not None:
            yield _with(scenario, "requests", i, abort_s=None)


def _smaller_pools(scenario: Scenario) -> Iterator[Scenario]:
    for i, pool in enumerate(scenario.pools):
        for field in ("replicas", "lanes", "slots_per_lane"):
            count: int = getattr(pool, field)
            targets = {f"{pool.role}/{count - 1}"} if field == "replicas" else set()
            if count > 1 and not targets & {fault.target for fault in scenario.faults}:
                yield _with(scenario, "pools", i, **{field: count - 1})
        simpler = {
            "mixed": False,
            "max_num_waiting": None,
            "prefill_streak": 1,
            "max_drafts": 0,
            "failed_rows": 0.0,
            "long_prompt_tokens": 0,
            "max_partial_prompts": 1,
            "max_long_prompts": 1,
            "num_scheduler_steps": 1,
        }
        yield _with(scenario, "pools", i, **simpler)
    if scenario.ingresses > 1:
        yield msgspec.structs.replace(scenario, ingresses=1)


def _simpler_settings(scenario: Scenario) -> Iterator[Scenario]:
    yield msgspec.structs.replace(scenario, network=NetworkConfig())
    for field in ("jitter_s", "kv_loss", "kv_repetition", "kv_jitter_s"):
        if getattr(scenario.network, field):
            network = msgspec.structs.replace(scenario.network, **{field: 0.0})
            yield msgspec.structs.replace(scenario, network=network)
    if scenario.router.policy != "most_empty_slots":
        router = msgspec.structs.replace(scenario.router, policy="most_empty_slots")
        yield msgspec.structs.replace(scenario, router=router)


def _smaller_requests(scenario: Scenario) -> Iterator[Scenario]:
    for i, request in enumerate(scenario.requests):
        if request.variant != PLAIN:
            yield _with(scenario, "requests", i, variant=PLAIN)
            fewer = {"num_choices": 2, "stopped_choice": min(request.variant.stopped_choice, 1)}
            simpler = msgspec.structs.replace(request.variant, **fewer)
            yield _with(scenario, "requests", i, variant=simpler)
        for field in ("num_output_tokens", "num_prompt_tokens"):
            count: int = getattr(request, field)
            for less in (1, count // 2):
                if 0 < less < count:
                    yield _with(scenario, "requests", i, **{field: less})


def _with(scenario: Scenario, field: str, i: int, **changes: object) -> Scenario:
    """Return the scenario with changes to the i-th item of one of its lists."""
    items = list(getattr(scenario, field))
    items[i] = msgspec.structs.replace(items[i], **changes)
    return msgspec.structs.replace(scenario, **{field: tuple(items)})

"""Switches features of the engine on in a scenario, at random.

Drawn after everything else, so that the rest of a seed's scenario is the same without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import msgspec

from cluster.lab.simulation.options import PlannedPause
from replicas.messages import PauseMode

if TYPE_CHECKING:
    import numpy as np

    from cluster.lab.simulation.scenario import Scenario, ScenarioRequest

_CHOICES_SHARE = 0.25
_DRAFTS_SHARE = 0.25
_GRAMMARS_SHARE = 0.25
_LONG_STEPS_SHARE = 0.25
_PRIORITIES_SHARE = 0.25
_FAILED_ROWS_SHARE = 0.15
_LONG_PROMPTS_SHARE = 0.25
_PAUSES_SHARE = 0.15
_WINDOWS_SHARE = 0.25
_WINDOW_TOKENS = (1, 16, 31, 40, 100)
_NUM_CHOICES = (2, 2, 3, 4)
_MANY_CHOICES = 5
"""More than any replica has slots in a lane."""
_MANY_CHOICES_SHARE = 0.02
_NUM_GRAMMARS = 4
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)
_STOP_AT = (1, 2, 10)
_STOP_STRING_SHARE = 0.3
_STOPS_SHARE = 0.3
_NUM_PASSES = (2, 3, 8)
_PAUSE_LENGTHS_S = (0.01, 0.5, 3.0)
_LONG_PROMPT_TOKENS = (16, 64, 150)
_PRIORITIES = (-1, 0, 0, 7)
_STOP_TOKEN_IDS = tuple(range(100, 116))
"""One in thirty of the vocabulary."""


def with_features(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Return the scenario with each of the features below, with some chance."""
    for share, change in (
        (_CHOICES_SHARE, _with_choices),
        (_DRAFTS_SHARE, _with_drafts),
        (_GRAMMARS_SHARE, _with_grammars),
        (_LONG_STEPS_SHARE, _with_long_steps),
        (_PRIORITIES_SHARE, _with_priorities),
        (_FAILED_ROWS_SHARE, _with_failed_rows),
        (_LONG_PROMPTS_SHARE, _with_limits_of_long_prompts),
        (_PAUSES_SHARE, _with_pauses),
        (_WINDOWS_SHARE, _with_windows),
    ):
        if rng.random() < share:
            scenario = change(scenario, rng)
    return scenario


def _with_windows(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Let some layers of engines without a connector see a window."""
    window = int(rng.choice(_WINDOW_TOKENS))
    pools = tuple(
        msgspec.structs.replace(pool, window=window) if pool.role == "both" else pool
        for pool in scenario.pools
    )
    return msgspec.structs.replace(scenario, pools=pools)


def _with_choices(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Ask for several answers at once; a stop string ends one of them in some requests."""
    share = float(rng.choice([0.3, 1.0]))
    most = int(rng.choice([2, 4]))
    pools = tuple(
        msgspec.structs.replace(pool, slots_per_lane=max(pool.slots_per_lane, most))
        for pool in scenario.pools
    )
    requests = []
    for request in scenario.requests:
        num_choices = min(int(rng.choice(_NUM_CHOICES)), most)
        if rng.random() < _MANY_CHOICES_SHARE:
            num_choices = _MANY_CHOICES
        if rng.random() >= share:
            num_choices = 1
        stop_at = int(rng.choice(_STOP_AT)) if rng.random() < _STOP_STRING_SHARE else None
        stopped = int(rng.integers(num_choices))
        changes = {"num_choices": num_choices, "stop_at": stop_at, "stopped_choice": stopped}
        requests.append(_with(request, **changes))
    return msgspec.structs.replace(scenario, pools=pools, requests=tuple(requests))


def _with_drafts(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Let engines decode with drafts, more or fewer of which are right.

    Stop tokens end some requests, most often in the middle of a run.
    """
    pools = tuple(
        msgspec.structs.replace(
            pool,
            mixed=True,
            max_drafts=int(rng.choice([1, 3, 8])),
            right_drafts=float(rng.choice([0.3, 0.8, 0.95])),
        )
        for pool in scenario.pools
    )
    requests = tuple(
        _with(request, stop_token_ids=_STOP_TOKEN_IDS) if rng.random() < _STOPS_SHARE else request
        for request in scenario.requests
    )
    return msgspec.structs.replace(scenario, pools=pools, requests=requests)


def _with_grammars(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Let answers follow few grammars; in some scenarios these are late, or cannot be compiled."""
    share = float(rng.choice([0.2, 1.0]))
    slow, bad = float(rng.choice([0.0, 0.3])), float(rng.choice([0.0, 0.0, 0.3]))
    pools = tuple(
        msgspec.structs.replace(pool, slow_grammars=slow, bad_grammars=bad)
        for pool in scenario.pools
    )
    requests = tuple(
        _with(request, grammar=int(rng.integers(_NUM_GRAMMARS)) + 1)
        if rng.random() < share
        else request
        for request in scenario.requests
    )
    return msgspec.structs.replace(scenario, pools=pools, requests=requests)


def _with_long_steps(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Let engines make several decode passes in one step."""
    pools = tuple(
        msgspec.structs.replace(pool, num_scheduler_steps=int(rng.choice(_NUM_PASSES)))
        for pool in scenario.pools
    )
    return msgspec.structs.replace(scenario, pools=pools)


def _with_priorities(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Let engines run requests in order of their priority."""
    pools = tuple(
        msgspec.structs.replace(pool, scheduling_policy="priority") for pool in scenario.pools
    )
    requests = tuple(
        _with(request, priority=int(rng.choice(_PRIORITIES))) for request in scenario.requests
    )
    return msgspec.structs.replace(scenario, pools=pools, requests=requests)


def _with_failed_rows(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Let rows get no token now and then, on engines of all pools or of one."""
    share = float(rng.choice([0.002, 0.02]))
    fails = rng.random(len(scenario.pools)) < rng.choice([0.5, 1.0])
    pools = tuple(
        msgspec.structs.replace(pool, failed_rows=share if is_failing else 0.0)
        for pool, is_failing in zip(scenario.pools, fails, strict=True)
    )
    return msgspec.structs.replace(scenario, pools=pools)


def _with_limits_of_long_prompts(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Limit how many prompts a step computes in part, and how much of long ones."""
    pools = []
    for pool in scenario.pools:
        tokens, most = int(rng.choice(_LONG_PROMPT_TOKENS)), int(rng.integers(1, 4))
        limits = {
            "long_prompt_tokens": min(tokens, scenario.max_model_len),
            "max_partial_prompts": most,
            "max_long_prompts": int(rng.integers(1, most + 1)),
        }
        pools.append(msgspec.structs.replace(pool, **limits) if pool.chunked else pool)
    return msgspec.structs.replace(scenario, pools=tuple(pools))


def _with_pauses(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Pause engines shortly after arrivals; pauses of one engine may overlap."""
    arrivals_s = [request.arrival_s for request in scenario.requests]
    targets = [f"{pool.role}/{rank}" for pool in scenario.pools for rank in range(pool.replicas)]
    pauses = tuple(
        PlannedPause(
            at_s=float(at_s + rng.exponential(0.3)),
            target=targets[rng.integers(len(targets))],
            mode=PAUSE_MODES[rng.integers(len(PAUSE_MODES))],
            duration_s=float(rng.choice(_PAUSE_LENGTHS_S)),
        )
        for at_s in sorted(rng.choice(arrivals_s, int(rng.integers(1, 5))))
    )
    return msgspec.structs.replace(scenario, pauses=pauses)


def _with(request: ScenarioRequest, **changes: int | tuple[int, ...] | None) -> ScenarioRequest:
    variant = msgspec.structs.replace(request.variant, **changes)
    return msgspec.structs.replace(request, variant=variant)

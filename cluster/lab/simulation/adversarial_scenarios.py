"""The scenario of a seed; some seeds get a combination of faults that chance rarely produces.

Each function here changes a sampled scenario so that its combination has an effect: enough
replicas, long streams, full slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from cluster.lab.simulation.sampled_features import with_features
from cluster.lab.simulation.sampled_scenarios import sample_scenario
from replicas.faults import Fault
from replicas.launch import HAND_OVER_SHARE

if TYPE_CHECKING:
    from cluster.lab.simulation.scenario import Scenario, ScenarioRequest
    from replicas.faults import FaultKind

_ADVERSARIAL_SHARE = 0.18
_NUM_BLOCKS = 48
_MAX_MODEL_LEN = 500
_OUTPUT_TOKENS = (60, 200)
_TOKEN_S = 0.04
"""Seconds of a decode step: the longest streams take eight seconds."""
DISRUPTIVE_FAULTS: tuple[FaultKind, ...] = (
    "kill",
    "freeze",
    "hang",
    "hang",
    "backpressure",
    "backpressure",
    "mute",
)
_CLIENT_LEAVES_S = (None, None, None, 0.01, 0.1, 0.4)
_HANG_S = 45.0
"""Longer than the streams that fill all other slots take, one after the other."""


def random_scenario(seed: int) -> Scenario:
    """Return the scenario of a seed: the same in every process and on every machine."""
    return with_features(*_sample(seed))


def plain_scenario(seed: int) -> Scenario:
    """Return the scenario of a seed without the features of `with_features`."""
    scenario, _ = _sample(seed)
    return scenario


def _sample(seed: int) -> tuple[Scenario, np.random.Generator]:
    rng = np.random.Generator(np.random.Philox(seed))
    scenario = sample_scenario(seed, rng)
    if rng.random() < _ADVERSARIAL_SHARE:
        scenario = make_adversarial(scenario, rng)
    return scenario, rng


def make_adversarial(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Apply one of the changes below."""
    kinds = (
        _with_failing_engine, _with_failing_engine, _with_short_drains, _with_hang_while_full,
        _with_live_migrations,
    )  # fmt: skip
    return kinds[int(rng.integers(len(kinds)))](scenario, rng)


def _with_failing_engine(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Break the connections to one engine repeatedly, before it has produced a token.

    Clients may leave before the engine has answered.
    """
    role = scenario.pools[int(rng.integers(len(scenario.pools)))].role
    scenario = _with_capacity(scenario, replicas=2)
    faults = []
    at_s = 0.3
    for _ in range(int(rng.integers(4, 9))):
        at_s += float(rng.choice([0.2, 0.3, 0.6]))
        faults.append(Fault(at_s=at_s, target=f"{role}/0", kind="mute", duration_s=0.05))
    timing = msgspec.structs.replace(scenario.timing, prefill_token_s=4e-3)
    requests = tuple(
        msgspec.structs.replace(
            request, abort_s=_CLIENT_LEAVES_S[rng.integers(len(_CLIENT_LEAVES_S))]
        )
        for request in _at_fixed_gaps(scenario.requests, gap_s=0.25)
    )
    return msgspec.structs.replace(scenario, timing=timing, requests=requests, faults=tuple(faults))


def _with_short_drains(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Replace replicas one after the other, with long streams and a short drain time.

    The engine to which a stream migrates may die or stall at just that moment.
    """
    drain_timeout_s = float(rng.choice([0.4, 1.0, 2.0]))
    scenario = _with_capacity(scenario, replicas=3, drain_timeout_s=drain_timeout_s, lanes=1)
    role = scenario.pools[-1].role
    faults: list[Fault] = []
    free_s: dict[str, float] = {}
    at_s = 0.0
    for rank in rng.integers(3, size=8):
        at_s += float(rng.exponential(1.0))
        faults.append(Fault(at_s=at_s, target=f"{role}/{rank}", kind="replace"))
        # Disturb one of the other two engines, which the streams migrate to.
        target = f"{role}/{(rank + 1 + rng.integers(2)) % 3}"
        begin_s = max(at_s + HAND_OVER_SHARE * drain_timeout_s - float(rng.exponential(0.1)), 0.0)
        if rng.random() < 0.6 and free_s.get(target, 0.0) <= begin_s:
            kind = DISRUPTIVE_FAULTS[rng.integers(len(DISRUPTIVE_FAULTS))]
            duration_s = None if kind == "kill" else float(rng.choice([0.5, 6.0]))
            free_s[target] = begin_s + (duration_s or 0.0)
            faults.append(Fault(at_s=begin_s, target=target, kind=kind, duration_s=duration_s))
    requests = _with_long_streams(_at_fixed_gaps(scenario.requests, gap_s=0.2), rng)
    return msgspec.structs.replace(scenario, requests=requests, faults=tuple(faults))


def _with_live_migrations(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Migrate long streams with their KV over a slow network, from engines that change roles.

    During a transfer either engine may die or stall, streams end and clients leave. In some
    scenarios blocks are so few that streams are preempted meanwhile.
    """
    if len(scenario.pools) == 1:
        return _with_short_drains(scenario, rng)
    num_blocks = int(rng.choice([20, _NUM_BLOCKS]))
    scenario = _with_capacity(scenario, replicas=3, lanes=1, num_blocks=num_blocks)
    faults: list[Fault] = []
    at_s = 1.0
    for rank in rng.integers(3, size=6):
        at_s += 0.3 + float(rng.exponential(1.0))
        faults.append(Fault(at_s=at_s, target=f"decode/{rank}", kind="flip"))
        if rng.random() < 0.4:
            kind = DISRUPTIVE_FAULTS[rng.integers(len(DISRUPTIVE_FAULTS))]
            faults.append(
                Fault(
                    at_s=at_s + float(rng.exponential(0.2)),
                    target=f"decode/{rng.integers(3)}",
                    kind=kind,
                    duration_s=None if kind == "kill" else 0.5,
                )
            )
            at_s += 0.5 + float(rng.exponential(0.2))  # no two faults of one engine at a time
    network = msgspec.structs.replace(
        scenario.network, kv_bytes_per_s=float(rng.choice([1e7, 1e8])), latency_s=1e-3
    )
    transfer = msgspec.structs.replace(scenario.transfer, chunk_bytes=int(rng.choice([1, 2048])))
    requests = _with_long_streams(_at_fixed_gaps(scenario.requests, gap_s=0.2), rng)
    return msgspec.structs.replace(
        scenario, network=network, transfer=transfer, requests=requests, faults=tuple(faults)
    )


def _with_hang_while_full(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Make an engine hang while all others are full, until some of them have room again."""
    scenario = _with_capacity(scenario, replicas=2, lanes=1, slots_per_lane=2, step_timeout_s=300.0)
    hang = Fault(
        at_s=0.5 + float(rng.exponential(1.0)),
        target=f"{scenario.pools[-1].role}/{rng.integers(2)}",
        kind="hang",
        duration_s=_HANG_S,
    )
    # Some more requests than slots: queued requests have precedence over migrations.
    requests = _with_long_streams(
        _at_fixed_gaps(scenario.requests[: 3 + rng.integers(4)], 0.02), rng
    )
    stayers = tuple(msgspec.structs.replace(request, abort_s=None) for request in requests)
    return msgspec.structs.replace(scenario, requests=stayers, faults=(hang,))


def _with_capacity(
    scenario: Scenario, *, replicas: int, num_blocks: int = _NUM_BLOCKS, **of_pools: float
) -> Scenario:
    """Set a minimum of replicas for each pool, and enough blocks for long sequences."""
    pools = tuple(
        msgspec.structs.replace(
            pool,
            replicas=max(pool.replicas, replicas),
            num_blocks=num_blocks,
            **of_pools,
        )
        for pool in scenario.pools
    )
    timing = msgspec.structs.replace(scenario.timing, decode_base_s=_TOKEN_S)
    return msgspec.structs.replace(
        scenario, pools=pools, timing=timing, max_model_len=_MAX_MODEL_LEN
    )


def _at_fixed_gaps(
    requests: tuple[ScenarioRequest, ...], gap_s: float
) -> tuple[ScenarioRequest, ...]:
    """Make requests arrive one after the other from the start, `gap_s` apart."""
    return tuple(
        msgspec.structs.replace(request, arrival_s=gap_s * i) for i, request in enumerate(requests)
    )


def _with_long_streams(
    requests: tuple[ScenarioRequest, ...], rng: np.random.Generator
) -> tuple[ScenarioRequest, ...]:
    lengths = rng.integers(*_OUTPUT_TOKENS, size=len(requests))
    return tuple(
        msgspec.structs.replace(request, num_output_tokens=int(length))
        for request, length in zip(requests, lengths, strict=True)
    )

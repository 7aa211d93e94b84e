"""Small simulated clusters on a device of round numbers, so that times can be told in advance.

Every constant is a power of two: sums of them are exact, and tests compare with `==`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.config.schema import RouterConfig
from cluster.lab.simulation.network import NetworkConfig
from cluster.lab.simulation.options import PoolSpec, SimulationOptions
from cluster.lab.simulation.simulator import Simulation
from cluster.lab.workloads.request import TraceRequest, Workload
from replicas.config import EngineConfig
from replicas.faults import FaultPlan
from replicas.generators.simulated.timing import LinkTiming
from replicas.simulation.virtual_engine import ModelFacts
from tests.kv_groups import one_kv_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.lab.simulation.records import EventRecord, SimulationResult
    from cluster.lab.simulation.scaling import Scaler
    from replicas.config import Role
    from replicas.generators.simulated.timing import StepTiming

LATENCY_S = 2.0**-13
HOST_S, HOST_ROW_S = 2.0**-10, 2.0**-14
PREFILL_TOKEN_S = 2.0**-12
DECODE_S, CONTEXT_TOKEN_S = 2.0**-6, 2.0**-22
BYTES_PER_TOKEN = 1024
LINK = LinkTiming(2.0**-12, 2.0**30)
KV_BYTES_PER_S = 2.0**32
BLOCK_SIZE = 32
VOCAB_SIZE = 1024


class RoundTiming:
    """Prompts of a lane one after another; a decode step, and a little for each context token."""

    host_s = HOST_S
    host_row_s = HOST_ROW_S
    bytes_per_token = BYTES_PER_TOKEN
    link = LINK

    def __init__(self, warm_up_s: float = 0.0) -> None:
        self._warm_up_s = warm_up_s

    def prefill_s(self, chunks: Sequence[tuple[int, int, int]]) -> float:
        return max(_per_lane((lane, end - start) for lane, start, end in chunks)) * PREFILL_TOKEN_S

    def decode_s(self, rows: Sequence[tuple[int, int]]) -> float:
        return DECODE_S + max(_per_lane(rows)) * CONTEXT_TOKEN_S

    def decode_run_s(self, rows: Sequence[tuple[int, int]], num_steps: int) -> list[float]:
        return [self.decode_s([(lane, n + i) for lane, n in rows]) for i in range(num_steps)]

    def mixed_s(
        self, chunks: Sequence[tuple[int, int, int]], rows: Sequence[tuple[int, int]]
    ) -> float:
        seconds = self.prefill_s(chunks) if chunks else 0.0
        return seconds + self.decode_s(rows) if rows else seconds

    def warm_up_s(self) -> float:
        return self._warm_up_s


def _per_lane(work) -> list[int]:
    lanes: dict[int, int] = {}
    for lane, amount in work:
        lanes[lane] = lanes.get(lane, 0) + amount
    return list(lanes.values())


def turn_s(device_s: float, num_rows: int = 1) -> float:
    """A step of the engine: its device and its host."""
    return device_s + HOST_S + num_rows * HOST_ROW_S


def prefill_turn_s(*num_tokens: int) -> float:
    """A step that computes these prompts in one lane."""
    return turn_s(sum(num_tokens) * PREFILL_TOKEN_S, len(num_tokens))


def decode_turn_s(*contexts: int) -> float:
    """A step that decodes these rows in one lane, each with so many tokens in its context."""
    return turn_s(DECODE_S + sum(contexts) * CONTEXT_TOKEN_S, len(contexts))


def pool(
    role: Role = "both",
    replicas: int = 1,
    timing: StepTiming | None = None,
    *,
    num_blocks: int = 33,
    **engine: object,
) -> PoolSpec:
    """A pool of engines with two slots, 32 blocks of 32 tokens, and nothing that waits."""
    fields: dict[str, object] = {
        "model": "none",
        "max_batch_size": 2,
        "block_size": BLOCK_SIZE,
        "num_blocks": num_blocks,
        "max_num_batched_tokens": 512,
        "max_model_len": 512,
        "max_num_waiting": 64 if role == "prefill" else 0,
        "kv_connector": None if role == "both" else "p2p",
    }
    config = EngineConfig(**{**fields, **engine})
    facts = ModelFacts(
        max_position_embeddings=512, vocab_size=VOCAB_SIZE, eos_token_ids=[0],
        kv_groups=one_kv_group(num_blocks, BLOCK_SIZE, BYTES_PER_TOKEN),
        supports_mixed_batch=False, supports_chunked_prefill=True, supports_prefix_caching=True,
    )  # fmt: skip
    return PoolSpec(role, replicas, config, timing or RoundTiming(), facts)


def requests(*rows: tuple[float, int, int]) -> Workload:
    """Requests of (arrival_s, prompt tokens, output tokens); no two share a prefix."""
    return Workload("test", tuple(TraceRequest(*row) for row in rows))


def fault(at_s: float, target: str, kind: str, duration_s: float | None = None) -> dict:
    """An entry of a plan."""
    return {"at_s": at_s, "target": target, "kind": kind, "duration_s": duration_s}


def simulation(
    pools: PoolSpec | Sequence[PoolSpec],
    workload: Workload,
    *,
    faults: Sequence[dict] = (),
    router: dict | None = None,
    network: dict | None = None,
    scaler: Scaler | None = None,
    **options: object,
) -> Simulation:
    """A run with all checks and an event log, unless told otherwise."""
    fields = {"latency_s": LATENCY_S, "kv_bytes_per_s": KV_BYTES_PER_S, **(network or {})}
    given = {"checks": True, "keeps_events": True, **options}
    return Simulation(
        [pools] if isinstance(pools, PoolSpec) else pools,
        workload,
        SimulationOptions(
            faults=FaultPlan.parse(list(faults)),
            router=RouterConfig(**{"min_remote_prefill_tokens": 0, **(router or {})}),
            network=NetworkConfig(**fields),
            **given,
        ),
        scaler=scaler,
    )


def simulate(
    pools: PoolSpec | Sequence[PoolSpec], workload: Workload, **options: object
) -> SimulationResult:
    """Run it; see `simulation`."""
    return simulation(pools, workload, **options).run()


def outcomes(result: SimulationResult) -> list[str]:
    """How each request ended."""
    return [record.outcome for record in result.records]


def events_of(result: SimulationResult, kind: str) -> list[tuple[float, str]]:
    """(at_s, subject) of every event of a kind."""
    return [(event.at_s, event.subject) for event in result.events if event.kind == kind]


def events_by_kind(events: Sequence[EventRecord]) -> dict[str, int]:
    """How many events of each kind a log has."""
    counts: dict[str, int] = {}
    for event in events:
        counts[event.kind] = counts.get(event.kind, 0) + 1
    return dict(sorted(counts.items()))

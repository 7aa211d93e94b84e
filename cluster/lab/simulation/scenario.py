"""A scenario: a value with everything that one checked run of the simulator needs.

Pure except for `run_scenario`. A scenario is sampled from a seed or read from a file, and always
gives the same run, to the bit. Scenarios have few slots and blocks, bursts, a bad network and
faults, so that refusals, preemption, eviction and lost replicas are frequent.
"""

from __future__ import annotations

import hashlib
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from cluster.config.schema import RouterConfig
from cluster.lab.simulation.network import NetworkConfig
from cluster.lab.simulation.options import (
    PLAIN,
    PlannedPause,
    PoolSpec,
    RequestVariant,
    SimulationOptions,
)
from cluster.lab.simulation.simulator import Simulation
from cluster.lab.workloads.request import TraceRequest, Workload
from kv_transfer.config import TransferConfig
from replicas.config import EngineConfig, SpeculativeConfig
from replicas.faults import Fault, FaultPlan
from replicas.generators.simulated.timing import LinkTiming
from replicas.generators.simulated.tokens import KV_SPEC
from replicas.kv_groups import KVGroup
from replicas.simulation.virtual_engine import Chances, ModelFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.lab.simulation.records import EventRecord

BLOCK_TOKENS = 32
"""Tokens of a KV block, and of a block that prompts share."""
VOCAB_SIZE = 512
EOS_TOKEN_IDS = (0, 2)
BYTES_PER_BLOCK = KV_SPEC.bytes_per_block(BLOCK_TOKENS)
TENANTS = ("a", "b", "b")
"""The tenants of consecutive requests."""


class ScenarioPool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool of equal replicas; other fields are as in `EngineConfig`.

    Attributes:
        lanes: DP groups of each replica.
        num_blocks: KV blocks of a lane, including the null block.
        max_num_waiting: Limit of waiting sequences; None is unbounded.
        step_timeout_s: Seconds of a step after which the replica's parent ends it.
        drain_timeout_s: How long the requests of a draining replica may take.
        steps_in_flight: Only has an effect if decodes are steps of their own, as on a mesh.
        max_drafts: Most drafts of a row in a step; 0 is no speculation. Needs `mixed`.
        right_drafts: Share of drafts that are right.
        slow_grammars: Share of grammars that are not compiled at once, or too late.
        bad_grammars: Share of grammars that cannot be compiled.
        failed_rows: Share of a step's rows that get no token, which ends their request.
        num_scheduler_steps: Most decode passes of one step.
        scheduling_policy: Order of queued requests; needed by requests with a priority.
        long_prompt_tokens: `EngineConfig.long_prefill_token_threshold`. Needs `chunked`.
        max_partial_prompts: `EngineConfig.max_num_partial_prefills`.
        max_long_prompts: `EngineConfig.max_long_partial_prefills`.
        window: Tokens that some of the model's layers see; 0: all layers see all tokens. Only of
            role both, which has no connector.
    """

    role: Literal["prefill", "decode", "both"]
    replicas: int = 1
    lanes: int = 1
    slots_per_lane: int = 4
    num_blocks: int = 64
    max_num_batched_tokens: int = 512
    max_num_waiting: int | None = None
    chunked: bool = True
    mixed: bool = False
    caching: bool = True
    prefill_streak: int = 1
    reservation_timeout_s: float = 60.0
    step_timeout_s: float = 300.0
    drain_timeout_s: float = 600.0
    steps_in_flight: Literal[1, 2] = 2
    max_drafts: int = 0
    right_drafts: float = 0.5
    slow_grammars: float = 0.0
    bad_grammars: float = 0.0
    failed_rows: float = 0.0
    num_scheduler_steps: int = 1
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    long_prompt_tokens: int = 0
    max_partial_prompts: int = 1
    max_long_prompts: int = 1
    window: int = 0


class ScenarioRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request.

    Attributes:
        block_ids: All blocks of the prompt, see `TraceRequest`; complete, so that removing other
            requests does not change the prompt.
        abort_s: Seconds after its arrival at which the client leaves.
        variant: What it asks for besides its tokens.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...]
    abort_s: float | None = None
    variant: RequestVariant = PLAIN


class ScenarioTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A linear `StepTiming`.

    Attributes:
        decode_token_s: Seconds per token of the contexts of a decode step.
        move_s: Seconds per message of KV blocks, on each side.
        host_s: Seconds per step, outside the device.
        host_row_s: Seconds per sequence of a step, outside the device.
        start_s: Seconds from a replica's start until it is ready.
    """

    prefill_token_s: float = 1e-4
    decode_base_s: float = 0.01
    decode_token_s: float = 1e-6
    move_s: float = 1e-4
    host_s: float = 1e-3
    host_row_s: float = 0.0
    start_s: float = 1.0
    bytes_per_token: int = 1 << 14

    @property
    def link(self) -> LinkTiming:
        """See `StepTiming.link`."""
        return LinkTiming(self.move_s, 1e9)

    def prefill_s(self, chunks: Sequence[tuple[int, int, int]]) -> float:
        """See `StepTiming.prefill_s`."""
        return self.prefill_token_s * sum(end - start for _, start, end in chunks)

    def decode_s(self, rows: Sequence[tuple[int, int]]) -> float:
        """See `StepTiming.decode_s`."""
        return self.decode_base_s + self.decode_token_s * sum(n for _, n in rows)

    def decode_run_s(self, rows: Sequence[tuple[int, int]], num_steps: int) -> list[float]:
        """See `StepTiming.decode_run_s`."""
        return [self.decode_s([(lane, n + i) for lane, n in rows]) for i in range(num_steps)]

    def mixed_s(
        self, chunks: Sequence[tuple[int, int, int]], rows: Sequence[tuple[int, int]]
    ) -> float:
        """See `StepTiming.mixed_s`."""
        return self.prefill_s(chunks) + self.decode_s(rows)

    def warm_up_s(self) -> float:
        """See `StepTiming.warm_up_s`."""
        return self.start_s


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The input of one checked run.

    Attributes:
        seed: Seed of every draw in the run; also its name.
        max_model_len: Longest sequence; has to fit into a lane of every pool.
        ingresses: Number of ingresses; request i goes to number i modulo this.
        requests: The requests, in order of arrival.
        restart_s: Seconds from the death of a replica to the start of its successor.
        pauses: Pauses of engines.
        run_ahead: Whether several plain decode steps are simulated as one event, where possible.
        deadline_s: A request that lasts longer fails the run.
    """

    seed: int
    max_model_len: int
    pools: tuple[ScenarioPool, ...]
    ingresses: int = 1
    router: RouterConfig = RouterConfig()
    network: NetworkConfig = NetworkConfig()
    transfer: TransferConfig = TransferConfig()
    timing: ScenarioTiming = ScenarioTiming()
    faults: tuple[Fault, ...] = ()
    requests: tuple[ScenarioRequest, ...] = ()
    pauses: tuple[PlannedPause, ...] = ()
    restart_s: float = 1.0
    run_ahead: bool = True
    deadline_s: float = 600.0

    def to_json(self) -> bytes:
        """Encode the scenario for a file; `from_json` restores it."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def from_json(cls, raw: bytes) -> Scenario:
        """Read what `to_json` wrote.

        Raises:
            msgspec.ValidationError: The text is not a scenario.
        """
        return msgspec.json.decode(raw, type=cls)


@dataclass(frozen=True)
class Outcome:
    """The result of a scenario's run.

    Attributes:
        outcomes: Number of requests by outcome; empty after a failure.
        failure: The error and where it was raised; None if every check passed.
        num_transfers: Prompts whose KV came from another replica.
        num_cached_tokens: Prompt tokens that were in a prefix cache.
        digest: Hash of the log and of every token and its time: equal for equal runs.
    """

    num_events: int
    outcomes: dict[str, int]
    failure: str | None
    log: list[EventRecord]
    digest: str
    num_preemptions: int = 0
    num_transfers: int = 0
    num_retries: int = 0
    num_cached_tokens: int = 0


def run_scenario(scenario: Scenario) -> Outcome:
    """Run a scenario to its end or to the first failure."""
    simulation = build(scenario)
    try:
        result = simulation.run()
    except Exception as error:  # noqa: BLE001 - a bug may raise anything
        log = simulation.recorder.events
        digest = hashlib.sha256(msgspec.json.encode(log)).hexdigest()
        return Outcome(simulation.loop.num_events, {}, _describe(error), log, digest)
    records = result.records
    parts = [record.token_times_s.tobytes() for record in records]
    parts += [msgspec.json.encode(x) for x in (simulation.recorder.outputs, result.events)]
    return Outcome(
        num_events=result.num_events,
        outcomes=dict(sorted(Counter(record.outcome for record in records).items())),
        failure=None,
        log=simulation.recorder.events,
        digest=hashlib.sha256(b"".join(parts)).hexdigest(),
        num_preemptions=sum(replica.num_preemptions for replica in result.replicas),
        num_transfers=sum(record.transfer_s is not None for record in records),
        num_retries=sum(record.num_retries for record in records),
        num_cached_tokens=sum(record.num_cached_tokens for record in records),
    )


def build(scenario: Scenario) -> Simulation:
    """Return the simulation of a scenario, with every check, ready to run."""
    options = SimulationOptions(
        seed=scenario.seed,
        router=scenario.router,
        ingresses=scenario.ingresses,
        network=scenario.network,
        faults=FaultPlan(faults=scenario.faults),
        restart_s=scenario.restart_s,
        models_kv=True,
        run_ahead=scenario.run_ahead,
        checks=True,
        deadline_s=scenario.deadline_s,
        keeps_events=True,
        aborts={i: r.abort_s for i, r in enumerate(scenario.requests) if r.abort_s is not None},
        pauses=scenario.pauses,
        variants={i: r.variant for i, r in enumerate(scenario.requests) if r.variant != PLAIN},
    )
    requests = tuple(
        TraceRequest(
            r.arrival_s, r.num_prompt_tokens, r.num_output_tokens, r.block_ids, TENANTS[i % 3]
        )
        for i, r in enumerate(scenario.requests)
    )
    specs = [_pool_spec(pool, scenario) for pool in scenario.pools]
    return Simulation(specs, Workload("chaos", requests, BLOCK_TOKENS), options)


def _pool_spec(pool: ScenarioPool, scenario: Scenario) -> PoolSpec:
    drafts = None
    if pool.max_drafts:
        drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=pool.max_drafts)
    engine = EngineConfig(
        model="virtual",
        max_batch_size=pool.lanes * pool.slots_per_lane,
        tt_data_parallel=pool.lanes,
        block_size=BLOCK_TOKENS,
        max_model_len=scenario.max_model_len,
        num_blocks=pool.num_blocks,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        max_num_waiting=pool.max_num_waiting,
        enable_chunked_prefill=pool.chunked,
        enable_prefix_caching=pool.caching,
        mixed_batches=pool.mixed,
        prefill_steps_per_decode_step=pool.prefill_streak,
        kv_connector=None if pool.role == "both" else "p2p",
        reservation_timeout_s=pool.reservation_timeout_s,
        step_timeout_s=pool.step_timeout_s,
        steps_in_flight=pool.steps_in_flight,
        speculative_config=drafts,
        num_scheduler_steps=pool.num_scheduler_steps,
        scheduling_policy=pool.scheduling_policy,
        long_prefill_token_threshold=pool.long_prompt_tokens,
        max_num_partial_prefills=pool.max_partial_prompts,
        max_long_partial_prefills=pool.max_long_prompts,
    )
    group = KVGroup(
        layers=(0,),
        spec=KV_SPEC,
        block_size=engine.block_size,
        num_blocks=pool.num_blocks,
    )
    facts = ModelFacts(
        max_position_embeddings=4096,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=list(EOS_TOKEN_IDS),
        kv_groups=(group, *_windows(group, pool.window)),
        supports_mixed_batch=True,
        supports_chunked_prefill=True,
        supports_prefix_caching=True,
        supports_drafts=pool.max_drafts > 0,
        supports_async_decode=not pool.mixed,
    )
    return PoolSpec(
        pool.role,
        pool.replicas,
        engine,
        scenario.timing,
        facts,
        scenario.transfer,
        pool.drain_timeout_s,
        Chances(pool.right_drafts, pool.slow_grammars, pool.bad_grammars, pool.failed_rows),
    )


def _windows(group: KVGroup, window: int) -> list[KVGroup]:
    """Return the KV groups beside that of all tokens, with as many blocks."""
    if not window:
        return []
    spec = msgspec.structs.replace(group.spec, kind="window", window=window)
    return [msgspec.structs.replace(group, layers=(1,), spec=spec)]


def _describe(error: BaseException) -> str:
    """Describe an error and the innermost place where it was raised."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)
    where = f"{code.co_filename.rsplit('/', 1)[-1]}:{line} in {name}"
    return f"{type(error).__name__} ({where}): {error}"

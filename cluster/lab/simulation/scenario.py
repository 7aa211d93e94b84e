"""A scenario: everything that one run of the simulator with checks needs, in one value.

Pure but for `run_scenario`. A seed makes a scenario, a file holds one, and either of them makes the
same run, to the bit. Scenarios are small and mean: few slots and blocks, bursts, a bad network and
faults, so that refusals, preemption, eviction and lost replicas happen all the time.
"""

from __future__ import annotations

import hashlib
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

import msgspec

from cluster.config.schema import (
    AdmissionConfig,
    IngressConfig,
    OrderName,
    PolicyName,
    RouterConfig,
    TenantConfig,
)
from cluster.lab.simulation.network import NetworkConfig
from cluster.lab.simulation.options import PoolSpec, SimulationOptions
from cluster.lab.simulation.simulator import Simulation
from cluster.lab.workloads.request import TraceRequest, Workload
from kv_transfer.config import TransferConfig
from replicas.config import EngineConfig
from replicas.faults import INGRESS, Fault, FaultKind, FaultPlan
from replicas.generators.simulated.timing import LinkTiming
from replicas.kv_groups import KVGroup
from replicas.virtual_engine import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from cluster.lab.simulation.records import EventRecord

_T = TypeVar("_T")

BLOCK_TOKENS = 32
"""Tokens of a KV block, and of a block that prompts share."""
VOCAB_SIZE = 512
EOS_TOKEN_IDS = (0, 2)
_BYTES_PER_BLOCK = 16 * BLOCK_TOKENS
_KINDS: tuple[FaultKind, ...] = (
    "kill", "freeze", "freeze", "slow", "drop_link", "corrupt", "corrupt", "partition",
    "hang", "hang", "deaf", "mute", "clog", "clock", "replace", "replace",
)  # fmt: skip
_INGRESS_KINDS: tuple[FaultKind, ...] = ("kill", "kill", "clock")
_TENANTS = ("a", "b", "b")
_INSTANTS = frozenset({"kill", "drop_link", "replace"})
_STUCK_KINDS: tuple[FaultKind, ...] = (
    "hang", "hang", "deaf", "deaf", "mute", "clog",
)  # fmt: skip
_STUCK_SPAN_S = 60.0
_ENDLESS = frozenset({"freeze", "partition", "hang", "mute", "deaf"})
"""What may last for ever: whoever waits for the replica gives it up, or its parent ends it."""
_SHIFTS_S = (-3600.0, -180.0, -5.0, 5.0, 180.0, 3600.0)
"""Less and more than clocks may differ by, and than a ticket is good for."""
_DAMAGES_S = (0.5, 5.0, 15.0)
_SILENCES_S = (0.05, 0.5, 2.0, 4.5, 5.5, 8.0, 15.0)
"""Shorter and longer than the 5 s after which a silent engine is given up."""


class ScenarioPool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal replicas of one role; see `EngineConfig` for what is not told here.

    Attributes:
        lanes: DP groups of each.
        num_blocks: KV blocks of a lane, null block included.
        max_num_waiting: Most sequences that wait; None is unbounded.
        step_timeout_s: How long a step may take before the replica's parent ends it.
        drain_timeout_s: How long requests may go on in a replica that is to be replaced.
        steps_in_flight: Has a meaning where decodes are steps of their own, as on a mesh.
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


class ScenarioRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request.

    Attributes:
        block_ids: What the prompt is made of, see `TraceRequest`; all of it, so that it stays the
            same prompt when other requests are taken out.
        abort_s: So many seconds after its arrival its client leaves.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...]
    abort_s: float | None = None


class ScenarioTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What steps cost; a `StepTiming` of straight lines.

    Attributes:
        decode_token_s: Per token of the contexts of a decode step.
        move_s: Per message of KV blocks, on each side.
        host_s: Per step, outside the device.
        host_row_s: Per sequence of a step, outside the device.
        start_s: From a replica's start to its readiness.
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
    """See the module docstring.

    Attributes:
        seed: Of every draw in the run; also names it.
        max_model_len: Longest sequence; has to fit into a lane of every pool.
        ingresses: How many; request i goes to number i modulo this.
        requests: What arrives, in order of arrival.
        restart_s: From the death of a replica to its start.
        run_ahead: Whether stretches of plain decode steps are passed over, where that is possible.
        deadline_s: A request that lasts longer hangs.
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
    restart_s: float = 1.0
    run_ahead: bool = True
    deadline_s: float = 600.0

    def to_json(self) -> bytes:
        """For a file; `from_json` gives the same scenario back."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def from_json(cls, raw: bytes) -> Scenario:
        """Read what `to_json` wrote.

        Raises:
            msgspec.ValidationError: It is something else.
        """
        return msgspec.json.decode(raw, type=cls)


@dataclass(frozen=True)
class Outcome:
    """What came of a scenario.

    Attributes:
        outcomes: How many requests ended in which way; empty after a failure.
        failure: What was broken, and where it was found; None for a good run.
        num_transfers: Prompts whose KV came from another replica.
        num_cached_tokens: Prompt tokens that were not computed again.
        digest: Of the log and of every token and its time: equal for equal runs.
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
    """Run a scenario to its end or to the first thing that is wrong."""
    simulation = build(scenario)
    try:
        result = simulation.run()
    except Exception as error:  # noqa: BLE001 - whatever a bug raises is a find
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
    """The simulation of a scenario, with every check, ready to run."""
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
    )
    requests = tuple(
        TraceRequest(
            r.arrival_s, r.num_prompt_tokens, r.num_output_tokens, r.block_ids, _TENANTS[i % 3]
        )
        for i, r in enumerate(scenario.requests)
    )
    specs = [_pool_spec(pool, scenario) for pool in scenario.pools]
    return Simulation(specs, Workload("chaos", requests, BLOCK_TOKENS), options)


def _pool_spec(pool: ScenarioPool, scenario: Scenario) -> PoolSpec:
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
    )
    group = KVGroup(
        layers=(0,),
        block_size=engine.block_size,
        num_blocks=pool.num_blocks,
        bytes_per_block=_BYTES_PER_BLOCK,
    )
    facts = ModelFacts(
        max_position_embeddings=4096,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=list(EOS_TOKEN_IDS),
        kv_groups=(group,),
        supports_mixed_batch=True,
        supports_chunked_prefill=True,
        supports_prefix_caching=True,
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
    )


def _describe(error: BaseException) -> str:
    """An error and the innermost place where it was raised."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)
    where = f"{code.co_filename.rsplit('/', 1)[-1]}:{line} in {name}"
    return f"{type(error).__name__} ({where}): {error}"


# --- random scenarios ---------------------------------------------------------------------------


def drawn_scenario(seed: int, rng: np.random.Generator) -> Scenario:
    """A scenario with whatever chance brings together."""
    return _Dice(seed, rng).scenario()


class _Dice:
    """Draws a scenario; one generator for all draws, in a fixed order."""

    def __init__(self, seed: int, rng: np.random.Generator) -> None:
        self._seed = seed
        self._rng = rng

    def scenario(self) -> Scenario:
        is_split = self._happens(0.65)
        pools = tuple(
            self._pool(role) for role in (("prefill", "decode") if is_split else ("both",))
        )
        longest = BLOCK_TOKENS * (min(pool.num_blocks for pool in pools) - 1)
        is_calm = self._happens(0.15)
        requests = self._requests()
        faults: tuple[Fault, ...] = ()
        ingresses = self._pick(1, 1, 2)
        if not is_calm and self._happens(0.8):
            faults = self._faults(pools, ingresses, [r.arrival_s for r in requests])
        if not is_calm and self._happens(0.08):
            faults = self._rolling_update(pools, requests[0].arrival_s)
        transfer, timing = self._transfer(), self._timing()
        if is_split and not is_calm and self._happens(0.2):
            # Long prefill steps, short leases, and producers that stand still for longer than that.
            transfer = msgspec.structs.replace(transfer, lease_s=1.2, renew_s=0.4)
            timing = msgspec.structs.replace(timing, prefill_token_s=4e-3)
            faults = self._stopped_producers(pools, [r.arrival_s for r in requests])
        scenario = Scenario(
            seed=self._seed,
            max_model_len=min(self._pick(500, 500, 500, 500, 200), longest),
            pools=pools,
            ingresses=ingresses,
            router=self._router(),
            network=NetworkConfig(latency_s=1e-4) if is_calm else self._network(),
            transfer=transfer,
            timing=timing,
            faults=faults,
            requests=requests,
            restart_s=self._pick(0.1, 1.0, 4.0),
        )
        scenario = self._with_admission(self._with_troubles(scenario, is_calm=is_calm))
        return scenario if is_calm else self._with_flips(scenario)

    def _with_troubles(self, scenario: Scenario, *, is_calm: bool) -> Scenario:
        """Choose the order of the legs, and for some what goes wrong in more places than one."""
        # Drawn last, and for all: the rest of a seed's scenario is the same for all orders.
        order = self._pick(*get_args(OrderName))
        router = msgspec.structs.replace(scenario.router, order=order)
        scenario = msgspec.structs.replace(scenario, router=router)
        if is_calm:
            return scenario
        if len(scenario.pools) == 2 and order == "prefill_first" and self._happens(0.3):
            scenario = self._with_lost_consumers(scenario)
        elif self._happens(0.3):
            scenario = self._with_stuck_engines(scenario)
        if any(f.kind in _ENDLESS and f.duration_s is None for f in scenario.faults):
            # Of several that hang each is ended by its parent before the next one is waited for.
            longest_s = IngressConfig().request_timeout_s
            scenario = msgspec.structs.replace(scenario, deadline_s=longest_s)
        return self._with_set_clocks(scenario) if self._happens(0.2) else scenario

    def _with_admission(self, scenario: Scenario) -> Scenario:
        """Let some decide at the door who is let in; drawn after everything else."""
        if not self._happens(0.3):
            return scenario
        admission = AdmissionConfig(
            ttft_s=self._pick(None, 0.3, 3.0, 30.0),
            tpot_s=self._pick(None, 0.02, 0.2),
            max_queued_tokens=self._pick(None, None, 1000),
            tenants={
                _TENANTS[0]: TenantConfig(
                    weight=self._pick(0.5, 1.0, 3.0),
                    priority=self._pick(-1, 0, 0),
                    max_requests=self._pick(None, 3),
                )
            },
        )
        router = msgspec.structs.replace(scenario.router, admission=admission)
        return msgspec.structs.replace(scenario, router=router)

    def _with_flips(self, scenario: Scenario) -> Scenario:
        """Let some engines change their roles under load; drawn after everything else."""
        if len(scenario.pools) == 1 or not self._happens(0.3):
            return scenario
        arrivals_s = [r.arrival_s for r in scenario.requests]
        moments_s = self._rng.choice(arrivals_s, self._pick(1, 2, 4, 8))
        targets = _replicas(scenario.pools)
        flips = tuple(
            Fault(at_s=float(at_s + self._rng.random()), target=self._pick(*targets), kind="flip")
            for at_s in sorted(moments_s)
        )
        return msgspec.structs.replace(scenario, faults=(*scenario.faults, *flips))

    def _pool(self, role: Literal["prefill", "decode", "both"]) -> ScenarioPool:
        lanes = self._pick(1, 1, 2, 4)
        slots_per_lane = self._pick(1, 2, 4)
        chunked = self._happens(0.7)
        # Without chunks a step has to take the longest prompt whole, and what it grew to.
        budget = self._pick(32, 64, 128, 512) if chunked else 512
        return ScenarioPool(
            role=role,
            replicas=self._pick(1, 2, 2, 3),
            lanes=lanes,
            slots_per_lane=slots_per_lane,
            num_blocks=self._pick(13, 13, 16, 24, 48),
            max_num_batched_tokens=max(budget, lanes * slots_per_lane),
            max_num_waiting=self._pick(None, 0, 2) if role == "both" else self._pick(None, None, 2),
            chunked=chunked,
            mixed=self._happens(0.4),
            caching=self._happens(0.8),
            prefill_streak=self._pick(1, 3),
            reservation_timeout_s=self._pick(2.0, 20.0, 60.0),
            step_timeout_s=self._pick(6.0, 20.0, 300.0),
            drain_timeout_s=self._pick(0.5, 5.0, 60.0),
        )

    def _router(self) -> RouterConfig:
        return RouterConfig(
            max_queued_requests=self._pick(2, 16, 256, 256),
            queue_timeout_s=self._pick(1.0, 10.0, 60.0),
            max_attempts=self._pick(1, 3, 3),
            min_remote_prefill_tokens=self._pick(None, 0, 40),
            policy=self._pick(*get_args(PolicyName)),
        )

    def _network(self) -> NetworkConfig:
        return NetworkConfig(
            latency_s=self._pick(1e-5, 1e-4, 5e-3),
            jitter_s=self._pick(0.0, 1e-3, 0.02),
            kv_bytes_per_s=self._pick(1e7, 1e9),
            kv_loss=self._pick(0.0, 0.0, 0.01, 0.1),
            kv_repetition=self._pick(0.0, 0.0, 0.1),
            kv_jitter_s=self._pick(0.0, 1e-3, 0.1),
        )

    def _transfer(self) -> TransferConfig:
        chunk_bytes = self._pick(1, 2, 4, 64) * _BYTES_PER_BLOCK
        lease_s = self._pick(1.2, 1.2, 5.0, 30.0)
        return TransferConfig(
            lease_s=lease_s,
            renew_s=lease_s / 3,
            rendezvous_s=self._pick(3.0, 30.0),
            no_progress_s=self._pick(2.0, 5.0),
            no_data_s=self._pick(3.0, 30.0),
            closing_s=self._pick(2.0, 10.0),
            chunk_bytes=chunk_bytes,
            window_bytes=chunk_bytes * self._pick(1, 2, 8),
            max_inflight_bytes=chunk_bytes * self._pick(2, 64),
            copy_s=self._pick(1e-6, 0.01, 1.0),
        )

    def _timing(self) -> ScenarioTiming:
        return ScenarioTiming(
            prefill_token_s=self._pick(2e-5, 4e-4, 4e-3),
            decode_base_s=self._pick(2e-3, 0.01, 0.04),
            move_s=self._pick(0.0, 1e-4, 5e-3),
            host_s=self._pick(0.0, 1e-3),
            host_row_s=self._pick(0.0, 1e-5),
            start_s=self._pick(0.0, 2.0),
        )

    def _requests(self) -> tuple[ScenarioRequest, ...]:
        num_requests = int(self._rng.integers(10, 50))
        num_prefixes = self._pick(1, 3, 8)
        abort_share = self._pick(0.0, 0.1, 0.4)
        gap_s = self._pick(0.02, 0.2, 1.0)
        requests: list[ScenarioRequest] = []
        arrival_s = 0.0
        while len(requests) < num_requests:
            # Those of a burst often begin alike, and meet each other half computed.
            burst_prefix = int(self._rng.integers(num_prefixes))
            for _ in range(self._pick(1, 1, 2, 6)):
                num_prompt_tokens = self._length(300)
                is_other = self._happens(0.3)
                prefix = int(self._rng.integers(num_prefixes)) if is_other else burst_prefix
                num_shared = int(self._rng.integers(0, 10)) if self._happens(0.6) else 0
                abort_s = None
                if self._happens(abort_share):
                    abort_s = float(self._rng.choice([0.001, 0.05, 0.3, 1.0, 4.0]))
                    abort_s *= 0.5 + float(self._rng.random())
                requests.append(
                    ScenarioRequest(
                        arrival_s=arrival_s,
                        num_prompt_tokens=num_prompt_tokens,
                        num_output_tokens=self._length(60),
                        block_ids=_blocks(len(requests), num_prompt_tokens, prefix, num_shared),
                        abort_s=abort_s,
                    )
                )
            arrival_s += float(self._rng.exponential(gap_s))
        return tuple(requests)

    def _length(self, most: int) -> int:
        """Mostly anything; sometimes just at the edge of a block."""
        if most > BLOCK_TOKENS and self._happens(0.25):
            edge = BLOCK_TOKENS * int(self._rng.integers(1, most // BLOCK_TOKENS + 1))
            return min(max(edge + int(self._rng.integers(-1, 2)), 1), most)
        return int(self._rng.integers(1, most + 1))

    def _faults(
        self, pools: Sequence[ScenarioPool], ingresses: int, arrivals_s: Sequence[float]
    ) -> tuple[Fault, ...]:
        """Faults soon after an arrival: that is when they meet something."""
        targets = _replicas(pools)
        senders = [target for target in targets if target.startswith("prefill")]
        busy_until_s: dict[tuple[str, str], float] = {}
        faults: list[Fault] = []
        num_faults = int(self._rng.integers(1, 12))
        delays_s = self._rng.exponential(0.3, num_faults)
        for at_s in sorted(self._rng.choice(arrivals_s, num_faults) + delays_s):
            if self._happens(0.08):
                kind, target = self._pick(*_INGRESS_KINDS), f"{INGRESS}/{self._below(ingresses)}"
            else:
                kind = self._pick(*_KINDS)
                # Only what sends KV can damage it.
                target = self._pick(*(senders if kind == "corrupt" and senders else targets))
            if busy_until_s.get((target, kind), -1.0) >= at_s:
                continue
            fault = self._fault(float(at_s), target, kind)
            busy_until_s[target, kind] = fault.window.end_s
            faults.append(fault)
            if kind == "replace" and self._happens(0.3):
                # Told to end, it may have reasons of its own not to.
                faults.append(Fault(at_s=float(at_s), target=target, kind="cling"))
                busy_until_s[target, "replace"] = float("inf")
        return tuple(faults)

    def _fault(self, at_s: float, target: str, kind: FaultKind) -> Fault:
        duration_s: float | None = None
        if kind not in _INSTANTS:
            choices_s = _DAMAGES_S if kind in {"corrupt", "clock", "cling"} else _SILENCES_S
            duration_s = self._pick(*choices_s) * (0.9 + 0.2 * float(self._rng.random()))
            if kind in _ENDLESS and self._happens(0.06):
                duration_s = None
        return Fault(
            at_s=at_s,
            target=target,
            kind=kind,
            duration_s=duration_s,
            factor=self._pick(2.0, 10.0) if kind == "slow" else 1.0,
            shift_s=self._pick(*_SHIFTS_S) if kind == "clock" else 0.0,
        )

    def _rolling_update(self, pools: Sequence[ScenarioPool], at_s: float) -> tuple[Fault, ...]:
        """Every replica is replaced, one after the other, under load."""
        faults = []
        for pool in pools:
            for rank in range(pool.replicas):
                at_s += float(self._rng.exponential(1.5))
                faults.append(Fault(at_s=at_s, target=f"{pool.role}/{rank}", kind="replace"))
        return tuple(faults)

    def _with_set_clocks(self, scenario: Scenario) -> Scenario:
        """The wall clock of all is set, as where all run on one host, and set right again later."""
        ingresses = [f"{INGRESS}/{rank}" for rank in range(scenario.ingresses)]
        at_s = scenario.requests[-1].arrival_s * float(self._rng.random())
        shift_s = self._pick(*_SHIFTS_S)
        clocks = tuple(
            Fault(at_s=at_s, target=target, kind="clock", duration_s=20.0, shift_s=shift_s)
            for target in [*_replicas(scenario.pools), *ingresses]
        )
        others = tuple(fault for fault in scenario.faults if fault.kind != "clock")
        return msgspec.structs.replace(scenario, faults=(*others, *clocks))

    def _stopped_producers(
        self, pools: Sequence[ScenarioPool], arrivals_s: Sequence[float]
    ) -> tuple[Fault, ...]:
        faults = []
        for rank in range(pools[0].replicas):
            end_s = 0.0
            for moment_s in sorted(self._rng.choice(arrivals_s, 6)):
                at_s = float(moment_s + self._rng.random())
                if at_s >= end_s:
                    duration_s = self._pick(1.5, 2.0, 4.5)
                    target = f"prefill/{rank}"
                    faults.append(
                        Fault(at_s=at_s, target=target, kind="freeze", duration_s=duration_s)
                    )
                    end_s = at_s + duration_s
        return tuple(faults)

    def _with_lost_consumers(self, scenario: Scenario) -> Scenario:
        """Slow transfers, and decode replicas that die in the middle of them, one after the other.

        What they have not fetched another one may.
        """
        prefill, decode = scenario.pools
        decode = msgspec.structs.replace(decode, replicas=3)
        arrivals_s = [request.arrival_s for request in scenario.requests]
        kills = []
        for moment_s in sorted(self._rng.choice(arrivals_s, 12)):
            at_s = float(moment_s + self._rng.exponential(0.3))
            target = f"decode/{self._rng.integers(decode.replicas)}"
            kills.append(Fault(at_s=at_s, target=target, kind="kill"))
        return msgspec.structs.replace(
            scenario,
            pools=(prefill, decode),
            network=msgspec.structs.replace(scenario.network, kv_bytes_per_s=1e7),
            faults=tuple(sorted(kills, key=lambda kill: kill.at_s)),
            restart_s=0.1,
        )

    def _with_stuck_engines(self, scenario: Scenario) -> Scenario:
        """Engines that say nothing, or nothing useful, for so long that others have to step in.

        Requests go on coming all the while.
        """
        targets = _replicas(scenario.pools)
        stretch = _STUCK_SPAN_S / max(scenario.requests[-1].arrival_s, 1e-3)
        requests = tuple(
            msgspec.structs.replace(request, arrival_s=request.arrival_s * stretch)
            for request in scenario.requests
        )
        faults = []
        at_s = 0.0
        for target in self._rng.permutation(targets)[: self._pick(1, 2, 3)]:
            at_s += float(self._rng.exponential(2.0))
            kind = self._pick(*_STUCK_KINDS)
            # Nobody else notices one that is deaf: whoever asks waits as long as he may.
            longest_s = 30.0 if kind == "clog" else None
            duration_s = self._pick(90.0 if kind == "deaf" else 12.0, 30.0, longest_s)
            faults.append(Fault(at_s=at_s, target=str(target), kind=kind, duration_s=duration_s))
        return msgspec.structs.replace(scenario, requests=requests, faults=tuple(faults))

    def _happens(self, share: float) -> bool:
        return bool(self._rng.random() < share)

    def _below(self, limit: int) -> int:
        return int(self._rng.integers(limit))

    def _pick(self, *choices: _T) -> _T:
        return choices[int(self._rng.integers(len(choices)))]


def _replicas(pools: Sequence[ScenarioPool]) -> list[str]:
    """Every replica, as in a fault plan."""
    return [f"{pool.role}/{rank}" for pool in pools for rank in range(pool.replicas)]


def _blocks(number: int, num_prompt_tokens: int, prefix: int, num_shared: int) -> tuple[int, ...]:
    """Blocks of a prompt: the first `num_shared` of a common prefix, then its own."""
    num_blocks = -(-num_prompt_tokens // BLOCK_TOKENS)
    shared = [1000 * (prefix + 1) + i for i in range(min(num_shared, num_blocks))]
    own = [1_000_000 + 1000 * number + i for i in range(len(shared), num_blocks)]
    return (*shared, *own)

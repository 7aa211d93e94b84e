"""Samples random scenarios.

All draws use one generator in a fixed order, so a seed's scenario is the same on every machine.
"""

from __future__ import annotations

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
from cluster.lab.simulation.scenario import (
    BLOCK_TOKENS,
    BYTES_PER_BLOCK,
    TENANTS,
    Scenario,
    ScenarioPool,
    ScenarioRequest,
    ScenarioTiming,
)
from kv_transfer.config import TransferConfig
from replicas.faults import INGRESS, Fault, FaultKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

_T = TypeVar("_T")

_KINDS: tuple[FaultKind, ...] = (
    "kill", "freeze", "freeze", "slow", "drop_link", "corrupt", "corrupt", "partition",
    "hang", "hang", "deaf", "mute", "backpressure", "clock", "replace", "replace",
)  # fmt: skip
_INGRESS_KINDS: tuple[FaultKind, ...] = ("kill", "kill", "clock")
_INSTANTS = frozenset({"kill", "drop_link", "replace"})
_STUCK_KINDS: tuple[FaultKind, ...] = (
    "hang", "hang", "deaf", "deaf", "mute", "backpressure",
)  # fmt: skip
_STUCK_SPAN_S = 60.0
_ENDLESS = frozenset({"freeze", "partition", "hang", "mute", "deaf"})
"""Faults that may last for ever: clients give the replica up, or its parent ends it."""
_CLOCK_SHIFTS_S = (-3600.0, -180.0, -5.0, 5.0, 180.0, 3600.0)
"""Below and above the tolerated clock difference, and below and above a ticket's lifetime."""
_DAMAGE_LENGTHS_S = (0.5, 5.0, 15.0)
_SILENCE_LENGTHS_S = (0.05, 0.5, 2.0, 4.5, 5.5, 8.0, 15.0)
"""Shorter and longer than the 5 s after which a silent engine is given up."""


def sample_scenario(seed: int, rng: np.random.Generator) -> Scenario:
    """Sample a scenario."""
    dice, make, trouble = _Sampler(rng), _ClusterSampler(rng), _FaultSampler(rng)
    is_split = dice.happens(0.65)
    pools = tuple(make.pool(role) for role in (("prefill", "decode") if is_split else ("both",)))
    longest = BLOCK_TOKENS * (min(pool.num_blocks for pool in pools) - 1)
    is_calm = dice.happens(0.15)
    requests = make.requests()
    faults: tuple[Fault, ...] = ()
    ingresses = dice.pick(1, 1, 2)
    if not is_calm and dice.happens(0.8):
        faults = trouble.faults(pools, ingresses, [r.arrival_s for r in requests])
    if not is_calm and dice.happens(0.08):
        faults = trouble.rolling_update(pools, requests[0].arrival_s)
    transfer, timing = make.transfer(), make.timing()
    if is_split and not is_calm and dice.happens(0.2):
        # Long prefill steps, short leases, and producers that stand still for longer than that.
        transfer = msgspec.structs.replace(transfer, lease_s=1.2, renew_s=0.4)
        timing = msgspec.structs.replace(timing, prefill_token_s=4e-3)
        faults = trouble.stopped_producers(pools, [r.arrival_s for r in requests])
    scenario = Scenario(
        seed=seed,
        max_model_len=min(dice.pick(500, 500, 500, 500, 200), longest),
        pools=pools,
        ingresses=ingresses,
        router=make.router(),
        network=NetworkConfig(latency_s=1e-4) if is_calm else make.network(),
        transfer=transfer,
        timing=timing,
        faults=faults,
        requests=requests,
        restart_s=dice.pick(0.1, 1.0, 4.0),
    )
    scenario = make.with_admission(trouble.with_faults(scenario, is_calm=is_calm))
    return scenario if is_calm else trouble.with_flips(scenario)


class _Sampler:
    """Basic random draws."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def happens(self, share: float) -> bool:
        return bool(self._rng.random() < share)

    def below(self, limit: int) -> int:
        return int(self._rng.integers(limit))

    def pick(self, *choices: _T) -> _T:
        return choices[int(self._rng.integers(len(choices)))]


class _ClusterSampler(_Sampler):
    """Samples a cluster's configuration and its requests."""

    def pool(self, role: Literal["prefill", "decode", "both"]) -> ScenarioPool:
        lanes = self.pick(1, 1, 2, 4)
        slots_per_lane = self.pick(1, 2, 4)
        chunked = self.happens(0.7)
        # Without chunks one step computes the longest prompt, or a preempted sequence, as a whole.
        budget = self.pick(32, 64, 128, 512) if chunked else 512
        return ScenarioPool(
            role=role,
            replicas=self.pick(1, 2, 2, 3),
            lanes=lanes,
            slots_per_lane=slots_per_lane,
            num_blocks=self.pick(13, 13, 16, 24, 48),
            max_num_batched_tokens=max(budget, lanes * slots_per_lane),
            max_num_waiting=self.pick(None, 0, 2) if role == "both" else self.pick(None, None, 2),
            chunked=chunked,
            mixed=self.happens(0.4),
            caching=self.happens(0.8),
            prefill_streak=self.pick(1, 3),
            reservation_timeout_s=self.pick(2.0, 20.0, 60.0),
            step_timeout_s=self.pick(6.0, 20.0, 300.0),
            drain_timeout_s=self.pick(0.5, 5.0, 60.0),
        )

    def router(self) -> RouterConfig:
        return RouterConfig(
            max_queued_requests=self.pick(2, 16, 256, 256),
            queue_timeout_s=self.pick(1.0, 10.0, 60.0),
            max_attempts=self.pick(1, 3, 3),
            min_remote_prefill_tokens=self.pick(None, 0, 40),
            policy=self.pick(*get_args(PolicyName)),
        )

    def network(self) -> NetworkConfig:
        return NetworkConfig(
            latency_s=self.pick(1e-5, 1e-4, 5e-3),
            jitter_s=self.pick(0.0, 1e-3, 0.02),
            kv_bytes_per_s=self.pick(1e7, 1e9),
            kv_loss=self.pick(0.0, 0.0, 0.01, 0.1),
            kv_repetition=self.pick(0.0, 0.0, 0.1),
            kv_jitter_s=self.pick(0.0, 1e-3, 0.1),
        )

    def transfer(self) -> TransferConfig:
        chunk_bytes = self.pick(1, 2, 4, 64) * BYTES_PER_BLOCK
        lease_s = self.pick(1.2, 1.2, 5.0, 30.0)
        return TransferConfig(
            lease_s=lease_s,
            renew_s=lease_s / 3,
            rendezvous_s=self.pick(3.0, 30.0),
            no_progress_s=self.pick(2.0, 5.0),
            no_data_s=self.pick(3.0, 30.0),
            closing_s=self.pick(2.0, 10.0),
            chunk_bytes=chunk_bytes,
            window_bytes=chunk_bytes * self.pick(1, 2, 8),
            max_inflight_bytes=chunk_bytes * self.pick(2, 64),
            copy_s=self.pick(1e-6, 0.01, 1.0),
        )

    def timing(self) -> ScenarioTiming:
        return ScenarioTiming(
            prefill_token_s=self.pick(2e-5, 4e-4, 4e-3),
            decode_base_s=self.pick(2e-3, 0.01, 0.04),
            move_s=self.pick(0.0, 1e-4, 5e-3),
            host_s=self.pick(0.0, 1e-3),
            host_row_s=self.pick(0.0, 1e-5),
            start_s=self.pick(0.0, 2.0),
        )

    def with_admission(self, scenario: Scenario) -> Scenario:
        """Enable admission control in some scenarios; drawn after everything else."""
        if not self.happens(0.3):
            return scenario
        admission = AdmissionConfig(
            ttft_s=self.pick(None, 0.3, 3.0, 30.0),
            tpot_s=self.pick(None, 0.02, 0.2),
            max_queued_tokens=self.pick(None, None, 1000),
            tenants={
                TENANTS[0]: TenantConfig(
                    weight=self.pick(0.5, 1.0, 3.0),
                    priority=self.pick(-1, 0, 0),
                )
            },
        )
        router = msgspec.structs.replace(scenario.router, admission=admission)
        return msgspec.structs.replace(scenario, router=router)

    def requests(self) -> tuple[ScenarioRequest, ...]:
        num_requests = int(self._rng.integers(10, 50))
        num_prefixes = self.pick(1, 3, 8)
        abort_share = self.pick(0.0, 0.1, 0.4)
        gap_s = self.pick(0.02, 0.2, 1.0)
        requests: list[ScenarioRequest] = []
        arrival_s = 0.0
        while len(requests) < num_requests:
            # Requests of a burst often share a prefix, which is then still being computed.
            burst_prefix = int(self._rng.integers(num_prefixes))
            for _ in range(self.pick(1, 1, 2, 6)):
                num_prompt_tokens = self._length(300)
                is_other = self.happens(0.3)
                prefix = int(self._rng.integers(num_prefixes)) if is_other else burst_prefix
                num_shared = int(self._rng.integers(0, 10)) if self.happens(0.6) else 0
                abort_s = None
                if self.happens(abort_share):
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
        """Draw a length, sometimes at or next to a block boundary."""
        if most > BLOCK_TOKENS and self.happens(0.25):
            edge = BLOCK_TOKENS * int(self._rng.integers(1, most // BLOCK_TOKENS + 1))
            return min(max(edge + int(self._rng.integers(-1, 2)), 1), most)
        return int(self._rng.integers(1, most + 1))


class _FaultSampler(_Sampler):
    """Samples faults."""

    def with_faults(self, scenario: Scenario, *, is_calm: bool) -> Scenario:
        """Set the router's order, and add combined faults to some scenarios."""
        # Drawn last, and for all: the rest of a seed's scenario is the same for all orders.
        order = self.pick(*get_args(OrderName))
        router = msgspec.structs.replace(scenario.router, order=order)
        scenario = msgspec.structs.replace(scenario, router=router)
        if is_calm:
            return scenario
        if len(scenario.pools) == 2 and order == "prefill_first" and self.happens(0.3):
            scenario = self._with_lost_consumers(scenario)
        elif self.happens(0.3):
            scenario = self._with_stuck_engines(scenario)
        if any(f.kind in _ENDLESS and f.duration_s is None for f in scenario.faults):
            # A request may wait for several hung engines in turn, until each one's parent ends it.
            longest_s = IngressConfig().request_timeout_s
            scenario = msgspec.structs.replace(scenario, deadline_s=longest_s)
        return self._with_set_clocks(scenario) if self.happens(0.2) else scenario

    def faults(
        self, pools: Sequence[ScenarioPool], ingresses: int, arrivals_s: Sequence[float]
    ) -> tuple[Fault, ...]:
        """Sample faults shortly after arrivals, when engines are busy."""
        targets = _replicas(pools)
        senders = [target for target in targets if target.startswith("prefill")]
        busy_until_s: dict[tuple[str, str], float] = {}
        faults: list[Fault] = []
        num_faults = int(self._rng.integers(1, 12))
        delays_s = self._rng.exponential(0.3, num_faults)
        for at_s in sorted(self._rng.choice(arrivals_s, num_faults) + delays_s):
            if self.happens(0.08):
                kind, target = self.pick(*_INGRESS_KINDS), f"{INGRESS}/{self.below(ingresses)}"
            else:
                kind = self.pick(*_KINDS)
                # Only engines that send KV can corrupt it.
                target = self.pick(*(senders if kind == "corrupt" and senders else targets))
            if busy_until_s.get((target, kind), -1.0) >= at_s:
                continue
            fault = self._fault(float(at_s), target, kind)
            busy_until_s[target, kind] = fault.window.end_s
            faults.append(fault)
            if kind == "replace" and self.happens(0.3):
                # Sometimes a replaced engine does not end when asked.
                faults.append(Fault(at_s=float(at_s), target=target, kind="ignore_sigterm"))
                busy_until_s[target, "replace"] = float("inf")
        return tuple(faults)

    def _fault(self, at_s: float, target: str, kind: FaultKind) -> Fault:
        duration_s: float | None = None
        if kind not in _INSTANTS:
            choices_s = (
                _DAMAGE_LENGTHS_S
                if kind in {"corrupt", "clock", "ignore_sigterm"}
                else _SILENCE_LENGTHS_S
            )
            duration_s = self.pick(*choices_s) * (0.9 + 0.2 * float(self._rng.random()))
            if kind in _ENDLESS and self.happens(0.06):
                duration_s = None
        return Fault(
            at_s=at_s,
            target=target,
            kind=kind,
            duration_s=duration_s,
            factor=self.pick(2.0, 10.0) if kind == "slow" else 1.0,
            shift_s=self.pick(*_CLOCK_SHIFTS_S) if kind == "clock" else 0.0,
        )

    def rolling_update(self, pools: Sequence[ScenarioPool], at_s: float) -> tuple[Fault, ...]:
        """Replace every replica, one after the other, under load."""
        faults = []
        for pool in pools:
            for rank in range(pool.replicas):
                at_s += float(self._rng.exponential(1.5))
                faults.append(Fault(at_s=at_s, target=f"{pool.role}/{rank}", kind="replace"))
        return tuple(faults)

    def stopped_producers(
        self, pools: Sequence[ScenarioPool], arrivals_s: Sequence[float]
    ) -> tuple[Fault, ...]:
        faults = []
        for rank in range(pools[0].replicas):
            end_s = 0.0
            for moment_s in sorted(self._rng.choice(arrivals_s, 6)):
                at_s = float(moment_s + self._rng.random())
                if at_s >= end_s:
                    duration_s = self.pick(1.5, 2.0, 4.5)
                    target = f"prefill/{rank}"
                    faults.append(
                        Fault(at_s=at_s, target=target, kind="freeze", duration_s=duration_s)
                    )
                    end_s = at_s + duration_s
        return tuple(faults)

    def _with_lost_consumers(self, scenario: Scenario) -> Scenario:
        """Kill decode replicas, one after the other, during slow transfers.

        Another decode replica may then fetch the same KV.
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
        """Make engines silent or stuck for so long that others have to take over.

        Requests arrive all the time.
        """
        targets = _replicas(scenario.pools)
        stretch = _STUCK_SPAN_S / max(scenario.requests[-1].arrival_s, 1e-3)
        requests = tuple(
            msgspec.structs.replace(request, arrival_s=request.arrival_s * stretch)
            for request in scenario.requests
        )
        faults = []
        at_s = 0.0
        for target in self._rng.permutation(targets)[: self.pick(1, 2, 3)]:
            at_s += float(self._rng.exponential(2.0))
            kind = self.pick(*_STUCK_KINDS)
            # Only requests notice a deaf engine: each waits until its own timeout.
            longest_s = 30.0 if kind == "backpressure" else None
            duration_s = self.pick(90.0 if kind == "deaf" else 12.0, 30.0, longest_s)
            faults.append(Fault(at_s=at_s, target=str(target), kind=kind, duration_s=duration_s))
        return msgspec.structs.replace(scenario, requests=requests, faults=tuple(faults))

    def _with_set_clocks(self, scenario: Scenario) -> Scenario:
        """Set all wall clocks, as on a cluster of one host, and set them right again later."""
        ingresses = [f"{INGRESS}/{rank}" for rank in range(scenario.ingresses)]
        at_s = scenario.requests[-1].arrival_s * float(self._rng.random())
        shift_s = self.pick(*_CLOCK_SHIFTS_S)
        clocks = tuple(
            Fault(at_s=at_s, target=target, kind="clock", duration_s=20.0, shift_s=shift_s)
            for target in [*_replicas(scenario.pools), *ingresses]
        )
        others = tuple(fault for fault in scenario.faults if fault.kind != "clock")
        return msgspec.structs.replace(scenario, faults=(*others, *clocks))

    def with_flips(self, scenario: Scenario) -> Scenario:
        """Change the roles of some engines under load; drawn after everything else."""
        if len(scenario.pools) == 1 or not self.happens(0.3):
            return scenario
        arrivals_s = [r.arrival_s for r in scenario.requests]
        moments_s = self._rng.choice(arrivals_s, self.pick(1, 2, 4, 8))
        targets = _replicas(scenario.pools)
        flips = tuple(
            Fault(at_s=float(at_s + self._rng.random()), target=self.pick(*targets), kind="flip")
            for at_s in sorted(moments_s)
        )
        return msgspec.structs.replace(scenario, faults=(*scenario.faults, *flips))


def _replicas(pools: Sequence[ScenarioPool]) -> list[str]:
    """Return the name of every replica, as in a fault plan."""
    return [f"{pool.role}/{rank}" for pool in pools for rank in range(pool.replicas)]


def _blocks(number: int, num_prompt_tokens: int, prefix: int, num_shared: int) -> tuple[int, ...]:
    """Return the blocks of a prompt: `num_shared` of a common prefix, then its own."""
    num_blocks = -(-num_prompt_tokens // BLOCK_TOKENS)
    shared = [1000 * (prefix + 1) + i for i in range(min(num_shared, num_blocks))]
    own = [1_000_000 + 1000 * number + i for i in range(len(shared), num_blocks)]
    return (*shared, *own)

"""Cost of placing one request: score all placements, hold the best, update its view.

A part of `benchmarks.placement`. Decode engines have lanes with known step times. Before each
request one engine reports its load, and the last placement has changed another engine's view. With
a queue, all slots are taken but one in each lane of an engine, which have just become free; the
queue's heads are placed. Processor time is shown beside the clock's, because other work on the
machine disturbs it less. Taking over a report has a row of its own. So has the choice where a
prompt is computed, with half of the engines for prompts alone: it is made once for a prompt that
moves, and twice for one that stays. Some decode engines have prompts to compute.
"""

from __future__ import annotations

import random
import time
from collections import deque
from typing import TYPE_CHECKING

from cluster.routing.conditional_prefill import ConditionalPrefill
from cluster.routing.cost import make_policies, no_cached_tokens
from cluster.routing.demand import Demand
from cluster.routing.explain import KEPT
from cluster.routing.forecast import Lengths
from cluster.routing.placement import Placement
from cluster.routing.pools import Member, PoolState
from cluster.routing.slot_queue import SlotQueue
from replicas.kv_groups import KVGroup, KVSpec
from replicas.messages import EngineDescription, EngineSnapshot, GroupSnapshot, StepWork, num_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.config.schema import PolicyName
    from cluster.routing.choice import Choice, Side
    from replicas.config import Role

NUM_REPLICAS = 64
NUM_GROUPS = 8
SLOTS = 32
QUEUES = (0, 1000, 10_000)
POLICIES: tuple[PolicyName, ...] = ("least_delay", "most_empty_slots", "round_robin")
BLOCKS = KVGroup(
    layers=(0,), block_size=32, num_blocks=40_000, spec=KVSpec(heads=1, width=1, dtype="bfloat16")
)


class _Kept:
    """A record of recent decisions, as in every ingress."""

    keeps_whole = False

    def __init__(self) -> None:
        self._choices: deque[Choice] = deque(maxlen=KEPT)

    def note(self, side: Side, request_id: str, choice: Choice) -> None:
        """See `cluster.routing.choice.Notes`."""
        del side, request_id
        self._choices.append(choice)


class Fleet:
    """Engines that report random loads, and the queue before them.

    Args:
        policy: How they are scored.
        dice: Draws loads.
        num_prefill: Of the engines, how many only compute prompts for the others.
    """

    def __init__(self, policy: PolicyName, dice: random.Random, num_prefill: int = 0) -> None:
        self._dice = dice
        self._num_prefill = num_prefill
        self._seq = 0
        self.pools = PoolState()
        decode = make_policies(policy, notes=_Kept()).decode
        self.queue = SlotQueue(self.pools, decode, 10**6, 1e9)
        self.names = [f"engine-{i:03}" for i in range(NUM_REPLICAS)]
        for name in self.names:
            self.pools.add(Member(self._role(name), name, _description(name)))
            for _ in range(8):
                self.tell(name)

    def _role(self, name: str) -> Role:
        if not self._num_prefill:
            return "both"
        return "prefill" if self.names.index(name) < self._num_prefill else "decode"

    def tell(self, name: str, num_empty: int | None = None) -> float:
        """Let an engine report a load and two steps; `num_empty` slots are free in a lane.

        Returns:
            Processor time to take the report over, in microseconds.
        """
        dice = self._dice
        groups = []
        for _ in range(NUM_GROUPS):
            empty = dice.randrange(1, SLOTS) if num_empty is None else num_empty
            running, tokens = SLOTS - empty, dice.randrange(2000)
            groups.append(
                GroupSnapshot(
                    empty, [20_000], running, 0, 0, running * 1500, dice.randrange(1500, 9000),
                    tokens, num_pairs(0, tokens), int(tokens > 0),
                )
            )  # fmt: skip
        context, prompt = dice.randrange(10**5), dice.randrange(1, 4096)
        self._seq += 1
        snapshot = EngineSnapshot(
            self._seq, False, 0, 0, self._seq, groups, self._role(name), 0.02,
            StepWork(SLOTS, context, context, 0, 0, 0, 0.02 + 1e-7 * context),
            StepWork(0, 0, 0, 1, prompt, num_pairs(0, prompt), 2e-4 * prompt),
        )  # fmt: skip
        started = time.thread_time()
        self.pools.take_snapshot(name, snapshot)
        self.pools.settle()
        return 1e6 * (time.thread_time() - started)


def placing_figures(*, is_quick: bool) -> dict[str, float]:
    """Measure policies with queues, print a row for each, and return the JSON figures."""
    count = 300 if is_quick else 2000
    print(f"a request over {NUM_REPLICAS} replicas of {NUM_GROUPS} DP groups")
    print(f"{'':>22} {'queued':>7} {'place p50':>10} {'p99 us':>8} {'CPU p50':>9} {'p99 us':>8}")
    figures = {}
    for policy in (*POLICIES, POLICIES[0]):
        for num_queued in QUEUES:
            (p50, p99), (cpu_p50, cpu_p99) = map(
                _percentiles, zip(*placing_us(policy, num_queued, count), strict=True)
            )
            print(f"{policy:>22} {num_queued:>7,} {p50:>10.1f} {p99:>8.1f} {cpu_p50:>9.1f} "
                  f"{cpu_p99:>8.1f}", flush=True)  # fmt: skip
            if policy == POLICIES[0] and not num_queued:
                figures = {"place_us_p50": p50, "place_us_p99": p99}
    p50, p99 = _percentiles(prefilling_us(count))
    print(f"where a prompt is computed, with half of them for prompts: CPU p50 {p50:.1f} us, p99 "
          f"{p99:.1f}")  # fmt: skip
    fleet = Fleet(POLICIES[0], random.Random(0))
    fleet.pools.decode_views()  # the first call builds them
    p50, p99 = _percentiles([fleet.tell(name) for name in fleet.names * (count // NUM_REPLICAS)])
    print(f"a snapshot of an engine, {POLICIES[0]}: CPU p50 {p50:.1f} us, p99 {p99:.1f}")
    return figures


def _percentiles(times: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(times)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]


def placing_us(policy: PolicyName, num_queued: int, num_requests: int) -> list[tuple[float, float]]:
    """Microseconds of each placement, and the processor's."""
    dice = random.Random(0)
    fleet = Fleet(policy, dice)
    prompt = [7] * 1000

    def new(number: int) -> Demand:
        return Demand(f"r{number}", prompt, expected_output_tokens=200)

    if num_queued:
        for name in fleet.names:
            fleet.tell(name, 0)
        for number in range(num_queued):
            assert fleet.queue.enter(fleet.queue.new_waiter(new(number)), 0.0) is None
    times_us = []
    for number in range(num_requests):
        name = dice.choice(fleet.names)
        if num_queued:
            fleet.tell(name, 1)
            started = time.thread_time(), time.perf_counter()
            placed = [(w.demand.request_id, p) for w, p in fleet.queue.assign()]
            ended = time.perf_counter(), time.thread_time()
            fleet.tell(name, 0)
        else:
            fleet.tell(name)
            waiter = fleet.queue.new_waiter(new(number))
            started = time.thread_time(), time.perf_counter()
            placement = fleet.queue.enter(waiter, 0.0)
            ended = time.perf_counter(), time.thread_time()
            assert placement is not None
            placed = [(waiter.demand.request_id, placement)]
        # The call ends at the first request without a placement.
        us_each = 1e6 / (len(placed) + (num_queued > 0))
        times_us.append((us_each * (ended[0] - started[1]), us_each * (ended[1] - started[0])))
        for request_id, placement in placed:
            fleet.pools.release(request_id, placement.incarnation)
        if num_queued:
            for request_id, _ in placed:
                # A placed request is queued again, behind all others.
                fleet.queue.enter(fleet.queue.new_waiter(Demand(request_id, prompt)), 0.0)
    return times_us


def prefilling_us(num_requests: int) -> list[float]:
    """Microseconds of the processor for each decision where a prompt is computed."""
    dice = random.Random(0)
    fleet = Fleet(POLICIES[0], dice, NUM_REPLICAS // 2)
    lengths = Lengths()
    for _ in range(100):
        lengths.prompts.add(1000)
        lengths.outputs.add(200)
    conditional = ConditionalPrefill(fleet.pools, no_cached_tokens, lengths)
    for name in fleet.names[-NUM_REPLICAS // 8 :]:
        place = Placement(name, dice.randrange(NUM_GROUPS))
        conditional.give(Demand(f"given to {name}", [7] * 1000), place, 0.0)
    times_us = []
    for number in range(num_requests):
        fleet.tell(dice.choice(fleet.names))
        demand = Demand(f"r{number}", [7] * 1000, expected_output_tokens=200)
        started = time.thread_time()
        conditional.place(demand, 0.0)
        times_us.append(1e6 * (time.thread_time() - started))
    return times_us


def _description(name: str) -> EngineDescription:
    return EngineDescription(
        incarnation=name, public_key="", input_endpoint="", output_endpoint="", kv_endpoints=None,
        kv_layout_hash=None, kv_groups=(BLOCKS,), model="", max_model_len=10**6, vocab_size=10**5,
        eos_token_ids=[], dp_groups=NUM_GROUPS, slots_per_group=SLOTS,
        max_num_batched_tokens=4096, pid=0,
    )  # fmt: skip

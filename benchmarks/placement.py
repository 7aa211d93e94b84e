"""Cost of placing a request: the decision, and the look-up of its prefix in engines' caches.

The decision is in `benchmarks.placing`. The look-up:
Prompts of 256 blocks over eight workers, which hold conversations that share their first halves;
between two look-ups a worker loses the end of one and stores that of another. With `--peer-python`,
an interpreter that has ai-dynamo 1.6.1, its radix tree does the same in the same run, and both have
to give the same answers. Both read the changes from their wire formats. The A/A row is ours again.

The last line is one JSON object: `place_us_p50` and `place_us_p99` of a decision that looks no
prefix up, `prefix_us_p50` of a look-up, and `bytes_per_block`, the memory that one block takes that
one worker holds.

    python -m benchmarks.placement --quick
    python -m benchmarks.placement --peer-python PATH
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.placing import BLOCKS, placing_figures
from cluster.routing.demand import Demand
from cluster.routing.placement import Placement
from cluster.routing.prefix_index import PrefixIndex
from replicas.messages import BlockRemoved, BlockStored, KVEvent, KVEventBatch

NUM_WORKERS = 8
NUM_BLOCKS = 256
BLOCK_SIZE = 32
CHANGED_BLOCKS = 32
HOLDERS = 4
"""Workers that hold a conversation, each to a depth of its own."""

Operation = tuple[str, int, int, int, int]
"""(operation, worker, chain, first block, end): one change or look-up."""


class Workload(NamedTuple):
    """The caches' first content, and the operations that follow.

    Attributes:
        chains: Names of the blocks of each conversation.
        loads: Operations that fill the caches.
        steps: Operations that are timed.
    """

    chains: list[list[int]]
    loads: list[Operation]
    steps: list[Operation]


class Run(NamedTuple):
    """Measurements of one index.

    Attributes:
        look_up_us: Of each look-up.
        change_us: Of each change.
        depths: Of each look-up [worker, blocks] of all workers that hold some.
        num_bytes: Memory that the caches' content took.
    """

    look_up_us: list[float]
    change_us: list[float]
    depths: list[list[list[int]]]
    num_bytes: int


def make_workload(num_conversations: int, num_steps: int) -> Workload:
    """The same one each time."""
    dice = random.Random(0)

    def names(count: int) -> list[int]:
        return [dice.getrandbits(63) for _ in range(count)]

    halves = [names(NUM_BLOCKS // 2) for _ in range(max(num_conversations // 10, 1))]
    chains = [[*dice.choice(halves), *names(NUM_BLOCKS // 2)] for _ in range(num_conversations)]
    depths = {}
    for chain in range(num_conversations):
        for worker in dice.sample(range(NUM_WORKERS), HOLDERS):
            depths[worker, chain] = dice.randrange(NUM_BLOCKS // 2, NUM_BLOCKS + 1)
    loads = [("store", worker, chain, 0, depth) for (worker, chain), depth in depths.items()]
    steps: list[Operation] = []
    for _ in range(num_steps):
        (worker, chain), depth = dice.choice(list(depths.items()))
        # Never of the half that others share: a worker holds that once.
        shorter = max(depth - CHANGED_BLOCKS, NUM_BLOCKS // 2)
        steps.append(("remove", worker, chain, shorter, depth))
        longer = min(shorter + CHANGED_BLOCKS, NUM_BLOCKS)
        steps.append(("store", worker, chain, shorter, longer))
        depths[worker, chain] = longer
        steps.append(("look_up", 0, dice.randrange(num_conversations), 0, NUM_BLOCKS))
    return Workload(chains, loads, steps)


def rss_bytes() -> int:
    """Memory of this process that is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run_ours(workload: Workload) -> Run:
    """Our index, fed as an ingress is."""
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    seqs = [0] * NUM_WORKERS

    def batch(kind: str, worker: int, names: list[int]) -> bytes:
        seqs[worker] += 1
        event: KVEvent = BlockRemoved(names[::-1]) if kind == "remove" else BlockStored(names)
        return msgspec.msgpack.encode(KVEventBatch(seqs[worker], 0, [event]))

    def encoded(operations: list[Operation]) -> list[tuple[int, list[int], bytes]]:
        return [
            (worker, workload.chains[chain], b"" if kind == "look_up" else
             batch(kind, worker, workload.chains[chain][first:end]))
            for kind, worker, chain, first, end in operations
        ]  # fmt: skip

    loads, steps = encoded(workload.loads), encoded(workload.steps)
    places = [Placement(f"{worker}", 0) for worker in range(NUM_WORKERS)]
    before = rss_bytes()
    index = PrefixIndex((BLOCKS,))
    for place in places:
        index.take(place, KVEventBatch(0, 0, [], is_listing=True))
    for worker, _, raw in loads:
        index.take(places[worker], decoder.decode(raw))
    num_bytes = rss_bytes() - before
    look_up_us, change_us, depths = [], [], []
    for worker, names, raw in steps:
        started = time.perf_counter()
        if raw:
            index.take(places[worker], decoder.decode(raw))
            change_us.append(1e6 * (time.perf_counter() - started))
        else:
            found = index.look_up([names])
            look_up_us.append(1e6 * (time.perf_counter() - started))
            depths.append(sorted([int(p.incarnation), n // BLOCK_SIZE] for p, n in found.items()))
    return Run(look_up_us, change_us, depths, num_bytes)


def run_apart(command: list[str], workload: Workload) -> Run:
    """Run one index in a process of its own, so that its memory can be measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.json"
        path.write_text(json.dumps(workload._asdict()))
        done = subprocess.run([*command, str(path)], check=True, capture_output=True, text=True)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def hashing_us() -> float:
    """Median time of naming a prompt's blocks, once for each request."""
    times = []
    prompt = [(7 * i + i * i) % 30_000 for i in range(NUM_BLOCKS * BLOCK_SIZE + 1)]
    for _ in range(50):
        demand = Demand("r", prompt)
        started = time.perf_counter()
        assert len(demand.block_names(BLOCK_SIZE, b"a key of 16 bytes")) == NUM_BLOCKS
        times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times)


def num_held(workload: Workload) -> int:
    """Blocks that the caches hold at first, each once for every worker that holds it."""
    held = {
        (worker, name)
        for _, worker, chain, first, end in workload.loads
        for name in workload.chains[chain][first:end]
    }
    return len(held)


def prefix_figures(peer_python: Path | None, *, is_quick: bool) -> dict[str, float]:
    """Measure the index, print a row for each run, and return the JSON figures."""
    workload = make_workload(num_conversations=100 if is_quick else 400, num_steps=400)
    held = num_held(workload)
    ours = [sys.executable, "-m", "benchmarks.placement", "--workload"]
    runs = {"ours": run_apart(ours, workload)}
    if peer_python is not None:
        script = str(Path(__file__).with_name("dynamo_index.py"))
        runs["dynamo"] = run_apart([str(peer_python), script], workload)
    runs["ours again"] = run_apart(ours, workload)
    print(f"{NUM_BLOCKS} blocks over {NUM_WORKERS} workers, {held:,} held; a prompt's names take "
          f"{hashing_us():.0f} us once")  # fmt: skip
    print(
        f"{'':>12} {'look-up p50':>12} {'p99 us':>9} {'change p50':>11} {'p99 us':>9} {'bytes':>6}"
    )
    for name, run in runs.items():
        assert run.depths == runs["ours"].depths, f"{name} finds something else"
        cells = [f"{p:9.1f}" for us in (run.look_up_us, run.change_us) for p in percentiles(us)]
        print(f"{name:>12} {cells[0]:>12} {cells[1]} {cells[2]:>11} {cells[3]} "
              f"{run.num_bytes / held:6.0f}", flush=True)  # fmt: skip
    figures = {
        "prefix_us_p50": percentiles(runs["ours"].look_up_us)[0],
        "bytes_per_block": runs["ours"].num_bytes / held,
    }
    if "dynamo" in runs:
        peer_us, _ = percentiles(runs["dynamo"].look_up_us)
        figures["prefix_times_peer"] = figures["prefix_us_p50"] / peer_us
    return figures


def percentiles(times: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    ordered = sorted(times)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]


def main() -> None:
    """Run everything, or one index if this is its own process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer conversations")
    parser.add_argument("--peer-python", type=Path, help="an interpreter that has ai-dynamo")
    parser.add_argument("--workload", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.workload is not None:
        run = run_ours(Workload(**json.loads(arguments.workload.read_text())))
        print(json.dumps(run._asdict()))
        return
    figures = placing_figures(is_quick=arguments.quick)
    figures |= prefix_figures(arguments.peer_python, is_quick=arguments.quick)
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    main()

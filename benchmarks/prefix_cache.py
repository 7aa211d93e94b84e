"""Cost of the prefix cache on the engine's core thread: hashing blocks, and waiting for room.

Names: time to hash a prompt's blocks of 32 tokens, against the prefill of that prompt by the
smallest model that there is, the demo model (random weights, more positions, bfloat16, one thread).
A prompt longer than `--longest` is compared with the prefill of the longest one, scaled with its
length: a lower bound, since attention grows faster than that.

Waiting: host time of a decode step of four sequences, scheduled and updated without a model, while
64 prompts of 47k tokens wait for blocks, 31k tokens of which are in the cache. The A/A row is the
same without waiting prompts, measured twice. Where blocks are evicted, 32 sequences decode in each
group, each at another place in its block, and all other blocks are cached: every step evicts a
block of a prompt that no request has.

    python -m benchmarks.prefix_cache [--longest 32768]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from cluster.config.resolve import demo_model_folder
from kv_transfer.block_hash import extend_block_hashes, prefix_root
from replicas.config import EngineConfig
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.engine.scheduler import Scheduler
from replicas.engine.sequence import KVPlace, Sequence
from replicas.engine.step import StepResult
from replicas.kv_groups import KVGroup, KVSpec
from replicas.messages import AddRequest, EngineRequest
from replicas.sampling_params import SamplingParams

LENGTHS = (4096, 32_768, 131_072)
BLOCK_SIZE = 32
KEY = bytes(range(32))
ROUNDS = 9
NUM_WAITING = 64
NUM_CACHED = 960
"""Blocks of a waiting prompt's beginning that are in the cache."""
NUM_STEPS = 2000
NUM_EVICTED = 480
"""Cached blocks without a user, of which each step evicts one. They are fewer than a waiting prompt
lacks, so that the prompts keep waiting."""


def prompt_of(length: int) -> list[int]:
    """Random tokens, the same ones each time."""
    rng = random.Random(length)
    return [rng.randrange(4096) for _ in range(length)]


# --- naming blocks -------------------------------------------------------------------------------


def hash_s(length: int) -> float:
    """Median seconds to hash a prompt of so many tokens."""
    prompt, seconds = prompt_of(length), []
    for _ in range(ROUNDS):
        hashes: list[bytes] = []
        started = time.perf_counter()
        extend_block_hashes(hashes, prompt, BLOCK_SIZE, prefix_root(KEY, ""))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def prefill_s(lengths: list[int]) -> dict[int, float]:
    """Seconds in which the demo model computes prompts of these lengths."""
    longest = max(lengths)
    with tempfile.TemporaryDirectory() as folder:
        for path in demo_model_folder().iterdir():
            if path.suffix != ".safetensors":
                shutil.copy(path, folder)
        described = Path(folder, "config.json")
        model = json.loads(described.read_text())
        described.write_text(json.dumps({**model, "max_position_embeddings": longest + BLOCK_SIZE}))
        config = EngineConfig(
            model=folder,
            load_format="random",
            num_threads=1,
            block_size=BLOCK_SIZE,
            num_blocks=longest // BLOCK_SIZE + 8,
        )
        core = EngineCore(config, UniProcExecutor(config))
        try:
            return {length: _prefill_s(core, length) for length in lengths}
        finally:
            core.shutdown()


def _prefill_s(core: EngineCore, length: int) -> float:
    sampling = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
    core.handle(b"", AddRequest(EngineRequest(f"{length}", prompt_of(length), sampling)), 0.0)
    started = time.perf_counter()
    while core.num_live:
        core.step(0.0)
    return time.perf_counter() - started


def show_names(longest: int) -> None:
    """Print the cost of hashing, a line for each length."""
    prefills = prefill_s([length for length in LENGTHS if length <= longest])
    for length in LENGTHS:
        hashed_s, known = hash_s(length), max(n for n in prefills if n <= length)
        computed_s = prefills[known] * length / known
        print(
            f"{length:>7,} tokens: hashed in {1e3 * hashed_s:7.3f} ms, computed in "
            f"{'' if known == length else 'more than '}{computed_s:.2f} s: "
            f"{100 * hashed_s / computed_s:.3f} %"
        )


# --- waiting for room ----------------------------------------------------------------------------


class Queue:
    """A scheduler with decoding sequences and a given number of waiting ones.

    Args:
        num_groups: DP groups.
        num_waiting: How many wait.
        evicts: Whether each step evicts a block in each group, for `NUM_EVICTED` steps.
    """

    def __init__(self, num_groups: int, num_waiting: int, *, evicts: bool) -> None:
        num_running = BLOCK_SIZE if evicts else 4
        config = EngineConfig(
            model="/none",
            max_batch_size=2 * num_running * num_groups,
            tt_data_parallel=num_groups,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=65_536,
            enable_chunked_prefill=True,
            enable_prefix_caching=True,
            mixed_batches=True,
        )
        self._num_requests = 0
        kv_group = KVGroup(
            layers=(0,),
            block_size=BLOCK_SIZE,
            num_blocks=NUM_CACHED + (NUM_EVICTED + 3 * BLOCK_SIZE if evicts else 4 * 75) + 4,
            spec=KVSpec(heads=1, width=1, dtype="bfloat16"),
        )
        self._scheduler = Scheduler(
            config,
            kv_groups=(kv_group,),
            prefix_cache_key=KEY,
            max_model_len=40_000,
            eos_token_ids=frozenset(),
        )
        prefix = prompt_of(NUM_CACHED * BLOCK_SIZE)
        for group in range(num_groups):
            if evicts:
                self._add(prompt_of(NUM_EVICTED * BLOCK_SIZE), group, max_tokens=1)
                self.step()
            self._add([*prefix, 1], group, max_tokens=1)
            self.step()
            for i in range(num_running):
                self._add([i] * (64 + i if evicts else 64), group, max_tokens=2400)
            self.step()
        for i in range(num_waiting):
            self._add([*prefix, *[i] * 16_000], -1, max_tokens=1)
        if evicts:
            for _ in range(BLOCK_SIZE):  # Use up all blocks that were never allocated.
                self.step()

    def _add(self, prompt: list[int], group: int, max_tokens: int) -> None:
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
        request = EngineRequest(f"{self._num_requests}", prompt, sampling)
        seq = Sequence(request, "local", b"", list(prompt), place=KVPlace(group))
        refusal = self._scheduler.add(seq, 0.0)
        assert refusal is None, refusal

    def step(self) -> None:
        """Schedule, and update with tokens in a model's place."""
        batch = self._scheduler.schedule()
        assert batch is not None
        self._scheduler.update(batch, StepResult([1] * len(batch.slots), [0.0]))


def step_us(num_groups: int, num_waiting: int, *, evicts: bool) -> tuple[float, float]:
    """Median and 99th percentile of a step's host time in microseconds."""
    queue = Queue(num_groups, num_waiting, evicts=evicts)
    num_steps = NUM_EVICTED - 2 * BLOCK_SIZE if evicts else NUM_STEPS
    times = []
    for _ in range(num_steps):
        started = time.perf_counter()
        queue.step()
        times.append(1e6 * (time.perf_counter() - started))
    times.sort()
    return times[num_steps // 2], times[num_steps * 99 // 100]


def show_waiting() -> None:
    """Print the cost of a step while prompts wait."""
    for evicts, num_groups in itertools.product((False, True), (1, 8)):
        for num_waiting in (0, 0, NUM_WAITING):
            median, worst = step_us(num_groups, num_waiting, evicts=evicts)
            print(
                f"{num_groups} groups, {num_waiting:>2} waiting"
                f"{', evicting' if evicts else ''}: {median:7.1f} us a step, p99 {worst:7.1f} us"
            )


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--longest", type=int, default=LENGTHS[1], help="longest prompt computed")
    arguments = parser.parse_args()
    show_waiting()
    show_names(arguments.longest)


if __name__ == "__main__":
    main()

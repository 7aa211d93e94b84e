"""Cost of the scheduler alone: `schedule` and `update` of decode steps, without a model.

Full batches decode. In plain steps each row gets one token and nothing else happens. In steps with
blocks, rows also fill blocks of 64 tokens, each in other steps. Varied steps have four passes, of
which rows use one to four: they get runs of that many tokens, are handled one by one, and give the
other passes' progress back. The A/A row is the plain one again.

    python -m benchmarks.scheduler_cost [--quick]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

from replicas.config import EngineConfig
from replicas.engine.scheduler import Scheduler
from replicas.engine.sequence import Sequence
from replicas.engine.step import StepResult
from replicas.kv_groups import KVGroup, KVSpec
from replicas.messages import EngineRequest
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from replicas.engine.step import ScheduledBatch

BATCH_SIZES = (32, 256)
BLOCK_SIZE = 64
MAX_MODEL_LEN = 16_384
NUM_PASSES = 4
"""Passes of a varied step."""
NUM_STEPS = 1000
WARM_UP_STEPS = 100
EOS, TOKEN = 0, 7


class Case(NamedTuple):
    """One kind of steps.

    Attributes:
        name: Of its figures.
        is_varied: Rows get runs of different lengths.
        block_size: Tokens of a block. With one as long as the model no row ever fills its block.
    """

    name: str
    is_varied: bool = False
    block_size: int = MAX_MODEL_LEN


CASES = (
    Case("plain"),
    Case("blocks", block_size=BLOCK_SIZE),
    Case("varied", is_varied=True),
    Case("plain again"),
)


def make_scheduler(batch_size: int, block_size: int) -> Scheduler:
    """Return a scheduler with room for `batch_size` sequences of the longest length."""
    config = EngineConfig(
        model="none",
        max_batch_size=batch_size,
        max_num_batched_tokens=batch_size * 2 * BLOCK_SIZE,
        block_size=block_size,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        mixed_batches=True,
    )
    num_blocks = 1 + batch_size * MAX_MODEL_LEN // block_size
    group = KVGroup(
        layers=(0,),
        block_size=block_size,
        num_blocks=num_blocks,
        spec=KVSpec(heads=1, width=1, dtype="bfloat16"),
    )
    return Scheduler(
        config,
        kv_groups=(group,),
        prefix_cache_key=bytes(32),
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=frozenset({EOS}),
    )


def add_rows(scheduler: Scheduler, batch_size: int, *, has_stops: bool) -> None:
    """Queue `batch_size` requests, whose prompts differ in length and in every block.

    Args:
        scheduler: Without a sequence.
        batch_size: Slots of the scheduler.
        has_stops: Whether the end token may end them.
    """
    sampling = SamplingParams(max_tokens=MAX_MODEL_LEN, seed=0, ignore_eos=not has_stops)
    for row in range(batch_size):
        prompt = [1 + row] * (BLOCK_SIZE + row % BLOCK_SIZE)
        request = EngineRequest(f"row-{row}", prompt, sampling)
        scheduler.add(Sequence(request, "local", b"benchmark", prompt), 0.0)


def varied_result(batch: ScheduledBatch) -> StepResult:
    """Return a result whose rows have runs of different lengths."""
    counts = [1 + row % batch.num_passes for row in range(len(batch.slots))]
    return StepResult([TOKEN] * sum(counts), [0.0] * batch.num_passes, counts)


def plain_result(batch: ScheduledBatch) -> StepResult:
    """Return a result with one token for each row."""
    return StepResult([TOKEN] * len(batch.slots), [0.0])


def step_times_us(case: Case, batch_size: int, num_steps: int) -> list[float]:
    """Return the microseconds of `schedule` and `update` in each step of a full batch."""
    is_varied = case.is_varied
    scheduler = make_scheduler(batch_size, case.block_size)
    # A step whose rows may end by a token has one pass.
    add_rows(scheduler, batch_size, has_stops=not is_varied)
    times = []
    # As in an engine process, which freezes its heap and collects seldom.
    gc.disable()
    try:
        for _ in range(WARM_UP_STEPS + num_steps):
            started = time.perf_counter()
            batch = scheduler.schedule()
            assert batch is not None
            if is_varied:
                batch = scheduler.extend(batch, NUM_PASSES)
            spent = time.perf_counter() - started
            result = varied_result(batch) if is_varied else plain_result(batch)
            started = time.perf_counter()
            scheduler.update(batch, result)
            times.append(1e6 * (spent + time.perf_counter() - started))
    finally:
        gc.enable()
    return times[WARM_UP_STEPS:]


def main() -> None:
    """Print a table, then one JSON object as the last line: medians in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 9")
    num_rounds = 3 if parser.parse_args().quick else 9
    found = {}
    print(f"{'rows':>5}  {'steps':12}{'median us':>11}{'mean us':>9}")
    for batch_size in BATCH_SIZES:
        # By turns, so that load on the machine affects all cases.
        rounds = [
            [step_times_us(case, batch_size, NUM_STEPS) for case in CASES]
            for _ in range(num_rounds)
        ]
        for case, runs in zip(CASES, zip(*rounds, strict=True), strict=True):
            median = statistics.median(statistics.median(times) for times in runs)
            mean = statistics.median(statistics.fmean(times) for times in runs)
            found[f"{case.name.replace(' ', '_')}_{batch_size}_us"] = round(median, 1)
            print(f"{batch_size:5}  {case.name:12}{median:11.1f}{mean:9.1f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Utilization of a mesh with one step at a time, two in flight, or several passes in a step.

An engine of this process on a simulated mesh and the wall clock decodes full batches, with frames
made and encoded. Its device keeps a timeline: it runs submitted steps one after another, and is
idle from the end of the last until the next is submitted. The useful share is the busy share of the
timeline, less what was computed of rows behind their ends. Steps are those of the smallest measured
model, where the host matters most. Either all rows run to the end, or one row ends with every step.
The A/A column is two steps again.

The second table is of the demo model on the CPU, where steps do not overlap: tokens for a second
of CPU time with one pass a step, with eight, and with one again.

    python -m benchmarks.steps_in_flight [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from benchmarks.tt_host_time import SLOTS_PER_LANE, ask_for_full_batch
from cluster.config.resolve import demo_model_folder
from replicas.codec import encode
from replicas.config import EngineConfig, SimulatedMeshConfig
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.engine_process.server import EngineServer
from replicas.messages import TokenColumns, TokenOutput
from replicas.platforms.simulated import SimulatedPlatform
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from replicas.generators.simulated.device import DeviceTimeline

MODEL = "Llama-3.2-1B"
"""The shortest step that was measured: 12 ms on one chip."""
BOARDS = {32: "n150", 256: "T3K"}
"""Batch size -> a board with a chip for each 32 slots."""
BLOCK_SIZE = 64
WARM_UP_PASSES = 8
CPU_ROWS = (1, 8)


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: Of its figures.
        batch_size: Slots.
        is_ending: A row ends with every step; otherwise none does.
    """

    name: str
    batch_size: int
    is_ending: bool = False


CASES = (Case("32", 32), Case("256", 256), Case("256_ending", 256, is_ending=True))


class Mode(NamedTuple):
    """How steps follow each other."""

    steps_in_flight: Literal[1, 2] = 1
    num_scheduler_steps: int = 1


ONE, TWO = Mode(), Mode(2)
MODES = {"one": ONE, "two": TWO, "8": Mode(1, 8), "8_two": Mode(2, 8), "two_again": TWO}
"""Columns of the first table. The passes of a step are one or two in flight as steps are."""


def engine_config(batch_size: int, mode: Mode) -> EngineConfig:
    """An engine on a simulated mesh of as many lanes as it takes."""
    return EngineConfig(
        model=str(demo_model_folder()),
        simulated_mesh=SimulatedMeshConfig(model=MODEL, board=BOARDS[batch_size]),
        max_batch_size=batch_size,
        tt_data_parallel=batch_size // SLOTS_PER_LANE,
        block_size=BLOCK_SIZE,
        max_model_len=4096,
        num_blocks=1 + SLOTS_PER_LANE * 32,
        max_num_batched_tokens=batch_size * 128,
        **mode._asdict(),
    )


class Decoding:
    """An engine that decodes a full batch.

    Args:
        config: Its configuration.
        samplings: Sampling parameters of each row.
    """

    def __init__(self, config: EngineConfig, samplings: list[SamplingParams]) -> None:
        self._executor = UniProcExecutor(config)
        self.core = EngineCore(config, self._executor)
        self._server = EngineServer(self.core, "local")
        ask_for_full_batch(self._server, samplings)
        while self.core.timer.num_steps < WARM_UP_PASSES or self.core.snapshot(0).num_waiting:
            self._step()

    def run(self, num_passes: int) -> int:
        """Make as many passes or a few more; return the number of tokens that were sent."""
        last = self.core.timer.num_steps + num_passes
        num_tokens = 0
        while self.core.timer.num_steps < last:
            num_tokens += self._step()
        return num_tokens

    def _step(self) -> int:
        """One step; its frames are encoded. Return the number of their tokens."""
        under_way = self.core.begin_step(time.monotonic())
        self.core.collect_step(under_way)
        num_tokens = 0
        for _, frame in self._server.frames(time.monotonic()):
            encode(frame)
            num_tokens += sum(
                len(event.token_ids)
                for event in frame.events
                if isinstance(event, TokenColumns | TokenOutput)
            )
        self.core.end_step(under_way, time.monotonic())
        return num_tokens

    @property
    def timeline(self) -> DeviceTimeline:
        """The timeline of the worker's simulated mesh."""
        platform = self._executor._worker._platform  # noqa: SLF001
        assert isinstance(platform, SimulatedPlatform)
        return platform.device.timeline


class Measured(NamedTuple):
    """Of one engine.

    Attributes:
        useful: Share of the time in which the device computes tokens that are sent.
        host_us: CPU time of a pass in microseconds, less sensitive to other work on the machine.
    """

    useful: float
    host_us: float


def measure(case: Case, mode: Mode, passes: int) -> Measured:
    """Let an engine decode a full batch."""
    engine = Decoding(engine_config(case.batch_size, mode), lengths(case, passes))
    try:
        timeline, timer = engine.timeline, engine.core.timer
        free_s, busy_s, computed = timeline.free_s, timeline.busy_s, timer.num_tokens
        num_steps, cpu_s = timer.num_steps, time.process_time()
        sent = engine.run(passes)
        cpu_s = time.process_time() - cpu_s
        busy = (timeline.busy_s - busy_s) / (timeline.free_s - free_s)
        return Measured(
            busy * sent / (timer.num_tokens - computed), 1e6 * cpu_s / (timer.num_steps - num_steps)
        )
    finally:
        engine.core.shutdown()


def lengths(case: Case, passes: int) -> list[SamplingParams]:
    """Return the sampling parameters of each row."""
    wanted = [16 + i if case.is_ending else passes + 64 for i in range(case.batch_size)]
    return [SamplingParams(max_tokens=n, seed=0, ignore_eos=True) for n in wanted]


def cpu_tokens_per_s(batch_size: int, num_scheduler_steps: int, passes: int) -> float:
    """Return the tokens of the demo model for a second of CPU time, in a batch that stays full."""
    config = EngineConfig(
        model=str(demo_model_folder()),
        max_batch_size=batch_size,
        max_model_len=1024,
        num_threads=1,
        num_scheduler_steps=num_scheduler_steps,
    )
    engine = Decoding(config, lengths(Case("", batch_size), passes))
    try:
        started_s = time.process_time()
        return engine.run(passes) / (time.process_time() - started_s)
    finally:
        engine.core.shutdown()


def compare_on_a_mesh(passes: int, rounds: int) -> dict[str, float]:
    """Print the first table, and return its figures."""
    print("Share of the time in which a simulated mesh computes tokens that are sent (microseconds")
    print("of CPU time a pass), medians.")
    print(f"{'rows':>14}" + "".join(f"{name:>16}" for name in MODES))
    result: dict[str, float] = {}
    for case in CASES:
        # By turns, so that load on the machine affects all columns.
        turns = [[measure(case, mode, passes) for mode in MODES.values()] for _ in range(rounds)]
        cells = []
        for column, name in enumerate(MODES):
            useful = statistics.median(turn[column].useful for turn in turns)
            host_us = statistics.median(turn[column].host_us for turn in turns)
            cells.append(f"{useful:.3f} ({host_us:.0f})")
            result[f"useful_{case.name}_{name}"] = round(useful, 4)
            result[f"host_us_{case.name}_{name}"] = round(host_us, 1)
        print(f"{case.name:>14}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    return result


def compare_on_the_cpu(passes: int, rounds: int) -> dict[str, float]:
    """Print the second table, and return its ratios."""
    print(
        "Tokens of the demo model for a second of CPU time, and ratios to one pass a step, medians."
    )
    print(f"{'rows':>14}{'1':>12}{'8':>12}{'1 again':>12}{'8 / 1':>12}{'A/A':>12}")
    result: dict[str, float] = {}
    for num_rows in CPU_ROWS:
        turns = [[cpu_tokens_per_s(num_rows, n, passes) for n in (1, 8, 1)] for _ in range(rounds)]
        one, eight, again = map(statistics.median, zip(*turns, strict=True))
        ratio = statistics.median(turn[1] / turn[0] for turn in turns)
        same = statistics.median(turn[2] / turn[0] for turn in turns)
        print(f"{num_rows:14}{one:12.0f}{eight:12.0f}{again:12.0f}{ratio:12.3f}{same:12.3f}")
        result[f"cpu_{num_rows}_ratio"] = round(ratio, 4)
        result[f"cpu_{num_rows}_aa_ratio"] = round(same, 4)
    return result


def main() -> None:
    """Parse arguments, run, print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps; about a minute")
    arguments = parser.parse_args()
    passes, rounds = (48, 3) if arguments.quick else (200, 5)
    on_mesh = compare_on_a_mesh(passes, rounds)
    print(json.dumps(on_mesh | compare_on_the_cpu(4 * passes, rounds)))


if __name__ == "__main__":
    main()

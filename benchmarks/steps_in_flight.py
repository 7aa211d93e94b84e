"""Utilization of a mesh with one step at a time, or two, in flight.

An engine of this process on a simulated mesh and the wall clock decodes full batches, with frames
made and encoded. Its device keeps a timeline: it runs submitted steps one after another, and is
idle from the end of the last until the next is submitted. The busy share is taken from the
timeline. Steps are those of the smallest measured model, where the host matters most. Either all
rows run to the end, or one row ends with every step. The A/A row is two steps again.

    python -m benchmarks.steps_in_flight [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from benchmarks.tt_host_time import SLOTS_PER_LANE, ask_for_full_batch
from cluster.config.resolve import demo_model_folder
from replicas.codec import encode
from replicas.config import EngineConfig, SimulatedMeshConfig
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.engine.process import EngineServer
from replicas.generators.simulated.device import SimulatedMesh
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from replicas.generators.simulated.device import DeviceTimeline

MODEL = "Llama-3.2-1B"
"""The shortest step that was measured: 12 ms on one chip."""
BOARDS = {32: "n150", 256: "T3K"}
"""Batch size -> a board with a chip for each 32 slots."""
BLOCK_SIZE = 64


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


def engine_config(batch_size: int, steps_in_flight: Literal[1, 2]) -> EngineConfig:
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
        steps_in_flight=steps_in_flight,
    )


def busy_share(case: Case, steps_in_flight: Literal[1, 2], steps: int) -> float:
    """Share of the time in which the device works, while a full batch decodes."""
    config = engine_config(case.batch_size, steps_in_flight)
    executor = UniProcExecutor(config)
    core = EngineCore(config, executor)
    server = EngineServer(core, "local")
    timeline = timeline_of(executor)
    try:
        ask_for_full_batch(server, lengths(case, steps))
        while core.metrics(0.0).num_steps < 8 or core.snapshot(0).num_waiting:
            step(server)
        free_s, busy_s = timeline.free_s, timeline.busy_s
        for _ in range(steps):
            step(server)
        return (timeline.busy_s - busy_s) / (timeline.free_s - free_s)
    finally:
        core.shutdown()


def lengths(case: Case, steps: int) -> list[SamplingParams]:
    """Return the sampling parameters of each row."""
    wanted = [16 + i if case.is_ending else steps + 64 for i in range(case.batch_size)]
    return [SamplingParams(max_tokens=n, seed=0, ignore_eos=True) for n in wanted]


def timeline_of(executor: UniProcExecutor) -> DeviceTimeline:
    """Return the timeline of the simulated mesh of an executor's worker."""
    device = executor._worker._device  # noqa: SLF001
    assert isinstance(device, SimulatedMesh)
    return device.timeline


def step(server: EngineServer) -> None:
    """One step; its frames are encoded."""
    under_way = server.core.begin_step(time.monotonic())
    server.core.collect_step(under_way)
    for _, frame in server.frames(time.monotonic()):
        encode(frame)
    server.core.end_step(under_way, time.monotonic())


def main() -> None:
    """Parse arguments, run, print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps; under a minute")
    arguments = parser.parse_args()
    steps, rounds = (50, 3) if arguments.quick else (200, 5)
    result: dict[str, float] = {}
    print("Share of the time in which a simulated mesh works, by its own timeline, medians.")
    print(f"{'rows':>14}{'one step':>10}{'two steps':>11}{'two (A/A)':>11}")
    kinds: tuple[Literal[1, 2], ...] = (1, 2, 2)
    for case in CASES:
        # By turns, so that load on the machine affects all cases.
        rows = [[busy_share(case, n, steps) for n in kinds] for _ in range(rounds)]
        one, two, again = (statistics.median(row) for row in zip(*rows, strict=True))
        print(f"{case.name:>14}{one:10.3f}{two:11.3f}{again:11.3f}")
        result |= {
            f"busy_{case.name}_one": round(one, 4),
            f"busy_{case.name}_two": round(two, 4),
            f"aa_ratio_{case.name}": round(again / two, 4),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""How busy a mesh is while one step at a time, or two, are under way.

The mesh is not there: a class written to the plugin's interface answers at once, and its device is
a clock that needs so many milliseconds for each step, one after the other. The engine decodes full
batches, with frames made and encoded; the device is idle from the end of a step until the next is
submitted. The A/A row is two steps once more.

    python -m benchmarks.steps_in_flight [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal
from unittest.mock import patch

import msgspec

from benchmarks.tt_host_time import (
    MESHES,
    ResidentNoOpModel,
    ask_for_full_batch,
    engine_config,
    open_absent_mesh,
    write_model,
)
from replicas.codec import encode
from replicas.engine import worker
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.engine.server import EngineServer
from replicas.sampling_params import SamplingParams

STEP_S = 0.02
"""Of the device: a fast one; Llama-3.1-8B takes 20 to 40 ms."""


class ClockModel(ResidentNoOpModel):
    """Steps take their time on the device, one after the other.

    Attributes:
        ends_s: When each decode step of the process is over, in order.
    """

    ends_s: ClassVar[list[float]] = []

    def decode_forward(self, **arguments: object) -> Any:  # noqa: ANN401 - left on the device
        """Submit a step."""
        started_s = max([time.perf_counter(), *self.ends_s[-1:]])
        self.ends_s.append(started_s + STEP_S)
        return [self._answer(arguments), self.ends_s[-1]]

    def read_decode_output(self, tt_out: list[Any], async_read: bool) -> tuple[Any, list[object]]:
        """It is there when the step is over."""
        return tt_out, [tt_out[1]]


def wait(end_s: object) -> None:
    """Until a step is over; the host sleeps, as it does beside a mesh."""
    assert isinstance(end_s, float)
    time.sleep(max(end_s - time.perf_counter(), 0.0))


def busy_share(steps_in_flight: Literal[1, 2], batch_size: int, folder: Path, steps: int) -> float:
    """Share of the time in which the device works, while a full batch decodes."""
    config = msgspec.structs.replace(
        engine_config("benchmarks.steps_in_flight:ClockModel", "all", batch_size, folder),
        steps_in_flight=steps_in_flight,
    )
    core = EngineCore(config, UniProcExecutor(config))
    server = EngineServer(core, "local")
    try:
        sampling = SamplingParams(max_tokens=steps + 64, seed=0, ignore_eos=True)
        ask_for_full_batch(server, batch_size, sampling)
        while core.metrics(0.0).num_steps < 8:
            step(server)
        first = len(ClockModel.ends_s) - 1
        for _ in range(steps):
            step(server)
        ends_s = ClockModel.ends_s[first : first + steps]
    finally:
        core.shutdown()
    return (len(ends_s) - 1) * STEP_S / (ends_s[-1] - ends_s[0])


def step(server: EngineServer) -> None:
    """One step; its frames are encoded."""
    under_way = server.core.begin_step(time.monotonic())
    server.core.publish(under_way)
    for _, frame in server.frames(time.monotonic()):
        encode(frame)
    server.core.end_step(under_way, time.monotonic())


def main() -> None:
    """Parse arguments, run, print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps; under half a minute")
    arguments = parser.parse_args()
    steps, rounds = (60, 3) if arguments.quick else (300, 5)
    result: dict[str, float] = {}
    print(
        f"Share of the time in which a device with steps of {1e3 * STEP_S:.0f} ms works, medians."
    )
    print(f"{'batch':>5}{'one step':>10}{'two steps':>11}{'two (A/A)':>11}")
    with (
        tempfile.TemporaryDirectory() as made,
        patch.object(worker, "_import_open_mesh", lambda _mesh: open_absent_mesh),
        # What the adapter waits with.
        patch.dict(sys.modules, ttnn=SimpleNamespace(event_synchronize=wait)),
    ):
        folder = Path(made)
        write_model(folder)
        for batch_size in MESHES:
            kinds: tuple[Literal[1, 2], ...] = (1, 2, 2)
            # By turns, so that a busy minute is everybody's.
            rows = [
                [busy_share(n, batch_size, folder, steps) for n in kinds] for _ in range(rounds)
            ]
            one, two, again = (statistics.median(row) for row in zip(*rows, strict=True))
            print(f"{batch_size:5}{one:10.3f}{two:11.3f}{again:11.3f}")
            result |= {
                f"busy_{batch_size}_one": round(one, 4),
                f"busy_{batch_size}_two": round(two, 4),
                f"aa_ratio_{batch_size}": round(again / two, 4),
            }
    print(json.dumps(result))


if __name__ == "__main__":
    # The engine finds the model's class by its module's name, and has to find this very one.
    from benchmarks import steps_in_flight  # noqa: PLW0406

    steps_in_flight.main()

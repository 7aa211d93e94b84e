"""Accuracy of the simulated mesh against Tenstorrent's measurements: the fit, engines, HTTP.

Three tables. The fit: every measured row, predicted with and without itself. The engine: an engine
core of this process on a simulated mesh and the wall clock, time to first token of one prompt and
time per token of a full batch, against the rows. With `--http`, the same through the URL of a
server that is started on a configuration, one stream, against what the engine's model of time says.

    python -m benchmarks.simulated_mesh [--quick] [--http configs/sim-n150x4.yaml ...]
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ready import wait_ready
from cluster.config.resolve import demo_model_folder, resolve
from cluster.config.serve_file import read_serve_file
from cluster.lifecycle.supervisor import free_port
from replicas.columns import ColumnReader
from replicas.config import EngineConfig, SimulatedMeshConfig
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.generators.simulated.calibration import FITTED, held_out
from replicas.generators.simulated.meshes import (
    BOARDS,
    EXCLUDED_ROWS,
    MODELS,
    OLDER_ROWS,
    PROMPT_LEN,
    ROWS,
    SLOTS_PER_LANE,
    MeasuredRow,
)
from replicas.generators.simulated.profiles import engine_timing
from replicas.messages import AddRequest, EngineRequest, TokenOutput
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from replicas.config import Role

CLIENT = b"benchmark"
QUICK = (("n150", "Llama-3.2-1B"), ("n150", "Llama-3.1-8B"), ("T3K", "Falcon-7B"))
"""Pairs that `--quick` runs through engines: the shortest step, the anchor, 256 slots."""
BLOCK_SIZE = 32
MANY = SamplingParams(max_tokens=64, temperature=0.0, seed=0, ignore_eos=True)
ONE = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)


# --- the fit -------------------------------------------------------------------------------------


def print_fit() -> dict[str, object]:
    """Print the errors of every row; returns the worst that were predicted without the row."""
    print("The fit. Errors in percent, of the prompt / of the decode step.")
    print(
        f"{'board':8}{'model':15}{'lanes':>5}{'ttft_ms':>9}{'step_ms':>9}  fitted        held out"
    )
    worst: list[tuple[float, str]] = []
    for row in (*ROWS, *OLDER_ROWS):
        board, model = BOARDS[row.board], MODELS[row.model]
        found = held_out(row)
        fitted = "own code"
        if found is not None:
            ttft = FITTED.ttft_s(board, model, row.num_lanes) / row.ttft_s - 1.0
            step = FITTED.step_s(board, model, row.num_lanes) / row.step_s - 1.0
            fitted = f"{ttft:+6.1%} {step:+6.1%}"
        left = "reproduced, not predicted" if found is None else "{:+6.1%} {:+6.1%}".format(*found)
        if row in OLDER_ROWS:
            fitted, left = "not used", f"{left}   older release"
        elif found is not None:
            name = f"{row.board} {row.model}"
            worst += [(abs(found[0]), f"{name} prompt"), (abs(found[1]), f"{name} step")]
        print(
            f"{row.board:8}{row.model:15}{row.num_lanes:5}{row.ttft_ms:9.0f}"
            f"{1000 * row.step_s:9.1f}  {fitted:14}{left}"
        )
    for what, why in EXCLUDED_ROWS:
        print(f"  not used: {what}: {why}")
    beyond = [name for error, name in worst if error > 0.15]
    return {
        "held_out_figures": len(worst),
        "held_out_beyond_15_percent": beyond,
        "held_out_worst_within": round(max(e for e, name in worst if name not in beyond), 3),
    }


# --- real engines --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Measured times of an engine.

    Attributes:
        ttft_s: One prompt alone, median.
        step_s: Between two tokens of a full batch, median.
        host_s: The part of it that was not the device's.
    """

    ttft_s: float
    step_s: float
    host_s: float


def engine_config(row: MeasuredRow) -> EngineConfig:
    """An engine with all the slots that the row had."""
    slots = SLOTS_PER_LANE * row.num_lanes
    return EngineConfig(
        model=str(demo_model_folder()),
        max_batch_size=slots,
        tt_data_parallel=row.num_lanes,
        block_size=BLOCK_SIZE,
        max_model_len=1024,
        max_num_batched_tokens=slots * PROMPT_LEN,
        simulated_mesh=SimulatedMeshConfig(model=row.model, board=row.board),
        # The rows were measured with their host between two steps.
        steps_in_flight=1,
    )


def prompt(i: int) -> list[int]:
    """Prompt i of 128 tokens, like no other."""
    return [(i * 7919 + j * (31 + i % 13)) % 4000 + 16 for j in range(PROMPT_LEN)]


def measure_engine(row: MeasuredRow, repeats: int, steps: int) -> Measured:
    """Run one engine core on this thread."""
    config = engine_config(row)
    core, columns = EngineCore(config, UniProcExecutor(config)), ColumnReader()
    try:
        ttft_s = [first_token_s(core, columns, i) for i in range(repeats + 1)][1:]
        for i in range(config.max_batch_size):
            core.handle(CLIENT, AddRequest(EngineRequest(f"b{i}", prompt(1000 + i), MANY)), 0.0)
        started: set[str] = set()
        while len(started) < config.max_batch_size:
            started |= {output.request_id for output in step(core, columns)}
        times = [time.perf_counter()]
        for _ in range(steps):
            assert len(step(core, columns)) == config.max_batch_size
            times.append(time.perf_counter())
    finally:
        core.shutdown()
    assert config.simulated_mesh is not None
    timing = engine_timing(config, config.simulated_mesh)
    lanes = [lane for lane in range(row.num_lanes) for _ in range(SLOTS_PER_LANE)]
    step_s = statistics.median(b - a for a, b in itertools.pairwise(times))
    device_s = timing.decode_s([(lane, PROMPT_LEN + steps // 2) for lane in lanes])
    return Measured(statistics.median(ttft_s), step_s, step_s - device_s)


def first_token_s(core: EngineCore, columns: ColumnReader, i: int) -> float:
    """Seconds from a request's arrival to its token."""
    started = time.perf_counter()
    core.handle(CLIENT, AddRequest(EngineRequest(f"a{i}", prompt(i), ONE)), 0.0)
    while not step(core, columns):
        pass
    return time.perf_counter() - started


def step(core: EngineCore, columns: ColumnReader) -> list[TokenOutput]:
    """One step and its tokens."""
    core.step(time.monotonic())
    events = columns.read(core.take_events().get(CLIENT, []))
    return [event for event in events if isinstance(event, TokenOutput)]


def print_engines(rows: list[MeasuredRow], repeats: int, steps: int) -> dict[str, object]:
    """Print the engines' times; return the worst errors."""
    print("\nAt the engine's boundary, wall clock, every slot of the lanes in use.")
    print(f"{'board':8}{'model':15}{'slots':>5}{'ttft_ms':>9}{'error':>8}{'step_ms':>9}{'error':>8}"
          f"{'host_ms':>9}")  # fmt: skip
    errors = []
    for row in rows:
        found = measure_engine(row, repeats, steps)
        ttft, per_step = found.ttft_s / row.ttft_s - 1.0, found.step_s / row.step_s - 1.0
        errors.append((abs(ttft), abs(per_step)))
        print(
            f"{row.board:8}{row.model:15}{SLOTS_PER_LANE * row.num_lanes:5}"
            f"{1000 * found.ttft_s:9.1f}{ttft:+8.1%}{1000 * found.step_s:9.1f}{per_step:+8.1%}"
            f"{1000 * found.host_s:9.2f}"
        )
    return {
        "engine_rows": len(rows),
        "engine_worst_ttft_error": round(max(error for error, _ in errors), 4),
        "engine_worst_step_error": round(max(error for _, error in errors), 4),
    }


# --- HTTP ----------------------------------------------------------------------------------------


def through_http(
    host: str, port: int, model: str, repeats: int, tokens: int
) -> tuple[float, float]:
    """Median seconds to the first token and per further token, one stream at a time.

    Read off the socket: a client library's own milliseconds would be counted as the server's.
    """
    connection = http.client.HTTPConnection(host, port)
    first, rest = [], []
    for i in range(repeats + 1):
        body = {
            "model": model, "prompt": prompt(5000 + i), "max_tokens": tokens, "temperature": 0,
            "stream": True, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        started = time.perf_counter()
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        times = []
        for line in connection.getresponse():
            now = time.perf_counter()
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["token_ids"]:
                times.append(now)
        first.append(times[0] - started)
        rest.append((times[-1] - times[0]) / (tokens - 1))
    connection.close()
    return statistics.median(first[1:]), statistics.median(rest[1:])


def print_http(config: Path, repeats: int) -> dict[str, object]:
    """Start a server, measure, compare with its engines' model of time."""
    file = read_serve_file(config).override(http_options={"port": free_port()})
    cluster, http = resolve(file.args), file.http_options
    tokens = 32
    roles: tuple[Role, Role] = (
        ("prefill", "decode") if cluster.is_disaggregated else ("both", "both")
    )
    ttft_s, step_s = expected(*(cluster.engines[role] for role in roles), tokens=tokens)
    command = [sys.executable, "-m", "cluster.cli", "serve", "--config", str(config)]
    server = subprocess.Popen(
        [*command, "--port", str(http.port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_ready(f"{file.url}/health", server)
        found = through_http(http.host, http.port, cluster.served_model_name, repeats, tokens)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
    ttft, per_token = found[0] / ttft_s - 1.0, found[1] / step_s - 1.0
    print(
        f"\n{config.name} over HTTP, one stream: TTFT {1000 * found[0]:.1f} ms of "
        f"{1000 * ttft_s:.1f} ({ttft:+.1%}), per token {1000 * found[1]:.1f} ms of "
        f"{1000 * step_s:.1f} ({per_token:+.1%})"
    )
    return {"config": config.name, "ttft_error": round(ttft, 4), "tpot_error": round(per_token, 4)}


def expected(prefill: EngineConfig, decode: EngineConfig, *, tokens: int) -> tuple[float, float]:
    """Seconds of a prompt of 128 tokens, and of a token after it with nothing else in the batch."""
    assert prefill.simulated_mesh is not None
    assert decode.simulated_mesh is not None
    first = engine_timing(prefill, prefill.simulated_mesh)
    later = engine_timing(decode, decode.simulated_mesh)
    ttft_s = first.prefill_s([(0, 0, PROMPT_LEN)]) + first.host_s + first.host_row_s
    step_s = later.decode_s([(0, PROMPT_LEN + tokens // 2)])
    if decode.steps_in_flight == 1:
        step_s += later.host_s + later.host_row_s
    return ttft_s, step_s


def main() -> None:
    """Parse arguments, run, print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rows; under a minute")
    parser.add_argument("--http", type=Path, nargs="*", default=[], help="configs to serve")
    arguments = parser.parse_args()
    quick = arguments.quick
    result: dict[str, object] = print_fit()
    rows = [row for row in ROWS if not quick or (row.board, row.model) in QUICK]
    result |= print_engines(rows, *((5, 15) if quick else (9, 31)))
    result["http"] = [print_http(path.absolute(), 5 if quick else 15) for path in arguments.http]
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""What the host costs beside a Tenstorrent mesh: engines whose model computes nothing.

The model is a class written to the plugin's interface, found and adapted as such classes are, on a
mesh that is not there. An engine core of this process decodes a full batch, every step of which
schedules, builds the padded inputs, calls the class, reads its output and hands tokens out. So a
step's time is the host's alone: what a step on silicon takes longer than the device needs, unless
the two overlap. Rows: tokens drawn on the device, where steady steps reload nothing (contract 1)
or everything (legacy); and on the host, from logits. The A/A row is the first one again.

    python -m benchmarks.tt_host_time [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from unittest.mock import patch

import torch

from cluster.config.resolve import demo_model_folder
from replicas.columns import ColumnReader
from replicas.config import EngineConfig, MeshConfig
from replicas.engine import worker
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.messages import AddRequest, EngineRequest, TokenOutput
from replicas.sampling_params import SamplingParams

CLIENT = b"benchmark"
PROMPT_LEN = 128
BLOCK_SIZE = 64
MAX_MODEL_LEN = 1024
SLOTS_PER_LANE = 32
MESHES = {32: "N150", 256: "T3K"}
"""Batch size -> a mesh with a lane of 32 slots on each chip."""


class NoOpModel:
    """Says the same token to everybody; legacy contract, output on the host at once."""

    model_capabilities: ClassVar[dict[str, object]] = {
        "supports_prefix_caching": False,
        "supports_chunked_prefill": False,
        "supports_sample_on_device": True,
    }

    def __init__(self, max_batch_size: int, vocab_size: int) -> None:
        self._tokens = torch.ones((max_batch_size, 1), dtype=torch.int32)
        self._logits = torch.zeros((max_batch_size, 1, vocab_size))
        self._logits[:, :, 1] = 1.0

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: Any,  # noqa: ANN401 - a transformers configuration
        mesh_device: object,
        max_batch_size: int,
        **_settings: object,
    ) -> NoOpModel:
        """Make one."""
        return cls(max_batch_size, hf_config.vocab_size)

    def allocate_kv_cache(self, *_shape: object) -> None:
        """There is none."""

    def warmup_model_prefill(self, **_settings: object) -> None:
        """There is nothing to warm up."""

    def warmup_model_decode(self, **_settings: object) -> None:
        """There is nothing to warm up."""

    def prefill_forward(self, *, tokens: torch.Tensor, **arguments: object) -> torch.Tensor:
        """Answer a prompt."""
        return self._answer(arguments)[: len(tokens)]

    def decode_forward(self, **arguments: object) -> torch.Tensor:
        """Answer a step."""
        return self._answer(arguments)

    def _answer(self, arguments: dict[str, object]) -> torch.Tensor:
        return self._logits if arguments.get("sampling_params") is None else self._tokens


class ResidentNoOpModel(NoOpModel):
    """Contract 1: goes on from what it has sampled, and is read in two calls."""

    decode_input_update_contract = 1
    model_capabilities: ClassVar[dict[str, object]] = {
        **NoOpModel.model_capabilities,
        "supports_async_decode": True,
    }

    def decode_forward(self, **arguments: object) -> Any:  # noqa: ANN401 - left on the device
        """Answer a step, on a device."""
        return [self._answer(arguments)]

    def read_decode_output(
        self, tt_out: list[torch.Tensor], async_read: bool
    ) -> tuple[list[torch.Tensor], list[object]]:
        """Nothing has to be waited for."""
        return tt_out, []

    def process_decode_output_host(
        self, tt_out: list[torch.Tensor], is_tokens: bool
    ) -> torch.Tensor:
        """It is there."""
        return tt_out[0]


class AbsentMesh:
    """Says how many chips it would have, and can be closed."""

    def __init__(self, num_chips: int) -> None:
        self._num_chips = num_chips

    def get_num_devices(self) -> int:
        """As of a mesh of ttnn."""
        return self._num_chips

    def close(self) -> None:
        """Nothing is open."""


def open_absent_mesh(settings: MeshConfig, **_settings: object) -> AbsentMesh:
    """Instead of a mesh's own."""
    return AbsentMesh(settings.spec.num_chips)


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: For people.
        model: The class.
        draws: Where tokens are drawn.
    """

    name: str
    model: type[NoOpModel]
    draws: Literal["none", "all"]


CASES = (
    Case("device, contract 1", ResidentNoOpModel, "all"),
    Case("device, legacy", NoOpModel, "all"),
    Case("host, contract 1", ResidentNoOpModel, "none"),
    Case("device, contract 1 (A/A)", ResidentNoOpModel, "all"),
)


@dataclass(frozen=True)
class Measured:
    """Microseconds of a decode step, medians.

    Attributes:
        step_us: All of it, by the clock on the wall.
        cpu_us: What of it the thread had a core: the same, but for a machine that is busy.
        call_us: Inside the generator: the adapter, as the class does nothing.
    """

    step_us: float
    cpu_us: float
    call_us: float


def measure(case: Case, batch_size: int, steps: int) -> Measured:
    """Run one engine core on this thread."""
    config = EngineConfig(
        model=str(demo_model_folder()),
        generator=f"benchmarks.tt_host_time:{case.model.__name__}",
        mesh=MeshConfig(name=MESHES[batch_size], sample_on_device=case.draws),
        max_batch_size=batch_size,
        tt_data_parallel=batch_size // SLOTS_PER_LANE,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=1 + SLOTS_PER_LANE * MAX_MODEL_LEN // BLOCK_SIZE,
        max_num_batched_tokens=batch_size * PROMPT_LEN,
        num_threads=1,
    )
    core, columns = EngineCore(config, UniProcExecutor(config)), ColumnReader()
    try:
        many = SamplingParams(max_tokens=steps + 64, temperature=0.0, seed=0, ignore_eos=True)
        for i in range(batch_size):
            prompt = [(i * 7919 + j * (31 + i % 13)) % 4000 + 16 for j in range(PROMPT_LEN)]
            core.handle(CLIENT, AddRequest(EngineRequest(f"b{i}", prompt, many)), 0.0)
        started: set[str] = set()
        while len(started) < batch_size:
            started |= {output.request_id for output in step(core, columns)}
        for _ in range(16):
            step(core, columns)
        spans, cpu, calls = [], [], []
        for _ in range(steps):
            before = core.metrics(0.0).device_seconds
            started_s, started_cpu_s = time.perf_counter(), time.thread_time()
            outputs = step(core, columns)
            cpu.append(1e6 * (time.thread_time() - started_cpu_s))
            spans.append(1e6 * (time.perf_counter() - started_s))
            calls.append(1e6 * (core.metrics(0.0).device_seconds - before))
            assert len(outputs) == batch_size
    finally:
        core.shutdown()
    return Measured(*map(statistics.median, (spans, cpu, calls)))


def step(core: EngineCore, columns: ColumnReader) -> list[TokenOutput]:
    """One step and its tokens."""
    core.step(time.monotonic())
    events = columns.read(core.take_events().get(CLIENT, []))
    return [event for event in events if isinstance(event, TokenOutput)]


def main() -> None:
    """Parse arguments, run, print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps; under half a minute")
    arguments = parser.parse_args()
    steps = 50 if arguments.quick else 300
    result: dict[str, object] = {}
    print("Microseconds of a decode step whose model computes nothing, medians.")
    print(f"{'batch':>5}  {'tokens drawn on':26}{'step':>9}{'CPU':>9}{'generator':>11}{'a row':>8}")
    with patch.object(worker, "_import_open_mesh", lambda _mesh: open_absent_mesh):
        for batch_size in MESHES:
            # By turns, so that a busy minute is everybody's.
            rounds = [[measure(case, batch_size, steps) for case in CASES] for _ in range(3)]
            found = [
                sorted(rows, key=lambda row: row.cpu_us)[1] for rows in zip(*rounds, strict=True)
            ]
            for case, row in zip(CASES, found, strict=True):
                print(
                    f"{batch_size:5}  {case.name:26}{row.step_us:9.0f}{row.cpu_us:9.0f}"
                    f"{row.call_us:11.0f}{row.cpu_us / batch_size:8.1f}"
                )
            result |= {
                f"step_us_{batch_size}": round(found[0].step_us, 1),
                f"cpu_us_{batch_size}": round(found[0].cpu_us, 1),
                f"generator_us_{batch_size}": round(found[0].call_us, 1),
                f"host_draws_cpu_us_{batch_size}": round(found[2].cpu_us, 1),
                f"aa_cpu_ratio_{batch_size}": round(found[3].cpu_us / found[0].cpu_us, 3),
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

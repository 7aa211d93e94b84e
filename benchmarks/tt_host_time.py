"""Host time beside a Tenstorrent mesh: engines whose model computes nothing.

The model is a class written to the plugin's interface, found and adapted as such classes are, on an
absent mesh. An engine of this process decodes a full batch of one client. Every step schedules,
builds the padded inputs, calls the class, reads its output, samples where the host samples, hands
tokens out, and encodes and sends the client's frame. So a step's time is the host's alone, up to
the last byte for the kernel's socket. On silicon it is added to the device's time, unless the two
overlap. A vocabulary of 128,256 tokens, page tables of 2,048 columns. Rows: tokens drawn on the
device at temperature 1, where steady steps reload nothing
(contract 1) or everything (legacy); and on the host, from bfloat16 logits, with the API's default
sampling and greedy. The A/A row is the first one again.

    python -m benchmarks.tt_host_time [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from unittest.mock import patch

import torch
import zmq

from cluster.config.resolve import demo_model_folder
from replicas.codec import encode
from replicas.config import EngineConfig, MeshConfig
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.engine_process.server import EngineServer
from replicas.messages import PROTOCOL_VERSION, AddRequest, EngineRequest, Hello
from replicas.platforms import mesh
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replicas.messages import EngineFrame

CLIENT = b"benchmark"
PROMPT_LEN = 128
BLOCK_SIZE = 64
TABLE_WIDTH = 2048
VOCAB_SIZE = 128_256
SLOTS_PER_LANE = 32
MESHES = {32: "N150", 256: "T3K"}
"""Batch size -> a mesh with a lane of 32 slots on each chip."""
PARTS = ("schedule", "prepare", "generator", "sample", "update", "frames", "encode")


class NoOpModel:
    """A model with a constant answer; legacy contract, output on the host at once."""

    model_capabilities: ClassVar[dict[str, object]] = {
        "supports_prefix_caching": False,
        "supports_chunked_prefill": False,
        "supports_sample_on_device": True,
    }

    def __init__(self, max_batch_size: int, vocab_size: int) -> None:
        self._tokens = torch.ones((max_batch_size, 1), dtype=torch.int32)
        spread = 3.0 * torch.randn(max_batch_size, 1, vocab_size)
        self._logits = spread.bfloat16()

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
    """The same under contract 1: it feeds back its own samples, and is read in two calls."""

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
        """Return the output, which needs no wait."""
        return tt_out, []

    def process_decode_output_host(
        self, tt_out: list[torch.Tensor], is_tokens: bool
    ) -> torch.Tensor:
        """Return the output, which is on the host."""
        return tt_out[0]


class AbsentMesh:
    """A mesh without hardware, which reports a number of chips."""

    def __init__(self, num_chips: int) -> None:
        self._num_chips = num_chips

    def get_num_devices(self) -> int:
        """Return the number of chips, like ttnn's mesh."""
        return self._num_chips

    def close(self) -> None:
        """Do nothing, as nothing is open."""


def open_absent_mesh(settings: MeshConfig, **_settings: object) -> AbsentMesh:
    """Return an absent mesh, in place of ttnn's function."""
    return AbsentMesh(settings.spec.num_chips)


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: For people.
        model: The class.
        draws: Where tokens are drawn.
        temperature: Of every request.
    """

    name: str
    model: type[NoOpModel]
    draws: Literal["none", "all"]
    temperature: float = 1.0


CASES = (
    Case("device, contract 1", ResidentNoOpModel, "all"),
    Case("device, legacy", NoOpModel, "all"),
    Case("host, default sampling", ResidentNoOpModel, "none"),
    Case("host, greedy", ResidentNoOpModel, "none", temperature=0.0),
    Case("device, contract 1 (A/A)", ResidentNoOpModel, "all"),
)


@dataclass(frozen=True)
class Measured:
    """Microseconds of a decode step, medians.

    Attributes:
        step_us: All of it, by the clock on the wall.
        cpu_us: The part of it in which the thread had a core; the same on an idle machine.
        parts: CPU time of each of `PARTS`; `generator` is the adapter, as the class does nothing.
    """

    step_us: float
    cpu_us: float
    parts: dict[str, float]


class Stopwatch:
    """CPU time of parts of a step; a part within another is not counted with that.

    Attributes:
        spent_us: Part -> microseconds since it was last cleared.
    """

    def __init__(self) -> None:
        self.spent_us: defaultdict[str, float] = defaultdict(float)
        self._inner_us = 0.0

    def time(self, part: str, owner: object, name: str) -> None:
        """Count the time of an object's method from now on."""
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any method
            outer_us, self._inner_us = self._inner_us, 0.0
            started_s = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                whole_us = 1e6 * (time.thread_time() - started_s)
                self.spent_us[part] += whole_us - self._inner_us
                self._inner_us = outer_us + whole_us

        setattr(owner, name, timed)


def engine_config(
    generator: str, draws: Literal["none", "all"], batch_size: int, folder: Path
) -> EngineConfig:
    """An engine on a mesh that is not there, with page tables of `TABLE_WIDTH` columns."""
    return EngineConfig(
        model=str(folder),
        generator=generator,
        mesh=MeshConfig(name=MESHES[batch_size], sample_on_device=draws),
        max_batch_size=batch_size,
        tt_data_parallel=batch_size // SLOTS_PER_LANE,
        block_size=BLOCK_SIZE,
        max_model_len=TABLE_WIDTH * BLOCK_SIZE,
        enable_chunked_prefill=False,
        num_blocks=1 + TABLE_WIDTH,
        max_num_batched_tokens=TABLE_WIDTH * BLOCK_SIZE,
        num_threads=1,
    )


def ask_for_full_batch(server: EngineServer, samplings: Sequence[SamplingParams]) -> None:
    """Have one client ask for something in every slot."""
    server.take(CLIENT, Hello(PROTOCOL_VERSION), 0.0)
    for i, sampling in enumerate(samplings):
        # Spread, so that rows fill their blocks one after the other, as they do in service.
        length = PROMPT_LEN - i * 37 % BLOCK_SIZE
        prompt = [(i * 7919 + j * (31 + i % 13)) % 4000 + 16 for j in range(length)]
        server.take(CLIENT, AddRequest(EngineRequest(f"b{i}", prompt, sampling)), 0.0)


class Engine:
    """An engine core with its server, and a socket from which a client reads.

    Args:
        case: The row.
        batch_size: Slots.
        folder: Of the model's configuration.
        steps: Half of the steps that are measured.
    """

    def __init__(self, case: Case, batch_size: int, folder: Path, steps: int) -> None:
        generator = f"benchmarks.tt_host_time:{case.model.__name__}"
        config = engine_config(generator, case.draws, batch_size, folder)
        self._executor = UniProcExecutor(config)
        self.core = EngineCore(config, self._executor)
        self._server = EngineServer(self.core, "local")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._output = self._context.socket(zmq.ROUTER)
        self._output.set(zmq.ROUTER_MANDATORY, 1)
        port = self._output.bind_to_random_port("tcp://127.0.0.1")
        self._input = self._context.socket(zmq.DEALER)
        self._input.set(zmq.IDENTITY, CLIENT)
        self._input.connect(f"tcp://127.0.0.1:{port}")
        sampling = SamplingParams(
            max_tokens=2 * steps + 128, temperature=case.temperature, seed=0, ignore_eos=True
        )
        ask_for_full_batch(self._server, [sampling] * batch_size)
        # Until the client's connection is there a frame cannot be sent.
        self._poll(lambda: self._is_sent(b""))

    def step(self) -> None:
        """One step to the last byte of its frames."""
        core = self.core
        step = core.begin_step(time.monotonic())
        core.collect_step(step)
        self.send_frames()
        core.end_step(step, time.monotonic())

    def send_frames(self) -> None:
        """Encode and send all pending frames."""
        for client, frame in self._server.frames(time.monotonic()):
            self.send(client, frame)

    def send(self, client: bytes, frame: EngineFrame) -> None:
        """Send a frame like the engine's sender, which has its own thread in an engine process."""
        self._output.send_multipart((client, encode(frame)), flags=zmq.NOBLOCK)

    def receive(self) -> None:
        """Read, as a client of another process does, so that nothing piles up."""
        while self._input.poll(0):
            self._input.recv()

    def watch(self, stopwatch: Stopwatch) -> None:
        """Time the parts of a step."""
        runner = self._executor._worker._runner  # noqa: SLF001
        generator = runner._generator  # noqa: SLF001
        stopwatch.time("schedule", self.core, "begin_step")
        stopwatch.time("schedule", self.core._scheduler, "schedule_ahead")  # noqa: SLF001
        stopwatch.time("prepare", runner, "submit")
        for name in ("decode_forward", "read_decode_output", "process_decode_output_host"):
            stopwatch.time("generator", generator, name)
        stopwatch.time("sample", runner, "_finish")
        stopwatch.time("update", self.core, "collect_step")
        stopwatch.time("frames", self, "send_frames")
        stopwatch.time("encode", self, "send")

    def close(self) -> None:
        """End it."""
        self.core.shutdown()
        self._context.destroy(linger=0)

    def _is_sent(self, raw: bytes) -> bool:
        try:
            self._output.send_multipart((CLIENT, raw), flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _poll(self, is_done: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 10.0
        while not is_done():
            assert time.monotonic() < until_s, "no connection on 127.0.0.1"
            time.sleep(0.02)


def measure(case: Case, batch_size: int, folder: Path, steps: int) -> Measured:
    """Run one engine on this thread."""
    engine = Engine(case, batch_size, folder, steps)
    try:
        while engine.core.metrics(0.0).num_steps < 2 or engine.core.snapshot(0).num_waiting:
            engine.step()
            engine.receive()
        for _ in range(16):
            engine.step()
            engine.receive()
        stopwatch = Stopwatch()
        spans, cpu = [], []
        for i in range(2 * steps):
            # The first half as it is; then with a watch on it, which costs a little.
            if i == steps:
                engine.watch(stopwatch)
            started_s, started_cpu_s = time.perf_counter(), time.thread_time()
            engine.step()
            cpu.append(1e6 * (time.thread_time() - started_cpu_s))
            spans.append(1e6 * (time.perf_counter() - started_s))
            engine.receive()
        parts = {part: stopwatch.spent_us[part] / steps for part in PARTS}
    finally:
        engine.close()
    return Measured(statistics.median(spans[:steps]), statistics.median(cpu[:steps]), parts)


def write_model(folder: Path) -> None:
    """A configuration with the vocabulary and the length of Llama-3.1."""
    config = json.loads((demo_model_folder() / "config.json").read_text())
    config |= {"vocab_size": VOCAB_SIZE, "max_position_embeddings": TABLE_WIDTH * BLOCK_SIZE}
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    """Parse arguments, run, print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps; under a minute")
    arguments = parser.parse_args()
    steps, num_rounds = (50, 3) if arguments.quick else (300, 5)
    found: dict[tuple[str, int], Measured] = {}
    print("Microseconds of a decode step whose model computes nothing, medians; parts: CPU, means.")
    print(
        f"{'batch':>5}  {'tokens drawn on':26}{'step':>8}{'CPU':>8}"
        + "".join(f"{p:>10}" for p in PARTS)
    )
    with (
        tempfile.TemporaryDirectory() as temporary,
        patch.object(mesh, "_import_open_mesh", lambda _mesh: open_absent_mesh),
    ):
        folder = Path(temporary)
        write_model(folder)
        for batch_size in MESHES:
            # By turns, so that load on the machine affects all cases; logits of 256 rows are slow.
            rounds = [
                [
                    measure(case, batch_size, folder, steps if case.draws == "all" else steps // 10)
                    for case in CASES
                ]
                for _ in range(num_rounds)
            ]
            for case, rows in zip(CASES, zip(*rounds, strict=True), strict=True):
                row = sorted(rows, key=lambda row: row.cpu_us)[num_rounds // 2]
                found[case.name, batch_size] = row
                print(
                    f"{batch_size:5}  {case.name:26}{row.step_us:8.0f}{row.cpu_us:8.0f}"
                    + "".join(f"{row.parts[part]:10.0f}" for part in PARTS)
                )
    drawn, again, host = CASES[0].name, CASES[-1].name, CASES[2].name
    print(
        json.dumps(
            {
                "device_32_us": round(found[drawn, 32].cpu_us, 1),
                "device_256_us": round(found[drawn, 256].cpu_us, 1),
                "host_128k_32_ms": round(found[host, 32].cpu_us / 1000, 2),
                "aa_32": round(found[again, 32].cpu_us / found[drawn, 32].cpu_us, 3),
                "aa_256": round(found[again, 256].cpu_us / found[drawn, 256].cpu_us, 3),
            }
        )
    )


if __name__ == "__main__":
    main()

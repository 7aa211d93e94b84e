"""Runs a third party's generator class on ttnn's mock device, step by step, as far as possible.

    PYTHONPATH=.:/path/to/their/packages python -m scripts.foreign_class GENERATOR MODEL [options]

GENERATOR and MODEL are a configuration's `generator` and `model`. Needs a Python with ttnn and the
stand-in for its compiler (`make test-tt` makes both), and the packages that the class imports. The
mock device computes nothing, so that tokens mean nothing and no trace can be captured. The run
shows that the class is found, which arguments it takes, and that it and ttnn accept each call:
load, cache, warm-up, prefill of one and of several prompts, a chunk, decodes, a row that is
preempted and resumed, close. Each step prints a line: ok, or the error and its place in the foreign
code. Steps that depend on a failed one are left out. The last line is a row for a table.
Results so far: docs/foreign-classes.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from replicas.config import EngineConfig, MeshConfig
from replicas.errors import ConfigError
from replicas.generators.model_config import load_engine_model
from replicas.generators.plugin.arguments import padding_rows
from replicas.mesh_environment import make_folders, mesh_environment
from tests.tt.mock.boards import DESCRIPTIONS, environment, what_is_missing

if TYPE_CHECKING:
    from collections.abc import Callable

    from replicas.generators.model_config import ModelConfig

_BLOCK_SIZE = 64
_PROMPT = 40


class _StoppedError(Exception):
    """A step failed that everything after it needs."""


class Run:
    """One run of a class.

    Args:
        config: The engine's configuration.
        draws: Let the class draw the tokens.
    """

    def __init__(self, config: EngineConfig, *, draws: bool) -> None:
        self._config = config
        self._draws = draws
        self.reached: list[str] = []
        self.stopped = ""

    def step(self, name: str, action: Callable[[], Any], *, is_needed: bool = True) -> Any:  # noqa: ANN401 - whatever it makes
        """Run an action and print its result."""
        started = time.perf_counter()
        try:
            made = action()
        except Exception as error:  # a foreign class may fail in every way
            print(f"{name}: {_reason(error)}", flush=True)
            self.stopped = self.stopped or f"{name}: {_reason(error)}"
            if is_needed:
                raise _StoppedError from error
            return None
        if name != "close":
            self.reached.append(name)
        print(f"{name}: ok ({time.perf_counter() - started:.1f} s)", flush=True)
        return made

    def all(self) -> None:
        """Run every step in order; close the mesh at the end."""
        from replicas.generators.plugin.routes import route_mesh
        from replicas.generators.registry import resolve_mesh_generator
        from replicas.generators.ttnn.mesh import open_mesh

        config = self._config
        model = self.step("read config.json", lambda: load_engine_model(config))
        architecture = model.architectures[0]
        found: Any = self.step("find", lambda: resolve_mesh_generator(config, architecture))
        print(f"  capabilities: {found.model_capabilities}")
        assert config.mesh is not None
        settings = route_mesh(config.generator, config.mesh)
        fabric = found.model_capabilities.get("fabric_config")
        mesh = self.step("open the mesh", lambda: open_mesh(settings, fabric_config=fabric))
        try:
            generator = self.step("load", lambda: self._load(found, model, mesh))
            try:
                self._serve(generator, model)
            finally:
                self.step("close", generator.close)
        finally:
            mesh.close()

    def _load(self, found: Any, model: Any, mesh: Any) -> Any:  # noqa: ANN401 - of classes not known here
        config = self._config
        return found.initialize_vllm_model(
            model, mesh, config.max_batch_size, max_seq_len=config.max_model_len,
            tt_data_parallel=config.tt_data_parallel, optimizations="performance",
        )  # fmt: skip

    def _serve(self, generator: Any, model: Any) -> None:  # noqa: ANN401 - of classes not known here
        config, draws = self._config, self._draws
        signature = getattr(generator, "signature", None)
        if signature is not None:
            print(f"  {signature.class_name}, contract {signature.contract}")
        served = Served(generator, config, draws=draws)
        self.step("allocate the cache", lambda: served.allocate(model))
        print(f"  {generator.kv_dtype}")
        self.step("warm up prefill", lambda: served.warm_up("prefill"))
        self.step("warm up decode", lambda: served.warm_up("decode"))
        first, last = [0], [config.max_batch_size - 1]
        both = sorted({*first, *last})
        self.step("prefill one", lambda: served.prefill(first, _PROMPT))
        self.step("prefill several", lambda: served.prefill(both, _BLOCK_SIZE), is_needed=False)
        can = generator.model_capabilities
        if can.get("supports_chunked_prefill") or can.get("supports_prefix_caching"):
            self.step(
                "prefill from a block on",
                lambda: served.prefill(last, _BLOCK_SIZE + _PROMPT, start=_BLOCK_SIZE),
                is_needed=False,
            )
        self.step("decode", lambda: served.decode(both))
        goes_on = draws and bool(can.get("supports_async_decode"))
        self.step("decode on", lambda: served.decode(both, reload=not goes_on))
        self.step("preempt", lambda: served.preempt(last[0]))
        self.step("decode again", lambda: served.decode(both))


class Served:
    """A loaded class and its requests, whose tokens are all 1.

    Owner: the cache, and how many tokens each slot has.

    Args:
        generator: The model.
        config: The engine's configuration.
        draws: Let the class draw the tokens.
    """

    def __init__(self, generator: Any, config: EngineConfig, *, draws: bool) -> None:  # noqa: ANN401 - of a class not known here
        self._generator = generator
        self._config = config
        self._draws = draws
        self._cache: Any = None
        self._lengths: dict[int, int] = {}
        self._width = -(-(config.max_model_len or 0) // _BLOCK_SIZE)

    def allocate(self, model: ModelConfig) -> None:
        """Allocate the KV cache."""
        shape = (self._config.num_blocks, model.num_key_value_heads, _BLOCK_SIZE, model.head_dim)
        self._cache = self._generator.allocate_kv_cache(
            shape, torch.bfloat16, model.num_hidden_layers
        )

    def warm_up(self, kind: str) -> None:
        """Warm up prefill or decode."""
        drawing = {"enable_trace": False, "can_sample_on_device": self._draws}
        if kind == "prefill":
            self._generator.warmup_model_prefill(kv_cache=self._cache, **drawing)
            return
        sizes = {"max_batch_size": self._config.max_batch_size, "num_blocks": self._width}
        self._generator.warmup_model_decode(kv_cache=self._cache, **sizes, **drawing)

    def prefill(self, slots: list[int], end: int, start: int = 0) -> None:
        """Compute the tokens from `start` to `end` of a prompt in each of some slots."""
        num_rows = len(slots)
        self._generator.prefill_forward(
            tokens=torch.ones((num_rows, end), dtype=torch.int32),
            page_table=self._tables(slots), kv_cache=self._cache, enable_trace=False,
            prompt_lens=torch.full((num_rows,), end),
            start_pos=torch.full((num_rows,), start, dtype=torch.int32),
            empty_slots=slots,
            sampling_params=padding_rows(num_rows) if self._draws else None,
        )  # fmt: skip
        self._lengths |= dict.fromkeys(slots, end)

    def decode(self, slots: list[int], *, reload: bool = True) -> None:
        """Decode a token in each of some slots, from the device's own state unless `reload`."""
        size = self._config.max_batch_size
        tokens = torch.zeros((size, 1), dtype=torch.int32)
        positions = torch.full((size,), -1, dtype=torch.int32)
        tables = torch.zeros((size, self._width), dtype=torch.int32)
        tokens[slots], tables[slots] = 1, self._tables(slots)
        positions[slots] = torch.tensor([self._lengths[slot] for slot in slots], dtype=torch.int32)
        self._generator.decode_forward(
            tokens=tokens, page_table=tables, kv_cache=self._cache, start_pos=positions,
            enable_trace=False, sampling_params=padding_rows(size) if self._draws else None,
            reload_inputs=reload, reload_sampling_params=reload and self._draws,
            reset_sampling_state=reload and self._draws,
        )  # fmt: skip
        self._lengths |= {slot: self._lengths[slot] + 1 for slot in slots}

    def preempt(self, slot: int) -> None:
        """Preempt a row, and compute it again from its start."""
        self._generator.release_request(slot)
        self.prefill([slot], self._lengths[slot])

    def _tables(self, slots: list[int]) -> torch.Tensor:
        """Return a page table that gives each slot blocks of its own in its lane."""
        per_lane = self._config.slots_per_group
        first = [1 + slot % per_lane * self._width for slot in slots]
        rows = [list(range(n, n + self._width)) for n in first]
        return torch.tensor(rows, dtype=torch.int32)


def _reason(error: BaseException) -> str:
    """Return the error's first line, and its place in the foreign code."""
    root = Path(__file__).resolve().parents[1]
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    frames = traceback.extract_tb(cause.__traceback__)
    theirs = [f for f in frames if not Path(f.filename).resolve().is_relative_to(root)]
    last = (theirs or frames)[-1]
    place = f"{'/'.join(Path(last.filename).parts[-3:])}:{last.lineno}"
    lines = [line for line in str(error).splitlines() if line.strip()] or ["no text"]
    return f"{type(error).__name__}: {lines[0].strip()} [{place}]"


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _absolute(text: str) -> str:
    return str(Path(text).absolute())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("generator", help='"module:Class", a route, or an architecture')
    parser.add_argument(
        "model", type=_absolute, help="folder with config.json and what the class reads"
    )
    parser.add_argument("--board", default="N150", type=str.upper, choices=sorted(DESCRIPTIONS))
    parser.add_argument("--lanes", type=_positive, default=1)
    parser.add_argument("--slots", type=_positive, default=4, help="of all lanes")
    parser.add_argument("--max-model-len", type=_positive, default=1024)
    parser.add_argument("--draw", action="store_true", help="the class draws the tokens")
    parser.add_argument("--tt-metal-home", type=_absolute)
    parser.add_argument("--extra-models-dir", type=_absolute)
    return parser


def _config(options: argparse.Namespace, scratch: str) -> EngineConfig:
    blocks_per_slot = -(-options.max_model_len // _BLOCK_SIZE)
    return EngineConfig(
        model=options.model, generator=options.generator,
        max_batch_size=options.slots, max_model_len=options.max_model_len,
        block_size=_BLOCK_SIZE, tt_data_parallel=options.lanes,
        num_blocks=1 + blocks_per_slot * (options.slots // options.lanes),
        mesh=MeshConfig(
            name=options.board, trace="none", weight_cache=scratch,
            tt_metal_home=options.tt_metal_home, extra_models_dir=options.extra_models_dir,
        ),
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run one class; return 1 if a step failed, else 0."""
    parser = _parser()
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        config = _config(options, scratch)
        try:
            config.validate()
        except ConfigError as error:
            parser.error(str(error))
        missing = what_is_missing()
        if missing is not None:
            parser.error(missing)
        os.environ.update(mesh_environment(config, {**os.environ, **environment(options.board)}))
        make_folders(config, os.environ)
        run = Run(config, draws=options.draw)
        with contextlib.suppress(_StoppedError):
            run.all()
    reached = run.reached[-1] if run.reached else "nothing"
    stopped = run.stopped or "nothing"
    ttnn = importlib.metadata.version("ttnn")
    print(f"| `{options.generator}` | ttnn {ttnn}, {options.board} | {reached} | {stopped} |")
    return 1 if run.stopped else 0


if __name__ == "__main__":
    sys.exit(main())

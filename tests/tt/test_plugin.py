"""Foreign classes on mock chips: the mesh, their caches, outputs and events are ttnn's own.

The mock device computes nothing, so the doubles' tokens come from their own arithmetic
(`tests.replicas.generators.plugin.doubles`), as without ttnn. Here engine, adapter and class
exchange tensors and events of ttnn, on meshes that the engine opens and closes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

import pytest
import torch
import ttnn

from kv_transfer.errors import InvalidLayoutError
from kv_transfer.layout import KVLayout
from replicas.config import EngineConfig, MeshConfig
from replicas.generators.plugin import checkpoints
from replicas.generators.ttnn.kv_io import TTKVIO
from tests.engines import engine_core, generate, num_preemptions
from tests.replicas.generators.plugin import doubles
from tests.replicas.generators.plugin.conformance import CONFIG, expect, make_prompt
from tests.replicas.generators.plugin.doubles import (
    NUM_KV_HEADS,
    NUM_LAYERS,
    Blocks,
    Chosen,
    Contract1,
    Double,
    Galaxy,
    Legacy,
    ReadsLater,
    Registered,
    Seed,
)

HEAD_DIM = 32


class CacheOnMesh(Double):
    """Keeps its cache on the mesh, cut into lanes as tt_transformers does."""

    mesh: Any
    has_one_cache = False

    def allocate(self, shape: Any, dtype: Any, num_layers: int) -> list[Any]:
        super().allocate(shape, dtype, num_layers)
        chips = self.mesh.get_num_devices() // self.num_lanes
        self.lanes = [self.mesh]
        if self.num_lanes > 1 and not self.has_one_cache:
            self.lanes = self.mesh.create_submeshes(ttnn.MeshShape(1, chips))
        self.cache = [
            [[self._plane(lane, shape) for _ in range(2)] for _ in range(num_layers)]
            for lane in self.lanes
        ]
        return self.cache

    @staticmethod
    def _plane(lane: Any, shape: Any) -> Any:
        return ttnn.as_tensor(
            torch.zeros(shape), device=lane, mesh_mapper=ttnn.ReplicateTensorToMesh(lane),
            layout=ttnn.TILE_LAYOUT, memory_config=ttnn.DRAM_MEMORY_CONFIG, dtype=ttnn.bfloat8_b,
        )  # fmt: skip


class OnMesh(CacheOnMesh, ReadsLater):
    """Leaves its outputs on the mesh, too."""

    def leave_on_device(self, values: torch.Tensor, *, is_tokens: bool) -> Any:
        output = super().leave_on_device(values, is_tokens=is_tokens)
        lane = self.lanes[0]
        output.tensor = ttnn.from_torch(
            torch.zeros(1, 1, 32, 32, dtype=torch.bfloat16), device=lane, dtype=ttnn.bfloat16,
            layout=ttnn.TILE_LAYOUT, mesh_mapper=ttnn.ReplicateTensorToMesh(lane),
        )  # fmt: skip
        return output

    def read_decode_output(self, tt_out: Any, async_read: bool = False) -> Any:
        assert async_read
        assert tt_out is self.pending[-1]
        tt_out.host = tt_out.tensor.cpu(blocking=False)
        tt_out.event = ttnn.record_event(self.lanes[0], 0)
        return tt_out, [tt_out.event]

    def process_decode_output_host(self, tt_out: Any, is_tokens: bool = False) -> Any:
        assert tt_out is self.pending.pop(0)
        assert tt_out.host.storage_type() == ttnn.StorageType.HOST
        assert is_tokens == tt_out.is_tokens
        return tt_out.values


class OnContract1(OnMesh, Contract1):
    """Contract 1, with a tensor for each layer."""


class OnBlocks(OnMesh, Blocks):
    """Several tokens a step."""


class OnLegacy(OnMesh, Legacy):
    """The legacy contract."""


class OnSeed(OnMesh, Seed):
    """The first interface."""


class OnGalaxy(OnMesh, Galaxy):
    """A Galaxy of two columns: one model and one cache on the whole mesh."""

    has_one_cache = True


class OnChosen(OnMesh, Chosen):
    """A class of tt-transformers."""

    def process_decode_output_host(self, tt_out: Any, *, is_tokens: bool = False) -> Any:
        return OnMesh.process_decode_output_host(self, tt_out, is_tokens), None


class OnRegistered(Registered):
    """A registry that chooses `OnChosen`."""

    models = {"some-org/Tiny-8B-Instruct": OnChosen}  # noqa: RUF012


@pytest.fixture(autouse=True)
def _own_places(tmp_path, monkeypatch):
    """Locks of boards and links to checkpoints are files; a test must not meet another one's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(checkpoints, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(doubles, "HEAD_DIM", HEAD_DIM)


def folder_in(tmp_path):
    folder = tmp_path / "Tiny-8B-Instruct"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "head_dim": HEAD_DIM}))
    return str(folder)


def planes(cache):
    """Every tensor in a cache, however it is nested."""
    if not isinstance(cache, list):
        return [cache]
    return [plane for part in cache for plane in planes(part)]


@pytest.mark.board("N300")
@pytest.mark.parametrize(
    ("name", "lanes", "draws"),
    [
        ("OnContract1", 1, "all"), ("OnContract1", 2, "none"), ("OnContract1", 2, "all"),
        ("OnBlocks", 2, "all"),
        ("OnLegacy", 1, "none"), ("OnLegacy", 1, "all"), ("OnLegacy", 2, "all"),
        ("OnSeed", 1, "none"), ("OnSeed", 2, "none"), ("OnSeed", 2, "all"),
        ("OnGalaxy", 2, "none"), ("OnGalaxy", 2, "all"),
        ("OnRegistered", 1, "none"), ("OnRegistered", 1, "all"), ("OnRegistered", 2, "all"),
    ],
)  # fmt: skip
def test_a_class_serves_on_a_mesh_that_the_engine_opens(name, lanes, draws, tmp_path):
    """Load, prefill, chunks where the class takes them, decode, preemption, close."""
    takes_chunks = name in ("OnContract1", "OnLegacy")
    config = EngineConfig(
        model=folder_in(tmp_path), generator=f"{__name__}:{name}", max_batch_size=4,
        max_model_len=128, block_size=32, num_blocks=10 - 2 * lanes, num_threads=1,
        max_num_batched_tokens=64 if takes_chunks else 128, tt_data_parallel=lanes,
        mesh=MeshConfig(name="N300", trace="none", sample_on_device=draws),
    )  # fmt: skip
    prompts = [make_prompt(i * 11, 55 + 5 * i) for i in range(7)]
    with engine_core(config) as core:
        generator = core._executor._worker._generator
        assert generate(core, prompts, stagger=2) == [expect(prompt, 12) for prompt in prompts]
        # Rows that may get several tokens have blocks for all of them from the start.
        assert num_preemptions(core) > 0 or name == "OnBlocks"
        model = generator._model
        tensors = planes(model.given_cache)
        has_one_cache = name == "OnGalaxy"
        assert len(tensors) == 2 * NUM_LAYERS * (1 if has_one_cache else lanes)
        assert generator.kv_dtype == "bfloat8_b"
        cache = core._executor._worker._runner._kv_cache
        if has_one_cache:
            with pytest.raises(InvalidLayoutError):
                check_kv_transfer(cache, lanes)
        else:
            check_kv_transfer(cache, lanes)
    assert core._executor._worker._platform.mesh is None
    assert name != "OnRegistered" or model.is_cleaned_up


def check_kv_transfer(cache, lanes):
    """The cache is one whose blocks can be read and written, lane by lane."""
    layout = KVLayout(
        num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, block_size=32,
        dtype="bfloat8_b", rope="meta", model_fingerprint="m",
    )  # fmt: skip
    io = TTKVIO(cache, layout)
    for lane in range(lanes):
        rows = io.read_rows(lane, [1, 2], 0, 2)
        assert rows.shape == (2, layout.row_bytes)
        io.write_rows(lane, [3, 4], 0, rows)


@pytest.mark.parametrize(
    ("name", "last", "failed"),
    [
        ("OnContract1", "decode again", None),
        ("OnSeed", "decode again", None),
        ("Unwilling", "allocate the cache", "warm up prefill: RuntimeError: no such core"),
    ],
)
def test_the_harness_tells_how_far_a_class_comes(name, last, failed, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = subprocess.run(
        [sys.executable, "-m", "scripts.foreign_class", f"{__name__}:{name}", str(tmp_path),
         "--board", "N300", "--max-model-len", "128"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == (0 if failed is None else 1), done.stdout + done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("| "))
    assert f"| {last} | {failed or 'nothing'}" in row
    assert "close: ok" in done.stdout


class Unwilling(OnContract1):
    """A class whose warm-up fails."""

    def warmup_model_prefill(self, **_settings: Any) -> None:
        raise RuntimeError("no such core\nbacktrace: ...")

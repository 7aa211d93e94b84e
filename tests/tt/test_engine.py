"""A whole engine on mock chips: it starts, every call it makes is accepted, it ends, all is closed.

The mock device computes nothing, so tokens mean nothing. Tests on golden chips check tokens, and
tests on a double check that an engine keeps the reload contract.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile

import msgspec
import pytest
import ttnn

from replicas.config import EngineConfig, MeshConfig
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.errors import ConfigError, DeviceError
from replicas.generators.model_config import load_hf_config
from replicas.generators.ttnn.budget import native_token_budget
from replicas.launch import start_engine
from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate
from tests.replicas.engine.fakes import KEYS
from tests.replicas.engine.pair import Pair
from tests.tt.calls import MODEL
from tests.tt.golden.lanes import model_folder

PROMPTS = [[1, 2, 3], [4] * 130, [5, 6] * 40, [7] * 65]
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
NARROW = SamplingParams(max_tokens=5, temperature=0.8, top_k=8, top_p=0.9, seed=3, ignore_eos=True)
WIDE = SamplingParams(max_tokens=5, temperature=0.8, seed=3, ignore_eos=True)


@pytest.fixture(autouse=True)
def _own_locks(tmp_path, monkeypatch):
    """Locks of boards are files; a test must not wait for another one's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(MODEL))
    return str(path)


@pytest.fixture
def config(folder, tmp_path):
    def make(name="N150", *, mesh=None, **changes):
        settings = {
            "model": folder, "load_format": "random", "max_batch_size": 4, "max_model_len": 256,
            "block_size": 64, "num_blocks": 24, "num_threads": 1, "max_num_batched_tokens": 128,
            "mesh": MeshConfig(
                name=name, trace="none", weight_cache=str(tmp_path / "weights"), **(mesh or {})
            ),
        }  # fmt: skip
        return EngineConfig(**{**settings, **changes})

    return make


def outputs(config, sampling):
    """Runs the prompts, arriving one after another; checks that every one got its tokens."""
    with engine_core(config) as core:
        device = core._executor._worker._platform.mesh.device
        found = generate(core, PROMPTS, sampling, stagger=2)
        programs = device.num_program_cache_entries()
        # Other lengths, and a prefix that is cached: nothing new is compiled.
        again = generate(core, [[4] * 130, [8] * 100], GREEDY)
        assert device.num_program_cache_entries() == programs
        facts = core.facts
    assert [len(tokens) for tokens in found + again] == [5] * 6
    return facts


@pytest.mark.board("N150")
@pytest.mark.parametrize("sample_on_device", ["none", "decode_only", "all"])
@pytest.mark.parametrize("sampling", [GREEDY, NARROW, WIDE], ids=["greedy", "top-k 8", "no top-k"])
def test_one_lane_on_one_chip(config, sample_on_device, sampling):
    facts = outputs(config(mesh={"sample_on_device": sample_on_device}), sampling)
    assert (facts.chunk_alignment, facts.kv_groups[0].num_blocks) == (64, 24)
    assert facts.kv_groups[0].bytes_per_block == 2 * 8 * 32 * 64 * 1088 // 1024


@pytest.mark.board("N300")
@pytest.mark.parametrize(("lanes", "optimizations"), [(1, "performance"), (2, "accuracy")])
def test_lanes_of_two_chips_and_of_one(config, lanes, optimizations):
    mesh = {"sample_on_device": "all", "optimizations": optimizations}
    outputs(config("N300", mesh=mesh, tt_data_parallel=lanes), [GREEDY, NARROW, WIDE, GREEDY])


@pytest.mark.board("N300")
@pytest.mark.parametrize("lanes", [1, 2])
def test_requests_leave_nothing_on_the_device(config, lanes):
    kinds = (ttnn.BufferType.DRAM, ttnn.BufferType.L1)
    made = config("N300", mesh={"sample_on_device": "all"}, tt_data_parallel=lanes)
    with engine_core(made) as core:
        found = []
        for _ in range(3):
            # Drawn for on the device, and on the host.
            for third in (NARROW, WIDE):
                generate(core, PROMPTS, [GREEDY, NARROW, third, GREEDY], stagger=2)
            views = [
                ttnn.get_memory_view(lane.device, kind)
                for lane in core._executor._worker._generator._batch.lanes
                for kind in kinds
            ]
            found.append([view.total_bytes_allocated_per_bank for view in views])
    assert len(found[0]) == 2 * lanes
    assert found[0] == found[1] == found[2]


@pytest.mark.board("N150")
def test_the_mesh_can_be_opened_again_after_an_engine_and_after_one_that_failed(config):
    outputs(config(), GREEDY)
    wrong = config(mesh={"worker_l1_size": 1})
    with pytest.raises(DeviceError):
        EngineCore(wrong, UniProcExecutor(wrong))
    too_large = config(num_blocks=2_000_000)
    with pytest.raises((DeviceError, ConfigError)):
        EngineCore(too_large, UniProcExecutor(too_large))
    outputs(config(), GREEDY)


@pytest.mark.board("N150")
def test_a_foreign_class_leaves_a_read_only_checkpoint_as_it_is(config, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(model_folder("llama-32"), model)
    files = sorted(path.name for path in model.iterdir())
    model.chmod(0o555)
    theirs = config(
        model=str(model), load_format="safetensors", generator="tests.tt.converting:Converting"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path / "home")}
    env.pop("TT_CACHE_PATH", None)
    handle = start_engine(theirs, env=env)
    assert handle.is_alive
    handle.stop()
    assert sorted(path.name for path in model.iterdir()) == files
    kept = list((tmp_path / "weights" / "tt-metal").glob("model-N150-wormhole-1-lanes-*/N150/*"))
    assert [path.name for path in kept] == ["layers.0.wqkv"]


@pytest.mark.board("N150")
def test_the_cache_has_the_blocks_that_the_budget_says(config):
    whole = config(num_blocks=None)
    with engine_core(whole) as core:
        model = load_hf_config(whole.model)
        sizes = {"block_size": 64, "num_slots": 4, "max_seq_len": 256}
        budget = native_token_budget(model, whole.mesh.spec, whole.mesh, 1, **sizes)
        assert core.facts.kv_groups[0].num_blocks == -(-(budget + 64 * 4) // 64) > 1000
        keys = core._executor._worker._generator._batch.cache[0][0][0]
        assert keys.shape[0] == core.facts.kv_groups[0].num_blocks


@pytest.mark.board("N300")
@pytest.mark.parametrize("computes", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("optimizations", "dtype"), [("performance", "bfloat8_b"), ("accuracy", "bfloat16")]
)
def test_kv_goes_between_a_mesh_and_a_cpu(config, computes, optimizations, dtype):
    """Tests of the engines' KV on golden chips check the bytes."""
    common = {"kv_connector": "p2p", "keys": KEYS}
    mesh = config(
        "N300", mesh={"optimizations": optimizations}, tt_data_parallel=2,
        kv_accept_dtypes=() if dtype == "bfloat16" else ("bfloat16",), **common,
    )  # fmt: skip
    cpu = msgspec.structs.replace(
        config(**common), mesh=None, dtype="bfloat16",
        kv_accept_dtypes=() if dtype == "bfloat16" else (dtype,),
    )  # fmt: skip
    pair = Pair(mesh, cpu) if computes == "prefill" else Pair(cpu, mesh)
    try:
        on_mesh = getattr(pair, computes).core
        assert (on_mesh.kv_layouts[0].dtype, on_mesh.kv_layouts[0].rope) == (dtype, "hf")
        found = pair.generate(PROMPTS, [GREEDY] * len(PROMPTS))
        assert pair.failures == pair.errors == {}
    finally:
        pair.close()
    assert [len(tokens) for tokens in found] == [5] * len(PROMPTS)

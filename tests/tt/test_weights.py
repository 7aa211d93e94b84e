"""Weights of a lane: their conversion, dtypes, cache and faults.

Host tensors are checked, with lanes that are doubles; the mock device takes them. Which part of a
weight each chip has, and padding, `test_numbers_model.py` checks by the logits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import ttnn
from safetensors.torch import load_file, save_file

from replicas.config import MeshConfig
from replicas.errors import ConfigError, DeviceError, ModelLoadError
from replicas.generators import fingerprint
from replicas.generators.checkpoint import expected_weights
from replicas.generators.model_config import load_hf_config
from replicas.generators.ttnn import weights
from replicas.generators.ttnn.products import striped
from replicas.generators.ttnn.profiles import ACCURACY, BALANCED, PERFORMANCE, PROFILES
from replicas.generators.ttnn.weights import load_lane_weights

pytestmark = pytest.mark.board("T3K")  # host tensors too: ttnn lays tiles out for a board's chips

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 170,
    "max_position_embeddings": 256,
}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama-biases": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True,
    },
    "qwen2-tied": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
}  # fmt: skip


def make_model(folder, name, seed=0, dtype=torch.float32):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SIZES | MODELS[name]))
    config = load_hf_config(folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in expected_weights(config).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return config


class Lane:
    """A double of a submesh: as many chips, and no memory."""

    def __init__(self, tp):
        self.shape = ttnn.MeshShape(1, tp)
        self.tp = tp

    def get_num_devices(self):
        return self.tp

    def compute_with_storage_grid_size(self):
        return ttnn.CoreCoord(8, 8)

    def dram_grid_size(self):
        return ttnn.CoreCoord(12, 1)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def on_host(monkeypatch):
    monkeypatch.setattr(ttnn, "to_device", lambda host, lane, *, memory_config: host)


@pytest.fixture
def mesh(tmp_path):
    settings = MeshConfig(name="N150", weight_cache=str(tmp_path / "cache"))
    return SimpleNamespace(settings=settings, load_format="safetensors", seed=0, progress=None)


def shards(tensor):
    return [shard.to_torch() for shard in ttnn.get_device_tensors(tensor)]


def everything(loaded):
    """Name and shards of every tensor."""
    found = {"embedding": loaded.embedding, "final_norm": loaded.final_norm}
    found["lm_head"] = loaded.lm_head
    for index, layer in enumerate(loaded.layers):
        for name in layer.__slots__:
            if getattr(layer, name) is not None:
                found[f"layers.{index}.{name}"] = getattr(layer, name)
    return {name: shards(tensor) for name, tensor in found.items()}


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, chips in wanted.items():
        assert len(found[name]) == len(chips), name
        for got, want in zip(found[name], chips, strict=True):
            assert torch.equal(got, want), name


def converted(matrix, dtype):
    """Return ttnn's conversion of a whole matrix."""
    tensor = ttnn.from_torch(matrix, dtype=getattr(ttnn, dtype), layout=ttnn.TILE_LAYOUT)
    return tensor.to_torch()


def load_one_lane(config, mesh, lane, profile):
    (loaded,) = load_lane_weights(config, mesh, [lane], profile)
    return loaded


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_matrix_is_what_ttnn_makes_of_its_bfloat16(tmp_path, mesh, tp):
    config = make_model(tmp_path / "model", "llama")
    found = everything(load_one_lane(config, mesh, Lane(tp), BALANCED))
    raw = load_file(tmp_path / "model" / "model.safetensors")
    for index in range(2):
        down = raw[f"model.layers.{index}.mlp.down_proj.weight"].to(torch.bfloat16)
        wanted = converted(down.T[None, None], "bfloat8_b")
        assert torch.equal(torch.cat(found[f"layers.{index}.down"], dim=-2), wanted)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("profile", [PERFORMANCE, BALANCED, ACCURACY], ids=PROFILES)
def test_dtypes_and_layouts_are_those_of_the_profile(tmp_path, mesh, profile):
    config = make_model(tmp_path / "model", "llama-biases")
    loaded = load_one_lane(config, mesh, Lane(2), profile)
    layer, last = loaded.layers
    matrix = getattr(ttnn, profile.weight_dtype)
    for tensor in (layer.qkv, layer.o, layer.down, loaded.lm_head, last.gate, last.up):
        assert (tensor.dtype, tensor.layout) == (matrix, ttnn.TILE_LAYOUT)
    inner = ttnn.bfloat4_b if profile is PERFORMANCE else matrix
    for tensor in (layer.gate, layer.up):
        assert (tensor.dtype, tensor.layout) == (inner, ttnn.TILE_LAYOUT)
    for tensor in (layer.input_norm, layer.qkv_bias, layer.down_bias, loaded.final_norm):
        assert (tensor.dtype, tensor.layout) == (ttnn.bfloat16, ttnn.TILE_LAYOUT)
        assert tuple(tensor.shape)[:3] == (1, 1, 1)
    assert loaded.embedding.dtype == ttnn.bfloat16
    assert loaded.embedding.layout == ttnn.ROW_MAJOR_LAYOUT


@pytest.mark.usefixtures("on_host")
def test_lanes_share_one_conversion(tmp_path, mesh, monkeypatch):
    config = make_model(tmp_path / "model", "llama")
    fetched = []
    whole = weights._whole
    monkeypatch.setattr(weights, "_whole", lambda name, *a: fetched.append(name) or whole(name, *a))
    mesh.settings = MeshConfig(name="N300", weight_cache="/dev/null/none")
    first, second = load_lane_weights(config, mesh, [Lane(2), Lane(2)], PERFORMANCE)
    assert len(fetched) == len(set(fetched)) == 5
    assert_equal(everything(first), everything(second))


@pytest.mark.usefixtures("on_host")
def test_progress_is_told_and_ends_at_one(tmp_path, mesh):
    config = make_model(tmp_path / "model", "llama")
    told = []
    mesh.progress = lambda stage, fraction: told.append((stage, fraction))
    for _ in range(2):  # converted, then read from the cache
        told.clear()
        load_one_lane(config, mesh, Lane(1), PERFORMANCE)
        assert {stage for stage, _ in told} == {"weights"}
        fractions = [fraction for _, fraction in told]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0


@pytest.mark.usefixtures("on_host")
def test_random_weights_are_those_of_the_torch_generator_and_not_kept(tmp_path, mesh):
    config = make_model(tmp_path / "model", "llama")
    (tmp_path / "model" / "model.safetensors").unlink()
    mesh.load_format, mesh.seed = "random", 7
    found = everything(load_one_lane(config, mesh, Lane(2), ACCURACY))
    draw = weights.random_source(expected_weights(config), 7)
    assert torch.equal(
        torch.cat(found["layers.1.down"], dim=-2)[0, 0],
        draw("model.layers.1.mlp.down_proj.weight").to(torch.bfloat16).T,
    )
    assert not (tmp_path / "cache").exists()


# ---- cache


def no_source(*args):
    raise AssertionError("the folder's weights were read")


@pytest.fixture
def first_load(tmp_path, mesh, on_host):
    config = make_model(tmp_path / "model", "llama-biases")
    wanted = everything(load_one_lane(config, mesh, Lane(2), PERFORMANCE))
    return config, wanted


def cached_files(mesh):
    return sorted(Path(mesh.settings.weight_cache).glob("*/*.tensorbin"))


def test_the_second_load_reads_the_cache_alone(mesh, first_load, monkeypatch):
    config, wanted = first_load
    monkeypatch.setattr(weights, "open_safetensors", no_source)
    monkeypatch.setattr(ttnn, "from_torch", no_source)
    again = everything(load_one_lane(config, mesh, Lane(2), PERFORMANCE))
    assert_equal(again, wanted)


@pytest.mark.parametrize(
    ("tp", "profile"), [(1, PERFORMANCE), (2, ACCURACY)], ids=["lane size", "profile"]
)
def test_another_conversion_is_not_taken_for_it(mesh, first_load, tp, profile):
    config, _ = first_load
    load_one_lane(config, mesh, Lane(tp), profile)
    assert len({path.parent for path in cached_files(mesh)}) == 2


def test_weights_that_changed_in_place_are_converted_anew(mesh, tmp_path, first_load):
    _, wanted = first_load
    config = make_model(tmp_path / "model", "llama-biases", seed=1)
    found = everything(load_one_lane(config, mesh, Lane(2), PERFORMANCE))
    assert not torch.equal(found["layers.0.qkv"][0], wanted["layers.0.qkv"][0])


@pytest.mark.usefixtures("on_host")
def test_a_file_changed_where_no_sample_is_taken_is_converted_anew(mesh, tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "model_fingerprint", lambda config: "the same")
    config, path = make_model(tmp_path / "model", "llama"), tmp_path / "model" / "model.safetensors"
    first = everything(load_one_lane(config, mesh, Lane(2), PERFORMANCE))
    raw = load_file(path)
    raw["model.norm.weight"] += 1
    save_file(raw, path)
    second = everything(load_one_lane(config, mesh, Lane(2), PERFORMANCE))
    assert not torch.equal(second["final_norm"][0], first["final_norm"][0])


def truncate(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("index", [0, -1])
def test_a_damaged_cache_is_rebuilt_with_a_warning(
    mesh, first_load, monkeypatch, caplog, damage, index
):
    config, wanted = first_load
    damage(cached_files(mesh)[index])
    found = everything(load_one_lane(config, mesh, Lane(2), PERFORMANCE))
    assert_equal(found, wanted)
    assert "converting the weights again" in caplog.text
    monkeypatch.setattr(weights, "open_safetensors", no_source)
    found = everything(load_one_lane(config, mesh, Lane(2), PERFORMANCE))
    assert_equal(found, wanted)


def test_a_file_that_ttnn_cannot_read_is_rebuilt(mesh, first_load, monkeypatch, caplog):
    config, wanted = first_load

    def refuse(path):
        raise RuntimeError("TT_FATAL")

    monkeypatch.setattr(ttnn, "load_tensor", refuse)
    found = everything(load_one_lane(config, mesh, Lane(2), PERFORMANCE))
    assert_equal(found, wanted)
    assert "TT_FATAL" in caplog.text


@pytest.mark.usefixtures("on_host")
def test_a_full_disk_costs_the_cache_and_nothing_else(tmp_path, mesh, monkeypatch, caplog):
    config = make_model(tmp_path / "model", "llama")
    dump, written = ttnn.dump_tensor, []

    def until_full(path, tensor):
        if len(written) == 5:
            raise RuntimeError("No space left on device")
        written.append(path)
        dump(path, tensor)

    monkeypatch.setattr(ttnn, "dump_tensor", until_full)
    loaded = load_one_lane(config, mesh, Lane(1), PERFORMANCE)
    assert "No space left" in caplog.text
    assert len(everything(loaded)) == 3 + 2 * 7
    assert cached_files(mesh) == []
    assert len(written) == 5


def test_without_a_home_nothing_is_kept(mesh, first_load, monkeypatch, caplog):
    config, wanted = first_load

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    mesh.settings = MeshConfig(name="N300")
    found = everything(load_one_lane(config, mesh, Lane(2), PERFORMANCE))
    assert_equal(found, wanted)
    assert "set HOME, or set mesh.weight_cache" in caplog.text


def test_by_default_it_is_in_the_user_s_cache(mesh, first_load, monkeypatch, tmp_path):
    config, _ = first_load
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    mesh.settings = MeshConfig(name="N300")
    load_one_lane(config, mesh, Lane(2), PERFORMANCE)
    (folder,) = (tmp_path / "home" / ".cache" / "ttserve" / "weights").glob(
        "model-performance-tp2-*/"
    )
    assert (folder / "manifest.json").is_file()


CONVERT = """
import sys
import ttnn
from tests.tt.test_weights import *
ttnn.to_device = lambda host, lane, *, memory_config: host
settings = MeshConfig(name="N300", weight_cache=sys.argv[2])
mesh = SimpleNamespace(settings=settings, load_format="safetensors", seed=0, progress=None)
print("ready", flush=True)
sys.stdin.readline()
found = everything(load_one_lane(load_hf_config(sys.argv[1]), mesh, Lane(2), PERFORMANCE))
torch.save(found, sys.argv[3])
"""


@pytest.mark.process
def test_two_processes_at_once_get_the_same(tmp_path, mesh, on_host):
    config = make_model(tmp_path / "model", "llama")
    arguments = [str(tmp_path / "model"), mesh.settings.weight_cache, str(tmp_path / "other.pt")]
    command = [sys.executable, "-c", CONVERT, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        while other.stdout.readline() not in {b"ready\n", b""}:
            pass
        other.stdin.write(b"\n")
        other.stdin.flush()
        found = everything(load_one_lane(config, mesh, Lane(2), PERFORMANCE))
    assert other.returncode == 0
    assert_equal(torch.load(tmp_path / "other.pt"), found)
    again = everything(load_one_lane(config, mesh, Lane(2), PERFORMANCE))
    assert_equal(again, found)
    assert len({path.parent for path in cached_files(mesh)}) == 1


# ---- mock device


@pytest.mark.parametrize("num_lanes", [2, 4, 8])
@pytest.mark.parametrize("profile", [PERFORMANCE, BALANCED, ACCURACY], ids=PROFILES)
def test_the_device_takes_them(tmp_path, open_mock_mesh, profile, num_lanes):
    config = make_model(tmp_path / "model", "llama-biases")
    mesh = open_mock_mesh(weight_cache=str(tmp_path / "cache"))
    for _ in range(2):  # converted, then read from the cache
        lanes = mesh.lanes(num_lanes)
        loaded = load_lane_weights(config, mesh, lanes, profile)
        assert len(loaded) == num_lanes
        for lane, weights_of_lane in zip(lanes, loaded, strict=True):
            tensor = weights_of_lane.layers[1].down
            assert tensor.storage_type() == ttnn.StorageType.DEVICE
            assert tensor.memory_config() == striped(*tuple(tensor.shape)[2:], 12)
            assert weights_of_lane.lm_head.memory_config() == ttnn.DRAM_MEMORY_CONFIG
            assert tuple(tensor.shape) == (1, 1, 256 // lane.get_num_devices(), 128)
            assert len(ttnn.get_device_tensors(tensor)) == lane.get_num_devices()


# ---- refusals


@pytest.mark.usefixtures("on_host")
def test_heads_that_do_not_divide_are_refused_before_anything_is_read(tmp_path, mesh, monkeypatch):
    config = make_model(tmp_path / "model", "llama")
    monkeypatch.setattr(weights, "open_safetensors", no_source)
    with pytest.raises(ConfigError, match=r"4 KV heads do not divide by the 8 chips"):
        load_one_lane(config, mesh, Lane(8), PERFORMANCE)


@pytest.mark.usefixtures("on_host")
def test_a_folder_without_weights_is_refused(tmp_path, mesh):
    config = make_model(tmp_path / "model", "llama")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        load_one_lane(config, mesh, Lane(1), PERFORMANCE)
    assert cached_files(mesh) == []


def test_a_device_that_takes_no_more_is_a_typed_error(tmp_path, mesh, monkeypatch):
    config = make_model(tmp_path / "model", "llama")

    def refuse(host, lane, *, memory_config):
        raise RuntimeError(
            "TT_FATAL @ allocator.cpp:1: ok\ninfo:\nOut of Memory\nbacktrace:\n --- x"
        )

    monkeypatch.setattr(ttnn, "to_device", refuse)
    with pytest.raises(
        DeviceError, match=r"embedding, bfloat16 of shape \(1, 1, 193, 128\).*Memory"
    ):
        load_one_lane(config, mesh, Lane(1), PERFORMANCE)

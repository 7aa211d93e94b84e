"""Loading: sharded, tied and random weights, and folders that hold the wrong thing."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from replicas.errors import ModelLoadError
from replicas.generators.checkpoint import expected_weights
from replicas.generators.model_config import load_hf_config
from replicas.generators.protocol import CpuDevice
from replicas.generators.torch.loader import load_weights
from tests.replicas.generators.tiny_models import save_model

FLOAT32 = CpuDevice(torch.float32)


@pytest.fixture
def folder(tmp_path):
    save_model("llama-gqa", tmp_path)
    return tmp_path


def rewrite(folder, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def tensors(part):
    """Yield all tensors of weights, layers and linear layers, in order."""
    if part is None or isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from tensors(each)
    elif hasattr(part, "__dataclass_fields__"):
        for name in part.__dataclass_fields__:
            yield from tensors(getattr(part, name))


def same(one, two):
    pairs = zip(tensors(one), tensors(two), strict=True)
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


def test_sharded_weights_equal_those_of_one_file(folder, tmp_path_factory):
    sharded = tmp_path_factory.mktemp("sharded")
    save_model("llama-gqa", sharded, max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    whole = load_weights(load_hf_config(folder), FLOAT32)
    assert same(load_weights(load_hf_config(sharded), FLOAT32), whole)


def test_tied_embeddings_share_memory_even_when_the_file_repeats_them(tmp_path):
    save_model("llama-tied", tmp_path)

    def repeat(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    rewrite(tmp_path, repeat)
    weights = load_weights(load_hf_config(tmp_path), FLOAT32)
    assert weights.lm_head.weight is weights.embedding


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"missing in .*: model\.layers\.1\.mlp\.up_pr"),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(64), r"unexpected .*q_proj\.bias"),
        (
            "model.norm.weight",
            torch.ones(32),
            r"model\.norm\.weight \(32,\) instead of \(64,\) \(model\.safetensors\)",
        ),
        (
            "model.layers.2.mlp.up_proj.weight",
            torch.zeros(96, 64, dtype=torch.int8),
            r"layers\.2\.mlp\.up_proj\.weight is I8 instead of BF16 .*\(model\.safetensors\)",
        ),
    ],
    ids=["missing", "unexpected", "another shape", "another dtype"],
)
def test_a_weight_that_is_not_as_it_should_be_is_named(folder, name, value, message):
    def change(weights):
        weights.pop(name, None)
        weights.update({} if value is None else {name: value})

    rewrite(folder, change)
    with pytest.raises(ModelLoadError, match=message):
        load_weights(load_hf_config(folder), FLOAT32)


def test_a_file_without_its_end_is_refused_with_the_missing_bytes(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: its end is missing, 10 bytes"):
        load_weights(load_hf_config(folder), FLOAT32)


def test_many_missing_weights_are_counted(folder):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 5}))
    with pytest.raises(ModelLoadError, match=r"model\.layers\.3.* and 10 more"):
        load_weights(load_hf_config(folder), FLOAT32)


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        load_weights(load_hf_config(folder), FLOAT32)


NO_SHARD = '{"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}'


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", "not tensors", "cannot read the weights in"),
        ("model.safetensors.index.json", "{", "no usable weight_map"),
        ("model.safetensors.index.json", "{}", "no usable weight_map"),
        ("model.safetensors.index.json", '{"weight_map": []}', "no usable weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": {}}}', "no usable weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}', "no usable weight_map"),
        ("model.safetensors.index.json", "[" * 100_000, "no usable weight_map"),
        ("model.safetensors.index.json", NO_SHARD, "model-00002-of-00002"),
    ],
)
def test_a_broken_file_is_refused(folder, file, content, message):
    (folder / file).write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        load_weights(load_hf_config(folder), FLOAT32)


def test_random_weights_need_only_the_configuration_and_follow_the_seed(folder):
    (folder / "model.safetensors").unlink()
    config = load_hf_config(folder)

    def draw(seed, dtype=torch.float32):
        return load_weights(config, CpuDevice(dtype, load_format="random", seed=seed))

    first = draw(1)
    assert same(draw(1), first)
    assert not torch.equal(draw(2).embedding, first.embedding)
    assert torch.equal(draw(1, torch.bfloat16).embedding, first.embedding.bfloat16())
    assert first.layers[0].attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(
        first.layers[0].attention.qkv.weight, first.layers[1].attention.qkv.weight
    )
    assert first.final_norm.weight.eq(1).all()


@pytest.mark.parametrize("case", ["llama-biases", "qwen2", "qwen3", "mistral"])
def test_expected_names_and_shapes_are_those_that_transformers_saves(tiny, case):
    saved = load_file(tiny(case).folder / "model.safetensors")
    found = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    assert expected_weights(tiny(case).config) == found

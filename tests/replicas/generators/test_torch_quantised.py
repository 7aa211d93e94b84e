"""Quantised checkpoints give the logits of the weights that they stand for."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from replicas.errors import ConfigError, ModelLoadError
from replicas.generators.model_config import load_hf_config, parse_hf_config
from replicas.generators.protocol import CpuDevice
from replicas.generators.quantization import StoredSpec, read_quantization, stored_weights
from replicas.generators.torch.loader import load_weights
from tests.models import model_folder, reference_model
from tests.replicas.generators.conftest import make_generator
from tests.replicas.generators.paged_loop import PagedLoop
from tests.replicas.generators.quantised import (
    pack_compressed,
    pack_folder,
    pack_gptq,
    pack_mxfp4,
)

PROMPT = tuple(7 * i % 149 for i in range(1, 22))
TOLERANCE = 1e-4


@torch.no_grad()
def assert_logits_of(folder, plain):
    """The logits of an engine with one folder are those of transformers with the other."""
    config = load_hf_config(folder)
    generator = make_generator(config, max_batch_size=4, max_seq_len=64)
    loop = PagedLoop(generator, config, max_seq_len=64)
    [sequence] = loop.generate([PROMPT], 4)
    model = reference_model(str(plain), torch.float32)
    wanted = model(torch.tensor([sequence.token_ids[:-1]])).logits[0, -4:]
    assert (torch.stack(sequence.logits) - wanted).abs().max() < TOLERANCE


def is_stack(name):
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


@pytest.fixture(scope="module")
def mxfp4_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mxfp4") / "model"
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    source = Path(model_folder("gpt-oss"))
    pack_folder(source, folder, settings, is_stack, pack_mxfp4, "")
    return folder


def test_experts_in_mxfp4_are_read_as_what_they_stand_for(mxfp4_folder):
    assert_logits_of(mxfp4_folder, mxfp4_folder / "plain")


def test_scales_of_another_shape_are_named(mxfp4_folder, tmp_path):
    stored = load_file(mxfp4_folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    stored[name] = stored[name][..., :-1].contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((mxfp4_folder / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=r"1\.mlp\.experts\.down_proj_scales \(6, 64, 2\) ins"):
        load_weights(load_hf_config(tmp_path), CpuDevice(torch.float32))


def is_linear(name):
    return ".layers." in name and name.endswith("_proj.weight")


def packed_folder(tmp_path, case, settings, pack):
    folder = tmp_path / "model"
    pack_folder(Path(model_folder(case)), folder, settings, is_linear, pack, "weight")
    return folder


@pytest.mark.parametrize(
    ("case", "bits", "group", "is_shuffled", "is_symmetric", "form"),
    [
        ("llama-gqa", 4, 32, False, True, "gptq"),
        ("qwen2", 4, 16, True, False, "gptq"),
        ("llama-gqa", 8, -1, False, False, "gptq_v2"),
        ("qwen3-moe", 8, 16, True, True, None),
    ],
)
def test_gptq_is_read_as_what_it_stands_for(
    tmp_path, case, bits, group, is_shuffled, is_symmetric, form
):
    less = int(form != "gptq_v2")
    pack = partial(
        pack_gptq, bits=bits, group=group, is_shuffled=is_shuffled, is_symmetric=is_symmetric,
        less=less,
    )  # fmt: skip
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": is_shuffled}
    settings |= {"sym": is_symmetric} | ({} if form is None else {"checkpoint_format": form})
    folder = packed_folder(tmp_path, case, settings, pack)
    assert_logits_of(folder, folder / "plain")


def compressed(bits, group, form, **changes):
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel"}
    if group != -1:
        weights |= {"strategy": "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights | changes}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


@pytest.mark.parametrize(
    ("case", "bits", "group", "form"),
    [
        ("llama-gqa", 8, -1, "pack-quantized"),
        ("qwen2", 8, 16, "pack-quantized"),
        ("llama-biases", 4, 32, "pack-quantized"),
        ("llama-gqa", 8, -1, "int-quantized"),
    ],
)
def test_compressed_tensors_are_read_as_what_they_stand_for(tmp_path, case, bits, group, form):
    pack = partial(pack_compressed, bits=bits, group=group, is_packed=form == "pack-quantized")
    folder = packed_folder(tmp_path, case, compressed(bits, group, form), pack)
    assert_logits_of(folder, folder / "plain")


def test_activations_that_are_quantised_as_they_come_stay_floats(tmp_path):
    settings = compressed(8, -1, "int-quantized")
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    settings["config_groups"]["group_0"]["input_activations"] = activations
    pack = partial(pack_compressed, bits=8, group=-1, is_packed=False)
    folder = packed_folder(tmp_path, "llama-gqa", settings, pack)
    assert_logits_of(folder, folder / "plain")


PACK_GPTQ = partial(pack_gptq, bits=8, group=32, is_shuffled=False, is_symmetric=True, less=1)
GPTQ_SETTINGS = {"quant_method": "gptq", "bits": 8, "group_size": 32}


def test_biases_of_zeros_beside_quantised_weights_are_no_biases(tmp_path):
    """AutoGPTQ writes them."""
    folder = packed_folder(tmp_path, "llama-gqa", GPTQ_SETTINGS, PACK_GPTQ)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.bias"
    stored[name] = torch.zeros(96)
    save_file(stored, folder / "model.safetensors")
    assert_logits_of(folder, folder / "plain")
    stored[name][3] = 0.5
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"1\.mlp\.up_proj\.bias .* is not zero"):
        load_weights(load_hf_config(folder), CpuDevice(torch.float32))


def test_sizes_that_fill_no_word_are_refused_by_name():
    shapes = {"a.weight": (12, 64), "b.weight": (64, 12)}
    names = {"a.qweight": None, "b.qweight": None}
    quantization = read_quantization({"quantization_config": GPTQ_SETTINGS | {"bits": 4}}, "m")
    found = stored_weights(shapes, quantization, names)
    assert found == {name: {name: StoredSpec(shape)} for name, shape in shapes.items()}


def test_groups_that_have_no_scales_are_named(tmp_path):
    folder = packed_folder(tmp_path, "llama-gqa", GPTQ_SETTINGS, PACK_GPTQ)
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.1.mlp.up_proj.g_idx"] += 5
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"1\.mlp\.up_proj\.weight .* 5 to 6 .* of 2 groups"):
        load_weights(load_hf_config(folder), CpuDevice(torch.float32))


def test_a_packed_weight_of_another_shape_is_named(tmp_path):
    pack = partial(pack_compressed, bits=8, group=-1, is_packed=True)
    settings = compressed(8, -1, "pack-quantized")
    folder = packed_folder(tmp_path, "llama-gqa", settings, pack)
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.weight_shape"] = torch.tensor([96, 63])
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"up_proj\.weight_shape is \[96, 63\], .* \[96, 64\]"):
        load_weights(load_hf_config(folder), CpuDevice(torch.float32))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({"quant_method": method}, f"quantised by {method!r} are not supported")
          for method in ("fp8", "awq", "bitsandbytes", None)),
        ({"quant_method": "gptq", "bits": 3}, "by 'gptq' with bits 3 "),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0 is neither"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        (compressed(8, -1, "float-quantized"), "with format 'float-quantized'"),
        (compressed(8, -1, "pack-quantized", symmetric=False), "with symmetric False"),
        (compressed(8, -1, "pack-quantized", strategy="tensor"), "with strategy 'tensor'"),
        (compressed(8, 16, "pack-quantized", actorder="group"), "with actorder 'group'"),
        (compressed(8, -1, "int-quantized", type="float"), "with type 'float'"),
    ],
)  # fmt: skip
def test_other_methods_are_refused_by_name(tiny, settings, message):
    raw = tiny("llama-gqa").hf_config.to_dict() | {"quantization_config": settings}
    with pytest.raises(ConfigError, match=message):
        parse_hf_config(raw, "folder")

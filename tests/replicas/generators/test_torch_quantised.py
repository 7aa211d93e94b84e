"""Quantised checkpoints give the logits of the weights that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from replicas.errors import ConfigError, ModelLoadError
from replicas.generators.model_config import load_hf_config, parse_hf_config
from replicas.generators.protocol import CpuDevice
from replicas.generators.torch.loader import load_weights
from tests.models import model_folder, reference_model
from tests.replicas.generators.conftest import make_generator
from tests.replicas.generators.paged_loop import PagedLoop
from tests.replicas.generators.quantised import pack_folder, pack_mxfp4

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


@pytest.mark.parametrize("method", ["fp8", "awq", "bitsandbytes", None])
def test_other_methods_are_refused_by_name(tiny, method):
    raw = tiny("llama-gqa").hf_config.to_dict() | {"quantization_config": {"quant_method": method}}
    with pytest.raises(ConfigError, match=f"weights quantised by {method!r} are not supported"):
        parse_hf_config(raw, "folder")

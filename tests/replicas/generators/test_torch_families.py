"""Every model family gives the float32 logits and greedy tokens of transformers' own class."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from replicas.errors import ModelLoadError
from replicas.generators.model_config import load_hf_config
from replicas.generators.torch import latent
from tests.models import model_folder, reference_model
from tests.replicas.generators.conftest import PROMPTS, TinyModel, make_generator
from tests.replicas.generators.paged_loop import PagedLoop
from tests.replicas.generators.tiny_models import FAMILIES

TOLERANCE = 1e-4


def paged_loop(config, max_seq_len=64):
    generator = make_generator(config, max_seq_len=max_seq_len)
    loop = PagedLoop(generator, config, slots_per_lane=8, block_size=16, max_seq_len=max_seq_len)
    # A sequence must not read entries that were not written for it: all of them are NaN.
    loop.fill(math.nan)
    return loop


@torch.no_grad()
def reference_logits(case, token_ids):
    """Return (n, V) after each token; attention of the class that computes caps and sinks."""
    model = reference_model(model_folder(case), torch.float32)
    model.set_attn_implementation("eager")
    return model(torch.tensor([token_ids])).logits[0]


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("mixed", [False, True], ids=["apart", "mixed, chunked"])
def test_logits_and_tokens_are_those_of_transformers(case, mixed):
    loop = paged_loop(TinyModel(case).config)
    sequences = loop.generate(PROMPTS, 8, chunk=7 if mixed else None, mixed=mixed)
    for sequence in sequences:
        wanted = reference_logits(case, sequence.token_ids[:-1])[-8:]
        found = torch.stack(sequence.logits)
        assert (found - wanted).abs().max() < TOLERANCE
        assert sequence.output == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("mixed", [False, True], ids=["apart", "mixed, chunked"])
def test_keys_and_values_made_of_latents_head_by_head_are_the_same(monkeypatch, mixed):
    """These prompts would attend to latents, and all heads expand them at once."""
    monkeypatch.setattr(latent, "_MOST_ABSORBED", 1)
    monkeypatch.setattr(latent, "_MOST_EXPANDED", 1)
    test_logits_and_tokens_are_those_of_transformers("deepseek-v2", mixed)


def test_latents_wider_than_the_kernels_take_are_computed_in_batches(monkeypatch, caplog):
    prefix, sizes = FAMILIES["deepseek-v2"]
    # Keys that are sums of so many products would be large, and their scores inexact.
    wide = {**sizes, "kv_lora_rank": 1040, "initializer_range": 0.05}
    monkeypatch.setitem(FAMILIES, "deepseek-wide", (prefix, wide))
    test_logits_and_tokens_are_those_of_transformers("deepseek-wide", mixed=True)
    assert "without the C kernels, several times slower: keys of 1048 numbers" in caplog.text


def test_the_correction_of_scores_is_not_rounded(tmp_path):
    """In bfloat16 all of these corrections would be 1, and the first experts would win."""
    folder = tmp_path / "v3"
    shutil.copytree(model_folder("deepseek-v3"), folder)
    stored = load_file(folder / "model.safetensors")
    config = load_hf_config(folder)
    for name, weight in stored.items():
        if name.endswith("mlp.gate.weight"):
            weight.zero_()
        elif name.endswith("e_score_correction_bias"):
            stored[name] = 1.0 + 1e-3 * torch.arange(8.0)
    save_file(stored, folder / "model.safetensors")
    generator = make_generator(config, torch.bfloat16, max_seq_len=64)
    loop = PagedLoop(generator, config, slots_per_lane=8, max_seq_len=64, dtype=torch.bfloat16)
    loop.generate(PROMPTS, 2)
    num_tokens = generator.expert_load().num_tokens
    per_token = config.experts.num_per_token
    assert (num_tokens[:, -per_token:] > 0).all()
    assert not num_tokens[:, :-per_token].any()


def test_layers_that_only_draft_tokens_are_not_read(tmp_path):
    """Checkpoints of DeepSeek-V3 have one."""
    folder = tmp_path / "v3"
    shutil.copytree(model_folder("deepseek-v3"), folder)
    stored = load_file(folder / "model.safetensors")
    last = load_hf_config(folder).num_hidden_layers
    stored[f"model.layers.{last}.eh_proj.weight"] = torch.zeros(2, 2)
    save_file(stored, folder / "model.safetensors")
    make_generator(load_hf_config(folder))
    values = json.loads((folder / "config.json").read_text())
    assert values["num_nextn_predict_layers"] == 1
    (folder / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelLoadError, match="eh_proj"):
        make_generator(load_hf_config(folder))


def test_tensors_of_drafting_layers_by_their_other_name_are_not_read(tmp_path):
    """Checkpoints of Qwen3-Next have them."""
    folder = tmp_path / "next"
    shutil.copytree(model_folder("qwen3-next"), folder)
    stored = load_file(folder / "model.safetensors")
    stored["mtp.fc.weight"] = torch.zeros(2, 2)
    save_file(stored, folder / "model.safetensors")
    make_generator(load_hf_config(folder))


def test_an_engine_with_long_sequences_takes_the_long_factors_of_longrope():
    """Transformers takes the short ones until a sequence is over the original length."""
    loop = paged_loop(TinyModel("phi4-long").config, max_seq_len=80)
    [sequence] = loop.generate([range(1, 70)], 4)
    wanted = reference_logits("phi4-long", sequence.token_ids[:-1])[-4:]
    assert (torch.stack(sequence.logits) - wanted).abs().max() < TOLERANCE

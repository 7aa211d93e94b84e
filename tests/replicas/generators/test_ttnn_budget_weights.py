"""Bytes of weights on a chip, from the parameters that transformers makes of a configuration."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from replicas.generators.model_config import parse_hf_config
from replicas.generators.ttnn.budget import weight_bytes_per_chip
from replicas.generators.ttnn.profiles import ACCURACY
from tests.replicas.generators.test_ttnn_budget import LLAMA_8B, QWEN3_8B, QWEN_7B, QWEN_HALF_B

BYTES, TILE = 2, 32
"""Of an element of bfloat16; rows of a tile, of which a vector fills one."""


def parameters(raw):
    """Name -> shape of every parameter; the output layer too where it is the embedding."""
    architecture = raw["architectures"][0].removesuffix("ForCausalLM").lower()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **raw))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    return {"lm_head.weight": shapes["model.embed_tokens.weight"], **shapes}


def bytes_on_a_chip(name, shape, tp):
    """Return a parameter's bytes in the layout of replicas/generators/ttnn/weights.py."""
    if len(shape) == 1:
        is_split = name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))
        return BYTES * TILE * shape[0] // (tp if is_split else 1)
    rows, columns = shape
    if name in ("lm_head.weight", "model.embed_tokens.weight"):
        rows = -(-rows // (TILE * tp)) * TILE
        # The embedding has a row of zeros for tokens of other chips.
        return BYTES * columns * (rows + (name != "lm_head.weight"))
    return BYTES * rows * columns // tp


@pytest.mark.parametrize(
    ("raw", "tp"),
    [
        (LLAMA_8B, 1),
        (LLAMA_8B, 8),
        (QWEN_HALF_B, 2),
        (QWEN_7B, 4),
        (QWEN3_8B, 1),
        (QWEN3_8B, 2),
        ({**LLAMA_8B, "num_hidden_layers": 3, "vocab_size": 170}, 8),
    ],
)
def test_weights_are_those_of_transformers(raw, tp):
    model = parse_hf_config(raw, "model")
    expected = sum(bytes_on_a_chip(name, shape, tp) for name, shape in parameters(raw).items())
    assert weight_bytes_per_chip(model, ACCURACY, tp) == expected

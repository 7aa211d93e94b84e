"""Fixtures: tiny models on disk, what transformers generates with them, and generators of ours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from replicas.generators.model_config import load_hf_config
from replicas.generators.protocol import CpuDevice
from replicas.generators.torch.generator import TorchGenerator
from tests.replicas.generators.tiny_models import CASES, in_true_float64, save_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from replicas.generators.model_config import ModelConfig

PROMPTS = (
    tuple(range(1, 38)),
    (5, 9, 3),
    (11,),
    tuple(7 * i % 149 for i in range(1, 22)),
    tuple(13 * i % 151 for i in range(2, 34)),
)
"""Lengths 37, 3, 1, 21 and 32: inside, across and at the end of blocks of 16 and 32."""
NUM_NEW = 12


@dataclass(frozen=True)
class TinyModel:
    """A model folder and what transformers says about it.

    Attributes:
        folder: Saved by transformers.
        config: Our reading of it.
        outputs: Per prompt, ``NUM_NEW`` greedy float32 tokens.
        margin: Smallest gap between the best and the second logit on the way.
        hf_config: The transformers configuration.
        inv_freq: The rotary frequencies that transformers uses.
        oracle: token ids -> float64 logits (n, V), computed in float64 throughout.
    """

    folder: Path
    config: ModelConfig
    outputs: list[list[int]]
    margin: float
    hf_config: Any
    inv_freq: torch.Tensor
    oracle: Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Make each case once."""

    @cache
    def make(case: str) -> TinyModel:
        folder = tmp_path_factory.mktemp(case)
        model = save_model(case, folder)
        outputs, margins = [], []
        for prompt in PROMPTS:
            result = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NUM_NEW,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            outputs.append(result.sequences[0, len(prompt) :].tolist())
            best = torch.cat(result.logits).topk(2).values
            margins.append((best[:, 0] - best[:, 1]).min().item())
        inv_freq = model.model.rotary_emb.inv_freq.clone()
        hf_config = model.config
        oracle_model = in_true_float64(model)

        @torch.no_grad()
        def oracle(token_ids: list[int]) -> torch.Tensor:
            logits: torch.Tensor = oracle_model(torch.tensor([token_ids])).logits[0]
            return logits

        return TinyModel(
            folder, load_hf_config(folder), outputs, min(margins), hf_config, inv_freq, oracle
        )

    return make


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest, tiny: Callable[[str], TinyModel]) -> TinyModel:
    """Every case in turn."""
    return tiny(request.param)


def make_generator(
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    *,
    max_batch_size: int = 8,
    max_seq_len: int = 128,
    tt_data_parallel: int = 1,
    **device: Any,
) -> TorchGenerator:
    """Load a torch generator."""
    return TorchGenerator.initialize_vllm_model(
        config,
        CpuDevice(dtype, **device),
        max_batch_size,
        max_seq_len=max_seq_len,
        tt_data_parallel=tt_data_parallel,
    )

"""Fixtures: tiny models on disk, transformers' outputs for them, and generators of ours."""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig

from replicas.generators.model_config import load_hf_config
from replicas.generators.protocol import CpuDevice
from replicas.generators.torch.generator import TorchGenerator
from tests.models import model_folder, oracle_of_all, reference_model, references
from tests.replicas.generators.tiny_models import CASES

if TYPE_CHECKING:
    from collections.abc import Callable

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


class TinyModel:
    """A model folder, and transformers' view and outputs of it.

    Attributes:
        folder: Saved by transformers.
        config: Our reading of it.
        hf_config: That of transformers.
    """

    def __init__(self, case: str) -> None:
        self.folder = Path(model_folder(case))
        self.config = load_hf_config(self.folder)
        self.hf_config = AutoConfig.from_pretrained(self.folder)

    @cached_property
    def outputs(self) -> list[list[int]]:
        """Per prompt, ``NUM_NEW`` greedy float32 tokens."""
        return [r.token_ids for r in references(str(self.folder), PROMPTS, NUM_NEW)]

    @property
    def inv_freq(self) -> torch.Tensor:
        """The rotary frequencies that transformers uses."""
        rotary = reference_model(str(self.folder), torch.float32).model.rotary_emb
        return rotary.inv_freq

    def oracle(self, token_ids: list[int]) -> torch.Tensor:
        """Return float64 logits (n, V) after each token, computed in float64 throughout."""
        return oracle_of_all(str(self.folder), torch.float32, token_ids)


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], TinyModel]:
    """Make each case once."""
    return cache(TinyModel)


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

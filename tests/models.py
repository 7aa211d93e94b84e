"""Tiny random-weight model folders, made once per session, and what transformers says of them."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

from tests.replicas.generators.tiny_models import in_true_float64, save_model
from tests.replicas.test_tokenizer import make_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB_SIZE = 160
MARGIN = 1e-4
"""Where the best two float32 logits are closer than this, either token is right."""


@cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="tiny-models-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@cache
def model_folder(case: str) -> str:
    """A folder of one of `tiny_models.CASES`, saved by transformers in float32."""
    folder = _root() / case
    save_model(case, folder)
    return str(folder)


@cache
def chat_folder() -> str:
    """A folder with a byte-level tokenizer and a chat template; token 1, "</s>", ends a text."""
    folder = _root() / "chat"
    template = (
        "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|user|>{% endif %}"
    )
    make_folder(folder, {"chat_template": template})
    config = transformers.LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@dataclass(frozen=True)
class Reference:
    """What transformers generates greedily for one prompt.

    Attributes:
        token_ids: The output.
        margins: For each of them the gap between the best two logits.
    """

    token_ids: list[int]
    margins: list[float]


@cache
def reference_model(folder: str, dtype: torch.dtype):
    """A model as transformers loads it; all tests share it: change nothing."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@cache
def _generate(folder: str, dtype: torch.dtype, prompt: tuple[int, ...], num_new: int) -> Reference:
    result = reference_model(folder, dtype).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(result.logits).float().topk(2).values
    token_ids = result.sequences[0, len(prompt) :].tolist()
    return Reference(token_ids, (best[:, 0] - best[:, 1]).tolist())


def references(
    folder: str,
    prompts: Sequence[Sequence[int]],
    num_new: int,
    dtype: torch.dtype = torch.float32,
) -> list[Reference]:
    """What transformers generates for each prompt by itself."""
    return [_generate(folder, dtype, tuple(prompt), num_new) for prompt in prompts]


@torch.no_grad()
def reference_logits(folder: str, dtype: torch.dtype, token_ids: Sequence[int]) -> torch.Tensor:
    """(V,) logits after these tokens as transformers computes them in `dtype`."""
    model = reference_model(folder, dtype)
    logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0, -1]
    return logits


@cache
def _oracle(folder: str, dtype: torch.dtype):
    # Loaded anew: the model is changed for good, and its weights are those that `dtype` can hold.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return in_true_float64(model)


@torch.no_grad()
def oracle_of_all(folder: str, dtype: torch.dtype, token_ids: Sequence[int]) -> torch.Tensor:
    """(n, V) float64 logits after each of these tokens; the weights are what `dtype` can hold."""
    logits: torch.Tensor = _oracle(folder, dtype)(torch.tensor([list(token_ids)])).logits[0]
    return logits


def oracle_logits(folder: str, dtype: torch.dtype, token_ids: Sequence[int]) -> torch.Tensor:
    """(V,) float64 logits after all of these tokens."""
    return oracle_of_all(folder, dtype, token_ids)[-1]

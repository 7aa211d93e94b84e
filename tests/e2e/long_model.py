"""A tiny model with a long context, so that texts of megabytes are not refused by their length."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
import transformers

from tests.cluster.engines import TINY
from tests.e2e import harness

MAX_MODEL_LEN = 131_072


@cache
def long_model_folder() -> Path:
    """A random-weights Llama with the demo model's tokenizer, which splits digits one by one."""
    folder = Path(tempfile.mkdtemp(prefix="long-model-")) / "tiny"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    demo = harness.REPOSITORY / "configs" / "demo-model"
    vocab_size = json.loads((demo / "config.json").read_text())["vocab_size"]
    config = transformers.LlamaConfig(
        **{**TINY, "max_position_embeddings": MAX_MODEL_LEN}, vocab_size=vocab_size, eos_token_id=1
    )
    torch.manual_seed(7)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder)
    return folder

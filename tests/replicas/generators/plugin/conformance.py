"""The model, prompts, settings and engines of the tests with doubles of plug-in classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replicas.generators.simulated.tokens import expected_tokens
from replicas.platforms import mesh as platform
from tests.engines import make_config
from tests.replicas.generators.plugin.doubles import (
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_LAYERS,
    VOCAB_SIZE,
    Mesh,
    WrappedMesh,
)

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from replicas.config import MeshConfig

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
NUM_SLOTS, BLOCK_SIZE, MAX_SEQ_LEN = 4, 32, 128


def make_prompt(start: int, length: int) -> list[int]:
    """Tokens that count up, short to print."""
    return [1 + (start + i) % (VOCAB_SIZE - 1) for i in range(length)]


def expect(prompt: list[int], num_tokens: int) -> list[int]:
    """Return the tokens of a double's model after a prompt."""
    return expected_tokens(prompt, num_tokens, VOCAB_SIZE, ())


def open_doubles(monkeypatch: pytest.MonkeyPatch, num_chips: int) -> list[tuple[Any, WrappedMesh]]:
    """Let engines open doubles of meshes with so many chips; return (request, mesh) of each."""
    opened: list[tuple[Any, WrappedMesh]] = []

    def open_mesh(settings: MeshConfig, **_arguments: object) -> WrappedMesh:
        opened.append((settings, WrappedMesh(Mesh(num_chips))))
        return opened[-1][1]

    monkeypatch.setattr(platform, "_import_open_mesh", lambda _mesh: open_mesh)
    return opened


def engine_config(folder: Path, generator: str, mesh: MeshConfig | None, **changes: Any) -> Any:
    """An engine whose sequences do not all fit into its blocks."""
    settings = {
        "dtype": "auto", "mesh": mesh, "max_batch_size": NUM_SLOTS, "max_model_len": MAX_SEQ_LEN,
        "block_size": BLOCK_SIZE, "num_blocks": 9, "max_num_batched_tokens": MAX_SEQ_LEN,
    }  # fmt: skip
    return make_config(str(folder), generator=generator, **{**settings, **changes})

"""The demo model's network while it learns: a Llama in bfloat16 over float32 weights.

Differs from a serving model in three ways: dropout, no KV cache, and an attention that is spelled
out for short rows, where it is faster than the library's. Its weights are saved under Hugging Face
names, so that the library's own Llama is measured and served afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

_SPELLED_OUT_ATTENTION_UP_TO = 256


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the network; every width is a multiple of 32."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_positions: int = 2048


class TrainingLlama(nn.Module):
    """Llama with tied embeddings that returns logits for rows of token ids.

    Args:
        shape: the sizes.
        dropout: share of the values dropped after the embedding, each attention and each MLP; it is
            rounded to a 256th.
    """

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = _matrix(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        self.dropped_bytes = round(256 * dropout)

    def noise_shape(self, rows: int, length: int) -> tuple[int, int, int, int]:
        """Return the shape of the noise that `forward` takes: one mask per place of dropout."""
        return (1 + 2 * len(self.layers), rows, length, self.shape.hidden_size)

    def forward(self, ids: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return float32 logits (rows, length, vocab) for int64 ids (rows, length).

        Args:
            ids: the rows.
            noise: uniform uint8 of `noise_shape` that selects dropped values; None drops none.
        """
        cos, sin = _rotation(self.shape, ids.shape[1])
        hidden = functional.embedding(ids, self.embedding).bfloat16()
        masks: list[Tensor | None] = [None] * (1 + 2 * len(self.layers))
        if noise is not None:
            # Bytes that the caller draws: a generator inside a compiled network is slow.
            kept = (noise >= self.dropped_bytes) / (1 - self.dropped_bytes / 256)
            masks = list(kept.bfloat16())
        hidden = _drop(hidden, masks[0])
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, cos, sin, masks[1 + 2 * index], masks[2 + 2 * index])
        hidden = _rms_norm(hidden, self.norm, self.shape.rms_norm_eps)
        return functional.linear(hidden, self.embedding.bfloat16()).float()

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the weight matrices inside the layers (what Muon updates)."""
        return [weight for weight in self.layers.parameters() if weight.ndim == 2]

    def other_parameters(self) -> list[nn.Parameter]:
        """Return the embedding and the norms (what Adam updates)."""
        return [self.embedding, self.norm, *(w for w in self.layers.parameters() if w.ndim == 1)]

    def hugging_face_weights(self) -> dict[str, Tensor]:
        """Return bfloat16 copies of all weights under the names of `LlamaForCausalLM`."""
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        for index, layer in enumerate(self.layers):
            for name, weight in layer.named_parameters():
                named[f"model.layers.{index}.{_HUGGING_FACE_NAMES[name]}.weight"] = weight
        return {name: weight.detach().bfloat16().contiguous() for name, weight in named.items()}


_HUGGING_FACE_NAMES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


class _Layer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        width, heads, kv_heads = shape.hidden_size, shape.num_heads, shape.num_kv_heads
        self.query = _matrix(heads * shape.head_dim, width)
        self.key = _matrix(kv_heads * shape.head_dim, width)
        self.value = _matrix(kv_heads * shape.head_dim, width)
        # The two matrices that write to the residual stream start smaller, as deep as the stack is.
        residual_scale = (2 * shape.num_layers) ** -0.5
        self.output = _matrix(width, heads * shape.head_dim, residual_scale)
        self.gate = _matrix(shape.intermediate_size, width)
        self.up = _matrix(shape.intermediate_size, width)
        self.down = _matrix(width, shape.intermediate_size, residual_scale)
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.mlp_norm = nn.Parameter(torch.ones(width))

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention_mask: Tensor | None,
        mlp_mask: Tensor | None,
    ) -> Tensor:
        """Return the residual stream (rows, length, hidden) after attention and MLP."""
        rows, length, _ = hidden.shape
        shape = self.shape
        normed = _rms_norm(hidden, self.attention_norm, shape.rms_norm_eps)
        weights = torch.cat((self.query, self.key, self.value)).bfloat16()
        heads = functional.linear(normed, weights).view(rows, length, -1, shape.head_dim)
        heads = heads.transpose(1, 2)
        query, key, value = torch.split(
            heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1
        )
        attended = _attention(_rotate(query, cos, sin), _rotate(key, cos, sin), value)
        attended = attended.transpose(1, 2).reshape(rows, length, -1)
        attended = functional.linear(attended, self.output.bfloat16())
        hidden = hidden + _drop(attended, attention_mask)
        normed = _rms_norm(hidden, self.mlp_norm, shape.rms_norm_eps)
        weights = torch.cat((self.gate, self.up)).bfloat16()
        gate, up = functional.linear(normed, weights).chunk(2, dim=-1)
        mixed = functional.linear(functional.silu(gate) * up, self.down.bfloat16())
        return hidden + _drop(mixed, mlp_mask)


def _drop(hidden: Tensor, mask: Tensor | None) -> Tensor:
    return hidden if mask is None else hidden * mask


def _matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * 0.02 * scale)


def _rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).bfloat16()


def _rotation(shape: ModelShape, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (length, head_dim) in the layout of Hugging Face (two halves)."""
    pairs = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-pairs)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = heads.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(heads.dtype)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention (rows, heads, length, head_dim), KV heads shared in groups."""
    rows, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    if length > _SPELLED_OUT_ATTENTION_UP_TO:
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    scores = query.reshape(rows, kv_heads, group * length, head_dim) @ key.transpose(-1, -2)
    scores = scores.view(rows, kv_heads, group, length, length).float() * head_dim**-0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -1e9).softmax(dim=-1).to(query.dtype)
    mixed: Tensor = weights.view(rows, kv_heads, group * length, length) @ value
    return mixed.view(rows, heads, length, head_dim)

"""The forward pass of Llama, Mistral, Qwen2 and Qwen3 over a paged KV cache.

One pass serves prefill chunks and decodes alike. The order of operations and of casts is that of
transformers, so that float32 results agree.

Dimensions: T tokens, H query heads, G KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from replicas.generators.torch.rope import RopeTable, rotate

if TYPE_CHECKING:
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import LayerCallback
    from replicas.generators.torch.attention import AttentionBackend
    from replicas.generators.torch.inputs import PagedBatch
    from replicas.generators.torch.kv_cache import TorchKVCache
    from replicas.generators.torch.loader import LayerWeights, ModelWeights


class PagedTransformer:
    """A decoder model.

    Owner: nothing that changes but the attention back end's scratch; the KV cache is the caller's.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        max_seq_len: int,
        attention: AttentionBackend,
    ) -> None:
        self._config = config
        self._weights = weights
        self._attention = attention
        self._rope = RopeTable(config.rope, config.head_dim, max_seq_len, weights.embedding.dtype)

    def forward(
        self,
        batch: PagedBatch,
        cache: TorchKVCache,
        before_layer: LayerCallback | None = None,
        after_layer: LayerCallback | None = None,
    ) -> torch.Tensor:
        """Compute every token, write its KV, and return the wanted logits.

        Args:
            batch: The tokens of the pass.
            cache: Written at ``batch.kv_positions``, read through ``batch.block_table``.
            before_layer: Called with each layer's index before its attention and any write.
            after_layer: Called with each layer's index after its attention.

        Returns:
            (len(batch.logits_indices), V) in the model's dtype.
        """
        config, weights = self._config, self._weights
        eps, head_dim = config.rms_norm_eps, config.head_dim
        x = functional.embedding(batch.input_ids, weights.embedding)
        cos, sin = self._rope.at(batch.positions)
        kv_rows = _kv_rows(batch.kv_positions, cache)
        attend = self._attention.prepare(batch, cache)
        cache.mark_written(batch.kv_positions.numpy() // cache.block_size)
        for index, layer in enumerate(weights.layers):
            q, kv = self._project(_rms_norm(x, layer.input_norm, eps), layer, cos, sin)
            if before_layer is not None:
                before_layer(index)
            cache.layers[index].view(-1, head_dim).index_copy_(0, kv_rows, kv.view(-1, head_dim))
            attended = attend(index, q, kv).flatten(1)
            if after_layer is not None:
                after_layer(index)
            if index == len(weights.layers) - 1:
                # Nothing reads the other tokens any more.
                attended, x = (_wanted(part, batch.logits_indices) for part in (attended, x))
            x = layer.o.plus(attended, x)
            normed = _rms_norm(x, layer.post_norm, eps)
            x = layer.down.plus(layer.up.times(normed, layer.gate.swish(normed)), x)
        last = _rms_norm(x, weights.final_norm, eps)
        # Made outside inference mode: callers may then change their logits in place.
        with torch.inference_mode(mode=False), torch.no_grad():
            return weights.lm_head(last)

    def _project(
        self, x: torch.Tensor, layer: LayerWeights, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries (T, H, D) and keys, then values (T, 2 * G, D); queries, keys rotated."""
        config = self._config
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        heads = layer.qkv(x).view(len(x), num_heads + 2 * num_kv_heads, config.head_dim)
        qk = heads[:, : num_heads + num_kv_heads]
        plain = qk
        if layer.qk_norm is not None:
            plain = _rms_norm(qk, layer.qk_norm, config.rms_norm_eps)
        rotate(plain, cos, sin, out=qk)
        return heads[:, :num_heads], heads[:, num_heads:].contiguous()


def _wanted(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    if len(indices) == len(rows) and torch.equal(indices, torch.arange(len(rows))):
        return rows
    return rows.index_select(0, indices)


def _kv_rows(kv_positions: torch.Tensor, cache: TorchKVCache) -> torch.Tensor:
    """Rows (T * 2 * G,) of a layer seen as (2 * P * G * S, D) that tokens' keys and values are."""
    num_blocks, num_kv_heads, block_size, _ = cache.planes[0][0].shape
    blocks = kv_positions // block_size
    offsets = kv_positions - blocks * block_size
    heads = torch.arange(num_kv_heads)
    rows = (blocks[:, None] * num_kv_heads + heads) * block_size + offsets[:, None]
    return torch.cat((rows, rows + num_blocks * num_kv_heads * block_size), dim=1).view(-1)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension; rounded before the weight is applied, as transformers does."""
    return functional.rms_norm(x, x.shape[-1:], eps=eps) * weight

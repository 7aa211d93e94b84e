"""The forward pass of Llama, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE over a paged KV cache.

One pass serves prefill chunks and decodes alike. The order of operations and of casts is that of
transformers, so that float32 results agree.

Dimensions: T tokens, S wanted tokens, N hidden size, H query heads, G KV heads, D head size,
V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from replicas.generators.torch.plain import TokenPlaces
from replicas.generators.torch.rope import rope_table

if TYPE_CHECKING:
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import LayerCallback
    from replicas.generators.torch.attention import AttentionBackend
    from replicas.generators.torch.inputs import PagedBatch
    from replicas.generators.torch.kv_cache import TorchKVCache
    from replicas.generators.torch.loader import ModelWeights
    from replicas.generators.torch.stack import LayerStack

    _Callbacks: TypeAlias = tuple[LayerCallback | None, LayerCallback | None]


class PagedTransformer:
    """A decoder model.

    Owner: nothing that changes; the KV cache is the caller's.
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
        dtype = weights.embedding.dtype
        self._rope = rope_table(config.rope, config.head_dim, max_seq_len, dtype)
        self._stack: LayerStack | None = None
        if attention.is_compiled:
            # Where nothing can be compiled it cannot be loaded, either.
            from replicas.generators.torch.stack import LayerStack

            if LayerStack.can_run(weights):
                self._stack = LayerStack(config, weights, self._rope)

    @property
    def is_one_call(self) -> bool:
        """Return whether a pass is one call."""
        return self._stack is not None

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
        return self.compute_logits(self.forward_hidden(batch, cache, before_layer, after_layer))

    def forward_hidden(
        self,
        batch: PagedBatch,
        cache: TorchKVCache,
        before_layer: LayerCallback | None = None,
        after_layer: LayerCallback | None = None,
    ) -> torch.Tensor:
        """Do the same as ``forward``, but return the hidden states of the wanted tokens.

        Returns:
            (len(batch.logits_indices), N) in the model's dtype, normed.
        """
        weights, kernels = self._weights, self._attention.kernels
        self._check(batch, cache)
        x = functional.embedding(batch.input_ids, weights.embedding)
        run = self._run_one_by_one if self._stack is None else self._run_stack
        last = run(x, batch, cache, (before_layer, after_layer))
        return kernels.rms_norm(last, weights.final_norm, self._config.rms_norm_eps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (S, V) of hidden states (S, N) from ``forward_hidden``."""
        # Made outside inference mode: callers may then change their logits in place.
        with torch.inference_mode(mode=False), torch.no_grad():
            return self._weights.lm_head(hidden)

    def _run_stack(
        self, x: torch.Tensor, batch: PagedBatch, cache: TorchKVCache, around: _Callbacks
    ) -> torch.Tensor:
        """Run all layers in one call, or one call each for a long pass with layer callbacks."""
        assert self._stack is not None
        layers = range(len(self._weights.layers))
        indices = batch.logits_indices.numpy()
        is_in_order = bool((indices[1:] > indices[:-1]).all())
        # Indices of an engine are always in order; only other callers need the sort.
        wanted, order = (indices, None) if is_in_order else np.unique(indices, return_inverse=True)
        plan = self._stack.plan(batch, wanted)
        before_layer, after_layer = around
        is_one = around == (None, None) or self._stack.is_short(len(x))
        for some in [layers] if is_one else [layers[index : index + 1] for index in layers]:
            _tell(before_layer, some)
            x = self._stack.run(x, batch, cache, some, plan)
            _tell(after_layer, some)
        return x if order is None else x.index_select(0, torch.from_numpy(order))

    def _run_one_by_one(
        self, x: torch.Tensor, batch: PagedBatch, cache: TorchKVCache, around: _Callbacks
    ) -> torch.Tensor:
        """Run operation by operation, each divided among the threads."""
        before_layer, after_layer = around
        config, weights, kernels = self._config, self._weights, self._attention.kernels
        eps = config.rms_norm_eps
        places = TokenPlaces(*self._rope, batch.positions, batch.kv_positions)
        attend = self._attention.prepare(batch, cache)
        for index, layer in enumerate(weights.layers):
            heads = layer.qkv(kernels.rms_norm(x, layer.input_norm, eps))
            heads = heads.view(len(x), -1, config.head_dim)
            if before_layer is not None:
                before_layer(index)
            kernels.rotate_and_store(heads, places, cache.planes[index], layer.qk_norm, eps)
            attended = attend(index, heads[:, : config.num_attention_heads]).flatten(1)
            if after_layer is not None:
                after_layer(index)
            if index == len(weights.layers) - 1:
                # Nothing reads the other tokens any more.
                attended, x = (_wanted(part, batch.logits_indices) for part in (attended, x))
            x = layer.o.plus(attended, x)
            normed = kernels.rms_norm(x, layer.post_norm, eps)
            x = layer.mlp_plus(normed, x)
        return x

    def serve_experts(self) -> None:
        """Take part in a pass of the ranks that share out the experts, with no token."""
        nothing = self._weights.embedding[:0]
        for layer in self._weights.layers:
            layer.mlp_plus(nothing, nothing)

    def _check(self, batch: PagedBatch, cache: TorchKVCache) -> None:
        """Check all indices, as kernels do not check bounds.

        Raises:
            IndexError: A position or a block does not exist.
        """
        num_blocks = len(cache.planes[0][0])
        limits = (
            ("position", batch.positions.numpy(), len(self._rope[0])),
            ("KV position", batch.kv_positions.numpy(), num_blocks * cache.block_size),
            ("block", batch.block_table, num_blocks),
        )
        starts, num_tokens = batch.query_start_loc, len(batch.input_ids)
        counts = np.diff(starts)
        is_whole = starts[0] == 0 and starts[-1] == num_tokens and counts.min(initial=0) >= 0
        if not is_whole or {len(batch.positions), len(batch.kv_positions)} != {num_tokens}:
            raise IndexError(f"requests from {starts}, of {num_tokens} tokens")
        if {len(batch.block_table), len(batch.seq_lens)} != {len(counts)}:
            raise IndexError(f"tables and lengths of other than {len(counts)} requests")
        for name, found, limit in limits:
            if found.min() < 0 or found.max() >= limit:
                raise IndexError(f"{name} {found.min()} to {found.max()}, of {limit}")
        wanted = batch.logits_indices.numpy()
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= num_tokens):
            raise IndexError(f"logits of tokens {wanted}, of {num_tokens}")
        held = batch.block_table.shape[1] * cache.block_size
        if (batch.seq_lens < np.maximum(counts, 1)).any() or batch.seq_lens.max() > held:
            raise IndexError(f"sequences of {batch.seq_lens} tokens in blocks for {held}")


def _tell(callback: LayerCallback | None, layers: range) -> None:
    if callback is not None:
        for index in layers:
            callback(index)


def _wanted(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    if len(indices) == len(rows) and torch.equal(indices, torch.arange(len(rows))):
        return rows
    return rows.index_select(0, indices)

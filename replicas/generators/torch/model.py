"""The forward pass of a decoder model over a paged KV cache.

One pass serves prefill chunks and decodes alike. Layers are computed one by one by their own
operators, or all in one call where compiled code can.

Dimensions: T tokens, S wanted tokens, N hidden size, H query heads, G KV heads, D head size,
V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from replicas.generators.protocol import ExpertLoad
from replicas.generators.torch.attention import BatchedAttention
from replicas.generators.torch.delta import DeltaRule
from replicas.generators.torch.experts import Experts
from replicas.generators.torch.forward_pass import ForwardPass
from replicas.generators.torch.plain import TokenPlaces
from replicas.generators.torch.rope import rope_table
from replicas.generators.torch.states import state_places

if TYPE_CHECKING:
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import LayerCallback
    from replicas.generators.torch.attention import AttentionBackend
    from replicas.generators.torch.inputs import Int64Array, PagedBatch
    from replicas.generators.torch.kv_cache import TorchKVCache
    from replicas.generators.torch.loader import ModelWeights
    from replicas.generators.torch.stack import LayerStack
    from replicas.generators.torch.states import StatePlaces

    _Callbacks: TypeAlias = tuple[LayerCallback | None, LayerCallback | None]
    _Part: TypeAlias = tuple[range, LayerStack | None]


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
        mlps = (layer.mlp for layer in weights.layers)
        self._experts = [mlp for mlp in mlps if isinstance(mlp, Experts)]
        self._attention = attention
        self._plain = BatchedAttention()
        dtype = weights.embedding.dtype
        parts = [layer.attention for layer in weights.layers]
        specs = (part.spec for part in parts if not isinstance(part, DeltaRule))
        self._ropes = {
            (rope, size): rope_table(rope, size, max_seq_len, dtype)
            for rope, size in dict.fromkeys((spec.rope, spec.head_dim) for spec in specs)
        }
        self._recurrent = next((i for i, p in enumerate(parts) if isinstance(p, DeltaRule)), None)
        """The first recurrent layer. All are in one KV group."""
        self._max_seq_len = max_seq_len
        self._scale = torch.tensor(config.embedding_scale, dtype=dtype)
        self._parts = self._divide()
        """Consecutive layers, and what computes them in one call if anything does."""

    def _divide(self) -> list[_Part]:
        """Divide the layers into runs that compiled code computes, and the others."""
        layers = self._weights.layers
        if not self._attention.is_compiled:
            return [(range(len(layers)), None)]
        # Without compiled code it cannot be loaded, either.
        from replicas.generators.torch.stack import LayerStack, claim

        parts: list[_Part] = []
        done = 0
        for run in claim(layers):
            if run.start > done:
                parts.append((range(done, run.start), None))
            dense = layers[run.start].as_dense()
            assert dense is not None, "a claimed layer is of Llama's form"
            rope = self._ropes[dense.spec.rope, dense.spec.head_dim]
            parts.append((run, LayerStack(layers, run, rope, self._config.rms_norm_eps)))
            done = run.stop
        if done < len(layers):
            parts.append((range(done, len(layers)), None))
        return parts

    @property
    def is_one_call(self) -> bool:
        """Return whether a pass is one call."""
        return len(self._parts) == 1 and self._parts[0][1] is not None

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
            cache: Written at ``batch.kv_positions``, read through ``batch.block_table``; of as many
                KV groups.
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
        weights = self._weights
        self._check(batch, cache)
        x = functional.embedding(batch.input_ids, weights.embedding)
        if self._config.embedding_scale != 1.0:
            x = x * self._scale
        last = self._run(x, batch, cache, (before_layer, after_layer))
        return weights.final_norm(last, self._attention.kernels)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (S, V) of hidden states (S, N) from ``forward_hidden``."""
        # Made outside inference mode: callers may then change their logits in place.
        with torch.inference_mode(mode=False), torch.no_grad():
            logits = self._weights.lm_head(hidden)
            cap = self._config.logits_soft_cap
            return logits if cap is None else (logits / cap).tanh() * cap

    def _run(
        self, x: torch.Tensor, batch: PagedBatch, cache: TorchKVCache, around: _Callbacks
    ) -> torch.Tensor:
        """Run all layers; return the hidden states of the wanted tokens."""
        indices = batch.logits_indices.numpy()
        is_in_order = bool((indices[1:] > indices[:-1]).all())
        # Indices of an engine are always in order; only other callers need the sort.
        wanted, order = (indices, None) if is_in_order else np.unique(indices, return_inverse=True)
        run: ForwardPass | None = None
        for layers, stack in self._parts:
            if stack is not None:
                x = _run_stack(stack, x, batch, cache, wanted, around)
                continue
            run = self._begin(batch, cache, around) if run is None else run
            for index in layers:
                is_last = index == len(self._weights.layers) - 1
                some = torch.from_numpy(wanted) if is_last else None
                x = self._weights.layers[index](x, index, run, some)
        return x if order is None else x.index_select(0, torch.from_numpy(order))

    def _begin(self, batch: PagedBatch, cache: TorchKVCache, around: _Callbacks) -> ForwardPass:
        """Return what layers have in common that run operation by operation."""
        attention, ropes = self._attention, self._ropes.items()
        return ForwardPass(
            cache,
            attention.kernels,
            [
                {key: TokenPlaces(*table, batch.positions, stored) for key, table in ropes}
                for stored in batch.kv_positions
            ],
            attention.prepare(batch, cache) if attention.is_compiled else None,
            self._plain.prepare(batch, cache),
            *around,
            self._states(batch, cache),
        )

    def _states(self, batch: PagedBatch, cache: TorchKVCache) -> StatePlaces | None:
        if self._recurrent is None:
            return None
        table = batch.block_table[cache.group_of[self._recurrent]]
        return state_places(batch, table, cache.block_size)

    def serve_experts(self) -> None:
        """Take part in a pass of the ranks that share out the experts, with no token."""
        nothing = self._weights.embedding[:0]
        for experts in self._experts:
            experts(nothing)

    def expert_load(self) -> ExpertLoad | None:
        """Return what the experts have computed; see ``SupportsExpertLoad``."""
        if not self._experts:
            return None
        by_layer = torch.stack([experts.num_tokens for experts in self._experts])
        return ExpertLoad(by_layer.numpy(), sum(experts.num_rows for experts in self._experts))

    def forget_expert_load(self) -> None:
        """Count from zero again."""
        for experts in self._experts:
            experts.forget_load()

    def _check(self, batch: PagedBatch, cache: TorchKVCache) -> None:
        """Check all indices, as kernels do not check bounds.

        Raises:
            IndexError: A position or a block does not exist.
        """
        limits = [("position", batch.positions.numpy(), self._max_seq_len)]
        of_groups = zip(
            cache.num_blocks, batch.kv_positions.numpy(), batch.block_table, strict=True
        )
        for lane_blocks, stored, table in of_groups:
            num_blocks = len(cache) * lane_blocks
            limits += [("KV position", stored, num_blocks * cache.block_size)]
            limits += [("block", table, num_blocks)]
        starts, num_tokens = batch.query_start_loc, len(batch.input_ids)
        counts = np.diff(starts)
        is_whole = starts[0] == 0 and starts[-1] == num_tokens and counts.min(initial=0) >= 0
        if not is_whole or {len(batch.positions), batch.kv_positions.shape[1]} != {num_tokens}:
            raise IndexError(f"requests from {starts}, of {num_tokens} tokens")
        if {batch.block_table.shape[1], len(batch.seq_lens)} != {len(counts)}:
            raise IndexError(f"tables and lengths of other than {len(counts)} requests")
        for name, found, limit in limits:
            if found.min() < 0 or found.max() >= limit:
                raise IndexError(f"{name} {found.min()} to {found.max()}, of {limit}")
        wanted = batch.logits_indices.numpy()
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= num_tokens):
            raise IndexError(f"logits of tokens {wanted}, of {num_tokens}")
        held = batch.block_table.shape[2] * cache.block_size
        if (batch.seq_lens < np.maximum(counts, 1)).any() or batch.seq_lens.max() > held:
            raise IndexError(f"sequences of {batch.seq_lens} tokens in blocks for {held}")


def _run_stack(
    stack: LayerStack,
    x: torch.Tensor,
    batch: PagedBatch,
    cache: TorchKVCache,
    wanted: Int64Array,
    around: _Callbacks,
) -> torch.Tensor:
    """Run layers in one call, or in one call each for a long pass with layer callbacks."""
    plan, layers = stack.plan(batch, wanted), stack.layers
    before_layer, after_layer = around
    is_one = around == (None, None) or stack.is_short(len(x))
    for some in [layers] if is_one else [layers[i : i + 1] for i in range(len(layers))]:
        _tell(before_layer, some)
        x = stack.run(x, batch, cache, some, plan)
        _tell(after_layer, some)
    return x


def _tell(callback: LayerCallback | None, layers: range) -> None:
    if callback is not None:
        for index in layers:
            callback(index)

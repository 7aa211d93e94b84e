"""All layers of a pass in one call, for models whose weights are packed as panels.

Between two operations on the rows of a small model nearly as much time goes by as in them. Here a
pass is one call, whose threads share out the tokens, or the weights where these are many and the
tokens few, not the operations.

Dimensions: T tokens, R requests, N hidden size, S wanted tokens, U units.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from replicas.generators.torch import compiled_shares, compiled_stack
from replicas.generators.torch.compiled import TILE
from replicas.generators.torch.compiled_stack import COLUMNS, PLANES
from replicas.generators.torch.fast_attention import tiles_of
from replicas.generators.torch.kernels import Kernel, address, bits, place
from replicas.generators.torch.linear import LONG_WEIGHTS
from replicas.generators.torch.panels import PanelLinear
from replicas.generators.torch.products import num_panels

if TYPE_CHECKING:
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.torch.inputs import Int64Array, PagedBatch
    from replicas.generators.torch.kv_cache import TorchKVCache
    from replicas.generators.torch.layers import DenseLayer
    from replicas.generators.torch.loader import ModelWeights

MOST_ROWS = 96
"""Tokens of a unit: more are no faster, and have longer to wait for each other at the end."""
FEWEST_ROWS = 8
"""A unit of fewer reads the weights for too little."""
SHORT_PASS = 1 << 30
"""A pass of at most so many products of a token and a weight takes milliseconds. Stopping at each
of its layers would take as long, and KV transfers can wait until its end."""


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Division of a pass into units of tokens; prompts are cut only at the ends of tiles.

    Attributes:
        cuts: int64 (U + 1,), the first token of each, and T.
        requests: int64 (U,), that of the first token.
        needs: int64 (U,), the first unit with tokens of that request.
        wanted: int64 (S,), in order: tokens that go through the model's last layer.
        firsts: int64 (U + 1,), of the wanted tokens, those of a unit and behind.
    """

    cuts: Int64Array
    requests: Int64Array
    needs: Int64Array
    wanted: Int64Array
    firsts: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """Division of a pass whose weights are distributed over the threads.

    Attributes:
        wanted: int64 (S,), in order: tokens that go through the model's last layer.
        tiles: int64 (4, B): of neighbouring tokens that attend together the first, how many, what
            the last of them sees, and their request.
        are_alone: int64 (B,), whether they are a request's only one.
    """

    wanted: Int64Array
    tiles: Int64Array
    are_alone: Int64Array


def cut(starts: Int64Array, wanted: Int64Array, num_threads: int) -> Units:
    """Cut a pass.

    Args:
        starts: int64 (R + 1,), the first token of each request, and T.
        wanted: int64 (S,), in order.
        num_threads: How many will take units.
    """
    num_tokens = int(starts[-1])
    num_units = -(-num_tokens // MOST_ROWS)
    if num_threads > 1:
        # As many for each, and some to even out, where they are not too small then.
        num_units = max(num_units, min(2 * num_threads, num_tokens // FEWEST_ROWS), 1)
    rows = -(-num_tokens // num_units)
    cuts = np.arange(0, num_tokens, rows)
    owners = np.searchsorted(starts, cuts, side="right") - 1
    cuts -= (cuts - starts[owners]) % TILE
    return Units(
        cuts=np.append(cuts, num_tokens),
        requests=owners,
        needs=np.searchsorted(cuts, starts[owners], side="right") - 1,
        wanted=wanted,
        firsts=np.append(np.searchsorted(wanted, cuts), len(wanted)),
    )


class LayerStack:
    """The layers of a model over a KV cache.

    Owner: the table of addresses, of the weights and of the cache that was used last.

    Args:
        config: The model.
        weights: bfloat16, every matrix a `PanelLinear`.
        rope: (cos, sin) as in `TokenPlaces`.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        self._config, self._weights, self._rope = config, weights, rope
        share = config.num_attention_heads // config.num_key_value_heads
        shape = weights.embedding.dtype, config.head_dim, share
        self._kernel = Kernel(compiled_stack.run_layers, *shape)
        layers = _dense(weights)
        self._addresses = np.array([_addresses(layer) for layer in layers])
        self._used: tuple[weakref.ref[TorchKVCache] | None, Int64Array] = None, self._addresses
        matrices = _matrices(layers[0])
        self._layer_weights = sum(linear.panels.weight.numel() for linear in matrices)
        self._make_shares_kernel = cache(lambda: Kernel(compiled_shares.share_layers, *shape))
        if not self._is_small:
            self._make_shares_kernel()  # compile at start, not during a step

    @property
    def _is_small(self) -> bool:
        """Return whether to read the weights is no work beside anything else."""
        return self._layer_weights < LONG_WEIGHTS

    def is_short(self, num_tokens: int) -> bool:
        """Return whether a pass of so many tokens is better not interrupted."""
        return num_tokens * self._layer_weights * len(self._addresses) < SHORT_PASS

    @staticmethod
    def can_run(weights: ModelWeights) -> bool:
        """Return whether all layers have Llama's form, and weights are packed as panels."""
        layers = _dense(weights)
        return len(layers) == len(weights.layers) and all(
            all(isinstance(linear, PanelLinear) for linear in _matrices(layer)) for layer in layers
        )

    def plan(self, batch: PagedBatch, wanted: Int64Array) -> Units | Shares:
        """Return how a pass is cut for the threads that PyTorch uses.

        Args:
            batch: The tokens.
            wanted: int64 (S,), those that go through the last layer, in order.
        """
        num_tokens, num_threads = len(batch.input_ids), torch.get_num_threads()
        if self._is_small or num_threads == 1 or num_tokens >= MOST_ROWS * num_threads:
            return cut(batch.query_start_loc, wanted, num_threads)
        tiles, are_alone = tiles_of(batch)
        return Shares(wanted, tiles, are_alone)

    def run(
        self,
        x: torch.Tensor,
        batch: PagedBatch,
        cache: TorchKVCache,
        layers: range,
        plan: Units | Shares,
    ) -> torch.Tensor:
        """Take the tokens through some layers.

        Args:
            x: (T, N), contiguous, written.
            batch: Their places.
            cache: Written and read.
            layers: Which, in order.
            plan: The pass, cut.

        Returns:
            (S, N) behind the model's last layer; else ``x``.
        """
        is_last = layers[-1] == len(self._addresses) - 1
        out = x.new_empty(len(plan.wanted), x.shape[1]) if is_last else x
        if isinstance(plan, Units):
            self._run_units(x, out, batch, cache, layers, plan)
        else:
            self._run_shares(x, out, batch, cache, layers, plan)
        return out

    def _run_units(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        batch: PagedBatch,
        cache: TorchKVCache,
        layers: range,
        units: Units,
    ) -> None:
        num_units = len(units.requests)
        progress = np.zeros((2, num_units), dtype=np.int64)
        table = self._with(cache)
        self._kernel(
            len(layers) * num_units,
            0,
            min(torch.get_num_threads(), num_units),
            num_units,
            layers[0],
            len(self._addresses) - 1,
            *self._given(x, out, batch, cache),
            place(batch.query_start_loc),
            place(batch.seq_lens),
            place(batch.block_table),
            place(units.wanted),
            place(units.cuts),
            place(units.requests),
            place(units.needs),
            place(units.firsts),
            place(table),
            place(progress[0]),
            place(progress[1]),
            int(np.diff(units.cuts).max()),
        )

    def _run_shares(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        batch: PagedBatch,
        cache: TorchKVCache,
        layers: range,
        shares: Shares,
    ) -> None:
        config, num_tokens = self._config, len(x)
        size = config.num_attention_heads * config.head_dim
        heads_size = size + 2 * config.num_key_value_heads * config.head_dim
        heads, attended = x.new_empty(num_tokens, heads_size), x.new_empty(num_tokens, size)
        gated = x.new_empty(num_tokens, config.intermediate_size)
        of_hidden, of_inner, of_heads = (
            num_panels(n) for n in (x.shape[1], config.intermediate_size, heads_size)
        )
        # In the order of the phases.
        counts = np.array((
            of_heads, -(-num_tokens // compiled_shares.ROWS),
            shares.tiles.shape[1] * config.num_key_value_heads, 1, of_hidden, of_inner, of_hidden,
        ))  # fmt: skip
        num_tasks = int(counts.sum())
        done = np.zeros(compiled_shares.PHASES * len(layers), dtype=np.int64)
        dtype, table = x.dtype, self._with(cache)
        self._make_shares_kernel()(
            len(layers) * num_tasks,
            layers[0],
            len(self._addresses) - 1,
            num_tokens,
            *self._given(x, out, batch, cache),
            *(place(row) for row in shares.tiles),
            place(counts),
            place(batch.block_table),
            place(shares.wanted),
            len(shares.wanted),
            address(heads, dtype),
            address(attended, dtype),
            address(gated, dtype),
            place(table),
            place(shares.are_alone),
            place(done),
            num_tasks,
        )

    def _given(
        self, x: torch.Tensor, out: torch.Tensor, batch: PagedBatch, cache: TorchKVCache
    ) -> tuple[int, ...]:
        """Return the arguments common to both kernels: sizes, rows, places."""
        config, dtype = self._config, x.dtype
        return (
            x.shape[1],
            config.intermediate_size,
            config.num_key_value_heads,
            cache.block_size,
            batch.block_table.shape[1],
            bits(config.rms_norm_eps),
            address(x, dtype),
            address(out, dtype),
            address(self._rope[0], dtype),
            address(self._rope[1], dtype),
            address(batch.positions, torch.int64),
            address(batch.kv_positions, torch.int64),
        )

    def _with(self, cache: TorchKVCache) -> Int64Array:
        """Return the table with the planes of a cache."""
        held, table = self._used
        if held is None or held() is not cache:
            # A table of its own: another thread may be in a pass over another cache.
            table = self._addresses.copy()
            table[:, PLANES:] = [
                [address(plane, plane.dtype) for plane in planes] for planes in cache.planes
            ]
            self._used = weakref.ref(cache), table
        return table


def _dense(weights: ModelWeights) -> list[DenseLayer]:
    """Return the layers that compiled code computes: causal, with SiLU, as scores are scaled."""
    found = (layer.as_dense() for layer in weights.layers)
    return [
        layer
        for layer in found
        if layer is not None and layer.window is layer.scale is None and layer.activation == "silu"
    ]


def _matrices(layer: DenseLayer) -> list[PanelLinear]:
    found = [layer.qkv, layer.o, layer.gate, layer.up, layer.down]
    return cast("list[PanelLinear]", found)


def _addresses(layer: DenseLayer) -> list[int]:
    dtype = layer.input_norm.dtype
    qkv, o, gate, up, down = (
        (linear.panels.weight.data_ptr(), address(linear.panels.bias, dtype))
        for linear in _matrices(layer)
    )
    norm, rest = address(layer.input_norm, dtype), address(layer.post_norm, dtype)
    found = [norm, *qkv, address(layer.qk_norm, dtype), *o, rest, *gate, *up, *down, 0, 0]
    assert len(found) == COLUMNS
    return found

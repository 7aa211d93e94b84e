"""Runs of decoder layers in one call of a C kernel, for models whose weights are packed as panels.

Between two operations on the rows of a small model nearly as much time goes by as in them. Here a
run of layers is one call. Its threads divide the tokens, or the weights where these are many and
the tokens few, instead of every operation. `csrc/layers.c` is the other side.

Dimensions: T tokens, R requests, N hidden size, S wanted tokens, U units, B tiles.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import byref
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from replicas.generators.torch import native
from replicas.generators.torch.fast_attention import tiles_of
from replicas.generators.torch.linear import LONG_WEIGHTS
from replicas.generators.torch.native import (
    ATTENTION_TILE,
    LayersPass,
    TokenLayersCall,
    WeightLayersCall,
    address,
    array_address,
)
from replicas.generators.torch.panels import PANEL, PanelLinear, num_panels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.generators.torch.inputs import Int64Array, PagedBatch
    from replicas.generators.torch.kv_cache import TorchKVCache
    from replicas.generators.torch.layers import DecoderLayer, DenseLayer
    from replicas.generators.torch.native import KernelSet

MOST_ROWS = 96
"""Tokens of a unit: more are no faster, and have longer to wait for each other at the end."""
FEWEST_ROWS = 8
"""A unit of fewer reads the weights for too little."""
SHORT_PASS = 1 << 30
"""A pass of at most so many products of a token and a weight takes milliseconds. Stopping at each
of its layers would take as long, and KV transfers can wait until its end."""

_ROTATED_ROWS = 8
"""Tokens that are rotated in one task; `SHARE_ROTATE_ROWS` of the header."""
_BFLOAT16 = torch.bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Division of a pass into units of tokens; prompts are cut only at the ends of tiles.

    Attributes:
        cuts: int64 (U + 1,), the first token of each, and T.
        requests: int64 (U,), that of the first token.
        needs: int64 (U,), the first unit with tokens of that request.
        wanted: int64 (S,), in order: tokens that go through the model's last layer.
        firsts: int64 (U + 1,), index in `wanted` of each unit's first, and S.
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
    cuts -= (cuts - starts[owners]) % ATTENTION_TILE
    return Units(
        cuts=np.append(cuts, num_tokens),
        requests=owners,
        needs=np.searchsorted(cuts, starts[owners], side="right") - 1,
        wanted=wanted,
        firsts=np.append(np.searchsorted(wanted, cuts), len(wanted)),
    )


def claim(layers: Sequence[DecoderLayer]) -> list[range]:
    """Return the runs of consecutive layers, as indices, that a `LayerStack` can compute.

    A layer is of Llama's form with SiLU, over all tokens or a window of them, and its matrices are
    packed as panels. All layers of a run are of one size and rotate alike.
    """
    runs: list[range] = []
    shapes = [_shape(layer) for layer in layers]
    for index, shape in enumerate(shapes):
        if shape is None:
            continue
        if runs and runs[-1].stop == index and shapes[index - 1] == shape:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs


def _shape(layer: DecoderLayer) -> tuple[object, ...] | None:
    """Return what the layers of a run have in common; None if a layer is of another form."""
    dense = layer.as_dense()
    if dense is None or dense.activation != "silu":
        return None
    spec, matrices = dense.spec, _matrices(dense)
    if not all(isinstance(linear, PanelLinear) for linear in matrices):
        return None
    sizes = [(one.matrix.num_inputs, one.matrix.num_outputs) for one in matrices]
    return spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rope, spec.scale, *sizes


class LayerStack:
    """A run of a model's layers over a KV cache.

    Owner: the structures of the layers, with the planes of the cache that was used last.

    Args:
        layers: All layers of the model.
        run: Those of one run of `claim`.
        rope: (cos, sin) as in `TokenPlaces`.
        eps: Of the norms.
        kernels: The kernels that compute them; None for the best of this processor.

    Attributes:
        layers: Indices of the run's layers.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        run: range,
        rope: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        kernels: KernelSet | None = None,
    ) -> None:
        self._kernels = native.kernel_set() if kernels is None else kernels
        self.layers, self._is_end = run, run.stop == len(layers)
        self._rope = rope
        found = [layers[index].as_dense() for index in run]
        self._weights = [layer for layer in found if layer is not None]
        assert len(self._weights) == len(run)
        cos, sin = rope
        spec, matrices = self._weights[0].spec, _matrices(self._weights[0])
        down = matrices[-1].matrix
        self._pass = LayersPass(
            hidden_size=down.num_outputs,
            inner_size=down.num_inputs,
            num_kv_heads=spec.num_kv_heads,
            share=spec.num_heads // spec.num_kv_heads,
            head_size=spec.head_dim,
            rotary_size=cos.shape[1],
            eps=eps,
            scale=spec.head_dim**-0.5 if spec.scale is None else spec.scale,
            cos=address(cos, _BFLOAT16),
            sin=address(sin, _BFLOAT16),
            num_positions=len(cos),
        )
        """Sizes and places that are the same for every pass."""
        self._used: tuple[weakref.ref[TorchKVCache] | None, ctypes.Array[native.DecoderLayer]]
        self._used = None, (native.DecoderLayer * len(run))()
        self._layer_weights: int = sum(
            one.matrix.num_inputs * num_panels(one.matrix.num_outputs) * PANEL for one in matrices
        )

    @property
    def _is_small(self) -> bool:
        """Return whether to read the weights is no work beside anything else."""
        return self._layer_weights < LONG_WEIGHTS

    def is_short(self, num_tokens: int) -> bool:
        """Return whether a pass of so many tokens is better not interrupted."""
        return num_tokens * self._layer_weights * len(self._weights) < SHORT_PASS

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
        """Take the tokens through some layers of the run.

        Args:
            x: (T, N), contiguous, written.
            batch: Their places.
            cache: Written and read.
            layers: Their indices in the model, in order.
            plan: The pass, cut.

        Returns:
            (S, N) behind the model's last layer; else ``x``.
        """
        planes = self._with(cache)
        given = LayersPass.from_buffer_copy(self._pass)
        nth = layers.start - self.layers.start
        given.layers, given.num_layers = ctypes.addressof(planes[nth]), len(layers)
        given.is_end = self._is_end and nth + len(layers) == len(self._weights)
        num_blocks = len(cache) * np.array(cache.num_blocks)
        given.num_groups, given.num_blocks = len(num_blocks), array_address(num_blocks)
        given.block_size = cache.block_size
        given.num_tokens, given.x = len(x), address(x, _BFLOAT16)
        given.positions = address(batch.positions, torch.int64)
        given.kv_positions = address(batch.kv_positions, torch.int64)
        _, given.num_requests, given.table_width = batch.block_table.shape
        given.lengths = array_address(batch.seq_lens)
        given.tables = array_address(batch.block_table)
        out = x
        if given.is_end:
            out = x.new_empty(len(plan.wanted), x.shape[1])
            given.num_wanted, given.wanted = len(plan.wanted), array_address(plan.wanted)
            given.out = out.data_ptr()
        if isinstance(plan, Units):
            self._run_units(given, batch, plan)
        else:
            self._run_shares(given, plan)
        return out

    def _run_units(self, given: LayersPass, batch: PagedBatch, units: Units) -> None:
        num_units = len(units.requests)
        num_threads = min(torch.get_num_threads(), num_units)
        progress = np.zeros((2, num_units), dtype=np.int64)
        max_rows = int(np.diff(units.cuts).max())
        num_heads = 2 * given.num_kv_heads * (given.share + 1)
        size = given.hidden_size + given.inner_size + num_heads * given.head_size
        # Rows of a thread begin with a cache line of their own.
        size = -(-max_rows * size // 32) * 32
        scratch = torch.empty(num_threads * size, dtype=_BFLOAT16)
        call = TokenLayersCall(
            (0, given.num_layers * num_units),
            given,
            num_threads,
            0,
            num_units,
            max_rows,
            array_address(batch.query_start_loc),
            array_address(units.cuts),
            array_address(units.requests),
            array_address(units.needs),
            array_address(units.firsts),
            array_address(progress[0]),
            array_address(progress[1]),
            scratch.data_ptr(),
            size,
        )
        native.require(self._kernels.library.check_token_layers(byref(call)), "a pass")
        self._kernels.token_layers(call)

    def _run_shares(self, given: LayersPass, shares: Shares) -> None:
        num_tokens, num_threads = given.num_tokens, torch.get_num_threads()
        size = given.num_kv_heads * given.share * given.head_size
        heads_size = size + 2 * given.num_kv_heads * given.head_size
        of_hidden, of_inner, of_heads = (
            num_panels(n) for n in (given.hidden_size, given.inner_size, heads_size)
        )
        num_tiles = shares.tiles.shape[1]
        # In the order of the phases.
        counts = np.array((
            of_heads, -(-num_tokens // _ROTATED_ROWS), num_tiles * given.num_kv_heads, 1,
            of_hidden, of_inner, of_hidden,
        ))  # fmt: skip
        done = np.zeros(len(counts) * given.num_layers, dtype=np.int64)
        heads, attended, gated, normed = (
            torch.empty(n, dtype=_BFLOAT16)
            for n in (
                num_tokens * heads_size,
                num_tokens * size,
                num_tokens * given.inner_size,
                num_threads * num_tokens * given.hidden_size,
            )
        )
        call = WeightLayersCall(
            (0, given.num_layers * int(counts.sum())),
            given,
            num_tiles,
            array_address(shares.tiles),
            array_address(shares.are_alone),
            array_address(counts),
            array_address(done),
            heads.data_ptr(),
            attended.data_ptr(),
            gated.data_ptr(),
            num_threads,
            0,
            normed.data_ptr(),
        )
        native.require(self._kernels.library.check_weight_layers(byref(call)), "a pass")
        self._kernels.weight_layers(call)

    def _with(self, cache: TorchKVCache) -> ctypes.Array[native.DecoderLayer]:
        """Return the structures of the layers with the planes of a cache."""
        held, found = self._used
        if held is None or held() is not cache:
            # Structures of their own: another thread may be in a pass over another cache.
            found = (native.DecoderLayer * len(self._weights))(*(
                _structure(layer, cache.planes[index], cache.group_of[index])
                for index, layer in zip(self.layers, self._weights, strict=True)
            ))  # fmt: skip
            self._used = weakref.ref(cache), found
        return found


def _matrices(layer: DenseLayer) -> list[PanelLinear]:
    found = [layer.qkv, layer.o, layer.gate, layer.up, layer.down]
    return cast("list[PanelLinear]", found)


def _structure(
    layer: DenseLayer, planes: tuple[torch.Tensor, ...], group: int
) -> native.DecoderLayer:
    qkv, o, gate, up, down = (linear.matrix for linear in _matrices(layer))
    keys, values = planes
    return native.DecoderLayer(
        input_norm=address(layer.input_norm, _BFLOAT16),
        qkv=qkv,
        head_norm=address(layer.qk_norm, _BFLOAT16),
        o=o,
        post_norm=address(layer.post_norm, _BFLOAT16),
        gate=gate,
        up=up,
        down=down,
        keys=address(keys, _BFLOAT16),
        values=address(values, _BFLOAT16),
        window=layer.spec.window or 0,
        group=group,
    )

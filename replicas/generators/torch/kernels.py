"""Kernels of a pass in C: norms, rotation, and attention over blocks.

Each replaces a dozen of PyTorch's operations on tensors too small to be worth one. Threads are
those of PyTorch, as many as it uses: a second team of threads would fight the first for the cores.

Dimensions: T tokens, H query heads, G KV heads, D head size, P blocks, S block size, N hidden size,
B tiles, R sequences, K blocks of the longest one.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from replicas.generators.torch import native
from replicas.generators.torch.native import (
    NO_FEATURES,
    AttentionCall,
    DeltaCall,
    Feature,
    NormCall,
    RopeCall,
    Tasks,
    address,
    array_address,
    require,
    rows_address,
)

if TYPE_CHECKING:
    from replicas.generators.layer_specs import DeltaConfig
    from replicas.generators.torch.inputs import Int64Array
    from replicas.generators.torch.plain import TokenPlaces
    from replicas.generators.torch.states import DeltaTokens, StatePlaces


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Neighbouring tokens of sequences that attend together; every array contiguous.

    Attributes:
        size: Tokens of a tile at most, 1 or `native.ATTENTION_TILE`.
        tokens: int64 (B,), the first of each in the pass.
        counts: int64 (B,), how many, at least 1.
        lengths: int64 (B,), tokens in the cache up to the last of them, itself included.
        requests: int64 (B,), the rows of ``tables``.
        tables: int64 (R, K), blocks of sequences.
    """

    size: int
    tokens: Int64Array
    counts: Int64Array
    lengths: Int64Array
    requests: Int64Array
    tables: Int64Array


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer's scores become weights.

    Attributes:
        scale: Factor of the scores; None for the inverse square root of the key width.
        window: Keys that a token sees at most, itself included; None for all before it.
        soft_cap: Scores become ``cap * tanh(score / cap)``; None for scores as they are.
        sinks: (H,) a score each that has no value, in the dtype of the queries; or None.
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None


PLAIN_SCORING = Scoring()


@cache
def kernels_for(dtype: torch.dtype, without: Feature = NO_FEATURES) -> Kernels:
    """Return the kernels for a dtype, made once."""
    return Kernels(dtype, without)


class Kernels:
    """All kernels for one dtype.

    Holds nothing that changes: any thread may call them.

    Args:
        dtype: bfloat16, float32 or float64, of every tensor that they are given.
        without: Features of the processor to do without.

    Raises:
        native.NativeError: The library cannot be used.
        RuntimeError: There are no kernels for the dtype.
    """

    def __init__(self, dtype: torch.dtype, without: Feature = NO_FEATURES) -> None:
        if dtype not in native.DTYPES:
            raise RuntimeError(f"no kernels for {dtype}")
        self._dtype, self._code = dtype, native.DTYPES[dtype]
        self._set = native.kernel_set(without)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
    ) -> torch.Tensor:
        """(T, N), weight (N,) -> (T, N).

        With an offset, which Gemma has, rows are multiplied by ``weight + weight_offset`` before
        they are rounded; otherwise they are rounded first.
        """
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if weight.shape != x.shape[1:]:
            raise ValueError(f"a weight of {tuple(weight.shape)} for rows of {x.shape[1]}")
        call = NormCall(
            tasks=Tasks(0, len(x)),
            dtype=self._code,
            x=rows_address(x, self._dtype),
            stride=x.stride(0),
            weight=address(weight, self._dtype),
            out=out.data_ptr(),
            size=x.shape[1],
            eps=eps,
            weight_offset=weight_offset,
        )
        require(self._set.library.check_norm(ctypes.byref(call)), "a norm")
        self._set.norm(call)
        return out

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        places: TokenPlaces,
        planes: tuple[torch.Tensor, torch.Tensor],
        norm: torch.Tensor | None,
        eps: float,
    ) -> None:
        """Normalise and rotate queries and keys in place; write keys and values to their blocks.

        Of the channels that rotate, i is paired with i + half of them.

        Args:
            heads: (T, H + 2 * G, D), queries, keys, values; contiguous.
            places: Of the tokens; as many channels rotate as ``cos`` has.
            planes: The layer's keys and values, each (P, G, S, D).
            norm: (H + G, D) weight per head, or None.
            eps: Of the norm.
        """
        keys, values = planes
        num_blocks, num_kv_heads, block_size, size = keys.shape
        num_tokens, num_heads = heads.shape[0], heads.shape[1] - 2 * num_kv_heads
        shapes = (heads.shape[2], values.shape, len(places.positions), len(places.kv_positions))
        if shapes != (size, keys.shape, num_tokens, num_tokens):
            raise ValueError(
                f"heads {tuple(heads.shape)} and {shapes[2:]} positions over keys "
                f"{tuple(keys.shape)} and values {tuple(values.shape)}"
            )
        if places.cos.shape != places.sin.shape:
            raise ValueError(f"cosines {tuple(places.cos.shape)}, sines {tuple(places.sin.shape)}")
        if norm is not None and norm.shape != (num_heads + num_kv_heads, size):
            raise ValueError(f"a norm of {tuple(norm.shape)} for heads {tuple(heads.shape)}")
        call = RopeCall(
            tasks=Tasks(0, num_tokens),
            dtype=self._code,
            heads=address(heads, self._dtype),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=size,
            rotary_size=places.cos.shape[1],
            cos=address(places.cos, self._dtype),
            sin=address(places.sin, self._dtype),
            num_positions=len(places.cos),
            positions=address(places.positions, torch.int64),
            kv_positions=address(places.kv_positions, torch.int64),
            keys=address(keys, self._dtype),
            values=address(values, self._dtype),
            num_blocks=num_blocks,
            block_size=block_size,
            norm=address(norm, self._dtype),
            eps=eps,
        )
        require(self._set.library.check_rope(ctypes.byref(call)), "a rotation")
        self._set.rope(call)

    def attend(
        self,
        q: torch.Tensor,
        tiles: Tiles,
        planes: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        scoring: Scoring = PLAIN_SCORING,
    ) -> None:
        """Attend, each token to those before it and itself; reads nothing behind a tile's last.

        Args:
            q: (T, H, key width); the heads of a token are contiguous.
            tiles: Which of them, and where their keys and values are.
            planes: The layer's keys (P, G, S, key width) and values (P, G, S, value width); the
                values may be the first part of each key.
            out: (T, H, value width); the tiles' tokens are written.
            scoring: How scores become weights.

        Raises:
            native.UnsupportedCallError: The kernel does not compute this; plain operators may.
            ValueError: Shapes or dtypes contradict each other, or an index is outside its array.
        """
        call = self._attention_call(q, tiles, planes, out, scoring)
        require(self._set.library.check_attention(ctypes.byref(call)), "attention")
        self._set.attention(call)

    def step_delta(
        self,
        sizes: DeltaConfig,
        places: StatePlaces,
        states: torch.Tensor,
        tokens: DeltaTokens,
    ) -> None:
        """Compute the tokens of a recurrent layer that are alone in their request's pass.

        Args:
            sizes: Of heads and states.
            places: Which tokens, and where their states are.
            states: (blocks, ...), each `sizes.state` numbers; float32 or float64. Overwritten.
            tokens: Of the pass, in the states' dtype; the results of those in `places` are written.

        Raises:
            ValueError: Shapes or dtypes contradict each other, or an index is outside its array.
        """
        mixed, rates, decays = tokens.mixed, tokens.rates, tokens.decays
        convolution, out = tokens.convolution, tokens.out
        dtype, num_tokens, heads = states.dtype, len(mixed), sizes.value_heads
        found = mixed.shape, rates.shape, decays.shape, convolution.shape, out.shape
        by_head = (num_tokens, heads)
        if found != (
            (num_tokens, sizes.channels), by_head, by_head, (sizes.kernel, sizes.channels),
            (*by_head, sizes.value_dim),
        ):  # fmt: skip
            raise ValueError(f"shapes {[*map(tuple, found)]} for {sizes}")
        num_singles = len(places.singles)
        num_tasks = num_singles * sizes.key_heads
        scratch = mixed.new_empty(num_tasks, 2 * (sizes.key_dim + sizes.value_dim), dtype=dtype)
        call = DeltaCall(
            tasks=Tasks(0, num_tasks),
            dtype=native.DTYPES[dtype],
            mixed=rows_address(mixed, dtype),
            mixed_stride=mixed.stride(0),
            num_tokens=num_tokens,
            rates=address(rates, dtype),
            decays=address(decays, dtype),
            out=address(out, dtype),
            states=address(states, dtype),
            state_size=states[0].numel(),
            num_blocks=len(states),
            convolution=address(convolution, dtype),
            key_heads=sizes.key_heads,
            share=heads // sizes.key_heads,
            key_dim=sizes.key_dim,
            value_dim=sizes.value_dim,
            kernel=sizes.kernel,
            num_singles=num_singles,
            tokens=address(places.singles, torch.int64),
            read=address(places.read, torch.int64),
            written=address(places.written, torch.int64),
            is_first=address(places.is_first, torch.bool),
            scratch=scratch.data_ptr(),
        )
        require(self._set.library.check_delta(ctypes.byref(call)), "a recurrent layer")
        self._set.delta(call)

    def _attention_call(
        self,
        q: torch.Tensor,
        tiles: Tiles,
        planes: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        scoring: Scoring,
    ) -> AttentionCall:
        keys, values = planes
        num_blocks, num_kv_heads, block_size, key_width = keys.shape
        value_width = values.shape[3]
        num_tokens, num_heads = q.shape[:2]
        share, rest = divmod(num_heads, num_kv_heads)
        wanted = (num_tokens, num_heads, value_width)
        if (
            rest
            or q.shape[2] != key_width
            or out.shape != wanted
            or values.shape[:3] != keys.shape[:3]
        ):
            raise ValueError(
                f"queries {tuple(q.shape)} into {tuple(out.shape)} over keys {tuple(keys.shape)} "
                f"and values {tuple(values.shape)}"
            )
        sinks = scoring.sinks
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(f"{tuple(sinks.shape)} sinks for {num_heads} heads")
        num_tiles = len(tiles.tokens)
        if not num_tiles == len(tiles.counts) == len(tiles.lengths) == len(tiles.requests):
            raise ValueError("the arrays of tiles differ in length")
        return AttentionCall(
            tasks=Tasks(0, num_tiles * num_kv_heads),
            dtype=self._code,
            q=rows_address(q, self._dtype),
            out=rows_address(out, self._dtype),
            q_stride=q.stride(0),
            out_stride=out.stride(0),
            num_tokens=num_tokens,
            keys=address(keys, self._dtype),
            values=_plane_address(values, self._dtype),
            key_stride=key_width,
            value_stride=values.stride(2),
            num_blocks=num_blocks,
            num_kv_heads=num_kv_heads,
            share=share,
            block_size=block_size,
            key_width=key_width,
            value_width=value_width,
            num_tiles=num_tiles,
            tile_size=tiles.size,
            tokens=array_address(tiles.tokens),
            counts=array_address(tiles.counts),
            lengths=array_address(tiles.lengths),
            requests=array_address(tiles.requests),
            tables=array_address(tiles.tables),
            num_requests=len(tiles.tables),
            table_width=tiles.tables.shape[1],
            scale=key_width**-0.5 if scoring.scale is None else scoring.scale,
            soft_cap=scoring.soft_cap or 0.0,
            window=scoring.window or 0,
            sinks=address(sinks, self._dtype),
        )


def _plane_address(plane: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the address of a plane (P, G, S, width) that may be the first part of a wider one.

    Raises:
        ValueError: The numbers do not lie so, or are of another dtype.
    """
    _, num_heads, block_size, _ = plane.shape
    stride = plane.stride(2)
    wanted = (num_heads * block_size * stride, block_size * stride, stride, 1)
    if plane.dtype != dtype or plane.stride() != wanted:
        raise ValueError(f"{plane.dtype} with strides {plane.stride()} is no plane of {dtype}")
    return plane.data_ptr()

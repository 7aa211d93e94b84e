"""Kernels of a pass that PyTorch has not: norms, rotation, attention over blocks, small products.

Each replaces a dozen operations on tensors too small to be worth one. numba compiles them for this
processor when they are first needed and keeps them on disk. Threads are those of PyTorch, as many
as it uses: a second team of threads would fight the first for the cores.

Dimensions: T tokens, H query heads, G KV heads, D head size, P blocks, S block size, N hidden size,
B decoding rows, K blocks of the longest row.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from numba import cfunc, types

from replicas.generators.torch import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from replicas.generators.torch.inputs import Int64Array

_ITEMS = {
    torch.bfloat16: types.uint16,
    torch.float32: types.float32,
    torch.float64: types.float64,
}
"""bfloat16 is what its bits are: numba does not know it."""
Then: TypeAlias = Literal["nothing", "plus", "times", "swish"]
_THEN: dict[Then, int] = {
    "nothing": 0,
    "plus": compiled.PLUS,
    "times": compiled.TIMES,
    "swish": compiled.SWISH,
}


# --- what they are given -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class TokenPlaces:
    """Where the tokens of a pass stand.

    Attributes:
        cos: (positions, D), the cosines of each position twice.
        sin: (positions, D), the sines with a minus, then without.
        positions: int64 (T,), in their sequences.
        kv_positions: int64 (T,), of their keys and values: block * S + offset.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    kv_positions: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """Sequences with one token in a pass; every array contiguous.

    Attributes:
        tokens: int64 (B,), their tokens.
        tables: int64 (B, K), their blocks.
        lengths: int64 (B,), their tokens in the cache, the new one included; at least 1.
    """

    tokens: Int64Array
    tables: Int64Array
    lengths: Int64Array


# --- how they are run ----------------------------------------------------------------------------


class Kernel:
    """A compiled kernel for one dtype."""

    def __init__(
        self, make: Callable[[types.Type], Callable[[Any], None]], dtype: torch.dtype
    ) -> None:
        signature = types.void(types.voidptr)
        function = make(_ITEMS[dtype])
        try:
            self._compiled = cfunc(signature, fastmath=compiled.FASTMATH, cache=True)(function)
        except RuntimeError:  # nowhere to keep it
            self._compiled = cfunc(signature, fastmath=compiled.FASTMATH)(function)
        self._address: int = self._compiled.address  # type: ignore[assignment]
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)

    def __call__(self, num_units: int, *arguments: int) -> None:
        """Do all units on as many threads as PyTorch uses."""
        block = (ctypes.c_int64 * (2 + len(arguments)))(0, num_units, *arguments)
        num_threads = min(torch.get_num_threads(), num_units)
        if num_threads > 1 and (in_team := _team()) is not None:
            in_team(self._address, block, num_threads, 0)
        else:
            self._call(block)


@cache
def _team() -> Callable[[int, ctypes.Array[ctypes.c_int64], int, int], None] | None:
    """`GOMP_parallel` of the OpenMP that PyTorch uses, which runs a function on each thread."""
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        try:
            found = ctypes.CDLL(library).GOMP_parallel
        except (OSError, AttributeError):
            continue
        found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        found.restype = None
        return found
    return None


def _start(tensor: torch.Tensor | None) -> int:
    """The address of its first number, 0 of None; the others follow."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _place(array: Int64Array) -> int:
    """The address of its first number; the others follow."""
    assert array.flags.c_contiguous
    assert array.dtype == np.int64
    return array.ctypes.data


def _bits(number: float) -> int:
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found


@cache
def kernels_for(dtype: torch.dtype) -> Kernels:
    """The kernels for a dtype, made once."""
    return Kernels(dtype)


class Kernels:
    """All kernels for one dtype; compiled, or read from disk, when this is made.

    Holds nothing that changes: any thread may call them.

    Args:
        dtype: bfloat16, float32 or float64, of every tensor that they are given.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._rms_norm = Kernel(compiled.rms_norm, dtype)
        self._rotate_and_store = Kernel(compiled.rotate_and_store, dtype)
        self._attend_decodes = Kernel(compiled.attend_decodes, dtype)
        self._multiply = Kernel(compiled.multiply, dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """(T, N), weight (N,) -> (T, N)."""
        out = torch.empty_like(x)
        self._rms_norm(
            len(x),
            x.shape[1],
            x.data_ptr(),
            x.stride(0),
            _start(weight),
            out.data_ptr(),
            _bits(eps),
        )
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

        Channel i of a head is paired with i + D / 2.

        Args:
            heads: (T, H + 2 * G, D), queries, keys, values; contiguous.
            places: Of the tokens.
            planes: The layer's keys and values, each (P, G, S, D).
            norm: (H + G, D) weight per head, or None.
            eps: Of the norm.
        """
        k_plane, v_plane = planes
        _, num_kv_heads, block_size, head_dim = k_plane.shape
        self._rotate_and_store(
            len(heads),
            heads.shape[1] - 2 * num_kv_heads,
            num_kv_heads,
            head_dim,
            block_size,
            _start(heads),
            _start(places.cos),
            _start(places.sin),
            _start(places.positions),
            _start(places.kv_positions),
            _start(k_plane),
            _start(v_plane),
            _start(norm),
            _bits(eps),
        )

    def attend_decodes(
        self,
        q: torch.Tensor,
        rows: DecodeRows,
        planes: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Attend with single tokens over all of their sequences; reads nothing behind an end.

        Args:
            q: (T, H, D); the heads of a token are contiguous.
            rows: Which of them, and where their keys and values are.
            planes: The layer's keys and values, each (P, G, S, D).
            out: Like ``q``; the rows' tokens are written.
        """
        k_plane, v_plane = planes
        _, num_kv_heads, block_size, head_dim = k_plane.shape
        self._attend_decodes(
            len(rows.tokens) * num_kv_heads,
            num_kv_heads,
            q.shape[1] // num_kv_heads,
            head_dim,
            block_size,
            rows.tables.shape[1],
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            out.stride(0),
            _start(k_plane),
            _start(v_plane),
            _place(rows.tokens),
            _place(rows.tables),
            _place(rows.lengths),
        )

    def multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        then: Then = "nothing",
        other: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """X @ weight.T + bias, and then something, rounded once; for few rows.

        Args:
            x: (T, K), contiguous.
            weight: (N, K), contiguous.
            bias: (N,) or None.
            then: "plus" or "times" the other, or SiLU.
            other: (T, N), contiguous.

        Returns:
            (T, N).
        """
        out = x.new_empty(len(x), len(weight))
        self._multiply(
            -(-len(weight) // compiled.OUTPUTS),
            len(x),
            x.shape[1],
            len(weight),
            _start(x),
            _start(weight),
            _start(bias),
            _start(other),
            out.data_ptr(),
            _THEN[then],
        )
        return out

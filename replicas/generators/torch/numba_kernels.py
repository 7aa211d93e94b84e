"""Kernels of a pass that PyTorch has not: norms, rotation, attention over blocks, products.

Each replaces a dozen operations on tensors too small to be worth one. numba compiles them for this
processor when they are first needed and keeps them on disk: in `__pycache__` beside their source,
or where that cannot be written in the user's cache folder (`~/.cache/numba`). Threads are those of
PyTorch, as many as it uses: a second team of threads would fight the first for the cores.

Dimensions: T tokens, H query heads, G KV heads, D head size, P blocks, S block size, N hidden size,
B tiles, R sequences, K blocks of the longest one.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import pickle  # noqa: TID251 - an error of numba's cache, which this reads nothing with
import re
import struct
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llvmlite
import numba
import numpy as np
import torch
from numba import cfunc, types
from numba.core.errors import NumbaError
from numba.core.registry import cpu_target

from replicas.generators.torch import (
    compiled,
    compiled_shares,
    compiled_stack,
    heads,
    pairs,
    products,
    rows,
    tiles,
    vectors,
)
from replicas.generators.torch.compiled import TILE
from replicas.generators.torch.team import in_team

if TYPE_CHECKING:
    from collections.abc import Callable

    from replicas.generators.torch.inputs import Int64Array
    from replicas.generators.torch.plain import TokenPlaces
    from replicas.generators.torch.products import Panels

logger = logging.getLogger(__name__)

_ITEMS = {
    torch.bfloat16: types.uint16,
    torch.float32: types.float32,
    torch.float64: types.float64,
}
"""bfloat16 is what its bits are: numba does not know it."""

_STALE_S = 30 * 24 * 3600.0
"""Code that another version compiled is kept for so long: that of other processors whose hosts
share the folder, say, which compile it again then."""
_IN_FILE_NAME = re.compile(r"_([0-9a-f]{16})-\d+\.")
"""The version in the names of files that numba makes of a qualified name."""

_SOURCES = (
    compiled, compiled_shares, compiled_stack, heads, pairs, products, rows, tiles, vectors,
)  # fmt: skip
"""What the compiled code is made of."""

# --- arguments of kernels ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Neighbouring tokens of sequences that attend together; every array contiguous.

    Attributes:
        size: Tokens of a tile at most, 1 or ``TILE``.
        tokens: int64 (B,), the first of each in the pass.
        counts: int64 (B,), how many, at least 1.
        lengths: int64 (B,), what the last of them sees: tokens in the cache, itself included.
        requests: int64 (B,), the rows of ``tables``.
        tables: int64 (R, K), blocks of sequences.
    """

    size: int
    tokens: Int64Array
    counts: Int64Array
    lengths: Int64Array
    requests: Int64Array
    tables: Int64Array


# --- how they are run ----------------------------------------------------------------------------


class Kernel:
    """A compiled kernel for one dtype, and for sizes where it is written for them.

    Raises:
        RuntimeError: numba cannot compile it here.
    """

    def __init__(
        self, make: Callable[..., Callable[[Any], None]], dtype: torch.dtype, *sizes: int
    ) -> None:
        self._compiled = _compile(make, dtype, sizes)
        self._address: int = self._compiled.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)

    def __call__(self, num_units: int, *arguments: int) -> None:
        """Do all units on as many threads as PyTorch uses."""
        block = (ctypes.c_int64 * (2 + len(arguments)))(0, num_units, *arguments)
        # Never fewer because there are fewer units: threads that a team has no use for would end.
        num_threads = torch.get_num_threads()
        if num_threads > 1 and num_units > 1 and (run := in_team()) is not None:
            run(self._address, block, num_threads, 0)
        else:
            self._call(block)


def _compile(
    make: Callable[..., Callable[[Any], None]], dtype: torch.dtype, sizes: tuple[int, ...]
) -> Any:  # noqa: ANN401
    """Compile a kernel, or read it from disk; where that does not work, go without."""
    function = make(_ITEMS[dtype], *sizes)
    # It names the files. One for each version, processor, dtype and size: numba numbers what shares
    # an index without a lock, so that one process could save its code as that of another.
    kind = "_".join(map(str, (str(dtype).removeprefix("torch."), *sizes)))
    function.__qualname__ = f"{make.__name__}_{kind}_{_version()}"
    signature = types.void(types.voidptr)
    try:
        try:
            found: Any = cfunc(signature, cache=True, **compiled.OPTIONS)(function)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            logger.warning("compiled code of %s is not cached: %s", make.__name__, error)
            return cfunc(signature, **compiled.OPTIONS)(function)
    except NumbaError as error:
        # The exception's text may contain terminal colours; `msg` does not.
        plain = getattr(error, "msg", error)
        raise RuntimeError(f"numba cannot compile {make.__name__}: {plain}") from error
    _prune(Path(found._cache.cache_path))  # noqa: SLF001 - said nowhere else
    return found


@cache
def _prune(folder: Path) -> None:
    """Take away what versions other than this one have left in a folder long ago, once."""
    for path in folder.glob("*.nb[ci]"):
        version = _IN_FILE_NAME.search(path.name)
        if version is None or version[1] == _version():
            continue
        # Another process may take it away, too, and of another user's folder nothing can be.
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()


@cache
def _version() -> str:
    """Return what the compiled code depends on besides its dtype, for cache names."""
    # Not LLVM's host: numba compiles for what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say.
    target = cpu_target.target_context.codegen().magic_tuple()
    # Code from disk has tiles, too: each process has to ask for them before it runs.
    has_tiles = tiles.are_supported()
    facts = f"{numba.__version__} {llvmlite.__version__} {target} {has_tiles}"
    source = b"".join(Path(str(part.__file__)).read_bytes() for part in _SOURCES)
    return hashlib.blake2b(facts.encode() + source, digest_size=8).hexdigest()


def address(tensor: torch.Tensor | None, dtype: torch.dtype) -> int:
    """Return the address of its first number, 0 of None; the others follow.

    Raises:
        ValueError: They do not, or are of another dtype.
    """
    if tensor is None:
        return 0
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"{tensor.dtype} with strides {tensor.stride()} is not {dtype} in a row")
    return tensor.data_ptr()


def _rows(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the address of its first number; the others of a row follow.

    Raises:
        ValueError: As `address`.
    """
    if len(tensor):
        address(tensor[0], dtype)
    return tensor.data_ptr()


def place(array: Int64Array) -> int:
    """Return the address of its first number; the others follow.

    Raises:
        ValueError: They do not, or are no int64.
    """
    if array.dtype != np.int64 or not array.flags.c_contiguous:
        raise ValueError(f"{array.dtype} with strides {array.strides} is not int64 in a row")
    return array.ctypes.data


def bits(number: float) -> int:
    """Return the bits of a float64."""
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found


@cache
def kernels_for(dtype: torch.dtype) -> Kernels:
    """Return the kernels for a dtype, made once."""
    return Kernels(dtype)


class Kernels:
    """All kernels for one dtype; compiled, or read from disk, when this is made.

    Holds nothing that changes: any thread may call them.

    Args:
        dtype: bfloat16, float32 or float64, of every tensor that they are given.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._rms_norm = Kernel(compiled.rms_norm, dtype)
        self._rotate_and_store = Kernel(compiled.rotate_and_store, dtype)
        if dtype == torch.bfloat16 and pairs.are_supported():
            self._multiply = Kernel(compiled.product, dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """(T, N), weight (N,) -> (T, N)."""
        out = torch.empty_like(x)
        self._rms_norm(
            len(x),
            x.shape[1],
            _rows(x, self._dtype),
            x.stride(0),
            address(weight, self._dtype),
            out.data_ptr(),
            bits(eps),
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
            address(heads, self._dtype),
            address(places.cos, self._dtype),
            address(places.sin, self._dtype),
            address(places.positions, torch.int64),
            address(places.kv_positions, torch.int64),
            address(k_plane, self._dtype),
            address(v_plane, self._dtype),
            address(norm, self._dtype),
            bits(eps),
        )

    def multiply(
        self,
        x: torch.Tensor,
        panels: Panels,
        then: int = products.NOTHING,
        other: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return rows times a packed weight plus its bias, and then something, rounded once.

        Args:
            x: (T, K) bfloat16, contiguous.
            panels: The weight and the bias.
            then: What `products.finish_rows` does.
            other: (T, N), contiguous.

        Returns:
            (T, N).
        """
        out = x.new_empty(len(x), panels.num_outputs)
        self._multiply(
            len(panels.weight),
            len(x),
            x.shape[1],
            panels.num_outputs,
            address(x, self._dtype),
            panels.weight.data_ptr(),
            address(panels.bias, self._dtype),
            address(other, self._dtype),
            out.data_ptr(),
            then,
        )
        return out


@cache
def attention_for(dtype: torch.dtype, head_dim: int, share: int) -> Attention:
    """Return the kernels for a dtype and a shape, made once."""
    return Attention(dtype, head_dim, share)


class Attention:
    """Attention of tokens over their sequences' blocks, for one dtype and shape of heads.

    Holds nothing that changes: any thread may call it.

    Args:
        dtype: bfloat16, float32 or float64, of every tensor that it is given.
        head_dim: D.
        share: H / G, the query heads of a KV head.
    """

    def __init__(self, dtype: torch.dtype, head_dim: int, share: int) -> None:
        self._dtype, self._head_dim, self._share = dtype, head_dim, share
        self._kernels = {
            size: Kernel(compiled.attend, dtype, head_dim, share, size) for size in (1, TILE)
        }

    def __call__(
        self,
        q: torch.Tensor,
        tiles: Tiles,
        planes: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Attend, each token to those before it and itself; reads nothing behind a tile's last.

        Args:
            q: (T, H, D); the heads of a token are contiguous.
            tiles: Which of them, and where their keys and values are.
            planes: The layer's keys and values, each (P, G, S, D).
            out: Like ``q``; the tiles' tokens are written.

        Raises:
            ValueError: The heads are of another shape or dtype, or do not follow one another.
        """
        k_plane, v_plane = planes
        _, num_kv_heads, block_size, head_dim = k_plane.shape
        wanted = (num_kv_heads * self._share, self._head_dim)
        if q.shape[1:] != wanted or head_dim != self._head_dim:
            raise ValueError(f"heads {tuple(q.shape[1:])} over {head_dim}, made for {wanted}")
        self._kernels[tiles.size](
            len(tiles.tokens) * num_kv_heads,
            num_kv_heads,
            block_size,
            tiles.tables.shape[1],
            _rows(q, self._dtype),
            q.stride(0),
            _rows(out, self._dtype),
            out.stride(0),
            address(k_plane, self._dtype),
            address(v_plane, self._dtype),
            place(tiles.tokens),
            place(tiles.counts),
            place(tiles.lengths),
            place(tiles.requests),
            place(tiles.tables),
        )

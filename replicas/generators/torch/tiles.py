"""Tiles of bfloat16, which AMX has registers and an instruction for: 16 rows times 16 columns.

A tile has up to 16 rows of 64 bytes: of 32 bfloat16 numbers, or 16 float32 sums. It computes in
float32, and takes numbers too small for a normal one as zeros.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any, TypeAlias

from llvmlite import ir
from numba.core import cgutils

from replicas.generators.torch import pairs

_Value: TypeAlias = Any
"""Of LLVM; llvmlite has no types to check."""

ROWS = 16
"""Of a tile."""
FEATURES = 32
"""bfloat16 numbers of a row."""
ROW_BYTES = 64
COUNT = 8
"""Tiles that there are."""
SHAPES_BYTES = 64
"""What says how large the tiles are."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18

_TILE = ir.IntType(8)
_BYTES = ir.IntType(8).as_pointer()
_STRIDE = ir.IntType(64)


@cache
def are_supported() -> bool:
    """Return whether numba may use them, and the kernel lets this process: it asks it to, once."""
    return pairs.has("amx-tile", "amx-bf16") and _is_permitted()


def _is_permitted() -> bool:
    """Ask Linux for the state that threads need then; those that there are have it, too."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    call = ctypes.CDLL(None).syscall
    return bool(call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def _emit(builder: _Value, name: str, *arguments: _Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, arguments)


def _tile(number: int) -> _Value:
    return ir.Constant(_TILE, number)


def load(builder: _Value, tile: int, place: _Value, stride: _Value) -> None:
    """Fill a tile.

    Args:
        builder: Where to.
        tile: Which.
        place: Of its first row.
        stride: Bytes from one row to the next; 0: all are the same.
    """
    _emit(builder, "tileloadd64", _tile(tile), builder.bitcast(place, _BYTES), stride)


def store(builder: _Value, tile: int, place: _Value, stride: _Value) -> None:
    """Write a tile; as `load`."""
    _emit(builder, "tilestored64", _tile(tile), builder.bitcast(place, _BYTES), stride)


def add_products(builder: _Value, sums: int, rows: int, columns: int) -> None:
    """Add the products of a tile of rows and one of columns, in pairs of features, to sums."""
    _emit(builder, "tdpbf16ps", _tile(sums), _tile(rows), _tile(columns))


def stride_of(num_bytes: int) -> _Value:
    """Return a constant distance of rows."""
    return ir.Constant(_STRIDE, num_bytes)


def begin(builder: _Value, shapes: _Value) -> None:
    """Take tiles of these shapes, `SHAPES_BYTES` as AMX has them; see `end`."""
    _emit(builder, "ldtilecfg", builder.bitcast(shapes, _BYTES))


def end(builder: _Value) -> None:
    """Leave the tiles: a thread that has none is quicker to switch."""
    _emit(builder, "tilerelease")

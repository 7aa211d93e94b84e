"""Conversion of KV rows between dtypes, where the two ends of a transfer differ in nothing else.

The consumer converts rows as they arrive, and only from dtypes that its configuration accepts: most
conversions lose bits, and so can change tokens. Pure; owns no state and needs no device library.

``bfloat8_b`` is packed as on the device. A tile of 32 tokens by 32 elements is four faces of 16x16,
left before right, upper before lower. The 16 elements of a face's row share the exponent E of the
largest of them; an element is a sign and seven bits m of magnitude, none of them hidden, and stands
for m * 2**(E - 133). A tile's bytes are its 64 exponents and then its 1,024 elements, both face by
face. Numbers below 2**-126 are zero, and an element of E = 255 is infinite for m = 64 and no number
above it.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_transfer.errors import InvalidLayoutError
from kv_transfer.layout import BFLOAT8_B, BFLOAT8_B_TILE_BYTES, ROW_TOKENS, KVLayout, RowLayout

_Bytes: TypeAlias = NDArray[np.uint8]
"""(units, bytes of a unit)"""

_Floats: TypeAlias = NDArray[np.floating[Any]]
"""(units, ROW_TOKENS, head_dim)"""

_FACE = ROW_TOKENS // 2
_TILE_EXPONENTS = 4 * _FACE

_LOSSLESS = frozenset(
    {
        ("bfloat16", "float32"),
        ("bfloat16", "float64"),
        ("float16", "float32"),
        ("float16", "float64"),
        ("float32", "float64"),
        (BFLOAT8_B, "bfloat16"),
        (BFLOAT8_B, "float32"),
    }
)
_LOSSY = frozenset(
    {
        ("bfloat16", "float16"),
        ("bfloat16", BFLOAT8_B),
        ("float16", "bfloat16"),
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("float32", BFLOAT8_B),
        ("float64", "bfloat16"),
        ("float64", "float16"),
        ("float64", "float32"),
    }
)


def is_lossless(source: str, target: str) -> bool:
    """Return whether the target dtype can hold every number of the source dtype.

    Args:
        source: Dtype of the producer.
        target: Dtype of the consumer.

    Raises:
        InvalidLayoutError: There is no conversion between the two; names both.
    """
    pair = (source, target)
    if source != target and pair not in _LOSSLESS and pair not in _LOSSY:
        raise InvalidLayoutError(
            f"KV of dtype {source!r} cannot be converted to {target!r}: take it out of "
            "kv_accept_dtypes, or run both ends with one dtype"
        )
    return source == target or pair in _LOSSLESS


def acceptable_layouts(own: RowLayout, accept_dtypes: Iterable[str]) -> dict[str, RowLayout]:
    """Return the layouts that an engine accepts, by hash: all it will know of a producer's layout.

    Args:
        own: The engine's layout.
        accept_dtypes: Dtypes to accept besides the engine's own.

    Returns:
        ``content_hash() -> layout``: the engine's own layout, and it with each accepted dtype. The
        block size in them is this engine's, not the producer's.

    Raises:
        InvalidLayoutError: A dtype is unknown, impossible for this layout, or cannot be converted
            to the engine's own.
    """
    layouts = [own]
    for dtype in accept_dtypes:
        layouts.append(own.with_dtype(dtype))
        for group in own.groups:
            is_lossless(dtype, group.dtype)
    return {layout.content_hash(): layout for layout in layouts}


def convert_rows(data: _Bytes, source: KVLayout, target: KVLayout) -> _Bytes:
    """Convert rows; round to nearest, ties to even, and keep infinities and NaNs.

    Args:
        data: ``(n, source.row_bytes)`` uint8, perhaps read-only.
        source: Layout of the rows.
        target: Layout to convert to; differs from the source in dtype and block size at most.

    Returns:
        ``(n, target.row_bytes)`` uint8; ``data`` itself when the dtypes are equal.

    Raises:
        InvalidLayoutError: The layouts differ in something else, or there is no such conversion.
        ValueError: ``data`` has another shape or dtype.
    """
    as_target = msgspec.structs.replace(source, dtype=target.dtype)
    if as_target.content_hash() != target.content_hash():
        raise InvalidLayoutError(
            f"cannot convert rows of {source} to rows of {target}: only the dtype may differ"
        )
    is_lossless(source.dtype, target.dtype)
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != source.row_bytes:
        raise ValueError(
            f"data has shape {data.shape} and dtype {data.dtype}; (n, {source.row_bytes}) uint8 "
            "is needed"
        )
    if source.dtype == target.dtype:
        return data
    units = np.ascontiguousarray(data).reshape(-1, source.unit_bytes)
    # Rounding makes a number infinite that is too large for the target.
    with np.errstate(over="ignore", invalid="ignore"):
        values = _READ[source.dtype](units).reshape(-1, ROW_TOKENS, source.head_dim)
        return _WRITE[target.dtype](values).reshape(len(data), target.row_bytes)


# ---- plain floats


def _reader(dtype: type[np.floating[Any]]) -> Callable[[_Bytes], _Floats]:
    return lambda units: units.view(dtype)


def _writer(dtype: type[np.floating[Any]]) -> Callable[[_Floats], _Bytes]:
    return lambda values: values.astype(dtype).view(np.uint8)


# ---- bfloat16


def _read_bfloat16(units: _Bytes) -> _Floats:
    return (units.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _write_bfloat16(values: _Floats) -> _Bytes:
    bits = _to_float32_and_odd(values).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    # Rounding could carry a NaN into an infinity, or clear all of its mantissa.
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, bits >> 16 | 0x40, rounded).astype(np.uint16).view(np.uint8)


def _to_float32_and_odd(values: _Floats) -> NDArray[np.float32]:
    """Narrow to float32 so that a second rounding gives what a single one would ("round to odd").

    Bits that float32 has no room for are cut off and leave the last bit set. No later rounding
    then mistakes the number for a tie.
    """
    narrow = values.astype(np.float32)
    if values.dtype == np.float64:
        bits = narrow.view(np.uint32)
        bits -= np.abs(narrow) > np.abs(values)
        bits |= narrow != values
    return narrow


# ---- bfloat8_b


@functools.cache
def _bfloat8_b_values() -> NDArray[np.float32]:
    """Tabulate the value of element ``byte`` under exponent ``e``, at ``e * 256 + byte``."""
    exponents, elements = np.divmod(np.arange(1 << 16), 256)
    magnitudes = elements & 0x7F
    values = np.ldexp(magnitudes.astype(np.float64), exponents - 133)
    values[values < 2.0**-126] = 0.0
    # m = 64 is too large for float32 here, which makes it infinite; above it are the NaNs.
    values[(exponents == 255) & (magnitudes > 64)] = np.nan
    signed: NDArray[np.float64] = np.where(elements >> 7, -values, values)
    return signed.astype(np.float32)


def _read_bfloat8_b(units: _Bytes) -> _Floats:
    tiles = units.reshape(-1, BFLOAT8_B_TILE_BYTES)
    exponents = tiles[:, :_TILE_EXPONENTS].reshape(-1, _FACE, 1).astype(np.uint16)
    elements = tiles[:, _TILE_EXPONENTS:].reshape(-1, _FACE, _FACE)
    values = _bfloat8_b_values()[exponents << 8 | elements]
    num_tiles = units.shape[1] // BFLOAT8_B_TILE_BYTES
    faces = values.reshape(len(units), num_tiles, 2, 2, _FACE, _FACE)
    # (unit, tile, face below, face right, token, element) -> (unit, token, element)
    return np.ascontiguousarray(faces.transpose(0, 2, 4, 1, 3, 5))


def _write_bfloat8_b(values: _Floats) -> _Bytes:
    num_tiles = values.shape[2] // ROW_TOKENS
    halves = values.astype(np.float32).reshape(len(values), 2, _FACE, num_tiles, 2, _FACE)
    bits = np.ascontiguousarray(halves.transpose(0, 3, 1, 4, 2, 5)).view(np.uint32)
    bits = bits.reshape(-1, _TILE_EXPONENTS, _FACE)
    exponents = bits >> 23 & 0xFF
    shared = exponents.max(axis=-1, keepdims=True)
    # 24 bits with the hidden one. The device drops the bits it shifts out before it rounds, so a
    # number slightly above a tie counts as a tie.
    magnitudes = (bits & 0x7FFFFF | 0x800000) >> np.minimum(shared - exponents, 24)
    magnitudes = (magnitudes + (0xFFFF + (magnitudes >> 17 & 1))) >> 17
    magnitudes = np.minimum(magnitudes, 0x7F)
    magnitudes[exponents == 0] = 0
    # The device packs a NaN whose upper bits are zero as an infinity.
    magnitudes[(bits & 0x7FFFFFFF) > 0x7F800000] |= 0x20
    elements = np.where(magnitudes, bits >> 31 << 7 | magnitudes, 0)
    tiles = np.empty((len(bits), BFLOAT8_B_TILE_BYTES), np.uint8)
    tiles[:, :_TILE_EXPONENTS] = shared[..., 0]
    tiles[:, _TILE_EXPONENTS:] = elements.reshape(len(bits), ROW_TOKENS * ROW_TOKENS)
    return tiles


_READ: dict[str, Callable[[_Bytes], _Floats]] = {
    "float64": _reader(np.float64),
    "float32": _reader(np.float32),
    "float16": _reader(np.float16),
    "bfloat16": _read_bfloat16,
    BFLOAT8_B: _read_bfloat8_b,
}
_WRITE: dict[str, Callable[[_Floats], _Bytes]] = {
    "float64": _writer(np.float64),
    "float32": _writer(np.float32),
    "float16": _writer(np.float16),
    "bfloat16": _write_bfloat16,
    BFLOAT8_B: _write_bfloat8_b,
}

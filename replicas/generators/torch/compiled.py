"""Kernels as numba compiles them: functions of one block of int64.

The first number of a block is the next unit of work, which threads take one after another, the
second how many there are; the others are sizes and addresses, as `kernels.py` beside this file
says, which alone calls them. They compute in float32, or float64 for float64, and round where the
operations of transformers do. Addresses are believed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic, overload

from replicas.generators.torch import vectors

# What is divided by zero is no exception, which nobody would hear of.
OPTIONS: dict[str, Any] = {"fastmath": set(vectors.FLAGS), "error_model": "numpy"}

OUTPUTS = 16
PLUS, TIMES, SWISH = 1, 2, 3
"""What `multiply` does with a product."""


# --- what numba cannot say -----------------------------------------------------------------------


def _bitcast(source, target, llvm_type):
    @intrinsic
    def cast(_context, _value):
        def generate(_context, builder, _signature, values):
            return builder.bitcast(values[0], llvm_type)

        return target(source), generate

    return cast


_float_of = _bitcast(types.uint32, types.float32, ir.FloatType())
_bits_of = _bitcast(types.float32, types.uint32, ir.IntType(32))
_double_of = _bitcast(types.int64, types.float64, ir.DoubleType())


@intrinsic
def _pointer(_context, _address, item):
    """An address as a pointer to items of a type."""

    def generate(context, builder, signature, values):
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(item.dtype)(types.int64, item), generate


@intrinsic
def _take(_context, _block):
    """The next unit: what the first number of a block was before it is one more."""

    def generate(_context, builder, _signature, values):
        integer = ir.IntType(64)
        counter = builder.bitcast(values[0], integer.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(integer, 1), "monotonic")

    return types.int64(types.voidptr), generate


def _widen(x):
    raise NotImplementedError


@overload(_widen)
def _(x):
    if x == types.uint16:
        return lambda x: _float_of(np.uint32(x) << np.uint32(16))
    return lambda x: x


def _put(array, index, x):
    raise NotImplementedError


@overload(_put)
def _(array, index, x):
    if array.dtype == types.uint16:

        def put(array, index, x):
            bits = _bits_of(x)
            half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            rounded = np.uint16((bits + half) >> np.uint32(16))
            # A NaN must not be rounded into a number.
            array[np.uintp(index)] = rounded if x == x else np.uint16(0x7FC0)

        return put

    def put(array, index, x):
        array[np.uintp(index)] = x

    return put


@njit
def _get(array, index):
    # Unsigned, or every read would ask whether it counts from the end.
    return _widen(array[np.uintp(index)])


def _same(like, x):
    raise NotImplementedError


@overload(_same)
def _(like, x):
    number = np.float64 if like == types.float64 else np.float32
    return lambda like, x: number(x)


# --- kernels ------------------------------------------------------------------------------------


def rms_norm(item):
    """Rows of x, normalised and weighted; a unit is a row."""
    wide = _wide(item)

    def kernel(block):
        a = carray(block, (8,), np.int64)
        size, stride = a[2], a[4]
        x = carray(_pointer(a[3], item), (1,))
        weight = carray(_pointer(a[5], item), (1,))
        out = carray(_pointer(a[6], item), (1,))
        eps = wide(_double_of(a[7]))
        unit = _take(block)
        while unit < a[1]:
            _normalise(x, unit * stride, weight, 0, out, unit * size, size, eps)
            unit = _take(block)

    return kernel


@njit(**OPTIONS)
def _normalise(x, first, weight, first_weight, out, first_out, size, eps):
    """Rounded before the weight is applied, as transformers does."""
    total = eps - eps
    for i in range(size):
        value = _get(x, first + i)
        total += value * value
    # Wider than the numbers, then as wide.
    scale = _same(eps, 1 / np.sqrt(total / size + eps))
    for i in range(size):
        _put(out, first_out + i, _get(x, first + i) * scale)
    for i in range(size):
        _put(out, first_out + i, _get(out, first_out + i) * _get(weight, first_weight + i))


def rotate_and_store(item):
    """Queries and keys rotated in place; keys, values also to their blocks; a unit is a token."""
    wide = _wide(item)

    def kernel(block):
        a = carray(block, (16,), np.int64)
        num_heads, num_kv_heads, head_dim, block_size = a[2], a[3], a[4], a[5]
        heads = carray(_pointer(a[6], item), (1,))
        cos = carray(_pointer(a[7], item), (1,))
        sin = carray(_pointer(a[8], item), (1,))
        positions = carray(_pointer(a[9], types.int64), (1,))
        kv_positions = carray(_pointer(a[10], types.int64), (1,))
        k_plane = carray(_pointer(a[11], item), (1,))
        v_plane = carray(_pointer(a[12], item), (1,))
        norm = carray(_pointer(a[13], item), (1,))
        has_norm, eps = a[13] != 0, wide(_double_of(a[14]))
        unit = _take(block)
        while unit < a[1]:
            first = unit * (num_heads + 2 * num_kv_heads) * head_dim
            angle = positions[unit] * head_dim
            for head in range(num_heads + num_kv_heads):
                at = first + head * head_dim
                if has_norm:
                    _normalise(heads, at, norm, head * head_dim, heads, at, head_dim, eps)
                _rotate(heads, at, cos, sin, angle, head_dim)
            first += num_heads * head_dim
            into, offset = divmod(kv_positions[unit], block_size)
            for head in range(num_kv_heads):
                target = ((into * num_kv_heads + head) * block_size + offset) * head_dim
                for d in range(head_dim):
                    at = first + head * head_dim + d
                    k_plane[np.uintp(target + d)] = heads[np.uintp(at)]
                    v_plane[np.uintp(target + d)] = heads[np.uintp(at + num_kv_heads * head_dim)]
            unit = _take(block)

    return kernel


@njit(**OPTIONS)
def _rotate(heads, at, cos, sin, angle, head_dim):
    half = head_dim // 2
    for d in range(half):
        left, right = _get(heads, at + d), _get(heads, at + half + d)
        turned = left * _get(cos, angle + d) + right * _get(sin, angle + d)
        other = right * _get(cos, angle + half + d) + left * _get(sin, angle + half + d)
        _put(heads, at + d, turned)
        _put(heads, at + half + d, other)


def attend(item, head_dim, share, num_tokens):
    """Some tokens of a sequence over its blocks; a unit is their query heads of a KV head.

    Args:
        item: What the numbers are stored as.
        head_dim: D.
        share: H / G.
        num_tokens: How many at once, at most; a sequence's last ones may be fewer.
    """
    wide = _wide(item)
    scale = wide(head_dim**-0.5)
    num_rows = num_tokens * share

    def kernel(block):
        a = carray(block, (16,), np.int64)
        num_kv_heads, block_size, width = a[2], a[3], a[4]
        q = carray(_pointer(a[5], item), (1,))
        out = carray(_pointer(a[7], item), (1,))
        k_plane = carray(_pointer(a[9], item), (1,))
        v_plane = carray(_pointer(a[10], item), (1,))
        tokens = carray(_pointer(a[11], types.int64), (1,))
        counts = carray(_pointer(a[12], types.int64), (1,))
        lengths = carray(_pointer(a[13], types.int64), (1,))
        requests = carray(_pointer(a[14], types.int64), (1,))
        tables = carray(_pointer(a[15], types.int64), (1,))
        queries = np.empty(num_rows * head_dim, wide)
        found = np.empty(num_rows * head_dim, wide)
        stride = -(-block_size // vectors.WIDTH) * vectors.WIDTH
        scores = np.empty(num_rows * stride, wide)
        tops = np.empty(num_rows, wide)
        totals = np.empty(num_rows, wide)
        fades = np.empty(num_rows, wide)
        seen = np.empty(num_rows, np.int64)
        unit = _take(block)
        while unit < a[1]:
            tile, head = divmod(unit, num_kv_heads)
            token, last, length = tokens[tile], counts[tile] - 1, lengths[tile]
            first = head * share * head_dim
            for j in range(num_tokens):
                # What is too few is made up with the last one again, and not written.
                _read(q, (token + min(j, last)) * a[6] + first, queries, j, share * head_dim, scale)
            found[:] = 0
            tops[:] = -np.inf
            totals[:] = 0
            for index in range(-(-length // block_size)):
                place = tables[requests[tile] * width + index] * num_kv_heads + head
                at, left = place * block_size * head_dim, length - index * block_size
                count = min(left, block_size)
                vectors.score(queries, k_plane, at, count, scores, stride, head_dim, num_rows)
                for row in range(num_rows):
                    # A token does not see those behind it, nor what fills its last vector up.
                    seen[row] = min(left - last + min(row // share, last), count)
                vectors.soften(scores, stride, seen, count, tops, totals, fades, num_rows)
                vectors.add_weighted(
                    scores, stride, v_plane, at, count, found, fades, head_dim, num_rows
                )
            for j in range(last + 1):
                _write(found, totals, j, share, head_dim, out, (token + j) * a[8] + first)
            unit = _take(block)

    return kernel


@njit(**OPTIONS)
def _read(q, at, queries, place, size, scale):
    for d in range(size):
        queries[np.uintp(place * size + d)] = _get(q, at + d) * scale


@njit(**OPTIONS)
def _write(found, totals, place, share, head_dim, out, at):
    """What the heads of a token found, over what their weights are together."""
    for h in range(share):
        row = place * share + h
        part = _same(totals[row], 1 / totals[row])
        for d in range(head_dim):
            value = found[np.uintp(row * head_dim + d)] * part
            _put(out, at + h * head_dim + d, value)


def multiply(item):
    """Rows times a weight matrix, and what is done with the product; a unit is 16 outputs."""
    wide = _wide(item)

    def kernel(block):
        a = carray(block, (12,), np.int64)
        num_rows, size, num_outputs = a[2], a[3], a[4]
        x = carray(_pointer(a[5], item), (1,))
        weight = carray(_pointer(a[6], item), (1,))
        bias = carray(_pointer(a[7], item), (1,))
        other = carray(_pointer(a[8], item), (1,))
        out = carray(_pointer(a[9], item), (1,))
        sums = np.empty(4, wide)
        unit = _take(block)
        while unit < a[1]:
            for n in range(unit * OUTPUTS, min((unit + 1) * OUTPUTS, num_outputs), 4):
                count = min(4, num_outputs - n)
                for row in range(num_rows):
                    _dots(x, row * size, weight, n * size, size, count, sums)
                    for i in range(count):
                        value = sums[i]
                        if a[7]:
                            value += _get(bias, n + i)
                        place = row * num_outputs + n + i
                        if a[10] == PLUS:
                            value += _get(other, place)
                        elif a[10] == TIMES:
                            value *= _get(other, place)
                        elif a[10] == SWISH:
                            value *= _sigmoid(value)
                        _put(out, place, value)
            unit = _take(block)

    return kernel


@njit(**OPTIONS)
def _dots(x, first, weight, at, size, count, sums):
    """Products of a row and up to four columns; four at once, so that the row is read once."""
    if count < 4:
        for i in range(count):
            sums[i] = 0
            for k in range(size):
                sums[i] += _get(x, first + k) * _get(weight, at + i * size + k)
        return
    one = two = three = four = _same(sums[0], 0)
    for k in range(size):
        value = _get(x, first + k)
        one += value * _get(weight, at + k)
        two += value * _get(weight, at + size + k)
        three += value * _get(weight, at + 2 * size + k)
        four += value * _get(weight, at + 3 * size + k)
    sums[0], sums[1], sums[2], sums[3] = one, two, three, four


@njit(**OPTIONS)
def _sigmoid(x):
    raised = vectors.exp(-abs(x))
    return (_same(x, 1) if x >= 0 else raised) / (_same(x, 1) + raised)


def _wide(item):
    return np.float64 if item == types.float64 else np.float32

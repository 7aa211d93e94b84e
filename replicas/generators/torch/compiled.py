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

from replicas.generators.torch import heads, pairs, products, rows, tiles, vectors
from replicas.generators.torch.products import MOST_ROWS, NOTHING, PANEL, PLUS, ROWS, SWISH, TIMES

# "numpy" makes division by zero give inf or NaN; a raised exception would be lost in a kernel.
OPTIONS: dict[str, Any] = {"fastmath": {*vectors.FLAGS, "reassoc"}, "error_model": "numpy"}

TILE = 4
"""Tokens of a prompt that read a key together."""

_AHEAD = 2
"""Blocks that are on their way while one is read: memory takes longer than a block's arithmetic."""


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
double_of = _bitcast(types.int64, types.float64, ir.DoubleType())


@intrinsic
def pointer(_context, _address, item):
    """Return an address as a pointer to items of a type."""

    def generate(context, builder, signature, values):
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(item.dtype)(types.int64, item), generate


@intrinsic
def take_from(_context, _block, place):
    """Increment a number of a block atomically; return its previous value."""

    def generate(_context, builder, _signature, values):
        integer = ir.IntType(64)
        counter = builder.bitcast(values[0], integer.as_pointer())
        counter = builder.gep(counter, [values[1]])
        return builder.atomic_rmw("add", counter, ir.Constant(integer, 1), "monotonic")

    return types.int64(types.voidptr, types.int64), generate


@njit
def take(block):
    """Take the next unit atomically."""
    return take_from(block, 0)


def _widen(x):
    raise NotImplementedError


@overload(_widen)
def _(x):
    if x == types.uint16:
        return lambda x: _float_of(np.uint32(x) << np.uint32(16))
    return lambda x: x


def put(array, index, x):
    """Store a number in an array, rounded."""
    raise NotImplementedError


@overload(put)
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
def get(array, index):
    """Load a number of an array, widened to the compute type."""
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
    """Normalise and weight the rows of x; a unit is a row."""
    wide = _wide(item)

    def kernel(block):
        a = carray(block, (8,), np.int64)
        size, stride = a[2], a[4]
        x = carray(pointer(a[3], item), (1,))
        weight = carray(pointer(a[5], item), (1,))
        out = carray(pointer(a[6], item), (1,))
        eps = wide(double_of(a[7]))
        unit = take(block)
        while unit < a[1]:
            normalise(x, unit * stride, weight, 0, out, unit * size, size, eps)
            unit = take(block)

    return kernel


@njit(**OPTIONS)
def normalise(x, first, weight, first_weight, out, first_out, size, eps):
    """Rounded before the weight is applied, as transformers does."""
    total = rows.square_sum(x, first, size, eps - eps)
    # Wider than the numbers, then as wide.
    scale = _same(eps, 1 / np.sqrt(total / size + eps))
    rows.weigh(x, first, scale, weight, first_weight, out, first_out, size)


def rotate_and_store(item):
    """Rotate queries and keys in place, store keys and values in blocks; a unit is a token."""
    wide = _wide(item)

    def kernel(block):
        a = carray(block, (16,), np.int64)
        num_heads, num_kv_heads, head_dim, block_size = a[2], a[3], a[4], a[5]
        heads = carray(pointer(a[6], item), (1,))
        cos = carray(pointer(a[7], item), (1,))
        sin = carray(pointer(a[8], item), (1,))
        positions = carray(pointer(a[9], types.int64), (1,))
        kv_positions = carray(pointer(a[10], types.int64), (1,))
        k_plane = carray(pointer(a[11], item), (1,))
        v_plane = carray(pointer(a[12], item), (1,))
        norm = carray(pointer(a[13], item), (1,))
        has_norm, eps = a[13] != 0, wide(double_of(a[14]))
        unit = take(block)
        while unit < a[1]:
            first = unit * (num_heads + 2 * num_kv_heads) * head_dim
            angle = positions[unit] * head_dim
            turn(
                heads,
                first,
                num_heads + num_kv_heads,
                head_dim,
                norm,
                has_norm,
                eps,
                cos,
                sin,
                angle,
            )
            first += num_heads * head_dim
            keep(
                heads,
                first,
                num_kv_heads,
                head_dim,
                kv_positions[unit],
                block_size,
                k_plane,
                v_plane,
            )
            unit = take(block)

    return kernel


@njit(**OPTIONS)
def turn(heads, first, num_heads, head_dim, norm, has_norm, eps, cos, sin, angle):
    """Normalise and rotate the queries and keys of a token in place."""
    for head in range(num_heads):
        at = first + head * head_dim
        if has_norm:
            normalise(heads, at, norm, head * head_dim, heads, at, head_dim, eps)
        rows.rotate(heads, at, cos, sin, angle, head_dim // 2)


@njit(**OPTIONS)
def keep(heads, first, num_kv_heads, head_dim, kv_position, block_size, k_plane, v_plane):
    """Store the keys and values of a token in their block."""
    into, offset = divmod(kv_position, block_size)
    for head in range(num_kv_heads):
        target = ((into * num_kv_heads + head) * block_size + offset) * head_dim
        for d in range(head_dim):
            at = first + head * head_dim + d
            k_plane[np.uintp(target + d)] = heads[np.uintp(at)]
            v_plane[np.uintp(target + d)] = heads[np.uintp(at + num_kv_heads * head_dim)]


def attend(item, head_dim, share, num_tokens):
    """Some tokens of a sequence over its blocks; a unit is their query heads of a KV head.

    Args:
        item: What the numbers are stored as.
        head_dim: D.
        share: H / G.
        num_tokens: How many at once, at most; a sequence's last ones may be fewer.
    """
    wide, kept = _wide(item), kept_as(item, head_dim)
    num_rows = num_tokens * share

    def kernel(block):
        a = carray(block, (16,), np.int64)
        num_kv_heads, block_size, width, q_stride, out_stride = a[2], a[3], a[4], a[6], a[8]
        q = carray(pointer(a[5], item), (1,))
        out = carray(pointer(a[7], item), (1,))
        planes = carray(pointer(a[9], item), (1,)), carray(pointer(a[10], item), (1,))
        tokens = carray(pointer(a[11], types.int64), (1,))
        counts = carray(pointer(a[12], types.int64), (1,))
        lengths = carray(pointer(a[13], types.int64), (1,))
        requests = carray(pointer(a[14], types.int64), (1,))
        tables = carray(pointer(a[15], types.int64), (1,))
        room = room_for(num_rows, head_dim, block_size, wide(0), kept(0))
        unit = take(block)
        while unit < a[1]:
            tile, head = divmod(unit, num_kv_heads)
            token = tokens[tile]
            reads, writes = (q, token * q_stride, q_stride), (out, token * out_stride, out_stride)
            here = counts[tile], lengths[tile], tables, requests[tile] * width, -1, width
            attend_tile(
                reads, writes, here, planes, block_size, num_kv_heads, head, room,
                head_dim, share, num_tokens, num_rows,
            )  # fmt: skip
            unit = take(block)

    return kernel


@njit(inline="always")
def room_for(num_rows, head_dim, block_size, zero, kept):
    """Allocate the buffers of a tile.

    Args:
        num_rows: Query heads of the tile.
        head_dim: D.
        block_size: S.
        zero: Zero of the compute type.
        kept: Zero of the type in which queries and weights are stored.

    Returns:
        Queries, results, scores, weights, the stride of their rows, the greatest score of each row,
        the sum of its weights, the factor on its earlier result, and the number of keys that it
        sees.
    """
    stride = -(-block_size // vectors.WIDTH) * vectors.WIDTH
    queries, weights = np.full(num_rows * head_dim, kept), np.full(num_rows * stride, kept)
    found, scores = np.full(num_rows * head_dim, zero), np.full(num_rows * stride, zero)
    tops = np.full(num_rows, zero)
    seen = np.empty(num_rows, np.int64)
    return queries, found, scores, weights, stride, tops, tops.copy(), tops.copy(), seen


@njit(inline="always")
def attend_tile(
    reads, writes, here, planes, block_size, num_kv_heads, head, room,
    head_dim, share, num_tokens, num_rows,
):  # fmt: skip
    """Attend with the query heads of one KV head, of neighbouring tokens, over a sequence's blocks.

    Args:
        reads: Queries, index of the first token's, and stride between tokens.
        writes: The same for the results.
        here: Number of tokens, keys that the last of them sees, block tables, index of this
            sequence's table, index of the table that this thread reads next (-1 if another thread
            may read even the next head), and stride of tables.
        planes: Keys and values.
        block_size: S.
        num_kv_heads: G.
        head: Index of the KV head.
        room: See `room_for`.
        head_dim: D; a compile-time constant, like the next three.
        share: H / G.
        num_tokens: Tokens of a tile.
        num_rows: Query heads of a tile.
    """
    q, q_at, q_stride = reads
    out, out_at, out_stride = writes
    count_tokens, length, tables, table, after, width = here
    k_plane, v_plane = planes
    queries, found, scores, weights, stride, tops, totals, fades, seen = room
    last = count_tokens - 1
    first = head * share * head_dim
    for j in range(num_tokens):
        # Missing tokens are filled with the last one; their results are not written.
        read(q, q_at + min(j, last) * q_stride + first, queries, j, share * head_dim)
    found[:] = 0
    tops[:] = -np.inf
    totals[:] = 0
    size, num_blocks = block_size * head_dim, -(-length // block_size)
    if after < 0:
        for nth in range(1, min(_AHEAD, num_blocks)):  # the first one is read at once
            fetch(planes, (tables[table + nth] * num_kv_heads + head) * size, size)
    for index in range(num_blocks):
        at, left = (tables[table + index] * num_kv_heads + head) * size, length - index * block_size
        nth = index + _AHEAD
        if nth < num_blocks or after >= 0:
            soon = _place_of(nth, tables, table, after, width, num_blocks, head, num_kv_heads)
            fetch(planes, soon * size, size)
        count = min(left, block_size)
        heads.score(queries, k_plane, at, count, scores, stride, head_dim, num_rows)
        for row in range(num_rows):
            # A token does not see those behind it, nor what fills its last vector up.
            seen[row] = min(left - last + min(row // share, last), count)
        heads.soften(scores, weights, stride, seen, count, tops, totals, fades, num_rows)
        heads.add_weighted(weights, stride, v_plane, at, count, found, fades, head_dim, num_rows)
    for j in range(last + 1):
        write(found, totals, j, share, head_dim, out, out_at + j * out_stride + first)


@njit(inline="always")
def _place_of(nth, tables, table, after, width, num_blocks, head, num_kv_heads):
    """Return the index in a plane of the nth block of a sequence, for a head.

    Behind a head's last one is the next head's first, and behind the last head's that of the
    sequence that comes next.
    """
    if nth < num_blocks:
        return tables[table + nth] * num_kv_heads + head
    nth -= num_blocks
    if head + 1 < num_kv_heads:
        return tables[table + min(nth, num_blocks - 1)] * num_kv_heads + head + 1
    return tables[after + min(nth, width - 1)] * num_kv_heads


@njit(**OPTIONS)
def fetch(planes, at, size):
    """Prefetch the keys and values of a block."""
    vectors.fetch(planes[0], at, size)
    vectors.fetch(planes[1], at, size)


@njit(**OPTIONS)
def read(q, at, queries, place, size):
    """Load the queries of a token."""
    for d in range(size):
        put(queries, place * size + d, get(q, at + d))


@njit(**OPTIONS)
def write(found, totals, place, share, head_dim, out, at):
    """Write the results of a token's heads, divided by the sums of their weights."""
    for h in range(share):
        row = place * share + h
        part = _same(totals[row], 1 / totals[row])
        for d in range(head_dim):
            value = found[np.uintp(row * head_dim + d)] * part
            put(out, at + h * head_dim + d, value)


def product(item):
    """Multiply rows by a packed matrix and apply the fused operation; a unit is a panel."""

    def kernel(block):
        a = carray(block, (12,), np.int64)
        num_rows, size, num_outputs = a[2], a[3], a[4]
        x = carray(pointer(a[5], item), (1,))
        weight = carray(pointer(a[6], item), (1,))
        bias = carray(pointer(a[7], item), (1,))
        other = carray(pointer(a[8], item), (1,))
        out = carray(pointer(a[9], item), (1,))
        linear = size, weight, bias, a[7] != 0, num_outputs
        room = sums_for()
        unit = take(block)
        while unit < a[1]:
            panels = unit, unit + 1
            multiply((x, 0), num_rows, linear, panels, a[10], (other, 0), (out, 0), room)
            unit = take(block)

    return kernel


@njit(**OPTIONS)
def multiply(reads, num_rows, linear, panels, then, other, writes, room):
    """Multiply rows by some panels of a matrix.

    Args:
        reads: Rows, where the first one is.
        num_rows: How many.
        linear: K, the packed weight, the bias, whether there is one, N.
        panels: The first, and the one behind the last.
        then: What `products.finish_rows` does.
        other: With what; rows as ``writes``.
        writes: The whole product, where its first row is.
        room: Of `sums_for`.
    """
    if not (_has_tiles() and linear[0] % tiles.FEATURES == 0):
        _multiply_some(
            reads, 0, num_rows, ROWS, False, linear, panels, then, other, writes, room
        )  # fmt: skip
        return
    # All that fill the tiles, then the others: to shape tiles takes as long as to use them.
    left = num_rows % MOST_ROWS
    for first, last in ((0, num_rows - left), (num_rows - left, num_rows)):
        if first < last:
            products.shape_tiles(room[2], min(last - first, MOST_ROWS))
            _multiply_some(
                reads, first, last, MOST_ROWS, True, linear, panels, then, other, writes, room
            )  # fmt: skip
    products.leave_tiles()


@njit(**OPTIONS)
def _multiply_some(
    reads, first, last, most, in_tiles, linear, panels, then, other, writes, room
):  # fmt: skip
    """Some rows, so many at once; a panel is read for all of them while it is in the caches."""
    (x, at), (size, weight, bias, has_bias, num_outputs) = reads, linear
    (out, out_at), (beside, beside_at), (sums, before, _) = writes, other, room
    for panel in range(panels[0], panels[1]):
        column = panel * PANEL
        width = min(PANEL, num_outputs - column)
        for i in range(width):
            before[np.uintp(i)] = get(bias, column + i) if has_bias else np.float32(0)
        for row in range(first, last, most):
            count = min(most, last - row)
            row_at, place = at + row * size, row * num_outputs + column
            if not in_tiles:
                _sum_rows(x, row_at, size, weight, panel, before, sums, count)
            elif count <= tiles.ROWS:
                products.multiply_tiles(x, row_at, size, weight, panel, size, before, sums, 1)
            else:
                products.multiply_tiles(x, row_at, size, weight, panel, size, before, sums, 2)
            _finish(
                sums, count, width, beside, beside_at + place, out, out_at + place, num_outputs,
                then,
            )  # fmt: skip


def _has_tiles():
    raise NotImplementedError


@overload(_has_tiles)
def _():
    found = tiles.are_supported()
    return lambda: found


@njit(**OPTIONS)
def sums_for():
    """Allocate buffers for `multiply`: sums of some rows and a panel, offsets, shapes of tiles."""
    shapes = np.zeros(tiles.SHAPES_BYTES, np.uint8)
    return np.empty(MOST_ROWS * PANEL, np.float32), np.zeros(PANEL, np.float32), shapes


@njit(**OPTIONS)
def _sum_rows(x, at, size, weight, panel, before, sums, count):
    if count == 6:
        products.multiply_rows(x, at, size, weight, panel, size, before, sums, 6)
    elif count == 5:
        products.multiply_rows(x, at, size, weight, panel, size, before, sums, 5)
    elif count == 4:
        products.multiply_rows(x, at, size, weight, panel, size, before, sums, 4)
    elif count == 3:
        products.multiply_rows(x, at, size, weight, panel, size, before, sums, 3)
    elif count == 2:
        products.multiply_rows(x, at, size, weight, panel, size, before, sums, 2)
    else:
        products.multiply_rows(x, at, size, weight, panel, size, before, sums, 1)


@njit(**OPTIONS)
def _finish(sums, count, width, other, other_at, out, at, stride, then):
    if then == PLUS:
        products.finish_rows(sums, count, width, other, other_at, out, at, stride, PLUS)
    elif then == TIMES:
        products.finish_rows(sums, count, width, other, other_at, out, at, stride, TIMES)
    elif then == SWISH:
        products.finish_rows(sums, count, width, other, other_at, out, at, stride, SWISH)
    else:
        products.finish_rows(sums, count, width, other, other_at, out, at, stride, NOTHING)


def kept_as(item, head_dim):
    """Return the storage type of queries and weights: that of pair products, where supported."""
    in_pairs = item == types.uint16 and pairs.are_supported() and head_dim % pairs.WIDTH == 0
    return np.uint16 if in_pairs else _wide(item)


def _wide(item):
    return np.float64 if item == types.float64 else np.float32

"""All layers of a pass as one kernel, which numba compiles; `stack.py` beside this file calls it.

A task is some neighbouring tokens in one layer. Threads take tasks in order, layer by layer, so
that all of them read the weights of a layer while these are in the caches. A task waits for its
tokens' previous layer and, in a cut prompt, for the keys and values of earlier tokens. These tasks
were taken earlier, so a waiting thread always waits for a running one.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from replicas.generators.torch import compiled
from replicas.generators.torch.compiled import (
    OPTIONS,
    TILE,
    attend_tile,
    double_of,
    pointer,
    take,
    take_from,
)
from replicas.generators.torch.products import NOTHING, PLUS, SWISH, TIMES, num_panels

COLUMNS = 15
"""Number of addresses of a layer: norm, qkv, its bias, norm of heads, o, its bias, norm, gate, its
bias, up, its bias, down, its bias, plane of keys, plane of values; 0 for a missing one."""
PLANES = COLUMNS - 2
"""Index of the first plane."""

_TURNS = 1000
"""Number of polls before a waiting thread yields its core."""


@intrinsic
def _publish(_context, array, index, value):
    """Writes a number that is seen only with all that was written before it."""

    def generate(_context, builder, _signature, values):
        place = builder.gep(values[0], [values[1]])
        builder.store_atomic(values[2], place, ordering="release", align=8)
        return _context.get_dummy_value()

    return types.void(array, index, value), generate


@intrinsic
def _seen(_context, array, index):
    """Reads a number, and with it all that was written before it."""

    def generate(_context, builder, _signature, values):
        place = builder.gep(values[0], [values[1]])
        return builder.load_atomic(place, ordering="acquire", align=8)

    return types.int64(array, index), generate


@intrinsic
def _let_others(_context):
    def generate(context, builder, _signature, _values):
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@njit(**OPTIONS)
def wait(progress, index, wanted):
    """Wait until a number that other threads publish is large enough."""
    turns = 0
    while _seen(progress, index) < wanted:
        turns += 1
        if turns > _TURNS:
            _let_others()


def run_layers(item, head_dim, share):
    """Some layers over all tokens; a unit is a task.

    Args:
        item: What the numbers are stored as: bfloat16's bits.
        head_dim: D.
        share: H / G.
    """
    few_rows, many_rows = share, TILE * share
    kept_as = compiled.kept_as(item, head_dim)

    def kernel(block):
        a = carray(block, (36,), np.int64)
        if take_from(block, 2) >= a[3]:
            return  # a thread too many
        num_units, final_layer, most = a[4], a[6], a[30]
        hidden, inner, num_kv_heads, block_size = a[7], a[8], a[9], a[10]
        eps = np.float32(double_of(a[12]))
        x, out = items(a[13], item), items(a[14], item)
        turns = items(a[15], item), items(a[16], item), numbers(a[17]), numbers(a[18])
        starts, lengths, tables, wanted = (
            numbers(a[19]), numbers(a[20]), numbers(a[21]), numbers(a[22]),
        )  # fmt: skip
        cuts, requests, needs, firsts = (
            numbers(a[23]), numbers(a[24]), numbers(a[25]), numbers(a[26]),
        )  # fmt: skip
        kept, done = pointer(a[28], types.int64), pointer(a[29], types.int64)
        size = num_kv_heads * share * head_dim
        heads_size = size + 2 * num_kv_heads * head_dim
        normed = np.empty(most * hidden, np.uint16)
        heads = np.empty(most * heads_size, np.uint16)
        attended = np.empty(most * size, np.uint16)
        gated = np.empty(most * inner, np.uint16)
        sums = compiled.sums_for()
        few = compiled.room_for(few_rows, head_dim, block_size, np.float32(0), kept_as(0))
        many = compiled.room_for(many_rows, head_dim, block_size, np.float32(0), kept_as(0))
        shape = hidden, inner, size, num_kv_heads, head_dim, block_size, eps
        task = take(block)
        while task < a[1]:
            nth, unit = divmod(task, num_units)
            layer = numbers(a[27] + 8 * COLUMNS * (a[5] + nth))
            begin, end = cuts[unit], cuts[unit + 1]
            planes = items(layer[PLANES], item), items(layer[PLANES + 1], item)
            wait(done, unit, nth)
            count = end - begin
            normalise_rows((x, begin * hidden), count, items(layer[0], item), normed, hidden, eps)
            make_heads(normed, count, (0, num_panels(heads_size)), layer, shape, heads, sums, item)
            turn_and_keep(heads, 0, count, begin, layer, shape, turns, planes, item)
            _publish(kept, unit, nth + 1)
            for before in range(needs[unit], unit):
                wait(kept, before, nth + 1)
            token, request = begin, requests[unit]
            while token < end:
                while starts[request + 1] <= token:
                    request += 1
                behind = starts[request + 1]
                num_tokens = min(TILE, min(behind, end) - token)
                row = token - begin
                length = lengths[request] - (behind - token - num_tokens)
                ends = token + num_tokens == behind and behind < end
                table, after = request * a[11], (request + ends) * a[11]
                here = num_tokens, length, tables, table, after, a[11]
                reads = heads, row * heads_size, heads_size
                writes = attended, row * size, size
                is_alone = behind - starts[request] == 1
                for head in range(num_kv_heads):
                    attend(
                        reads, writes, here, planes, block_size, num_kv_heads, head, few, many,
                        is_alone, head_dim, share, few_rows, many_rows,
                    )  # fmt: skip
                token += num_tokens
            into, place = x, begin * hidden
            if a[5] + nth == final_layer:
                # Nothing reads the other tokens any more.
                count, into, place = firsts[unit + 1] - firsts[unit], out, firsts[unit] * hidden
                leave(wanted, firsts[unit], count, begin, attended, size, x, out, hidden)
            _mix(into, place, count, layer, shape, attended, normed, gated, sums, item)
            _publish(done, unit, nth + 1)
            task = take(block)

    return kernel


@njit(inline="always")
def items(address, item):
    """Return the items stored from an address on."""
    return carray(pointer(address, item), (1,))


@njit(inline="always")
def numbers(address):
    """Return the int64 values from an address on."""
    return carray(pointer(address, types.int64), (1,))


@njit(**OPTIONS)
def leave(wanted, first, count, begin, attended, size, x, out, hidden):
    """Move wanted tokens: results to the start of ``attended``, hidden states to ``out``."""
    for nth in range(first, first + count):
        token, row = wanted[np.uintp(nth)], nth - first
        _copy(attended, (token - begin) * size, attended, row * size, size)
        _copy(x, token * hidden, out, nth * hidden, hidden)


@njit(**OPTIONS)
def _copy(source, at, target, to, size):
    for d in range(size):
        target[np.uintp(to + d)] = source[np.uintp(at + d)]


@njit(inline="always")
def _mix(x, at, count, layer, shape, attended, normed, gated, sums, item):
    """Add attention's output projection and the MLP to some rows of x."""
    hidden, inner, _, _, _, _, eps = shape
    all_of_hidden = 0, num_panels(hidden)
    add_attended(attended, count, all_of_hidden, layer, shape, (x, at), sums, item)
    normalise_rows((x, at), count, items(layer[6], item), normed, hidden, eps)
    gate(normed, count, (0, num_panels(inner)), layer, shape, gated, sums, item)
    add_gated(gated, count, all_of_hidden, layer, shape, (x, at), sums, item)


# --- parts of a layer, which `compiled_shares.py` is made of as well ------------------------------
# Some rows (count) times some panels of a matrix, from the first to the one before the last; what
# is written, or added to, is the whole product. A shape is hidden, inner and query size, KV heads,
# D, block size, epsilon.


@njit(inline="always")
def make_heads(normed, count, panels, layer, shape, heads, sums, item):
    """Compute columns of queries, keys and values."""
    hidden, _, size, num_kv_heads, head_dim, _, _ = shape
    num_outputs = size + 2 * num_kv_heads * head_dim
    _multiply(
        normed, count, hidden, layer, 1, num_outputs, panels, NOTHING, (heads, 0), sums, item
    )  # fmt: skip


@njit(inline="always")
def turn_and_keep(heads, first, last, begin, layer, shape, turns, planes, item):
    """Rotate queries and keys of some rows in place; store keys and values in their blocks.

    Args:
        heads: Of the rows.
        first: Of these.
        last: The one behind them.
        begin: Token of row 0.
        layer: Addresses, see `COLUMNS`.
        shape: See above.
        turns: cos, sin, positions, positions in the cache.
        planes: Of keys and values.
        item: What the numbers are stored as.
    """
    _, _, size, num_kv_heads, head_dim, block_size, eps = shape
    cos, sin, positions, kv_positions = turns
    norm = items(layer[3], item)
    for row in range(first, last):
        place = row * (size + 2 * num_kv_heads * head_dim)
        compiled.turn(
            heads, place, size // head_dim + num_kv_heads, head_dim, norm, layer[3] != 0, eps,
            cos, sin, positions[begin + row] * head_dim,
        )  # fmt: skip
        compiled.keep(
            heads, place + size, num_kv_heads, head_dim, kv_positions[begin + row], block_size,
            planes[0], planes[1],
        )  # fmt: skip


@njit(inline="always")
def attend(
    reads, writes, here, planes, block_size, num_kv_heads, head, few, many, is_alone,
    head_dim, share, few_rows, many_rows,
):  # fmt: skip
    """`attend_tile` of a request's only token, or of a tile of tokens: each has its room."""
    if is_alone:
        attend_tile(
            reads, writes, here, planes, block_size, num_kv_heads, head, few,
            head_dim, share, 1, few_rows,
        )  # fmt: skip
    else:
        attend_tile(
            reads, writes, here, planes, block_size, num_kv_heads, head, many,
            head_dim, share, TILE, many_rows,
        )  # fmt: skip


@njit(inline="always")
def add_attended(attended, count, panels, layer, shape, writes, sums, item):
    """Add columns of the output projection."""
    hidden, _, size, _, _, _, _ = shape
    _multiply(attended, count, size, layer, 4, hidden, panels, PLUS, writes, sums, item)


@njit(inline="always")
def gate(normed, count, panels, layer, shape, gated, sums, item):
    """Compute columns of the MLP's first half."""
    hidden, inner, _, _, _, _, _ = shape
    _multiply(normed, count, hidden, layer, 7, inner, panels, SWISH, (gated, 0), sums, item)
    _multiply(normed, count, hidden, layer, 9, inner, panels, TIMES, (gated, 0), sums, item)


@njit(inline="always")
def add_gated(gated, count, panels, layer, shape, writes, sums, item):
    """Add columns of the MLP's second half."""
    hidden, inner, _, _, _, _, _ = shape
    _multiply(gated, count, inner, layer, 11, hidden, panels, PLUS, writes, sums, item)


@njit(**OPTIONS)
def normalise_rows(reads, count, weight, normed, hidden, eps):
    """Normalise some rows."""
    x, at = reads
    for row in range(count):
        compiled.normalise(x, at + row * hidden, weight, 0, normed, row * hidden, hidden, eps)


@njit(inline="always")
def _multiply(rows, count, size, layer, column, num_outputs, panels, then, writes, sums, item):
    weight, bias = items(layer[column], item), items(layer[column + 1], item)
    linear = size, weight, bias, layer[column + 1] != 0, num_outputs
    compiled.multiply((rows, 0), count, linear, panels, then, writes, writes, sums)

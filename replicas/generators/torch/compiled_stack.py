"""All layers of a pass as one kernel, which numba compiles; `stack.py` beside this file calls it.

A task is some neighbouring tokens in one layer. Threads take tasks in order, layer by layer, so
that all of them read the weights of a layer while it is in the caches. A task waits for its tokens'
layer before, and, where a prompt is cut, for the keys and values of what is before them: tasks
that were taken earlier, so that whoever waits waits for a thread that computes.
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
from replicas.generators.torch.products import NOTHING, PANEL, PLUS, SWISH, TIMES

COLUMNS = 15
"""Addresses of a layer: norm, qkv, its bias, norm of heads, o, its bias, norm, gate, its bias, up,
its bias, down, its bias, plane of keys, plane of values; 0 for what it has not."""
PLANES = COLUMNS - 2
"""Where the planes begin."""

_TURNS = 1000
"""How often a thread looks before it lets others have its core."""


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
    """Until a number that other threads publish is large enough."""
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
        angles = items(a[15], item), items(a[16], item)
        places = numbers(a[17]), numbers(a[18])
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
            _make_heads(
                (x, begin * hidden), end - begin, layer, shape, angles, places, begin, planes,
                normed, heads, sums, item,
            )  # fmt: skip
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
                here = num_tokens, length, tables, request * a[11]
                reads = heads, row * heads_size, heads_size
                writes = attended, row * size, size
                is_alone = behind - starts[request] == 1
                for head in range(num_kv_heads):
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
                token += num_tokens
            count, into, place = end - begin, x, begin * hidden
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
    """What is stored from an address on."""
    return carray(pointer(address, item), (1,))


@njit(inline="always")
def numbers(address):
    """The int64 from an address on."""
    return carray(pointer(address, types.int64), (1,))


@njit(**OPTIONS)
def leave(wanted, first, count, begin, attended, size, x, out, hidden):
    """Wanted tokens: what they found to the start of ``attended``, they themselves to ``out``."""
    for nth in range(first, first + count):
        token, row = wanted[np.uintp(nth)], nth - first
        _copy(attended, (token - begin) * size, attended, row * size, size)
        _copy(x, token * hidden, out, nth * hidden, hidden)


@njit(**OPTIONS)
def _copy(source, at, target, to, size):
    for d in range(size):
        target[np.uintp(to + d)] = source[np.uintp(at + d)]


@njit(inline="always")
def _make_heads(
    reads, count, layer, shape, angles, places, begin, planes, normed, heads, sums, item
):
    """Queries, keys and values of some tokens; keys and values also to their blocks."""
    hidden, _, size, num_kv_heads, head_dim, block_size, eps = shape
    heads_size = size + 2 * num_kv_heads * head_dim
    normalise_rows(reads, count, items(layer[0], item), normed, hidden, eps)
    _multiply(
        (normed, 0), count, hidden, layer, 1, heads_size, NOTHING, (heads, 0), sums, item
    )  # fmt: skip
    norm, (cos, sin), (positions, kv_positions) = items(layer[3], item), angles, places
    for row in range(count):
        place = row * heads_size
        compiled.turn(
            heads, place, size // head_dim + num_kv_heads, head_dim, norm, layer[3] != 0, eps,
            cos, sin, positions[begin + row] * head_dim,
        )  # fmt: skip
        compiled.keep(
            heads, place + size, num_kv_heads, head_dim, kv_positions[begin + row], block_size,
            planes[0], planes[1],
        )  # fmt: skip


@njit(inline="always")
def _mix(x, at, count, layer, shape, attended, normed, gated, sums, item):
    """What attention found and the MLP, added to some rows of x."""
    hidden, inner, size, _, _, _, eps = shape
    _multiply((attended, 0), count, size, layer, 4, hidden, PLUS, (x, at), sums, item)
    normalise_rows((x, at), count, items(layer[6], item), normed, hidden, eps)
    _multiply((normed, 0), count, hidden, layer, 7, inner, SWISH, (gated, 0), sums, item)
    _multiply((normed, 0), count, hidden, layer, 9, inner, TIMES, (gated, 0), sums, item)
    _multiply((gated, 0), count, inner, layer, 11, hidden, PLUS, (x, at), sums, item)


@njit(**OPTIONS)
def normalise_rows(reads, count, weight, normed, hidden, eps):
    """The norm of some rows."""
    x, at = reads
    for row in range(count):
        compiled.normalise(x, at + row * hidden, weight, 0, normed, row * hidden, hidden, eps)


@njit(inline="always")
def _multiply(reads, count, size, layer, column, num_outputs, then, writes, sums, item):
    """Rows times a weight of the layer, into what it is added to or multiplied by."""
    panels = 0, -(-num_outputs // PANEL)
    multiply_panels(
        reads, count, size, layer, column, num_outputs, panels, then, writes, sums, item
    )  # fmt: skip


@njit(inline="always")
def multiply_panels(
    reads, count, size, layer, column, num_outputs, panels, then, writes, sums, item
):
    """Rows times some panels of a weight of the layer, into what it is added to or multiplied by.

    Args:
        reads: Rows, where the first one is.
        count: How many.
        size: K.
        layer: Addresses, see `COLUMNS`.
        column: Which of them is the weight's, before that of its bias.
        num_outputs: N.
        panels: The first, and the one behind the last.
        then: What `products.finish_rows` does.
        writes: The whole product, where its first row is.
        sums: Of `compiled.sums_for`.
        item: What the numbers are stored as.
    """
    weight, bias = items(layer[column], item), items(layer[column + 1], item)
    linear = size, weight, bias, layer[column + 1] != 0, num_outputs
    compiled.multiply(reads, count, linear, panels, then, writes, writes, sums)

"""All layers of a pass of few tokens as one kernel, which numba compiles; see `stack.py`.

Few tokens are no work to read many weights for: were tokens shared out, each thread would read them
all. Here threads share out the weights, panel by panel, and between two products what is done to
tokens and heads. Tasks are taken in order, and a task waits for all those of the phase before its
own, which were taken earlier: whoever waits waits for a thread that computes.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from replicas.generators.torch import compiled
from replicas.generators.torch.compiled import OPTIONS, TILE, attend_tile, double_of, pointer, take
from replicas.generators.torch.compiled_stack import (
    COLUMNS,
    PLANES,
    items,
    leave,
    multiply_panels,
    normalise_rows,
    numbers,
    wait,
)
from replicas.generators.torch.products import NOTHING, PANEL, PLUS, SWISH, TIMES

PHASES = 7
"""Of a layer: queries, keys and values; rotation; attention; what nobody reads any more is left
behind; the output projection; gate and up; down."""
ROWS = 8
"""Tokens that are rotated in one task."""


@intrinsic
def _count(_context, array, index):
    """One more, seen only with all that was written before it."""

    def generate(_context, builder, _signature, values):
        place = builder.gep(values[0], [values[1]])
        one = values[1].type(1)
        builder.atomic_rmw("add", place, one, "acq_rel")
        return _context.get_dummy_value()

    return types.void(array, index), generate


@njit(**OPTIONS)
def _panels_of(num_outputs):
    return -(-num_outputs // PANEL)


def share_layers(item, head_dim, share):
    """Some layers over all tokens; a unit is a task.

    Args:
        item: What the numbers are stored as: bfloat16's bits.
        head_dim: D.
        share: H / G.
    """
    few_rows, many_rows = share, TILE * share
    kept_as = compiled.kept_as(item, head_dim)

    def kernel(block):
        a = carray(block, (33,), np.int64)
        first_layer, final_layer, num_tokens = a[2], a[3], a[4]
        hidden, inner, num_kv_heads, block_size, width = a[5], a[6], a[7], a[8], a[9]
        eps = np.float32(double_of(a[10]))
        x, out = items(a[11], item), items(a[12], item)
        turns = items(a[13], item), items(a[14], item), numbers(a[15]), numbers(a[16])
        tiles, num_tiles = (numbers(a[17]), numbers(a[18]), numbers(a[19]), numbers(a[20])), a[21]
        tables, wanted, num_wanted = numbers(a[22]), numbers(a[23]), a[24]
        heads, attended, gated = items(a[25], item), items(a[26], item), items(a[27], item)
        are_alone, done = numbers(a[29]), pointer(a[30], types.int64)
        size = num_kv_heads * share * head_dim
        heads_size = size + 2 * num_kv_heads * head_dim
        counts = (
            _panels_of(heads_size), -(-num_tokens // ROWS), num_tiles * num_kv_heads, np.int64(1),
            _panels_of(hidden), _panels_of(inner), _panels_of(hidden),
        )  # fmt: skip
        shape = hidden, inner, size, num_kv_heads, head_dim, block_size, eps
        normed, normed_for = np.empty(num_tokens * hidden, np.uint16), -1
        sums = compiled.sums_for()
        few = compiled.room_for(few_rows, head_dim, block_size, np.float32(0), kept_as(0))
        many = compiled.room_for(many_rows, head_dim, block_size, np.float32(0), kept_as(0))
        of_layer = sum(counts)
        task = take(block)
        while task < a[1]:
            nth, part = divmod(task, of_layer)
            phase, part, before = _place_of(part, counts)
            at = nth * PHASES + phase
            if at > 0:
                wait(done, at - 1, before)
            layer = numbers(a[28] + 8 * COLUMNS * (first_layer + nth))
            planes = items(layer[PLANES], item), items(layer[PLANES + 1], item)
            is_final = first_layer + nth == final_layer
            # Behind the last layer's attention nothing reads the other tokens any more.
            rows, into = (num_wanted, out) if is_final and phase > 3 else (num_tokens, x)
            if phase in (0, 5) and normed_for != at:
                weight = items(layer[0 if phase == 0 else 6], item)
                normalise_rows((into, 0), rows, weight, normed, hidden, eps)
                normed_for = at
            if phase < 2:
                _make_heads(
                    phase, part, rows, layer, shape, turns, planes, normed, heads, sums, item
                )
            elif phase == 2:
                tile, head = divmod(part, num_kv_heads)
                token = tiles[0][tile]
                here = tiles[1][tile], tiles[2][tile], tables, tiles[3][tile] * width
                reads, writes = (
                    (heads, token * heads_size, heads_size),
                    (attended, token * size, size),
                )
                if are_alone[tile]:
                    attend_tile(
                        reads, writes, here, planes, block_size, num_kv_heads, head, few,
                        head_dim, share, 1, few_rows,
                    )  # fmt: skip
                else:
                    attend_tile(
                        reads, writes, here, planes, block_size, num_kv_heads, head, many,
                        head_dim, share, TILE, many_rows,
                    )  # fmt: skip
            elif phase > 3:
                _mix(phase, part, rows, layer, shape, attended, normed, gated, into, sums, item)
            elif is_final:
                leave(wanted, 0, num_wanted, 0, attended, size, x, out, hidden)
            _count(done, at)
            task = take(block)

    return kernel


@njit(inline="always")
def _make_heads(phase, part, count, layer, shape, turns, planes, normed, heads, sums, item):
    """Some columns of queries, keys and values of all tokens; or some tokens' rotated and kept."""
    hidden, _, size, num_kv_heads, head_dim, block_size, eps = shape
    cos, sin, positions, kv_positions = turns
    heads_size = size + 2 * num_kv_heads * head_dim
    if phase == 0:
        multiply_panels(
            (normed, 0), count, hidden, layer, 1, heads_size, (part, part + 1), NOTHING, (heads, 0),
            sums, item,
        )  # fmt: skip
        return
    norm = items(layer[3], item)
    for row in range(part * ROWS, min(count, (part + 1) * ROWS)):
        at = row * heads_size
        compiled.turn(
            heads, at, size // head_dim + num_kv_heads, head_dim, norm, layer[3] != 0, eps,
            cos, sin, positions[row] * head_dim,
        )  # fmt: skip
        compiled.keep(
            heads, at + size, num_kv_heads, head_dim, kv_positions[row], block_size,
            planes[0], planes[1],
        )  # fmt: skip


@njit(inline="always")
def _mix(phase, part, count, layer, shape, attended, normed, gated, into, sums, item):
    """Some columns of what attention found, or of the MLP's first or second half."""
    hidden, inner, size, _, _, _, _ = shape
    panels = part, part + 1
    if phase == 4:
        multiply_panels(
            (attended, 0), count, size, layer, 4, hidden, panels, PLUS, (into, 0), sums, item
        )  # fmt: skip
    elif phase == 5:
        multiply_panels(
            (normed, 0), count, hidden, layer, 7, inner, panels, SWISH, (gated, 0), sums, item
        )  # fmt: skip
        multiply_panels(
            (normed, 0), count, hidden, layer, 9, inner, panels, TIMES, (gated, 0), sums, item
        )  # fmt: skip
    else:
        multiply_panels(
            (gated, 0), count, inner, layer, 11, hidden, panels, PLUS, (into, 0), sums, item
        )  # fmt: skip


@njit(**OPTIONS)
def _place_of(part, counts):
    """Of a task of a layer the phase, which one it is there, and how many the phase before has."""
    phase, before = 0, counts[PHASES - 1]
    while part >= counts[phase]:
        part -= counts[phase]
        before = counts[phase]
        phase += 1
    return phase, part, before

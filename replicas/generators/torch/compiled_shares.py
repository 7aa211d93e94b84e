"""All layers of a pass of few tokens as one kernel, which numba compiles; see `stack.py`.

With few tokens, reading the weights dominates: if threads divided the tokens, each would read all
weights. Here threads divide the weights, panel by panel, and the per-token and per-head work
between two products. Tasks are taken in order, and a task waits for all tasks of the previous
phase. These were taken earlier, so a waiting thread always waits for a running one.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from replicas.generators.torch import compiled
from replicas.generators.torch.compiled import OPTIONS, TILE, double_of, pointer, take
from replicas.generators.torch.compiled_stack import (
    COLUMNS,
    PLANES,
    add_attended,
    add_gated,
    attend,
    gate,
    items,
    leave,
    make_heads,
    normalise_rows,
    numbers,
    turn_and_keep,
    wait,
)

PHASES = 7
"""Phases of a layer: queries, keys and values; rotation; attention; dropping of unused tokens;
output projection; gate and up; down."""
ROWS = 8
"""Tokens rotated in one task."""


@intrinsic
def _count(_context, array, index):
    """Increment atomically, with release semantics for all earlier writes."""

    def generate(_context, builder, _signature, values):
        place = builder.gep(values[0], [values[1]])
        one = values[1].type(1)
        builder.atomic_rmw("add", place, one, "acq_rel")
        return _context.get_dummy_value()

    return types.void(array, index), generate


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
        a = carray(block, (32,), np.int64)
        first_layer, final_layer, num_tokens = a[2], a[3], a[4]
        hidden, inner, num_kv_heads, block_size, width = a[5], a[6], a[7], a[8], a[9]
        eps = np.float32(double_of(a[10]))
        x, out = items(a[11], item), items(a[12], item)
        turns = items(a[13], item), items(a[14], item), numbers(a[15]), numbers(a[16])
        tiles = numbers(a[17]), numbers(a[18]), numbers(a[19]), numbers(a[20])
        counts = numbers(a[21])
        tables, wanted, num_wanted = numbers(a[22]), numbers(a[23]), a[24]
        heads, attended, gated = items(a[25], item), items(a[26], item), items(a[27], item)
        are_alone, done = numbers(a[29]), pointer(a[30], types.int64)
        size = num_kv_heads * share * head_dim
        heads_size = size + 2 * num_kv_heads * head_dim
        shape = hidden, inner, size, num_kv_heads, head_dim, block_size, eps
        normed, normed_for = np.empty(num_tokens * hidden, np.uint16), -1
        sums = compiled.sums_for()
        few = compiled.room_for(few_rows, head_dim, block_size, np.float32(0), kept_as(0))
        many = compiled.room_for(many_rows, head_dim, block_size, np.float32(0), kept_as(0))
        of_layer = a[31]
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
            if phase == 0:
                panels = part, part + 1
                make_heads(normed, rows, panels, layer, shape, heads, sums, item)
            elif phase == 1:
                last = min(rows, (part + 1) * ROWS)
                turn_and_keep(heads, part * ROWS, last, 0, layer, shape, turns, planes, item)
            elif phase == 2:
                tile, head = divmod(part, num_kv_heads)
                token = tiles[0][tile]
                here = tiles[1][tile], tiles[2][tile], tables, tiles[3][tile] * width, -1, width
                reads = heads, token * heads_size, heads_size
                writes = attended, token * size, size
                attend(
                    reads, writes, here, planes, block_size, num_kv_heads, head, few, many,
                    are_alone[tile], head_dim, share, few_rows, many_rows,
                )  # fmt: skip
            elif phase > 3:
                _mix(phase, part, rows, layer, shape, attended, normed, gated, into, sums, item)
            elif is_final:
                leave(wanted, 0, num_wanted, 0, attended, size, x, out, hidden)
            _count(done, at)
            task = take(block)

    return kernel


@njit(inline="always")
def _mix(phase, part, count, layer, shape, attended, normed, gated, into, sums, item):
    """Some columns of what attention found, or of the MLP's first or second half."""
    panels = part, part + 1
    if phase == 4:
        add_attended(attended, count, panels, layer, shape, (into, 0), sums, item)
    elif phase == 5:
        gate(normed, count, panels, layer, shape, gated, sums, item)
    else:
        add_gated(gated, count, panels, layer, shape, (into, 0), sums, item)


@njit(**OPTIONS)
def _place_of(part, counts):
    """Return a task's phase, its index in it, and the number of tasks of the previous phase."""
    phase, before = 0, counts[PHASES - 1]
    while part >= counts[phase]:
        part -= counts[phase]
        before = counts[phase]
        phase += 1
    return phase, part, before

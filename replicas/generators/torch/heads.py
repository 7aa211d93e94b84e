"""Attention of query heads over a block of keys, in vectors.

Instructions are written out one by one for the size of a head and for the query heads that share a
KV head, which are therefore literals; queries that share are treated together, so that a key is
read once. Where the processor multiplies pairs of bfloat16, queries and weights are kept as such:
keys and values are then used as they are, without being widened first.

Dimensions: D head size, h query heads of a KV head, n tokens of a block, S block size.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from replicas.generators.torch import pairs
from replicas.generators.torch.vectors import (
    FLAGS,
    TOGETHER,
    WIDTH,
    Vectors,
    number_of,
    unpacked,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_Value: TypeAlias = Any
"""Of LLVM; llvmlite has no types to check."""

_PLACE = ir.IntType(32)

_MOST_HEADS = 8
"""Sums that fit the registers beside 16 turned vectors."""


def _some(items: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(items), most):
        yield items[first : first + most]


def _fours(items: Sequence[int]) -> Iterator[Sequence[int]]:
    return _some(items, TOGETHER)


def _in_turn(builder: _Value, count: _Value, write: Callable[[_Value, int], None]) -> None:
    """Loops over so many tokens: some at once, then fewer.

    Args:
        builder: Where to.
        count: How many.
        write: Given the first token and how many it is about.
    """
    done = number_of(0)
    # Two before one: tokens that are a pair among many are one among few, or sums would differ.
    for num in (TOGETHER, 2, 1):
        rounds = builder.sdiv(builder.sub(count, done), number_of(num))
        with cgutils.for_range(builder, rounds) as loop:
            write(builder.add(done, builder.mul(loop.index, number_of(num))), num)
        done = builder.add(done, builder.mul(rounds, number_of(num)))


@intrinsic(prefer_literal=True)
def score(_context, queries, keys, at, count, scores, stride, head_dim, share):
    """Compute the products of queries and keys, divided by the square root of D.

    Args:
        queries: (h * D,).
        keys: The plane.
        at: Of the first key in it.
        count: n keys, one after the other.
        scores: (h, S), the first n of each row are written.
        stride: S.
        head_dim: D.
        share: h.
    """
    size, heads = head_dim.literal_value, range(share.literal_value)

    def generate(context, builder, signature, values):
        queries, keys, at, count, scores, stride, *_ = unpacked(context, builder, signature, values)
        if pairs.are_of(queries):
            _score_pairs(builder, (queries, keys, at, count, scores, stride), size, heads)
            return context.get_dummy_value()
        width = min(WIDTH, size & -size)
        vectors = Vectors(builder, queries.type.pointee, width)

        def tokens(first: _Value, num: int) -> None:
            begin = builder.add(at, builder.mul(first, number_of(size)))
            for some in _fours(heads):
                sums = {(h, t): vectors.zero for h in some for t in range(num)}
                for d in range(0, size, width):
                    places = [builder.add(begin, number_of(t * size + d)) for t in range(num)]
                    found = [vectors.load(keys, place) for place in places]
                    for h in some:
                        query = vectors.load(queries, number_of(h * size + d))
                        for t in range(num):
                            sums[h, t] = vectors.add_product(query, found[t], sums[h, t])
                for h in some:
                    place = builder.add(builder.mul(stride, number_of(h)), first)
                    found = vectors.join(vectors.add, [sums[h, t] for t in range(num)])
                    scale = ir.Constant(found.type, [size**-0.5] * num)
                    vectors.store(builder.fmul(found, scale, flags=FLAGS), scores, place)

        _in_turn(builder, count, tokens)
        return context.get_dummy_value()

    return types.void(queries, keys, at, count, scores, stride, head_dim, share), generate


def _score_pairs(builder, given, size, heads):
    """Do the same for 16 keys at once, transposed: a vector has one pair of numbers of each."""
    queries, keys, at, count, scores, stride = given
    vectors = Vectors(builder, ir.FloatType(), WIDTH)
    scale = ir.Constant(vectors.zero.type, [size**-0.5] * WIDTH)
    last = builder.sub(count, number_of(1))
    with _whole_vectors(builder, count) as first:
        rows = []
        for t in range(WIDTH):
            # Missing keys are filled with the last one.
            row = builder.add(first, number_of(t))
            row = builder.select(builder.icmp_signed("<", row, last), row, last)
            rows.append(builder.add(at, builder.mul(row, number_of(size))))
        for some in _some(heads, _MOST_HEADS):
            sums = dict.fromkeys(some, vectors.zero)
            for d in range(0, size, pairs.WIDTH):
                places = [builder.add(row, number_of(d)) for row in rows]
                turned = pairs.transposed(
                    builder, [pairs.load(builder, keys, place) for place in places]
                )
                for pair, column in enumerate(turned):
                    for h in some:
                        query = pairs.spread(builder, queries, number_of(h * size + d + 2 * pair))
                        sums[h] = pairs.add_products(builder, sums[h], column, query)
            for h in some:
                place = builder.add(builder.mul(stride, number_of(h)), first)
                vectors.store(builder.fmul(sums[h], scale, flags=FLAGS), scores, place)


@intrinsic(prefer_literal=True)
def soften(_context, scores, weights, stride, seen, count, tops, totals, fades, num_rows):
    """Makes scores weights, relative to the greatest of a row so far.

    Args:
        scores: (h, S), full vectors each; the first n of a row are read.
        weights: The same, rounded; may be ``scores``.
        stride: S.
        seen: (h,), how many of a row are none that a token must not see; the others weigh nothing.
        count: n.
        tops: (h,), the greatest so far, -inf before any; NaN is not seen.
        totals: (h,), the sum of the weights so far.
        fades: (h,), written: factor on the earlier results.
        num_rows: h.
    """
    rows = range(num_rows.literal_value)

    def generate(context, builder, signature, values):
        scores, weights, stride, seen, count, tops, totals, fades, _ = unpacked(
            context, builder, signature, values
        )
        number = tops.type.pointee
        vectors = Vectors(builder, number, WIDTH)

        least = vectors.spread(ir.Constant(number, float("-inf")))
        for some in _fours(rows):
            few, first = Vectors(builder, number, len(some)), number_of(some[0])
            starts = [builder.mul(stride, number_of(row)) for row in some]
            limits = [builder.load(builder.gep(seen, [number_of(row)])) for row in some]
            places = list(zip(starts, limits, strict=True))
            before = few.load(tops, first)
            found = _greatest(builder, vectors, scores, places, count, least)
            after = few.greater(found, before)
            few.store(after, tops, first)
            # Nothing was before the first block: there is nothing to fade.
            fade = few.exp(builder.fsub(before, after, flags=FLAGS))
            few.store(fade, fades, first)
            total = _weigh(builder, vectors, (scores, weights), places, count, after)
            few.store(few.add_product(few.load(totals, first), fade, total), totals, first)
        return context.get_dummy_value()

    arguments = (scores, weights, stride, seen, count, tops, totals, fades, num_rows)
    return types.void(*arguments), generate


def _greatest(builder, vectors, scores, places, count, least):
    """Return a vector with the greatest score of each of some rows.

    Args:
        builder: Where to.
        vectors: For scores.
        scores: See ``soften``.
        places: Of each row where it starts, and how many of it are seen.
        count: See ``soften``.
        least: Value of masked scores.
    """
    best = [cgutils.alloca_once_value(builder, least) for _ in places]
    with _whole_vectors(builder, count) as first:
        for (start, limit), kept in zip(places, best, strict=True):
            found = vectors.load(scores, builder.add(start, first))
            is_seen = vectors.are_before(builder.sub(limit, first))
            found = builder.select(is_seen, found, least)
            builder.store(vectors.greater(found, builder.load(kept)), kept)
    return vectors.join(vectors.greater, [builder.load(kept) for kept in best])


def _weigh(builder, vectors, planes, places, count, tops):
    """Turn scores of some rows into weights, by the greatest of each; return a vector of sums.

    Args:
        builder: Where to.
        vectors: For scores.
        planes: Scores and weights; see ``soften``.
        places: Of each row where it starts, and how many of it are seen.
        count: See ``soften``.
        tops: The greatest of each row, together in a vector.
    """
    scores, weights = planes
    sums = [cgutils.alloca_once_value(builder, vectors.zero) for _ in places]
    with _whole_vectors(builder, count) as first:
        for row, ((start, limit), kept) in enumerate(zip(places, sums, strict=True)):
            at = builder.add(start, first)
            top = vectors.spread(builder.extract_element(tops, ir.Constant(_PLACE, row)))
            found = builder.fsub(vectors.load(scores, at), top, flags=FLAGS)
            is_seen = vectors.are_before(builder.sub(limit, first))
            found = builder.select(is_seen, vectors.exp(found), vectors.zero)
            vectors.round_into(found, weights, at)
            builder.store(vectors.add(builder.load(kept), found), kept)
    return vectors.join(vectors.add, [builder.load(kept) for kept in sums])


@contextlib.contextmanager
def _whole_vectors(builder: _Value, count: _Value) -> Iterator[_Value]:
    """Generate a loop over vectors of so many numbers, rounded up; yield each first index."""
    rounds = builder.sdiv(builder.add(count, number_of(WIDTH - 1)), number_of(WIDTH))
    with cgutils.for_range(builder, rounds) as loop:
        yield builder.mul(loop.index, number_of(WIDTH))


@intrinsic(prefer_literal=True)
def add_weighted(_context, weights, stride, plane, at, count, found, fades, head_dim, share):
    """Scale the earlier results by ``fades`` and add the weighted sums of values.

    Args:
        weights: (h, S), the first n of each row are read.
        stride: S.
        plane: Of the values.
        at: Of the first value in it.
        count: n values, one after the other.
        found: (h * D,).
        fades: (h,), by how much.
        head_dim: D.
        share: h.
    """
    size, heads = head_dim.literal_value, range(share.literal_value)

    def generate(context, builder, signature, values):
        weights, stride, plane, at, count, found, fades, *_ = unpacked(
            context, builder, signature, values
        )
        width = min(WIDTH, size & -size)
        vectors = Vectors(builder, found.type.pointee, width)
        add = _add_pairs if pairs.are_of(weights) else _add_one_by_one

        def columns(some: Sequence[int], parts: Sequence[int]) -> None:
            sums = {}
            for h in some:
                fade = vectors.spread_from(fades, number_of(h))
                for d in parts:
                    before = vectors.load(found, number_of(h * size + d))
                    before = builder.fmul(before, fade, flags=FLAGS)
                    sums[h, d] = cgutils.alloca_once_value(builder, before)

            def tokens(first: _Value, num: int) -> None:
                begin = builder.add(at, builder.mul(first, number_of(size)))
                starts = {h: builder.add(builder.mul(stride, number_of(h)), first) for h in some}
                rows = [builder.add(begin, number_of(t * size)) for t in range(num)]
                add(builder, vectors, sums, (weights, starts), (plane, rows))

            _in_turn(builder, count, tokens)
            for (h, d), place in sums.items():
                vectors.store(builder.load(place), found, number_of(h * size + d))

        for some in _fours(heads):
            for parts in _fours(range(0, size, width)):
                columns(some, parts)
        return context.get_dummy_value()

    arguments = (weights, stride, plane, at, count, found, fades, head_dim, share)
    return types.void(*arguments), generate


def _add_one_by_one(builder, vectors, sums, by, of):
    """Add the values of some tokens, times the weights of heads, to their sums.

    Args:
        builder: Where to.
        vectors: For numbers of that width.
        sums: (head, first number of the vector) -> where the sum is.
        by: The weights, where those of a head start.
        of: The plane, where each token's value is.
    """
    (weights, starts), (plane, rows) = by, of
    shares = {
        (h, t): vectors.spread_from(weights, builder.add(start, number_of(t)))
        for h, start in starts.items()
        for t in range(len(rows))
    }
    for d in sorted({d for _, d in sums}):
        read = [vectors.load(plane, builder.add(row, number_of(d))) for row in rows]
        for h in starts:
            here = vectors.zero
            for t, value in enumerate(read):
                here = vectors.add_product(shares[h, t], value, here)
            # Once for all of them: a sum that waits for the one before costs time.
            builder.store(vectors.add(builder.load(sums[h, d]), here), sums[h, d])


def _add_pairs(builder, vectors, sums, by, of):
    """Do the same for two tokens at once; the last one may be alone."""
    (weights, starts), (plane, rows) = by, of
    parts = sorted({d for _, d in sums if d % pairs.WIDTH == 0})
    for t in range(0, len(rows), 2):
        shares = {
            h: pairs.spread(builder, weights, builder.add(start, number_of(t)))
            for h, start in starts.items()
        }
        for d in parts:
            here = [
                pairs.load(builder, plane, builder.add(row, number_of(d)))
                for row in rows[t : t + 2]
            ]
            for half, both in enumerate(pairs.interleaved(builder, *here)):
                for h in starts:
                    kept = sums[h, d + half * WIDTH]
                    total = pairs.add_products(builder, builder.load(kept), both, shares[h])
                    builder.store(total, kept)

"""Attention over a block of keys in vectors, as LLVM has them, for kernels that numba compiles.

numba leaves it to LLVM to find vectors in loops. It finds few in these: heads are too short, and a
maximum that keeps NaN is none that it may reorder. Here their instructions are written out, one by
one for the size of a head and for the query heads that share a KV head, which are therefore
literals; queries that share are treated together, so that a key is widened once.

Dimensions: D head size, h query heads of a KV head, n tokens of a block, S block size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_Value: TypeAlias = Any
"""Of LLVM; llvmlite has no types to check."""

FLAGS = ("reassoc", "contract", "nsz", "arcp")
"""Sums may be taken in any order, and a product and a sum be one operation; NaN stays NaN."""

_MAX_WIDTH = 16
"""Numbers of a vector: float32 of AVX-512; LLVM splits them for lesser processors."""

_TOGETHER = 4
"""Heads, tokens or vectors of a head that are treated at once: their sums fit the registers."""

_INDEX = ir.IntType(64)
_PLACE = ir.IntType(32)


def _index(number: int) -> _Value:
    return ir.Constant(_INDEX, number)


def _fours(items: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(items), _TOGETHER):
        yield items[first : first + _TOGETHER]


class _Vectors:
    """Writes instructions on vectors of one width.

    Args:
        builder: Where to.
        number: What they compute in.
        width: Numbers of a vector, a power of two.
    """

    def __init__(self, builder: _Value, number: _Value, width: int) -> None:
        self._builder, self._number, self._width = builder, number, width
        self.zero = ir.Constant(ir.VectorType(number, width), None)

    def load(self, array: _Value, index: _Value) -> _Value:
        """Numbers from an index on, which need not be aligned; 16 bits are a bfloat16's."""
        builder, item = self._builder, array.type.pointee
        size = item.width // 8 if isinstance(item, ir.IntType) else 4
        place = builder.bitcast(
            builder.gep(array, [index]), ir.VectorType(item, self._width).as_pointer()
        )
        found = builder.load(place, align=size)
        if item == self._number:
            return found
        bits = ir.VectorType(ir.IntType(32), self._width)
        shift = ir.Constant(bits, [16] * self._width)
        return builder.bitcast(builder.shl(builder.zext(found, bits), shift), self.zero.type)

    def store(self, vector: _Value, array: _Value, index: _Value) -> None:
        """Of any width, from an index on, which need not be aligned."""
        place = self._builder.gep(array, [index])
        self._builder.store(vector, self._builder.bitcast(place, vector.type.as_pointer()), align=4)

    def spread(self, number: _Value) -> _Value:
        """One number everywhere."""
        one = self._builder.insert_element(self.zero, number, ir.Constant(_PLACE, 0))
        return self._take(one, one, [0] * self._width)

    def add(self, one: _Value, other: _Value) -> _Value:
        return self._builder.fadd(one, other, flags=FLAGS)

    def add_product(self, one: _Value, other: _Value, to: _Value) -> _Value:
        return self.add(self._builder.fmul(one, other, flags=FLAGS), to)

    def greater(self, one: _Value, other: _Value) -> _Value:
        """The other where either is NaN."""
        return self._builder.select(self._builder.fcmp_ordered(">", one, other), one, other)

    def fold(self, join: Callable[[_Value, _Value], _Value], vector: _Value, width: int) -> _Value:
        """Halves joined until so many numbers are left."""
        while (have := vector.type.count) > width:
            low, high = range(have // 2), range(have // 2, have)
            vector = join(self._take(vector, vector, low), self._take(vector, vector, high))
        return vector

    def first(self, vector: _Value) -> _Value:
        return self._builder.extract_element(vector, ir.Constant(_PLACE, 0))

    def sums(self, vectors: Sequence[_Value]) -> _Value:
        """The sum of each vector's numbers, as a vector; of four, or of one."""
        if len(vectors) == 1 or self._width < _TOGETHER:
            found = ir.Constant(ir.VectorType(self._number, len(vectors)), None)
            for place, vector in enumerate(vectors):
                total = self.first(self.fold(self.add, vector, 1))
                found = self._builder.insert_element(found, total, ir.Constant(_PLACE, place))
            return found
        one, two, three, four = vectors
        # Every four numbers become one sum of each vector; these are what a processor shuffles.
        joined = self._pairs(self._pairs(one, two), self._pairs(three, four))
        return self.fold(self.add, joined, _TOGETHER)

    def _pairs(self, one: _Value, other: _Value) -> _Value:
        """Neighbours added up: of each four, two of the one, then two of the other."""
        starts = range(0, self._width, _TOGETHER)
        even = [start + i for start in starts for i in (0, 2, self._width, self._width + 2)]
        odd = [place + 1 for place in even]
        return self.add(self._take(one, other, even), self._take(one, other, odd))

    def _take(self, one: _Value, other: _Value, places: Sequence[int]) -> _Value:
        mask = ir.Constant(ir.VectorType(_PLACE, len(places)), list(places))
        return self._builder.shuffle_vector(one, other, mask)


def _in_turn(
    builder: _Value, count: _Value, step: int, write: Callable[[_Value, int], None]
) -> None:
    """Loops over ``count`` tokens: ``step`` at a time, then one by one.

    Args:
        builder: Where to.
        count: How many.
        step: At a time.
        write: Given the first token and how many it is about.
    """
    rounds = builder.sdiv(count, _index(step))
    with cgutils.for_range(builder, rounds) as loop:
        write(builder.mul(loop.index, _index(step)), step)
    done = builder.mul(rounds, _index(step))
    with cgutils.for_range(builder, builder.sub(count, done)) as loop:
        write(builder.add(done, loop.index), 1)


def _starts(context: _Value, builder: _Value, signature: _Value, values: _Value) -> list[_Value]:
    """Arguments, arrays as where they begin."""
    return [
        context.make_array(kind)(context, builder, value).data
        if isinstance(kind, types.Array)
        else value
        for kind, value in zip(signature.args, values, strict=True)
    ]


@intrinsic(prefer_literal=True)
def score(_context, queries, keys, at, count, scores, stride, head_dim, share):
    """Products of each query and each key.

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
        queries, keys, at, count, scores, stride, *_ = _starts(context, builder, signature, values)
        width = min(_MAX_WIDTH, size & -size)
        vectors = _Vectors(builder, queries.type.pointee, width)

        def tokens(first: _Value, num: int) -> None:
            begin = builder.add(at, builder.mul(first, _index(size)))
            for some in _fours(heads):
                sums = {(h, t): vectors.zero for h in some for t in range(num)}
                for d in range(0, size, width):
                    places = [builder.add(begin, _index(t * size + d)) for t in range(num)]
                    found = [vectors.load(keys, place) for place in places]
                    for h in some:
                        query = vectors.load(queries, _index(h * size + d))
                        for t in range(num):
                            sums[h, t] = vectors.add_product(query, found[t], sums[h, t])
                for h in some:
                    place = builder.add(builder.mul(stride, _index(h)), first)
                    vectors.store(vectors.sums([sums[h, t] for t in range(num)]), scores, place)

        _in_turn(builder, count, _TOGETHER, tokens)
        return context.get_dummy_value()

    return types.void(queries, keys, at, count, scores, stride, head_dim, share), generate


@intrinsic
def greatest(_context, scores, at, count, top):
    """The greatest of some scores and of ``top``; NaN is not seen.

    Args:
        scores: All of them.
        at: The first in question.
        count: How many.
        top: The greatest before them.
    """

    def generate(context, builder, signature, values):
        scores, at, count, top = _starts(context, builder, signature, values)
        wide = _Vectors(builder, top.type, _MAX_WIDTH)
        one = _Vectors(builder, top.type, 1)
        best = cgutils.alloca_once_value(builder, wide.spread(top))
        rest = cgutils.alloca_once_value(builder, one.spread(top))

        def tokens(first: _Value, num: int) -> None:
            vectors, kept = (wide, best) if num > 1 else (one, rest)
            found = vectors.load(scores, builder.add(at, first))
            builder.store(vectors.greater(found, builder.load(kept)), kept)

        _in_turn(builder, count, _MAX_WIDTH, tokens)
        found = wide.fold(wide.greater, builder.load(best), 1)
        return one.first(one.greater(found, builder.load(rest)))

    return top(scores, at, count, top), generate


@intrinsic(prefer_literal=True)
def add_weighted(_context, weights, stride, planes, at, count, found, head_dim, share):
    """Adds the weighted sums of values to what was found.

    Args:
        weights: (h, S), the first n of each row are read.
        stride: S.
        planes: The plane of the values.
        at: Of the first value in it.
        count: n values, one after the other.
        found: (h * D,).
        head_dim: D.
        share: h.
    """
    size, heads = head_dim.literal_value, range(share.literal_value)

    def generate(context, builder, signature, values):
        weights, stride, plane, at, count, found, *_ = _starts(context, builder, signature, values)
        width = min(_MAX_WIDTH, size & -size)
        vectors = _Vectors(builder, found.type.pointee, width)

        def columns(some: Sequence[int], parts: Sequence[int]) -> None:
            sums = {
                (h, d): cgutils.alloca_once_value(
                    builder, vectors.load(found, _index(h * size + d))
                )
                for h in some
                for d in parts
            }

            def tokens(first: _Value, num: int) -> None:
                begin = builder.add(at, builder.mul(first, _index(size)))
                shares = {
                    (h, t): vectors.spread(builder.load(builder.gep(weights, [place])))
                    for h in some
                    for t in range(num)
                    for place in [
                        builder.add(builder.mul(stride, _index(h)), builder.add(first, _index(t)))
                    ]
                }
                for d in parts:
                    places = [builder.add(begin, _index(t * size + d)) for t in range(num)]
                    read = [vectors.load(plane, place) for place in places]
                    for h in some:
                        here = vectors.zero
                        for t in range(num):
                            here = vectors.add_product(shares[h, t], read[t], here)
                        # Once for all of them: a sum that waits for the one before costs time.
                        builder.store(vectors.add(builder.load(sums[h, d]), here), sums[h, d])

            _in_turn(builder, count, _TOGETHER, tokens)
            for (h, d), place in sums.items():
                vectors.store(builder.load(place), found, _index(h * size + d))

        for some in _fours(heads):
            for parts in _fours(range(0, size, width)):
                columns(some, parts)
        return context.get_dummy_value()

    return types.void(weights, stride, planes, at, count, found, head_dim, share), generate

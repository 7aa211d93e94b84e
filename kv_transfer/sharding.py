"""Which KV heads and layers each device shard of an engine holds, and how two splits meet.

A *shard* is a rectangle of layers and KV heads: tensor parallelism splits the heads, pipeline
stages split the layers. Where there are more shards than heads, and for a latent cache (one head),
several shards hold the same rectangle: *replicas*. Any split meets any other by intersection, so
the numbers of shards of two engines need not divide each other.

Rows on the wire know of no shards (see ``layout``): ``ShardedKVIO`` puts them together from the
shards of one engine, and takes them apart, by moving bytes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from kv_transfer.errors import InvalidLayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kv_transfer.connector import KVDeviceIO
    from kv_transfer.layout import KVLayout

# ---- range algebra


@dataclass(frozen=True, slots=True)
class Shard:
    """What one device shard holds.

    Attributes:
        layers: Its layers, consecutive.
        heads: Its KV heads of each of these layers, consecutive.
    """

    layers: range
    heads: range


@dataclass(frozen=True, slots=True)
class Part:
    """One rectangle to move.

    Attributes:
        source: Index of the shard to take it from.
        destination: Index of the shard that gets it.
        layers: Layers of the model.
        heads: KV heads of the model.
    """

    source: int
    destination: int
    layers: range
    heads: range


def head_shards(num_kv_heads: int, num_shards: int) -> tuple[range, ...]:
    """Split KV heads over tensor-parallel shards.

    Args:
        num_kv_heads: KV heads of the model; 1 for a latent cache, which every shard then holds.
        num_shards: Shards; they need not divide the heads.

    Returns:
        The heads of each shard. With no more shards than heads these are consecutive and disjoint,
        the first ones one head longer where the division leaves a rest. With more shards, each
        holds one head, and the replicas of a head are neighbours.

    Raises:
        InvalidLayoutError: A number is not positive.
    """
    _check_positive(num_kv_heads=num_kv_heads, num_shards=num_shards)
    if num_shards <= num_kv_heads:
        return _split(num_kv_heads, num_shards)
    heads = (shard * num_kv_heads // num_shards for shard in range(num_shards))
    return tuple(range(head, head + 1) for head in heads)


def layer_stages(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Split layers over pipeline stages; the first ones get the rest of the division.

    Raises:
        InvalidLayoutError: A number is not positive, or there are more stages than layers.
    """
    _check_positive(num_layers=num_layers, num_stages=num_stages)
    if num_stages > num_layers:
        raise InvalidLayoutError(
            f"{num_stages} pipeline stages of {num_layers} layers: a stage needs a layer"
        )
    return _split(num_layers, num_stages)


def mesh_shards(layout: KVLayout, num_shards: int, num_stages: int = 1) -> tuple[Shard, ...]:
    """Split a cache over a mesh: all shards of the first stage, then those of the next.

    Args:
        layout: Of the whole cache.
        num_shards: Tensor-parallel shards of each stage.
        num_stages: Pipeline stages.

    Raises:
        InvalidLayoutError: As for ``head_shards`` and ``layer_stages``.
    """
    heads = head_shards(layout.num_kv_heads, num_shards)
    stages = layer_stages(layout.num_layers, num_stages)
    return tuple(Shard(layers, part) for layers in stages for part in heads)


def transfer_plan(sources: Sequence[Shard], destinations: Sequence[Shard]) -> tuple[Part, ...]:
    """Find where every destination shard gets its layers and heads from.

    Where several sources hold the same, destination ``d`` takes the one at ``d`` modulo their
    number, so that destinations that need the same data do not all ask the same source.

    Args:
        sources: What the shards of one end hold, in any split, replicas included.
        destinations: What the shards of the other end want.

    Returns:
        Parts that cover each destination exactly once, ordered by destination, layers and heads.

    Raises:
        InvalidLayoutError: No source holds something that a destination wants.
    """
    parts: list[Part] = []
    for index, wanted in enumerate(destinations):
        for layers in _cut(wanted.layers, [source.layers for source in sources]):
            parts += _heads_of(sources, index, Shard(layers, wanted.heads))
    return tuple(parts)


def _heads_of(sources: Sequence[Shard], destination: int, wanted: Shard) -> list[Part]:
    """Find sources for layers that each source holds all or none of; see ``transfer_plan``."""
    holders = [i for i, source in enumerate(sources) if _covers(source.layers, wanted.layers)]
    parts: list[Part] = []
    for heads in _cut(wanted.heads, [sources[i].heads for i in holders]):
        replicas = [i for i in holders if _covers(sources[i].heads, heads)]
        if not replicas:
            raise InvalidLayoutError(
                f"no source shard holds heads {_text(heads)} of layers {_text(wanted.layers)}, "
                f"which destination shard {destination} wants"
            )
        source, start = replicas[destination % len(replicas)], heads.start
        if parts and parts[-1].source == source:
            start = parts.pop().heads.start
        parts.append(Part(source, destination, wanted.layers, range(start, heads.stop)))
    return parts


def _split(count: int, num_parts: int) -> tuple[range, ...]:
    size, rest = divmod(count, num_parts)
    bounds = [part * size + min(part, rest) for part in range(num_parts + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def _cut(wanted: range, held: Sequence[range]) -> list[range]:
    """Cut a range wherever one of the others starts or stops."""
    inner = {bound for span in held for bound in (span.start, span.stop) if bound in wanted}
    return [range(*bounds) for bounds in pairwise(sorted(inner | {wanted.start, wanted.stop}))]


def _covers(outer: range, inner: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def _text(span: range) -> str:
    return f"[{span.start}, {span.stop})"


def _check_positive(**counts: int) -> None:
    for name, count in counts.items():
        if count <= 0:
            raise InvalidLayoutError(f"{name} must be positive, got {count}")


# ---- device access


class ShardMemory(Protocol):
    """Block memory of one shard in one lane, by rows of this shard; ``HostBlocks`` is one."""

    @property
    def layout(self) -> KVLayout:
        """Layout of the shard alone: its layers, its heads."""

    def read_rows(
        self, block_ids: Sequence[int], first_row: int, num_rows: int
    ) -> NDArray[np.uint8]:
        """Copy rows out: ``(num_rows, layout.row_bytes)`` uint8."""

    def write_rows(self, block_ids: Sequence[int], first_row: int, data: NDArray[np.uint8]) -> None:
        """Copy rows in."""


class ShardedKVIO:
    """Row access to a cache whose layers and heads are spread over shards.

    Implements ``connector.KVDeviceIO``. Reading takes every byte from one replica, writing reaches
    all of them.

    Owner: nothing; the memories that it was given are used on the engine's core thread only.

    Attributes:
        layout: Of the whole cache.
        host_blocks: None: no process can address a whole block, nor map one.
        shared_region: None.
        region_layout: None.
    """

    host_blocks: None = None
    shared_region: None = None
    region_layout: None = None

    def __init__(
        self, layout: KVLayout, shards: Sequence[Shard], lanes: Sequence[Sequence[ShardMemory]]
    ) -> None:
        """Check that the shards make up the cache.

        Args:
            layout: Of the whole cache.
            shards: What each shard holds, the same in every lane; replicas included.
            lanes: ``[lane][shard]``, memories whose layouts are those of the shards.

        Raises:
            InvalidLayoutError: A part of the cache is in no shard, or a memory is laid out
                otherwise than its shard should be.
        """
        self.layout = layout
        self._shards = tuple(shards)
        self._lanes = [tuple(lane) for lane in lanes]
        whole = Shard(range(layout.num_layers), range(layout.num_kv_heads))
        for shard in self._shards:
            if not (_covers(whole.layers, shard.layers) and _covers(whole.heads, shard.heads)):
                raise InvalidLayoutError(
                    f"a shard of layers {_text(shard.layers)} and heads {_text(shard.heads)} is "
                    f"outside {layout.num_layers} layers of {layout.num_kv_heads} KV heads"
                )
        wanted = [_shard_layout(layout, shard) for shard in self._shards]
        for lane, memories in enumerate(self._lanes):
            found = [memory.layout for memory in memories]
            if found != wanted:
                raise InvalidLayoutError(
                    f"shards of lane {lane} are laid out as {found}, not as {wanted}"
                )
        self._sources: dict[int, list[Part]] = {}
        for part in transfer_plan(self._shards, [whole]):
            self._sources.setdefault(part.source, []).append(part)

    def read_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, num_rows: int
    ) -> NDArray[np.uint8]:
        """Put rows together; see ``KVDeviceIO.read_rows``."""
        rows = np.empty((num_rows, self.layout.row_bytes), np.uint8)
        units = _units(rows, self.layout)
        for source, parts in self._sources.items():
            memory, shard = self._lanes[lane][source], self._shards[source]
            held = _units(memory.read_rows(block_ids, first_row, num_rows), memory.layout)
            for part in parts:
                layers, heads = _within(part.layers, shard.layers), _within(part.heads, shard.heads)
                units[:, _slice(part.layers), :, _slice(part.heads)] = held[:, layers, :, heads]
        return rows

    def write_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, data: NDArray[np.uint8]
    ) -> None:
        """Take rows apart; see ``KVDeviceIO.write_rows``.

        Raises:
            ValueError: ``data`` has another shape or dtype.
        """
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != self.layout.row_bytes:
            raise ValueError(
                f"data of {data.shape} {data.dtype} instead of (n, {self.layout.row_bytes}) uint8"
            )
        units = _units(data, self.layout)
        for memory, shard in zip(self._lanes[lane], self._shards, strict=True):
            held = units[:, _slice(shard.layers), :, _slice(shard.heads)]
            memory.write_rows(
                block_ids, first_row, held.reshape(len(data), memory.layout.row_bytes)
            )


def _shard_layout(layout: KVLayout, shard: Shard) -> KVLayout:
    return msgspec.structs.replace(
        layout, num_layers=len(shard.layers), num_kv_heads=len(shard.heads)
    )


def _units(rows: NDArray[np.uint8], layout: KVLayout) -> NDArray[np.uint8]:
    """View rows as (row, layer, plane, head, byte of the unit)."""
    return rows.reshape(
        len(rows), layout.num_layers, layout.num_planes, layout.num_kv_heads, layout.unit_bytes
    )


def _slice(span: range) -> slice:
    return slice(span.start, span.stop)


def _within(span: range, outer: range) -> slice:
    return slice(span.start - outer.start, span.stop - outer.start)


if TYPE_CHECKING:  # fails type checking when the class and the protocol part ways

    def _conforms(io: ShardedKVIO) -> KVDeviceIO:
        return io

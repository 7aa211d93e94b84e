"""Dense rows are what the blocks hold, whatever happened to them since the last pass."""

import math
import random

import numpy as np
import pytest
import torch

from replicas.generators.torch.dense_kv import DenseKV
from replicas.generators.torch.kv_cache import TorchKVCache

LAYERS, HEADS, SIZE, DIM, BLOCKS = 2, 2, 4, 3, 24
PLENTY = 1 << 30


class World:
    """Sequences over a cache, of which any may decode, leave, come back or be written over."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.cache = TorchKVCache((BLOCKS, HEADS, SIZE, DIM), torch.float32, LAYERS, 1)
        for layer in self.cache.layers:
            layer.fill_(math.nan)
        self.free = list(range(1, BLOCKS))
        self.sequences = []

    def write(self, blocks, first, last):
        """New values for positions first to last - 1 of a table."""
        for position in range(first, last):
            block, offset = blocks[position // SIZE], position % SIZE
            for k, v in self.cache.planes:
                k[block, :, offset] = torch.rand(HEADS, DIM)
                v[block, :, offset] = torch.rand(HEADS, DIM)
        touched = {blocks[position // SIZE] for position in range(first, last)}
        self.cache.mark_written(np.array(sorted(touched), dtype=np.int64))

    def join(self):
        length = self.rng.randint(1, 9)
        if len(self.free) >= 5:
            sequence = [[self.free.pop() for _ in range(5)], length]
            self.write(sequence[0], 0, length)
            self.sequences.append(sequence)

    def leave(self):
        if self.sequences:
            blocks, _ = self.sequences.pop(self.rng.randrange(len(self.sequences)))
            self.free += reversed(blocks)

    def replace_by_like(self):
        """Another sequence of the same length in the same blocks, written while nobody ran."""
        if self.sequences:
            blocks, length = self.rng.choice(self.sequences)
            self.write(blocks, 0, length)

    def decode(self, dense, max_bytes=PLENTY):
        """One pass over some sequences in some order; how many rows were gathered."""
        live = [s for s in self.sequences if s[1] < 5 * SIZE and self.rng.random() < 0.8]
        self.rng.shuffle(live)
        if not live:
            return 0
        lengths = np.array([length + 1 for _, length in live])
        tables = np.array([blocks for blocks, _ in live])
        rows = dense.rows_for(self.cache, tables, lengths, max_bytes)
        for blocks, length in live:
            self.write(blocks, length, length + 1)
        order = np.argsort(rows.rows)
        for layer in range(LAYERS):
            self.check(layer, rows, [live[i] for i in order])
        rows.keep()
        for sequence in live:
            sequence[1] += 1
        if rows.gather is None:
            return 0
        return len(rows.gather.sources) // (2 * HEADS * (rows.length // SIZE))

    def check(self, layer, rows, live):
        planes = self.cache.planes[layer]
        newest = torch.stack(
            [
                torch.cat([plane[blocks[n // SIZE], :, n % SIZE] for plane in planes])
                for blocks, n in live
            ]
        )
        for found, plane in zip(rows.with_new(layer, newest), planes, strict=True):
            assert found.is_contiguous()
            for row, (blocks, n) in zip(found.unflatten(0, (-1, HEADS)), live, strict=True):
                wanted = plane[blocks].transpose(0, 1).flatten(1, 2)[:, : n + 1]
                assert torch.equal(row[:, : n + 1], wanted)
                assert not row[:, n + 1 :].any()


@pytest.mark.parametrize("max_bytes", [PLENTY, 0], ids=["kept", "not kept"])
@pytest.mark.parametrize("seed", range(20))
def test_rows_equal_blocks_whatever_happens(seed, max_bytes):
    world, dense = World(seed), DenseKV()
    for _ in range(60):
        event = world.rng.choice([world.join, world.leave, world.replace_by_like, None, None])
        if event is not None:
            event()
        world.decode(dense, max_bytes)


def steady(num_sequences=3):
    world, dense = World(0), DenseKV()
    for _ in range(num_sequences):
        world.join()
    world.rng.random = lambda: 0.0  # everybody runs
    for sequence in world.sequences:
        world.write(sequence[0], sequence[1], 9)
        sequence[1] = 9
    assert world.decode(dense) == num_sequences
    return world, dense


def test_a_steady_pass_gathers_nothing():
    world, dense = steady()
    assert [world.decode(dense) for _ in range(2)] == [0, 0]


def test_only_a_written_row_is_gathered_again():
    world, dense = steady()
    blocks, length = world.sequences[1]
    world.write(blocks, 0, length)
    assert world.decode(dense) == 1
    assert world.decode(dense) == 0


def test_when_one_leaves_only_the_row_that_takes_its_place_is_gathered():
    world, dense = steady(4)
    world.sequences.pop(0)
    assert world.decode(dense) == 1
    assert world.decode(dense) == 0


def test_a_pass_that_failed_leaves_no_row_to_rely_on():
    world, dense = steady()
    lengths = np.array([length + 1 for _, length in world.sequences])
    dense.rows_for(world.cache, np.array([b for b, _ in world.sequences]), lengths, PLENTY)
    assert world.decode(dense) == 3


def test_memory_is_that_of_all_rows_or_of_one_layer():
    world, dense = steady()
    row_bytes = 2 * HEADS * 12 * DIM * 4
    assert dense.nbytes == LAYERS * 8 * row_bytes
    small = DenseKV()
    world.decode(small, dense.nbytes - 1)
    assert small.nbytes == 8 * row_bytes


def test_the_longer_rows_get_more_room_and_nothing_is_lost():
    world, dense = steady()
    gathered = [world.decode(dense) for _ in range(9)]
    assert gathered == [0, 0, 3, 0, 0, 0, 3, 0, 0]

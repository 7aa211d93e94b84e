"""Sampling on golden chips: ties, wide vocabularies and who may be drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import ttnn

from replicas.generators.ttnn.collectives import Collectives
from replicas.generators.ttnn.inputs import to_device
from replicas.generators.ttnn.sampling import (
    Sampler,
    SamplingRows,
    greedy_rows,
    host_sampling_inputs,
)
from tests.tt.golden.library import GoldenLibrary, installed
from tests.tt.golden.tensors import GoldenDevice

ROWS = 5


def drawn(logits, rows, num_chips, position=0):
    """Tokens (ROWS,) that the chips of a lane draw from (ROWS, V) logits; all chips agree."""
    with installed(GoldenLibrary()) as library:
        device = GoldenDevice((1, num_chips))
        width = logits.shape[1] // num_chips
        padded = torch.zeros(1, 1, 32, logits.shape[1])
        padded[0, 0, : len(logits)] = logits
        tiles = library.from_torch(
            padded,
            ttnn.bfloat16,
            layout=ttnn.TILE_LAYOUT,
            device=device,
            mesh_mapper=library.ShardTensorToMesh(device, dim=3),
        )
        inputs = to_device(host_sampling_inputs(rows, np.full(len(logits), position)), device)
        tokens = library.zeros((1, len(logits)), ttnn.uint32, ttnn.ROW_MAJOR_LAYOUT, device)
        sampler = Sampler(device, Collectives(device), len(logits), width)
        sampler.sample(tiles, inputs, tokens)
        assert all(torch.equal(shard, tokens.shards[0]) for shard in tokens.shards)
        return tokens.shards[0].flatten().tolist()


@pytest.mark.parametrize("num_chips", [1, 2, 4])
@pytest.mark.parametrize("width", [256, 4096, 4 * 32 * 40, 160_000])
def test_greedy_takes_the_lowest_of_equals(width, num_chips):
    # Few different values: hundreds of tokens share the best one.
    generator = torch.Generator().manual_seed(width)
    logits = torch.randint(-4, 3, (ROWS, width), generator=generator).float()
    logits[0] = -1.0
    logits[1, :] = -3.0
    logits[1, [width - 1, width // 2]] = 2.5
    logits[2, -1] = 7.0
    # A tie of far more tokens than a chip has candidates, none of them in the first piece.
    logits[3, : width - 50] = -5.0
    logits[3, width - 40 :] = 1.0
    wanted = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert drawn(logits, greedy_rows(ROWS), num_chips) == wanted


@pytest.mark.parametrize("num_chips", [1, 4])
def test_only_the_best_k_of_all_chips_are_drawn(num_chips):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, 512, generator=generator) * 0.3
    # No two alike in bfloat16 among the best.
    best = torch.randperm(512, generator=generator)[:40]
    logits[:, best] = 3 + torch.arange(40) / 16
    for top_k in (1, 2, 7, 32):
        allowed = set(logits[0].topk(top_k).indices.tolist())
        seen = set()
        for seed in range(12):
            rows = SamplingRows(
                is_greedy=np.zeros(ROWS, dtype=bool),
                top_k=np.full(ROWS, top_k),
                top_p=np.ones(ROWS),
                temperature=np.full(ROWS, 3.0),
                seed=np.arange(ROWS, dtype=np.uint64) + np.uint64(100 * seed),
            )
            seen.update(drawn(logits, rows, num_chips))
        assert seen <= allowed
        assert len(seen) >= min(top_k, 12)


def test_a_draw_depends_on_seed_and_position_alone():
    logits = torch.randn(1, 256, generator=torch.Generator().manual_seed(2)).expand(ROWS, -1)

    def rows(*seeds):
        count = len(seeds)
        return SamplingRows(
            is_greedy=np.zeros(count, dtype=bool),
            top_k=np.full(count, 32),
            top_p=np.ones(count),
            temperature=np.full(count, 5.0),
            seed=np.array(seeds, dtype=np.uint64),
        )

    first = drawn(logits, rows(1, 2, 3, 4, 1), 2)
    assert first[0] == first[4]
    assert drawn(logits, rows(4, 3, 2, 1, 1), 2)[:4] == first[:4][::-1]
    others = [drawn(logits, rows(1, 2, 3, 4, 1), 2, position) for position in (1, 2, 3)]
    assert all(other != first for other in others)

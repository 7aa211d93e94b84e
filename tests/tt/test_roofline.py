"""The roofline's ops are those that the native models call: on ttnn's mock device, each by name.

Numbers of calls are compared, not their order. Moves between shards are as many as the roofline
reckons with, or fewer: they depend on which grids happen to be equal.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
import ttnn

from replicas.generators.ttnn.inputs import to_device
from replicas.generators.ttnn.products import chip_cores
from replicas.generators.ttnn.profiles import PROFILES
from replicas.generators.ttnn.programs import ChipCores
from replicas.generators.ttnn.sampling import Sampler, greedy_rows, host_sampling_inputs
from scripts.roofline.chunk import chunk_ops
from scripts.roofline.decode import decode_ops
from scripts.roofline.facts import CORES
from scripts.roofline.ops import native_design, native_precision
from tests.tt.golden.library import TRANSFERS, Noting, installed
from tests.tt.test_model import LaneUnderTest, make_config, on_board

MOVE = "to_memory_config"
NUM_TOKENS = 128


def called(run):
    """Name -> calls of ttnn's ops."""
    with installed(Noting()) as noting:
        run()
    return Counter(call.name for call in noting.calls if call.name not in TRANSFERS)


def listed(ops):
    """Name -> calls that the roofline reckons with."""
    counts = Counter()
    for op in ops:
        for call in op.calls:
            counts[call] += op.count
    return counts


def assert_same(found, wanted):
    assert found.pop(MOVE, 0) <= wanted.pop(MOVE, 0)
    assert found == wanted


def draw(lane):
    """Tokens from logits, all of them equal."""
    num_rows, width = lane.rows, lane.vocab // lane.tp
    greedy = host_sampling_inputs(greedy_rows(num_rows), np.zeros(num_rows, dtype=np.int64))
    logits = torch.zeros(1, 1, 32, width, dtype=torch.bfloat16)
    sampler = Sampler(lane.device, lane.model.collectives, num_rows, width)
    return lambda: sampler.sample(
        ttnn.from_torch(logits, layout=ttnn.TILE_LAYOUT, device=lane.device),
        to_device(greedy, lane.device),
        ttnn.from_torch(
            torch.zeros(1, num_rows, dtype=torch.int32), dtype=ttnn.uint32, device=lane.device
        ),
    )


@pytest.mark.parametrize(
    ("board", "family", "size", "vocab_size"),
    [
        on_board("N150", "llama", "small", 2000),
        on_board("N150", "qwen3", "large", 2000),
        on_board("N150", "mistral", "small", 70_000),
        on_board("N300", "llama", "small", 70_000),
        on_board("P150", "llama", "small", 2000),
    ],
)
def test_a_step_calls_what_is_listed(open_mock_mesh, board, family, size, vocab_size):
    mesh = open_mock_mesh(load_format="random", trace="none")
    lane = LaneUnderTest(mesh, make_config(family, size, vocab_size=vocab_size))
    found = called(lambda: lane.decode([7])) + called(draw(lane))
    # The lane's own, on positions and rotary rows.
    found["plus_one"] += 2
    profile, chip = PROFILES["performance"], chip_cores(lane.device)
    design = native_design(lane.config, profile, chip, lane.tp)
    kind = lane.config, lane.tp, native_precision(profile), design
    assert_same(found, listed(decode_ops(*kind, num_banks=12, context=8)))

    found = called(lambda: lane.prefill(0, NUM_TOKENS))
    ops = chunk_ops(*kind, num_banks=12, num_cores=64, num_tokens=NUM_TOKENS)
    assert_same(found, listed(ops))


@pytest.mark.parametrize("board", [on_board(name) for name in ("N150", "N300", "T3K", "P150")])
def test_banks_and_cores_are_those_of_the_chips(open_mock_mesh, board):
    mesh = open_mock_mesh()
    (device,) = mesh.lanes(1)
    assert chip_cores(device) == ChipCores(CORES[mesh.spec.arch].grid, mesh.spec.chip.dram_banks)

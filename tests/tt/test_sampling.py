"""Sampling on the device: its settings, its refusals, and the choice among ties."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import ttnn

from replicas.generators.ttnn import sampling
from replicas.generators.ttnn.collectives import Collectives
from replicas.generators.ttnn.inputs import refresh, to_device
from replicas.generators.ttnn.sampling import (
    Sampler,
    SamplingRows,
    greedy_rows,
    host_sampling_inputs,
    parse_sampling,
    topk_pieces,
)
from tests.tt.golden.rows import params
from tests.tt.golden.tensors import GoldenDevice


@pytest.mark.parametrize(
    ("width", "pieces"),
    [
        (32, (1, 64)),
        (64, (1, 64)),
        (96, (1, 128)),
        (16032, (1, 16384)),
        (32768, (1, 32768)),
        (32800, (2, 32768)),
        (128256, (4, 32768)),
        (151936, (5, 32768)),
    ],
)
def test_a_vocabulary_is_cut_into_powers_of_two(width, pieces):
    assert topk_pieces(width) == pieces


# ---- settings


def test_settings_are_taken_over():
    rows = parse_sampling(
        params(
            4,
            temperature=[0.0, 0.5, 2.0, 1.0],
            top_k=[0, 32, 5, 1],
            top_p=[1.0, 0.25, 0.0, 0.5],
            seed=[None, 7, -1, 2**70],
        ),
        4,
        1000,
    )
    assert rows.is_greedy.tolist() == [True, False, False, True]
    assert rows.top_k.tolist() == [1, 32, 5, 1]
    assert rows.top_p.tolist() == [1.0, 0.25, 0.0, 0.5]
    assert rows.temperature.tolist() == [1.0, 0.5, 2.0, 1.0]
    assert rows.seed[1:].tolist() == [7, 2**64 - 1, 0]


def test_rows_without_a_seed_get_one_each():
    first, second = (parse_sampling(params(3), 3, 100).seed.tolist() for _ in range(2))
    assert len({*first, *second}) == 6


def test_a_small_vocabulary_needs_no_top_k():
    rows = parse_sampling(params(3, temperature=1.0, top_k=[0, 40, 3]), 3, 20)
    assert rows.top_k.tolist() == [20, 20, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 33, "temperature": 1.0}, "top_k 33 .* 1 to 32 candidates"),
        ({"top_k": 0, "temperature": 0.7}, "top_k 0 with temperature 0.7"),
        ({"top_k": [5, -1], "temperature": 1.0}, "top_k -1"),
        ({"top_p": 1.5}, "top_p .* 0 to 1"),
        ({"top_p": [0.5, -0.1]}, "top_p .* 0 to 1"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": [0.0, -1.0]}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"enable_log_probs": [False, True]}, "log-probabilities"),
        ({"num_logprobs": 0}, "log-probabilities"),
        ({"seed": [1]}, "seed has 1 entries, not 2"),
        ({"temperature": [0.0] * 3}, "temperature has 3 entries, not 2"),
    ],
)
def test_what_only_the_host_can_do_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_sampling(params(2, **changes), 2, 1000)


def test_seeds_of_draws_are_of_seed_and_position():
    rows = parse_sampling(params(4, seed=[1, 1, 2, 1]), 4, 1000)
    first, second, third, fourth = rows.draw_seeds(np.array([10, 10, 10, 11])).tolist()
    assert first == second
    assert len({first, third, fourth}) == 3
    many = greedy_rows(1000).draw_seeds(np.arange(1000))
    assert len(set(many.tolist())) == 1000
    assert many.min() >= 0
    # Neighbours are as unlike as any two: half of their bits differ.
    differing = np.unpackbits((many[1:] ^ many[:-1]).view(np.uint8)).sum() / 999
    assert 15 < differing < 16
    assert greedy_rows(2).draw_seeds(np.array([-1, 2**40])).min() >= 0


# ---- draws


class GoldenSampler:
    """A sampler on golden chips for logits (rows, vocabulary)."""

    def __init__(self, library, num_chips, vocab, num_rows):
        self.library, self.vocab, self.num_rows = library, vocab, num_rows
        self.device = GoldenDevice((1, num_chips))
        self.sampler = Sampler(self.device, Collectives(self.device), num_rows, vocab // num_chips)
        zeros = np.zeros(num_rows, dtype=np.int64)
        self.inputs = to_device(host_sampling_inputs(greedy_rows(num_rows), zeros), self.device)
        self.tokens = library.from_torch(
            torch.zeros(1, num_rows, dtype=torch.int32),
            dtype=ttnn.uint32,
            layout=ttnn.ROW_MAJOR_LAYOUT,
            device=self.device,
        )

    def __call__(self, logits, rows, positions=None):
        padded = torch.full((1, 1, 32, self.vocab), 9.0)
        padded[0, 0, : self.num_rows] = logits
        on_device = self.library.from_torch(
            padded.bfloat16(),
            dtype=ttnn.bfloat16,
            layout=ttnn.TILE_LAYOUT,
            device=self.device,
            mesh_mapper=self.library.ShardTensorToMesh(self.device, dim=3),
        )
        positions = np.zeros(self.num_rows) if positions is None else np.asarray(positions)
        refresh(self.inputs, host_sampling_inputs(rows, positions.astype(np.int64)))
        assert self.sampler.sample(on_device, self.inputs, self.tokens) is self.tokens
        chips = [
            self.library.to_torch(chip) for chip in self.library.get_device_tensors(self.tokens)
        ]
        assert all(torch.equal(chip, chips[0]) for chip in chips)
        return chips[0].reshape(-1).tolist()


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda chips: f"{chips} chips")
def sampler(request, golden, monkeypatch):
    """A vocabulary of 576, whose slices are cut into pieces of 128: some with padding, some not."""
    monkeypatch.setattr(sampling, "_PIECE", 128)
    return GoldenSampler(golden, request.param, 576 if request.param == 3 else 512 + 128, 5)


def test_greedy_takes_the_best_and_of_equals_the_lowest(sampler):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, sampler.vocab, generator=generator)
    # Few values, so that dozens are equal, on all chips; and one row of nothing else.
    logits[1] = torch.randint(0, 4, (sampler.vocab,), generator=generator).float()
    logits[2] = -3.0
    logits[3, sampler.vocab - 1] = 50.0
    # A tie of more tokens than a chip has candidates, none of them in the first piece.
    logits[0, -50:] = 50.0
    logits[4] = -logits[4].abs() - 100
    logits = logits.bfloat16().float()
    wanted = logits.argmax(-1).tolist()
    assert wanted[2] == 0
    # ttnn.sampling may choose any of equals: here any of 32.
    rows = dataclasses.replace(greedy_rows(5), top_k=np.full(5, 32))
    for position in range(4):
        assert sampler(logits, rows, [position] * 5) == wanted


def test_greedy_rows_beside_drawing_ones_are_exact(sampler):
    logits = torch.zeros(5, sampler.vocab)
    logits[:, 40:70] = 1.0
    is_greedy = np.array([True, False, True, False, True])
    rows = SamplingRows(
        is_greedy=is_greedy,
        top_k=np.where(is_greedy, 1, 32),
        top_p=np.ones(5),
        temperature=np.ones(5),
        seed=np.arange(5).astype(np.uint64),
    )
    for position in range(20):
        tokens = sampler(logits, rows, [position] * 5)
        assert [tokens[row] for row in (0, 2, 4)] == [40, 40, 40]


def test_draws_are_among_the_best_of_all_chips(sampler):
    # The best three are on the first, some middle and the last chip.
    best = [3, sampler.vocab // 2 + 1, sampler.vocab - 2]
    logits = torch.randn(5, sampler.vocab, generator=torch.Generator().manual_seed(2))
    logits[:, best] = torch.tensor([8.0, 8.0, 8.0])
    found = set()
    for position in range(12):
        seeds = list(range(5))
        rows = parse_sampling(params(5, temperature=1.0, top_k=3, seed=seeds), 5, sampler.vocab)
        found.update(sampler(logits, rows, [position] * 5))
    assert found == set(best)
    # top_p 0.3 keeps one of three equals.
    rows = parse_sampling(params(5, temperature=1.0, top_k=3, top_p=0.3), 5, sampler.vocab)
    assert len(set(sampler(logits, rows))) == 1


# ---- real sizes


@pytest.mark.parametrize(
    "vocab",
    [
        pytest.param(vocab, marks=pytest.mark.board(board), id=f"{board} {vocab}")
        for board, vocab in [("N150", 128256), ("N150", 151936), ("T3K", 128256), ("T3K", 152064)]
    ],
)
def test_ttnn_takes_the_vocabularies_of_real_models(open_mock_mesh, vocab):
    (device,) = open_mock_mesh(trace="none").lanes(1)
    num_rows = 5
    rows = greedy_rows(num_rows)
    inputs = to_device(host_sampling_inputs(rows, np.arange(num_rows)), device)
    logits = ttnn.from_torch(
        torch.zeros(1, 1, 32, vocab, dtype=torch.bfloat16),
        dtype=ttnn.bfloat16,
        layout=ttnn.TILE_LAYOUT,
        device=device,
        memory_config=ttnn.DRAM_MEMORY_CONFIG,
        mesh_mapper=ttnn.ShardTensorToMesh(device, dim=3),
    )
    tokens = ttnn.from_torch(
        torch.zeros(1, num_rows, dtype=torch.int32),
        dtype=ttnn.uint32,
        layout=ttnn.ROW_MAJOR_LAYOUT,
        device=device,
    )
    sampler = Sampler(device, Collectives(device), num_rows, vocab // device.get_num_devices())
    sampler.sample(logits, inputs, tokens)
    programs = device.num_program_cache_entries()
    drawing = parse_sampling(params(num_rows, temperature=1.0, top_k=32), num_rows, vocab)
    refresh(inputs, host_sampling_inputs(drawing, np.arange(num_rows)))
    sampler.sample(logits, inputs, tokens)
    assert device.num_program_cache_entries() == programs

"""A lane's numbers on golden chips, against transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from replicas.generators.ttnn.buckets import prefill_buckets
from replicas.generators.ttnn.inputs import to_device
from replicas.generators.ttnn.profiles import PROFILES
from tests.tt.golden.lanes import (
    CASES,
    golden_lane,
    grown_folder,
    model_folder,
    pcc,
    reference_logits,
    reference_model,
    relative_error,
)
from tests.tt.golden.library import poisoned

IDS = torch.randint(0, 230, (2200,), generator=torch.Generator().manual_seed(3)).tolist()
BLOCKS = [31, 4, 17, 8, 25, 2, 40, 11, 36, 5, 29, 14, 21]
"""Of the sequence, in its order: neither rising nor beside each other."""

LEAST_PCC = {"accuracy": 0.999, "balanced": 0.997, "performance": 0.99}
MOST_ERROR = {"accuracy": 0.03, "balanced": 0.12, "performance": 0.15}
"""Also in size: a correlation does not see a factor."""

AFTER = {"prefill": 64, "later chunk": 150, "decode": 151}
"""How many tokens the logits of `three_calls` come after."""


def three_calls(lane):
    """Logits (V,) after a chunk at 0, after a later one, and after a decoded token."""
    return {
        "prefill": lane.prefill(IDS, 0, 64, BLOCKS),
        "later chunk": lane.prefill(IDS, 64, 150, BLOCKS),
        "decode": lane.decode({3: (IDS[150], 150, BLOCKS)})[3],
    }


def folder_of(case, optimizations):
    return grown_folder(case) if optimizations == "performance" else model_folder(case)


def assert_like(found, case, optimizations, what, record_property):
    wanted = reference_logits(folder_of(case, optimizations), IDS[:151])
    for name, logits in found.items():
        reference = wanted[AFTER[name] - 1]
        likeness, error = pcc(logits, reference), relative_error(logits, reference)
        record_property(f"pcc {what} {name}", round(likeness, 6))
        print(f"{case}, {what}, {optimizations}, {name}: {likeness=:.6f} {error=:.4f}")
        assert likeness >= LEAST_PCC[optimizations]
        assert error <= MOST_ERROR[optimizations]


@pytest.mark.parametrize("optimizations", PROFILES)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, optimizations, record_property):
    # A read of unwritten memory, or of a skipped row, ends in NaN.
    with golden_lane(folder_of(case, optimizations), 1, optimizations) as lane, poisoned(math.nan):
        lane.fill(math.nan)
        found = three_calls(lane)
    assert_like(found, case, optimizations, "1 chip", record_property)


@pytest.mark.parametrize(
    ("case", "num_chips", "optimizations"),
    [
        (case, num_chips, optimizations)
        for case in CASES
        for num_chips in (2, 4)
        for optimizations in PROFILES
    ],
)
def test_logits_do_not_depend_on_the_chips_of_a_lane(
    case, num_chips, optimizations, record_property
):
    folder = folder_of(case, optimizations)
    with golden_lane(folder, num_chips, optimizations) as lane, poisoned(math.nan):
        lane.fill(math.nan)
        found = three_calls(lane)
    assert_like(found, case, optimizations, f"{num_chips} chips", record_property)


def test_keys_and_values_in_the_cache_are_those_of_transformers():
    # The layout of the torch engine's blocks, so that either may read the other's.
    for case in ("llama-32", "qwen3-64"):
        with golden_lane(case) as lane:
            lane.prefill(IDS, 0, 64, BLOCKS)
            lane.prefill(IDS, 64, 150, BLOCKS)
            lane.decode({3: (IDS[150], 150, BLOCKS)})
            model, cache = reference_model(model_folder(case)), DynamicCache()
            with torch.no_grad():
                model(torch.tensor([IDS[:151]]), past_key_values=cache)
            for layer, planes in enumerate(lane.cache):
                for plane, name in zip(planes, ("keys", "values"), strict=True):
                    blocks = plane.shards[0][BLOCKS].transpose(0, 1).flatten(1, 2)[:, :151]
                    wanted = getattr(cache.layers[layer], name)[0]
                    assert relative_error(blocks, wanted) < 0.02


def test_padding_of_a_bucket_changes_nothing():
    with golden_lane("qwen3-32") as lane, poisoned(math.nan):
        lane.fill(math.nan)
        for start, end in ((0, 75), (64, 75)):
            inputs = lane.prefill_inputs(IDS, start, end, BLOCKS)
            wanted = lane.run_prefill(inputs, start)
            for name in ("tokens", "rope_indices"):
                getattr(inputs, name).shards[0][0, end - start :] = torch.tensor(
                    IDS[200 : 200 + 128 - (end - start)]
                )
            assert torch.equal(lane.run_prefill(inputs, start), wanted)
            assert wanted.isfinite().all()


def test_only_the_blocks_of_a_chunk_and_the_null_block_are_written():
    with golden_lane("llama-32") as lane:
        lane.prefill(IDS, 0, 64, BLOCKS)
        before = [plane.clone() for plane in lane.planes()]
        lane.prefill(IDS, 64, 75, BLOCKS)
        for plane, old in zip(lane.planes(), before, strict=True):
            changed = (plane != old).flatten(1).any(dim=1).nonzero().flatten().tolist()
            assert BLOCKS[2] in changed
            assert set(changed) <= {0, BLOCKS[2]}


def test_a_decoded_token_is_written_to_its_place_only():
    with golden_lane("llama-32") as lane:
        lane.prefill(IDS, 0, 75, BLOCKS)
        before = [plane.clone() for plane in lane.planes()]
        lane.decode({1: (IDS[75], 75, BLOCKS)})
        for plane, old in zip(lane.planes(), before, strict=True):
            places = (plane != old).any(dim=-1).any(dim=1).nonzero().tolist()
            assert places == [[BLOCKS[2], 75 - 64]]


def test_decode_rows_do_not_depend_on_each_other():
    # Lengths at, before and after the end of a block, and rows that are skipped between them.
    ends = {0: 33, 2: 64, 3: 65, 6: 32, 7: 1}
    tables = {row: [1 + 5 * i + j for j in range(5)] for i, row in enumerate(ends)}
    with golden_lane("mistral-32") as lane, poisoned(math.nan):
        lane.fill(math.nan)
        rows, alone = {}, {}
        for row, end in ends.items():
            ids = IDS[7 * row : 7 * row + end + 1]
            lane.prefill(ids, 0, end, tables[row])
            rows[row] = (ids[end], end, tables[row])
        for row, inputs in rows.items():
            # The same place is written again with the same.
            alone[row] = lane.decode({5: inputs})[5]
        together = lane.decode(rows)
        for row, logits in alone.items():
            assert torch.equal(together[row], logits)
            ids = IDS[7 * row : 7 * row + ends[row] + 1]
            wanted = reference_logits(model_folder("mistral-32"), ids)[-1]
            assert pcc(logits, wanted) >= LEAST_PCC["accuracy"]


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_every_bucket_gives_the_logits_of_transformers(block_size):
    # With the longest sequence these are buckets of 128, 1024, 2048 and 2176 tokens.
    folder = model_folder("llama-32")
    wanted = reference_logits(folder, IDS)
    assert prefill_buckets(2170) == (128, 1024, 2048, 2176)
    sizes = {"max_seq_len": 2170, "block_size": block_size, "num_blocks": 2176 // block_size + 9}
    blocks = np.random.default_rng(5).permutation(np.arange(1, sizes["num_blocks"])).tolist()
    blocks = blocks[: -(-2170 // block_size)]
    ends = {32: (100, 128, 130, 1025), 64: (1024, 2048), 128: (1, 2049, 2169)}[block_size]
    with golden_lane("llama-32", max_rows=2, **sizes) as lane, poisoned(math.nan):
        for end in ends:
            lane.fill(math.nan)
            assert pcc(lane.prefill(IDS, 0, end, blocks), wanted[end - 1]) >= 0.999
        # A chunk that ends the sequence has padding that would go past it.
        start = (end - 1) // block_size * block_size
        assert pcc(lane.prefill(IDS, start, end, blocks), wanted[end - 1]) >= 0.999
        logits = lane.decode({1: (IDS[end], end, blocks)})[1]
        assert pcc(logits, wanted[end]) >= 0.999


@pytest.mark.parametrize("num_chips", [1, 2, 4])
def test_padding_of_the_vocabulary_is_never_the_best(num_chips):
    with golden_lane("llama-32", num_chips) as lane:
        inputs = to_device(lane.prefill_inputs(IDS, 0, 64, BLOCKS), lane.device)
        piece = lane.model.attention_piece(128, 0)
        logits = torch.cat(lane.model.prefill(inputs, lane.cache, piece).shards, dim=-1)
        assert logits.shape[-1] == 256
        assert (logits[..., 230:] < -1e29).all()
        assert (logits[..., :230].abs() < 1e3).all()

"""The flat inputs of a known two-step example, number by number.

Ten tokens fit a step, a block holds two, and a sequence has at most twelve. Requests of 3, 2 and 8
prompt tokens arrive together: the first step takes 3, 2 and 5 tokens, so the third prompt is cut;
the second step decodes the first two requests beside the last 3 prompt tokens of the third.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from replicas.engine.batch import PersistentBatch
from replicas.engine.step import NewSequence, ScheduledBatch
from replicas.generators.masks import causal_mask

BLOCK_SIZE, MAX_MODEL_LEN, MAX_BATCH_SIZE = 2, 12, 4
PROMPTS = [[100, 101, 102], [200, 201], [300, 301, 302, 303, 304, 305, 306, 307]]
"""Hundreds name the request, units the position."""


def new_sequence(slot, block_ids):
    prompt = PROMPTS[slot]
    return NewSequence(
        slot=slot,
        dp_group=0,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=[block_ids],
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        seed=0,
    )


STEP_1 = ScheduledBatch(
    kind="mixed",
    slots=[0, 1, 2],
    num_scheduled_tokens=[3, 2, 5],
    new=[new_sequence(0, [1, 2]), new_sequence(1, [3]), new_sequence(2, [4, 5, 6])],
    appended_blocks=[],
)
STEP_2 = ScheduledBatch(
    kind="mixed",
    slots=[0, 1, 2],
    num_scheduled_tokens=[1, 1, 3],
    new=[],
    appended_blocks=[(1, [[7]]), (2, [[8]])],
)
SAMPLED_IN_STEP_1 = [103, 202, -1]


def run(steps, table_width):
    """The flat batch of the last of these steps."""
    batch = PersistentBatch(MAX_BATCH_SIZE, MAX_MODEL_LEN, [BLOCK_SIZE], table_width)
    flat = None
    for step in steps:
        batch.apply(step)
        work = (
            np.asarray(step.slots, dtype=np.int32),
            np.asarray(step.num_scheduled_tokens, dtype=np.int32),
        )
        flat = batch.flat_inputs(*work)
        places, tokens = batch.num_tokens[work[0]], np.asarray(SAMPLED_IN_STEP_1)
        batch.advance(*work, tokens >= 0)
        batch.record(work[0][tokens >= 0], places[tokens >= 0], tokens[tokens >= 0])
    return flat


def plain(flat):
    """Arrays as lists, so that one comparison shows every difference."""
    return {
        f.name: value.tolist() if isinstance(value := getattr(flat, f.name), np.ndarray) else value
        for f in dataclasses.fields(flat)
    }


@pytest.mark.parametrize("width", [6, 64])
def test_first_step_gives_three_prompts_of_which_one_is_cut(width):
    assert plain(run([STEP_1], width)) == {
        "request_indices": [0, 0, 0, 1, 1, 2, 2, 2, 2, 2],
        "input_ids": [100, 101, 102, 200, 201, 300, 301, 302, 303, 304],
        "positions": [0, 1, 2, 0, 1, 0, 1, 2, 3, 4],
        "slot_mapping": [2, 3, 4, 6, 7, 8, 9, 10, 11, 12],
        "query_start_loc": [0, 3, 5, 10],
        "seq_lens": [3, 2, 5],
        "block_table": [[1, 2, 0], [3, 0, 0], [4, 5, 6]],
        "dp_groups": [0, 0, 0],
        "logits_indices": [2, 4],
    }


@pytest.mark.parametrize("width", [6, 64])
def test_second_step_mixes_two_decodes_with_the_rest_of_the_cut_prompt(width):
    assert plain(run([STEP_1, STEP_2], width)) == {
        "request_indices": [0, 1, 2, 2, 2],
        "input_ids": [103, 202, 305, 306, 307],
        "positions": [3, 2, 5, 6, 7],
        "slot_mapping": [5, 14, 13, 16, 17],
        "query_start_loc": [0, 1, 2, 5],
        "seq_lens": [4, 3, 8],
        "block_table": [[1, 2, 0, 0], [3, 7, 0, 0], [4, 5, 6, 8]],
        "dp_groups": [0, 0, 0],
        "logits_indices": [0, 1, 4],
    }


def test_arrays_have_the_dtypes_that_generators_expect():
    flat = run([STEP_1], 6)
    arrays = {f.name: getattr(flat, f.name) for f in dataclasses.fields(flat)}
    dtypes = {n: a.dtype.name for n, a in arrays.items() if isinstance(a, np.ndarray)}
    wide = {"positions", "slot_mapping", "logits_indices"}
    assert dtypes == {name: "int64" if name in wide else "int32" for name in dtypes}


def shared_mask(flat):
    """The one mask that every request of a step of first chunks can use."""
    longest = int(np.diff(flat.query_start_loc).max())
    return causal_mask(np.arange(longest), longest)


def own_mask(flat):
    """A row for each scheduled token, over the longest context."""
    return causal_mask(flat.positions, int(flat.seq_lens.max()))


def test_first_chunks_share_one_triangle_of_5_by_5():
    mask = shared_mask(run([STEP_1], 6))
    assert mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]


def test_every_request_of_the_first_step_reads_its_rows_off_the_shared_triangle():
    flat = run([STEP_1], 6)
    shared, own = shared_mask(flat), own_mask(flat)
    for start, end in zip(flat.query_start_loc[:-1], flat.query_start_loc[1:], strict=True):
        np.testing.assert_array_equal(own[start:end], shared[: end - start])


def test_second_step_has_a_row_of_8_positions_for_each_of_5_tokens():
    mask = own_mask(run([STEP_1, STEP_2], 6))
    assert mask.astype(int).tolist() == [
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 1, 1],
    ]

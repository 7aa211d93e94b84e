"""The padded inputs of a generator's two calls, and what moves a sequence in the tables."""

from __future__ import annotations

import msgspec
import numpy as np

from replicas.engine.batch import PersistentBatch
from replicas.engine.step import NewSequence, ScheduledBatch


def new(slot, token_ids, block_ids, *, computed=0, prompt=None, group=0):
    return NewSequence(
        slot=slot,
        dp_group=group,
        token_ids=token_ids,
        num_prompt_tokens=prompt or len(token_ids),
        num_computed_tokens=computed,
        block_ids=[block_ids],
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        seed=slot,
    )


def step(kind, work, new_sequences=(), appended=()):
    """A step of {slot: count}."""
    return ScheduledBatch(
        kind, list(work), list(work.values()), list(new_sequences),
        [(slot, [block_ids]) for slot, block_ids in appended],
    )  # fmt: skip


def apply(batch, scheduled):
    batch.apply(scheduled)
    return (
        np.asarray(scheduled.slots, dtype=np.int32),
        np.asarray(scheduled.num_scheduled_tokens, dtype=np.int32),
    )


def advance(batch, scheduled, token_ids):
    """What the runner does with a step, and at its end."""
    slots = np.asarray(scheduled.slots, dtype=np.int32)
    counts = np.asarray(scheduled.num_scheduled_tokens, dtype=np.int32)
    places, tokens = batch.num_tokens[slots], np.asarray(token_ids, dtype=np.int64)
    batch.advance(slots, counts, tokens >= 0)
    sampled = tokens >= 0
    batch.record(slots[sampled], places[sampled], tokens[sampled])


def make_batch():
    return PersistentBatch(max_batch_size=4, max_model_len=12, block_sizes=[4])


def test_prefill_rows_are_requests_and_padding_is_zero():
    batch = make_batch()
    first = step("prefill", {3: 2, 1: 5}, [new(3, [7, 8], [5]), new(1, [1, 2, 3, 4, 5, 6], [2, 9])])
    inputs = batch.prefill_inputs(*apply(batch, first))
    assert inputs.tokens.tolist() == [[7, 8, 0, 0, 0], [1, 2, 3, 4, 5]]
    assert inputs.page_tables[0].tolist() == [[5, 0, 0], [2, 9, 0]]
    assert inputs.start_pos.tolist() == [0, 0]
    assert inputs.prompt_lens.tolist() == [2, 5]
    assert inputs.empty_slots == [3, 1]


def test_later_chunk_holds_the_prompt_from_its_start_and_ends_where_the_chunk_ends():
    batch = make_batch()
    first = step("prefill", {1: 2}, [new(1, [1, 2, 3, 4, 5, 6], [2, 9])])
    apply(batch, first)
    advance(batch, first, [-1])
    inputs = batch.prefill_inputs(*apply(batch, step("prefill", {1: 3})))
    assert inputs.tokens.tolist() == [[1, 2, 3, 4, 5]]
    assert inputs.start_pos.tolist() == [2]
    assert inputs.prompt_lens.tolist() == [5]


def test_padding_of_prefill_tokens_does_not_touch_the_table():
    batch = make_batch()
    sequences = [new(0, [1, 2, 3, 4], [1]), new(1, [5, 6], [2])]
    batch.prefill_inputs(*apply(batch, step("prefill", {0: 2, 1: 2}, sequences)))
    assert batch.token_ids[0, :4].tolist() == [1, 2, 3, 4]


def test_decode_rows_are_slots_and_the_others_are_null():
    batch = make_batch()
    first = step(
        "prefill", {3: 2, 1: 5, 0: 1}, [
            new(3, [7, 8], [5]), new(1, [1, 2, 3, 4, 5], [2, 9]), new(0, [6], [4]),
        ],
    )  # fmt: skip
    apply(batch, first)
    advance(batch, first, [70, 60, 50])
    slots, _ = apply(batch, step("decode", {3: 1, 1: 1}))
    inputs = batch.decode_inputs(slots)
    assert inputs.tokens.tolist() == [[0], [60], [0], [70]]
    assert inputs.start_pos.tolist() == [-1, 5, -1, 2]
    assert inputs.page_tables[0].tolist() == [[0, 0, 0], [2, 9, 0], [0, 0, 0], [5, 0, 0]]
    arrays = inputs.tokens, inputs.start_pos, inputs.page_tables
    assert [array.dtype.name for array in arrays] == ["int32", "int32", "int32"]


def test_appended_blocks_follow_those_that_are_there():
    batch = make_batch()
    apply(batch, step("prefill", {2: 4}, [new(2, [1, 2, 3, 4], [6])]))
    apply(batch, step("decode", {2: 1}, appended=[(2, [8])]))
    assert batch.block_table[0, 2].tolist() == [6, 8, 0]


def test_resumed_sequence_replaces_whatever_its_slot_held():
    batch = make_batch()
    first = step("prefill", {2: 9}, [new(2, list(range(1, 10)), [1, 2, 3])])
    apply(batch, first)
    advance(batch, first, [99])
    # The other sequence was preempted after two outputs and comes back to this slot.
    back = step("prefill", {2: 5}, [new(2, [11, 12, 13, 14, 15], [7, 8], prompt=3)])
    inputs = batch.prefill_inputs(*apply(batch, back))
    assert inputs.tokens.tolist() == [[11, 12, 13, 14, 15]]
    assert inputs.page_tables[0].tolist() == [[7, 8, 0]]
    assert (batch.num_tokens[2], batch.num_prompt_tokens[2], batch.num_computed_tokens[2]) == (
        5,
        3,
        0,
    )
    advance(batch, back, [16])
    slots, _ = apply(batch, step("decode", {2: 1}))
    inputs = batch.decode_inputs(slots)
    assert (inputs.tokens[2, 0], inputs.start_pos[2]) == (16, 5)


def test_sequence_with_cached_tokens_starts_after_them():
    batch = make_batch()
    hit = step("prefill", {0: 2}, [new(0, [1, 2, 3, 4, 5, 6], [3, 4], computed=4)])
    slots, counts = apply(batch, hit)
    inputs = batch.prefill_inputs(slots, counts)
    assert (inputs.start_pos.tolist(), inputs.prompt_lens.tolist()) == ([4], [6])
    flat = batch.flat_inputs(slots, counts)
    assert flat.positions.tolist() == [4, 5]
    assert flat.slot_mapping.tolist() == [16, 17]


def test_only_rows_whose_last_token_is_computed_sample():
    batch = make_batch()
    work = step("mixed", {0: 3, 1: 2}, [new(0, [1, 2, 3], [1]), new(1, [1, 2, 3], [2])])
    slots, counts = apply(batch, work)
    assert batch.samples(slots, counts).tolist() == [True, False]
    assert batch.flat_inputs(slots, counts).logits_indices.tolist() == [2]


def test_token_past_the_longest_length_is_not_stored():
    batch = make_batch()
    full = step("prefill", {0: 12}, [new(0, list(range(12)), [1, 2, 3])])
    apply(batch, full)
    advance(batch, full, [5])
    assert batch.num_tokens[0] == 12


def test_lane_of_each_row_travels_with_it():
    batch = make_batch()
    work = step("mixed", {3: 1, 0: 1}, [new(3, [1], [1], group=1), new(0, [1], [1])])
    assert batch.flat_inputs(*apply(batch, work)).dp_groups.tolist() == [1, 0]


def test_one_step_may_sample_for_some_rows_and_not_for_others():
    batch = make_batch()
    work = step("mixed", {2: 3, 0: 2, 3: 1}, [new(2, [1, 2, 3], [1]), new(0, [1, 2, 3], [2]),
                                               new(3, [9], [3])])  # fmt: skip
    apply(batch, work)
    advance(batch, work, [7, -1, 8])
    assert batch.num_tokens.tolist() == [3, 0, 4, 2]
    assert batch.num_computed_tokens.tolist() == [2, 0, 3, 1]
    assert (batch.token_ids[2, 3], batch.token_ids[3, 1]) == (7, 8)
    assert batch.token_ids[0].tolist() == [1, 2, 3, *[0] * 9]


def test_the_flat_table_is_as_wide_as_the_longest_row_of_the_step():
    batch = make_batch()
    work = step("mixed", {0: 2, 1: 5}, [new(0, [1, 2], [5, 6, 7]), new(1, [1] * 6, [2, 9])])
    assert batch.flat_inputs(*apply(batch, work)).block_table.tolist() == [[5, 6], [2, 9]]
    short = step("mixed", {0: 2})
    assert batch.flat_inputs(*apply(batch, short)).block_table.tolist() == [[5]]


def test_the_page_tables_stay_and_only_what_changes_is_written():
    batch = make_batch()
    first = step("prefill", {0: 2, 2: 4}, [new(0, [1, 2], [5]), new(2, [1, 2, 3, 4], [6])])
    apply(batch, first)
    advance(batch, first, [7, 8])

    def tables(scheduled):
        return batch.decode_inputs(apply(batch, scheduled)[0]).page_tables

    kept = tables(step("decode", {0: 1, 2: 1}))
    [both] = kept
    assert both.tolist() == [[5, 0, 0], [0] * 3, [6, 0, 0], [0] * 3]
    # Marks what the batch writes: a block that it does not know stays where nothing changes.
    both[0, 2] = 77
    assert tables(step("decode", {0: 1, 2: 1})) is kept
    assert tables(step("decode", {2: 1, 0: 1}, appended=[(2, [9])])) is kept
    assert both.tolist() == [[5, 0, 77], [0] * 3, [6, 9, 0], [0] * 3]
    assert tables(step("decode", {2: 1})) is kept
    assert both.tolist() == [[0] * 3, [0] * 3, [6, 9, 0], [0] * 3]
    both[2, 2] = 77
    [both] = tables(step("decode", {0: 1, 2: 1}))
    assert both.tolist() == [[5, 0, 0], [0] * 3, [6, 9, 77], [0] * 3]


def test_every_kv_group_has_tables_of_its_own():
    batch = PersistentBatch(max_batch_size=3, max_model_len=8, block_sizes=[2, 4])
    assert batch.table_width == 4
    two = msgspec.structs.replace(new(0, [1, 2, 3], []), block_ids=[[5, 6], [7]])
    one = msgspec.structs.replace(new(2, [4], []), block_ids=[[8], [9]])
    first = step("prefill", {0: 3, 2: 1}, [two, one])
    inputs = batch.prefill_inputs(*apply(batch, first))
    assert inputs.page_tables.tolist() == [
        [[5, 6, 0, 0], [8, 0, 0, 0]],
        [[7, 0, 0, 0], [9, 0, 0, 0]],
    ]
    advance(batch, first, [1, 1])

    def tables(work, *appended):
        slots = list(work)
        scheduled = ScheduledBatch("decode", slots, [1] * len(slots), [], list(appended))
        return batch.decode_inputs(apply(batch, scheduled)[0]).page_tables.tolist()

    none = [0] * 4
    assert tables({0: 1, 2: 1}) == [
        [[5, 6, 0, 0], none, [8, 0, 0, 0]],
        [[7, 0, 0, 0], none, [9, 0, 0, 0]],
    ]
    # A step may need a block in one of them alone.
    assert tables({0: 1, 2: 1}, (0, [[3], [4]]), (2, [[1], []])) == [
        [[5, 6, 3, 0], none, [8, 1, 0, 0]],
        [[7, 4, 0, 0], none, [9, 0, 0, 0]],
    ]
    assert tables({2: 1}, (0, [[2], []])) == [
        [none, none, [8, 1, 0, 0]],
        [none, none, [9, 0, 0, 0]],
    ]
    assert tables({0: 1})[0] == [[5, 6, 3, 2], none, none]


def test_blocks_that_a_row_got_while_it_sat_out_are_there_when_it_is_back():
    batch = make_batch()
    first = step("prefill", {0: 2, 2: 4}, [new(0, [1, 2], [5]), new(2, [1, 2, 3, 4], [6])])
    apply(batch, first)
    advance(batch, first, [7, 8])

    def rows(scheduled):
        return batch.decode_inputs(apply(batch, scheduled)[0]).page_tables[0, [0, 2]].tolist()

    assert rows(step("decode", {0: 1, 2: 1})) == [[5, 0, 0], [6, 0, 0]]
    assert rows(step("decode", {0: 1}, appended=[(2, [9])])) == [[5, 0, 0], [0, 0, 0]]
    assert rows(step("decode", {0: 1, 2: 1})) == [[5, 0, 0], [6, 9, 0]]


def test_another_sequence_takes_a_row_of_the_page_table_over_whole():
    batch = make_batch()
    first = step("prefill", {0: 9, 2: 4}, [new(0, [1] * 9, [5, 7, 8]), new(2, [1, 2, 3, 4], [6])])
    apply(batch, first)
    advance(batch, first, [7, 8])

    def table(scheduled):
        return batch.decode_inputs(apply(batch, scheduled)[0]).page_tables[0].tolist()

    table(step("decode", {0: 1, 2: 1}))
    table(step("prefill", {0: 3}, [new(0, [1, 2, 3], [4])]))
    # Its prefill is not done: it takes no part.
    assert table(step("decode", {2: 1})) == [[0] * 3, [0] * 3, [6, 0, 0], [0] * 3]
    assert table(step("decode", {2: 1, 0: 1})) == [[4, 0, 0], [0] * 3, [6, 0, 0], [0] * 3]
    # Handed over with its KV, in the very step.
    taken = step("decode", {2: 1, 0: 1}, [new(2, [1, 2, 3], [3], computed=2)])
    assert table(taken) == [[4, 0, 0], [0] * 3, [3, 0, 0], [0] * 3]

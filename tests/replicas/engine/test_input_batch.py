"""The padded inputs of a generator's two calls, and the changes of a sequence's tables."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from itertools import accumulate

import msgspec
import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from replicas.engine.input_batch import PersistentBatch
from replicas.engine.step import NewRow, ScheduledBatch
from replicas.sampling_params import SamplingParams

NUM_SLOTS, MAX_LEN = 4, 12


def new(slot, token_ids, *block_ids, computed=0, group=0, **sampling):
    return NewRow(
        slot=slot,
        dp_group=group,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=computed,
        block_ids=[list(blocks) for blocks in block_ids],
        sampling=SamplingParams(**sampling),
    )


def step(kind, work, new_sequences=(), appended=()):
    """A step of {slot: count}."""
    return ScheduledBatch(
        kind, list(work), list(work.values()), list(new_sequences), list(appended)
    )


def apply(batch, scheduled):
    batch.apply(scheduled)
    return (
        np.asarray(scheduled.slots, dtype=np.int32),
        np.asarray(scheduled.num_scheduled_tokens, dtype=np.int32),
    )


def advance(batch, scheduled, token_ids):
    """Advance a batch by a step, as the runner does."""
    slots = np.asarray(scheduled.slots, dtype=np.int32)
    counts = np.asarray(scheduled.num_scheduled_tokens, dtype=np.int32)
    places, tokens = batch.num_tokens[slots], np.asarray(token_ids, dtype=np.int64)
    batch.advance(slots, counts, tokens >= 0)
    sampled = tokens >= 0
    batch.record(slots[sampled], places[sampled], tokens[sampled])


@dataclass
class Row:
    """The content of a slot, as plain lists."""

    tokens: list[int]
    computed: int
    blocks: list[list[int]]
    group: int

    def table(self, kv_group, width):
        blocks = self.blocks[kv_group]
        return blocks + [0] * (width - len(blocks))


class Tables:
    """A batch beside rows of lists, and dice that choose events."""

    def __init__(self, dice, block_sizes, spare_width):
        self.dice, self.block_sizes = dice, block_sizes
        self.width = MAX_LEN // min(block_sizes) + spare_width
        self.batch = PersistentBatch(NUM_SLOTS, MAX_LEN, block_sizes, self.width)
        self.rows: dict[int, Row] = {}

    def put(self, slot):
        """Another sequence takes a slot: a prompt, one with a cached prefix, or one resumed."""
        dice, length = self.dice, self.dice.randint(1, MAX_LEN)
        tokens = [dice.randint(1, 99) for _ in range(length)]
        blocks = [[dice.randint(1, 99) for _ in range(-(-length // n))] for n in self.block_sizes]
        computed = dice.choice([0, 0, length - 1, dice.randrange(length)])
        row = self.rows[slot] = Row(tokens, computed, blocks, dice.randrange(2))
        return new(slot, tokens, *blocks, computed=computed, group=row.group)

    def append(self, slot):
        """A row gets a block in some of its tables, where there is room."""
        row, more = self.rows[slot], []
        for blocks, size in zip(row.blocks, self.block_sizes, strict=True):
            has_room = len(blocks) < MAX_LEN // size and self.dice.random() < 0.7
            more.append([self.dice.randint(1, 99)] if has_room else [])
            blocks.extend(more[-1])
        return slot, more

    def step(self, kind):
        """Take a step over; None where there is nothing to do. Returns its rows and counts."""
        dice = self.dice
        fresh = [self.put(slot) for slot in range(NUM_SLOTS) if dice.random() < 0.2]
        old = self.rows.keys() - {seq.slot for seq in fresh}
        grown = [self.append(slot) for slot in sorted(old) if dice.random() < 0.3]
        left = {slot: len(row.tokens) - row.computed for slot, row in self.rows.items()}
        able = [s for s, n in left.items() if (n == 1 if kind == "decode" else n > 0)]
        chosen = dice.sample(able, dice.randint(min(1, len(able)), len(able)))
        work = {slot: dice.randint(1, left[slot]) for slot in chosen}
        scheduled = step(kind, work, fresh, grown)
        found = apply(self.batch, scheduled)
        return found if work else None

    def advance(self, slots, counts):
        """Sample for each row whose last token is computed."""
        tokens = []
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            row = self.rows[slot]
            row.computed += count
            samples = row.computed == len(row.tokens)
            tokens.append(self.dice.randint(1, 99) if samples else -1)
            if samples and len(row.tokens) < MAX_LEN:
                row.tokens.append(tokens[-1])
        sampled = np.asarray(tokens) >= 0
        assert self.batch.num_logits(slots, counts).tolist() == sampled.tolist()
        places = self.batch.num_tokens[slots]
        self.batch.advance(slots, counts, sampled)
        self.batch.record(slots[sampled], places[sampled], np.asarray(tokens)[sampled])
        wanted = [(len(self.rows[s].tokens), self.rows[s].computed) for s in slots.tolist()]
        found = self.batch.num_tokens[slots], self.batch.num_computed_tokens[slots]
        assert list(zip(*(array.tolist() for array in found), strict=True)) == wanted


def assert_prefill(tables, slots, counts):
    inputs, rows = tables.batch.prefill_inputs(slots, counts), [tables.rows[s] for s in slots]
    ends = [row.computed + count for row, count in zip(rows, counts.tolist(), strict=True)]
    assert inputs.tokens.tolist() == [
        row.tokens[:end] + [0] * (max(ends) - end) for row, end in zip(rows, ends, strict=True)
    ]
    assert inputs.page_tables.tolist() == [
        [row.table(g, tables.width) for row in rows] for g in range(len(tables.block_sizes))
    ]
    assert inputs.start_pos.tolist() == [row.computed for row in rows]
    assert (inputs.prompt_lens.tolist(), inputs.empty_slots) == (ends, slots.tolist())


def assert_decode(tables, slots):
    inputs = tables.batch.decode_inputs(slots)
    live = [tables.rows[slot] if slot in slots else None for slot in range(NUM_SLOTS)]
    assert inputs.tokens.tolist() == [[row.tokens[row.computed] if row else 0] for row in live]
    assert inputs.start_pos.tolist() == [row.computed if row else -1 for row in live]
    assert inputs.page_tables.tolist() == [
        [row.table(g, tables.width) if row else [0] * tables.width for row in live]
        for g in range(len(tables.block_sizes))
    ]
    arrays = inputs.tokens, inputs.start_pos, inputs.page_tables
    assert [array.dtype.name for array in arrays] == ["int32", "int32", "int32"]


def assert_flat(tables, slots, counts):
    num_logits = tables.batch.num_logits(slots, counts)
    flat, sizes = tables.batch.flat_inputs(slots, counts, num_logits), tables.block_sizes
    wanted, last = [], []
    for request, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
        row = tables.rows[slot]
        for at in range(row.computed, row.computed + count):
            places = (
                row.table(g, tables.width)[at // size] * size + at % size
                for g, size in enumerate(sizes)
            )
            wanted.append((request, row.tokens[at], at, *places))
        if at + 1 == len(row.tokens):
            last.append(len(wanted) - 1)
    found = flat.request_indices, flat.input_ids, flat.positions, *flat.slot_mapping
    assert list(zip(*(array.tolist() for array in found), strict=True)) == wanted
    assert flat.logits_indices.tolist() == last
    width = -(-int(flat.seq_lens.max()) // min(sizes))
    rows = [tables.rows[slot] for slot in slots.tolist()]
    assert flat.block_table.tolist() == [
        [row.table(g, tables.width)[:width] for row in rows] for g in range(len(sizes))
    ]
    assert flat.dp_groups.tolist() == [row.group for row in rows]
    assert flat.query_start_loc.tolist() == [0, *accumulate(counts.tolist())]
    assert flat.seq_lens.tolist() == [
        row.computed + count for row, count in zip(rows, counts.tolist(), strict=True)
    ]
    wide = {"positions", "slot_mapping", "logits_indices"}
    dtypes = {f.name: getattr(flat, f.name).dtype.name for f in fields(flat)}
    assert dtypes == {name: "int64" if name in wide else "int32" for name in dtypes}


@given(st.integers(0, 2**32), st.sampled_from([[4], [2, 4]]), st.sampled_from([0, 50]))
def test_inputs_of_any_steps_are_those_of_plain_lists(seed, block_sizes, spare_width):
    """Chunks, cached prefixes, rows that sit out, grow, end, or are taken over by others."""
    dice, kinds = random.Random(seed), ["prefill", "decode", "decode", "mixed"]
    tables = Tables(dice, block_sizes, spare_width)
    num_full = 0
    for _ in range(40):
        kind = dice.choice(kinds)
        work = tables.step(kind)
        if work is None:
            continue
        if kind == "prefill":
            assert_prefill(tables, *work)
        elif kind == "decode":
            assert_decode(tables, work[0])
        else:
            assert_flat(tables, *work)
        tables.advance(*work)
        num_full += any(len(row.tokens) == row.computed for row in tables.rows.values())
    event(f"rows at the longest length: {num_full > 0}")


def test_a_row_has_logits_for_its_last_token_and_each_draft():
    """The example of vLLM v1/worker/gpu_model_runner.py `_calc_spec_decode_metadata`."""
    batch = PersistentBatch(5, 128, [4])
    drafts = [3, 0, 2, 0, 1]
    counts = np.array([4, 100, 3, 100, 2], dtype=np.int32)
    blocks = list(range(1, 33))
    for slot, (count, num_drafts) in enumerate(zip(counts, drafts, strict=True)):
        known = int(count) - num_drafts
        apply(batch, step("mixed", {}, [new(slot, [7] * (known + 9), blocks, computed=9)]))
    slots = np.arange(5, dtype=np.int32)
    assert batch.num_logits(slots, counts).tolist() == [4, 1, 3, 1, 2]
    flat = batch.flat_inputs(slots, counts, batch.num_logits(slots, counts))
    assert flat.logits_indices.tolist() == [0, 1, 2, 3, 103, 104, 105, 106, 206, 207, 208]
    cut = np.array([4, 99, 3, 98, 2], dtype=np.int32)
    assert batch.num_logits(slots, cut).tolist() == [4, 0, 3, 0, 2], "a prompt that is cut"


def test_rejected_drafts_are_given_back():
    batch = PersistentBatch(NUM_SLOTS, MAX_LEN, [4])
    apply(batch, step("mixed", {}, [new(1, [1, 2, 3], [5, 6], computed=2)]))
    apply(batch, step("mixed", {}, [new(2, [8] * 10, [7, 8, 9], computed=9)]))
    slots = np.array([1, 2], dtype=np.int32)
    counts = np.array([4, 3], dtype=np.int32)
    batch.advance(slots, counts, batch.num_logits(slots, counts))
    assert batch.num_tokens[slots].tolist() == [7, MAX_LEN]
    batch.give_back(slots, np.array([2, 1]))
    assert batch.num_tokens[slots].tolist() == [5, 12]
    assert batch.num_computed_tokens[slots].tolist() == [4, 11]


def test_the_page_tables_stay_and_only_what_changes_is_written():
    batch = PersistentBatch(NUM_SLOTS, MAX_LEN, [4])
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
    assert tables(step("decode", {2: 1, 0: 1}, appended=[(2, [[9]])])) is kept
    assert both.tolist() == [[5, 0, 77], [0] * 3, [6, 9, 0], [0] * 3]
    assert tables(step("decode", {2: 1})) is kept
    assert both.tolist() == [[0] * 3, [0] * 3, [6, 9, 0], [0] * 3]
    both[2, 2] = 77
    [both] = tables(step("decode", {0: 1, 2: 1}))
    assert both.tolist() == [[5, 0, 0], [0] * 3, [6, 9, 77], [0] * 3]


def test_a_row_crosses_a_process_boundary():
    row = new(1, [3, 4], [5], [6], computed=1, seed=9, stop_token_ids=frozenset({8}), stop=("x",))
    raw = msgspec.msgpack.encode(row)
    assert msgspec.msgpack.decode(raw, type=NewRow) == row

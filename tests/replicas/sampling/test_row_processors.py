"""Row processors: only touched rows pay for them, and a row's state follows from its tokens."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from replicas.engine.step import NewRow
from replicas.sampling import processor, sampler
from replicas.sampling.logprobs import Logprobs
from replicas.sampling.order import row_processors
from replicas.sampling.processor import LogitRows, RowProcessors
from replicas.sampling_params import ReasoningBudget, ReasoningMarks, SamplingParams
from tests.replicas.sampling.row_runner import VOCAB, Rows

EOS = 3
SEEDED = {"temperature": 0.8, "top_k": 12, "top_p": 0.95}


class Repeats:
    """A processor for rows with stop token 1: raises the logits of the output so far.

    Attributes:
        output: By slot, the output so far.
        calls: Names of the methods called, with what they got.
    """

    def __init__(self):
        self.output = {}
        self.calls = []

    def add(self, row):
        self.output.pop(row.slot, None)
        if 1 in row.sampling.stop_token_ids:
            self.output[row.slot] = row.token_ids[row.num_prompt_tokens :]
        return row.slot in self.output

    def remove(self, slot):
        self.output.pop(slot, None)

    def prepare(self, rows):
        self.prepared = rows
        self.calls.append(("prepare", rows.slots.tolist(), rows.steps.tolist()))

    def apply(self, logits, rows, indices):
        assert rows is self.prepared
        slots, steps = rows.slots[indices].tolist(), rows.steps[indices].tolist()
        for values, slot, step in zip(logits, slots, steps, strict=True):
            assert len(self.output[slot]) == step
            values[self.output[slot]] += 9.0
        self.calls.append(("apply", slots, steps))

    def note_drawn(self, token_ids):
        _, slots, _ = self.calls[-1]
        self.calls.append(("drawn", slots, token_ids))

    def accept(self, slot, token_ids):
        self.output[slot] += token_ids
        self.calls.append(("accept", slot, len(token_ids)))


TOUCHED = {"stop_token_ids": frozenset({1})}


def test_processors_get_the_rows_that_they_touch_and_no_others():
    repeats = Repeats()
    rows = Rows([repeats])
    rows.add(2, [3, 4], **TOUCHED)
    rows.add(0, [5])
    rows.add(3, [5], output=[6, 7], **TOUCHED)
    rows.step()
    first, second = rows.token_ids[2][-1], rows.token_ids[3][-1]
    rows.remove(2)
    rows.step()
    assert repeats.calls == [
        ("prepare", [2, 3], [0, 2]), ("apply", [2, 3], [0, 2]), ("drawn", [2, 3], [first, second]),
        ("accept", 2, 1), ("accept", 3, 1),
        ("prepare", [3], [3]), ("apply", [3], [3]), ("drawn", [3], rows.token_ids[3][-1:]),
        ("accept", 3, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SEEDED, {"temperature": 1.0}])
def test_a_row_draws_alike_beside_touched_neighbours_and_alone(sampling):
    alone = Rows([Repeats()])
    alone.add(1, [3, 4], **sampling)
    beside = Rows([Repeats()])
    for slot in range(4):
        beside.add(slot, [3, 4], **sampling, **({} if slot == 1 else TOUCHED))
    for _ in range(8):
        alone.step()
        beside.step()
    assert beside.token_ids[1] == alone.token_ids[1]
    assert beside.token_ids[0] == beside.token_ids[2] == beside.token_ids[3]
    assert beside.token_ids[0] != alone.token_ids[1], "the processor changed nothing"


def test_state_is_dropped_when_a_row_leaves_and_when_its_slot_is_reused_in_the_same_step():
    repeats = Repeats()
    rows = Rows([repeats])
    rows.add(0, [3], **TOUCHED)
    rows.add(1, [3], **TOUCHED)
    rows.add(2, [3], **TOUCHED)
    rows.step()
    rows.remove(0)
    rows.remove(1)
    rows.add(1, [9], output=[8, 2], **TOUCHED)
    rows.step()
    assert repeats.output == {1: rows.token_ids[1][1:], 2: rows.token_ids[2][1:]}
    rows.remove(1)
    rows.add(1, [9])
    rows.step()
    rows.add(2, [5])
    rows.step()
    assert repeats.output == {}, "a row that is replaced is dropped without a word"


@pytest.mark.parametrize("processors", [[], [Repeats()]])
def test_a_step_without_touched_rows_calls_no_processor(processors):
    rows, called = Rows(processors), []
    rows.add(0, [3])
    rows.add(1, [4], **SEEDED)
    rows.step()
    sys.setprofile(lambda frame, event, _: called.append((event, frame.f_code.co_filename)))
    try:
        rows.step()
    finally:
        sys.setprofile(None)
    assert ("call", sampler.__file__) in called
    assert not {("call", processor.__file__), ("call", __file__)} & set(called)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SEEDED, {"temperature": 1.0}])
def test_rows_are_changed_and_drawn_alike_together_and_in_parts(monkeypatch, sampling):
    def results():
        logprobs = Logprobs("raw_logprobs")
        rows = Rows(row_processors([EOS], logprobs=logprobs), logprobs=logprobs)
        for slot in range(4):
            chosen = {**sampling, "repetition_penalty": 1.5, "logprobs": 2}
            rows.add(slot, [3, slot], seed=slot, **({} if slot == 2 else chosen))
        return [rows.step() for _ in range(6)]

    def tokens_and_logprobs():
        return [(result.token_ids, result.logprobs) for result in results()]

    whole = tokens_and_logprobs()
    monkeypatch.setattr(sampler, "_ELEMENTS_AT_ONCE", 2 * VOCAB)
    assert tokens_and_logprobs() == whole


BUDGET = ReasoningBudget(max_tokens=3, marks=ReasoningMarks(end_token_ids=(9, 6), is_open=True))
STATE = [
    {"bad_words_token_ids": ((5, 9), (9, 5, 5), (4, 9), (2,)), "temperature": 0.0},
    {"bad_words_token_ids": tuple((i, i) for i in range(VOCAB)), **SEEDED},
    {"min_tokens": 6, "stop_token_ids": frozenset(range(4, 20)), **SEEDED},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 0.0},
    {"repetition_penalty": 2.5, **SEEDED},
    {"reasoning_budget": BUDGET, **SEEDED},
]
"""Parameters whose effect depends on earlier tokens."""


@pytest.mark.parametrize("sampling", STATE, ids=lambda sampling: next(iter(sampling)))
def test_a_row_that_is_rebuilt_from_its_tokens_continues_as_if_it_had_stayed(sampling):
    """Preemption, migration, prefill elsewhere and resumption all send a row whole again."""
    stays = Rows(row_processors([EOS]))
    stays.add(0, [3, 4, 3], **sampling)
    for _ in range(12):
        stays.step()
    wanted = stays.token_ids[0]
    for num_output in (0, 1, 5, 11):
        moved = Rows(row_processors([EOS]))
        moved.add(3, [3], **sampling)
        moved.step()
        moved.remove(3)
        moved.add(3, [3, 4, 3], output=wanted[3 : 3 + num_output], **sampling)
        for _ in range(12 - num_output):
            moved.step()
        assert moved.token_ids[3] == wanted


@pytest.mark.parametrize("sampling", STATE, ids=lambda sampling: next(iter(sampling)))
def test_drafts_before_a_position_count_as_output(sampling):
    output, drafts = [4, 9], [5, 5, 9]

    def changed(output, drafts):
        processors, count = RowProcessors(row_processors([EOS]), 1), len(drafts) + 1
        row = NewRow(0, 0, [3, 5, *output], 2, 0, [[1]], SamplingParams(**sampling))
        assert processors.add(row)
        slots, steps = np.zeros(count, np.int32), len(output) + np.arange(count)
        rows = LogitRows(slots, steps, [drafts[:i] for i in range(count)] if drafts else ())
        logits = torch.linspace(-1, 1, VOCAB).repeat(count, 1)
        processors.prepare(rows).apply(logits, np.arange(count))
        return logits

    together = changed(output, drafts)
    for count in range(4):
        assert torch.equal(together[count], changed([*output, *drafts[:count]], [])[0])

"""Whatever is drafted, rows get the tokens of plain decoding."""

from __future__ import annotations

import random
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from replicas.config import EngineConfig
from replicas.engine.model_runner import ModelRunner
from replicas.engine.step import NewRow, RowFailure, ScheduledBatch
from replicas.generators.model_config import load_hf_config
from replicas.generators.protocol import CpuDevice
from replicas.generators.torch.generator import TorchGenerator
from replicas.sampling_params import SamplingParams
from tests.kv_groups import one_kv_group
from tests.models import VOCAB_SIZE, model_folder

BLOCK_SIZE, MAX_LEN = 8, 48
NUM_BLOCKS = MAX_LEN // BLOCK_SIZE
PROMPTS = [[5, 9, 3], [2 * i % 151 for i in range(17)], [11] * 8]
SAMPLING = [
    SamplingParams(temperature=0.0, seed=1),
    SamplingParams(temperature=1.0, seed=2),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=3),
]


class Script:
    """A drafter that gets its drafts from a function of a row's slot, tokens and limit."""

    def __init__(self, drafts_of):
        self.drafts_of = drafts_of
        self.taken = []

    def take_slot(self, slot):
        self.taken.append(slot)

    def propose(self, token_ids, slots, num_tokens, limits):
        rows = zip(slots.tolist(), num_tokens.tolist(), limits.tolist(), strict=True)
        return [
            self.drafts_of(slot, token_ids[slot, :n].tolist(), limit) for slot, n, limit in rows
        ]


class NoRepeat:
    """A processor that forbids a row's last token, as it knows it: accepted, or a draft."""

    def __init__(self):
        self.last = {}

    def add(self, row):
        self.last[row.slot] = row.token_ids[-1]
        return row.slot != 1

    def remove(self, slot):
        del self.last[slot]

    def prepare(self, rows):
        assert (np.diff(rows.steps)[np.diff(rows.slots) == 0] == 1).all()

    def apply(self, logits, rows, indices):
        for values, row, slot in zip(
            logits, indices.tolist(), rows.slots[indices].tolist(), strict=True
        ):
            drafts = rows.drafts[row] if rows.drafts else []
            values[[*drafts, self.last[slot]][len(drafts) - 1]] = -float("inf")

    def note_drawn(self, token_ids):
        pass

    def accept(self, slot, token_ids):
        self.last[slot] = token_ids[-1]


@cache
def generator():
    return TorchGenerator.initialize_vllm_model(
        load_hf_config(model_folder("llama-gqa")),
        CpuDevice(torch.float32),
        len(PROMPTS),
        max_seq_len=MAX_LEN,
    )


def make_runner(model, num_slots, drafter, processors=()):
    config = EngineConfig(model="/none", max_batch_size=num_slots, block_size=BLOCK_SIZE)
    shape = (num_slots * NUM_BLOCKS + 1, 2, BLOCK_SIZE, 16)
    kv_cache = model.allocate_kv_cache(shape, torch.float32, 3)
    return ModelRunner(
        model,
        kv_cache,
        config,
        one_kv_group(shape[0], BLOCK_SIZE),
        MAX_LEN,
        drafter=drafter,
        processors=processors,
    )


def new_row(slot, prompt, sampling):
    blocks = [slot * NUM_BLOCKS + i + 1 for i in range(NUM_BLOCKS)]
    return NewRow(slot, 0, prompt, len(prompt), 0, [blocks], sampling)


def runs_of(result, num_rows):
    tokens = iter(result.token_ids)
    counts = result.counts or [1] * num_rows
    return [[next(tokens) for _ in range(count)] for count in counts]


def decode(drafter=None, *, max_drafts=0, dice=None, processors=()):
    """Output tokens of each prompt, up to the longest length or a little less.

    Args:
        drafter: See `ModelRunner`.
        max_drafts: The most drafts of a step.
        dice: Chooses how many of the drafts are verified, and cuts prompts; None for all.
        processors: See `ModelRunner`.
    """
    slots = list(range(len(PROMPTS)))
    runner = make_runner(generator(), len(PROMPTS), drafter, processors)
    new = [new_row(*row) for row in zip(slots, PROMPTS, SAMPLING, strict=True)]
    left = [len(prompt) for prompt in PROMPTS]
    outputs = [[] for _ in slots]
    num_passes = 0
    while slots:
        counts = [n if dice is None else dice.randint(min(n, 1 + (n > 9)), n) for n in left]
        step = ScheduledBatch(
            "mixed", slots, [counts[s] for s in slots], new, [], max_drafts=max_drafts
        )
        new, result = [], runner.run(step)
        num_passes += 1
        num_drafts = result.num_drafts or [0] * len(slots)
        for row, (slot, run) in enumerate(zip(slots, runs_of(result, len(slots)), strict=True)):
            outputs[slot] += run
            left[slot] = 1 + num_drafts[row] if run else left[slot] - counts[slot]
        slots = [s for s in slots if len(PROMPTS[s]) + len(outputs[s]) < MAX_LEN]
    return [(p + o)[:MAX_LEN] for p, o in zip(PROMPTS, outputs, strict=True)], num_passes


@cache
def plain(*, is_processed):
    return decode(processors=[NoRepeat()] if is_processed else ())


def test_right_drafts_save_passes():
    wanted, num_passes = plain(is_processed=False)
    script = Script(lambda slot, tokens, limit: wanted[slot][len(tokens) : len(tokens) + limit])
    found, num_with_drafts = decode(script, max_drafts=4)
    assert found == wanted
    assert num_with_drafts <= 1 + -(-num_passes // 5)
    assert sorted(script.taken) == list(range(len(PROMPTS))), "a new row drops a slot's state"


@settings(max_examples=12)
@given(st.integers(0, 2**32), st.integers(1, 7), st.booleans())
def test_any_drafts_leave_the_tokens_as_they_are(seed, max_drafts, is_processed):
    """Right ones, wrong ones, right ones with a wrong one among them; fewer are verified or all.

    Processors of some rows know the drafts before each position.
    """
    dice, (wanted, num_plain) = random.Random(seed), plain(is_processed=is_processed)
    share_right, share_drafted = dice.choice([0.0, 0.7, 0.95]), dice.choice([0.5, 1.0])

    def drafts_of(slot, tokens, limit):
        right = wanted[slot][len(tokens) : len(tokens) + limit]
        drafts = [t if dice.random() < share_right else dice.randrange(VOCAB_SIZE) for t in right]
        return drafts[: dice.randint(0, limit)] if dice.random() < share_drafted else []

    processors = [NoRepeat()] if is_processed else ()
    found, num_passes = decode(
        Script(drafts_of), max_drafts=max_drafts, dice=dice, processors=processors
    )
    assert found == wanted
    event(f"fewer passes: {num_passes < num_plain}")


class Table:
    """A model whose logits depend on the position alone, and are NaN at one."""

    model_capabilities: ClassVar[dict[str, object]] = {}

    def __init__(self, table, broken=-1):
        self.table, self.broken = table, broken

    def allocate_kv_cache(self, *_args):
        return "cache"

    def forward_mixed(self, batch, kv_cache):
        positions = batch.positions[batch.logits_indices]
        logits = self.table[torch.from_numpy(positions % len(self.table))].clone()
        logits[positions == self.broken] = float("nan")
        return logits


def test_a_row_keeps_its_right_drafts_before_logits_that_are_none():
    """Plain decoding would have given these tokens, too, and then failed."""
    table = torch.eye(12)[[3, 4, 5, 6]] * 9.0
    runner = make_runner(Table(table, broken=4), 1, Script(lambda *_: [5, 6, 3, 4][:3]))
    greedy = SamplingParams(temperature=0.0)
    first = ScheduledBatch("mixed", [0], [2], [new_row(0, [1, 2], greedy)], [], max_drafts=3)
    assert runner.run(first).token_ids == [4]
    second = runner.run(ScheduledBatch("mixed", [0], [4], [], []))
    assert (second.token_ids, second.counts, second.failed) == ([5, 6], [2], [])
    third = runner.run(ScheduledBatch("mixed", [0], [1], [], []))
    assert (third.token_ids, third.counts, third.failed) == (
        [],
        [0],
        [RowFailure(0, "no_distribution")],
    )


def test_tokens_after_drafts_have_the_distribution_of_the_model():
    """A chi-square test of 200,000 tokens of twelve, of which the likeliest two are the drafts.

    For a total variation of 0.01 the noncentrality is at least n * (2 * 0.01)^2 = 80, by the
    inequality of Cauchy and Schwarz. With 11 degrees of freedom a statistic of that noncentrality
    exceeds 31.26, the quantile of 0.001, with a probability above 0.999.
    """
    num_rows = 12_000
    table = torch.randn(1, 12, generator=torch.Generator().manual_seed(5))
    probabilities = table[0].double().softmax(-1).numpy()
    drafts = probabilities.argsort()[:-3:-1].tolist()
    runner = make_runner(Table(table), num_rows, Script(lambda *_: drafts))
    slots = list(range(num_rows))
    new = [new_row(slot, [1], SamplingParams(seed=slot)) for slot in slots]
    runner.run(ScheduledBatch("mixed", slots, [1] * num_rows, new, [], max_drafts=2))
    found = np.zeros(12)
    for _ in range(14):
        step = ScheduledBatch("mixed", slots, [3] * num_rows, [], [], max_drafts=2)
        found += np.bincount(runner.run(step).token_ids, minlength=12)
    expected = probabilities * found.sum()
    assert found.sum() > 200_000 > 14 * num_rows, "some drafts were right"
    assert ((found - expected) ** 2 / expected).sum() < 31.26

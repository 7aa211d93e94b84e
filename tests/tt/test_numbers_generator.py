"""The ttnn generator on golden chips: however work is cut up and placed, the same logits."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from replicas.generators.ttnn import buckets
from tests.tt.golden.lanes import (
    fill,
    golden_generator,
    model_folder,
    pcc,
    reference_logits,
    relative_error,
    shards_of,
)
from tests.tt.golden.library import poisoned
from tests.tt.golden.rows import params

_IDS = torch.randint(0, 230, (200,), generator=torch.Generator().manual_seed(9)).tolist()
PROMPTS = [_IDS[:70], _IDS[100:101], _IDS[3:67], _IDS[20:115], _IDS[110:142], _IDS[:150]]
"""Lengths inside, at and across ends of blocks and of the first bucket."""

LEAST_PCC = {"accuracy": 0.999, "balanced": 0.997}


def assert_reference(case, sequences, optimizations="accuracy"):
    """Every recorded logits are like transformers' after the same tokens; returns the least PCC."""
    least = 1.0
    for sequence in sequences:
        wanted = reference_logits(model_folder(case), sequence.token_ids[:-1])
        for index, logits in enumerate(sequence.logits):
            reference = wanted[sequence.num_prompt_tokens - 1 + index]
            least = min(least, pcc(logits[:230], reference))
            assert relative_error(logits[:230], reference) < 0.15
    assert least >= LEAST_PCC[optimizations]
    return least


WAYS = {
    "whole": ("llama-32", 1, 1, None, "accuracy"),
    "chunks of 37": ("qwen3-32", 1, 1, 37, "accuracy"),
    "chunks of 32, two chips": ("qwen2-64", 2, 1, 32, "accuracy"),
    "two lanes": ("mistral-32", 2, 2, None, "accuracy"),
    "two lanes of two chips, chunks of 50": ("llama-64-biases", 4, 2, 50, "accuracy"),
    "four lanes of two chips": ("qwen3-64", 8, 4, None, "accuracy"),
    "four chips": ("qwen2-32", 4, 1, None, "accuracy"),
    "balanced, chunks of 37": ("qwen3-64", 2, 1, 37, "balanced"),
}
"""Name -> case, chips, lanes, tokens of a chunk, profile."""


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_those_of_transformers(way, record_property):
    case, num_chips, num_lanes, chunk, optimizations = WAYS[way]
    sizes = {"num_lanes": num_lanes, "slots_per_lane": -(-8 // num_lanes)}
    with golden_generator(case, num_chips, optimizations, **sizes) as loop, poisoned(math.nan):
        fill(loop.cache, math.nan)
        sequences = loop.generate(PROMPTS, 4, chunk=chunk)
    least = assert_reference(case, sequences, optimizations)
    record_property("least pcc", round(least, 6))
    print(f"{way}: {case} on {num_chips} chips as {num_lanes} lanes: least pcc {least:.6f}")


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_blocks_and_slots_do_not_matter(block_size):
    outputs = []
    for seed in (0, 1):
        settings = {"block_size": block_size, "seed": seed, "slots_per_lane": 6}
        with golden_generator("qwen2-32", **settings) as loop, poisoned(math.nan):
            fill(loop.cache, math.nan)
            outputs.append(loop.generate(PROMPTS, 3, chunk=45))
    blocks = [[sequence.block_ids for sequence in sequences] for sequences in outputs]
    assert blocks[0] != blocks[1]
    for first, second in zip(*outputs, strict=True):
        for logits, others in zip(first.logits, second.logits, strict=True):
            assert torch.equal(logits, others)


@pytest.mark.parametrize("start", [32, 64, 65, 95, 33, 127])
def test_a_prefix_that_is_in_the_cache_is_not_computed(start):
    # The second sequence has the first's blocks as far as they are the same.
    prompt = _IDS[:150]
    with golden_generator("llama-32") as loop:
        fill(loop.cache, math.nan)
        first = loop.add(prompt, 1)
        loop.step_prefill([first])
        second = loop.add([*prompt[:127], 5, 6, 7], 1)
        second.block_ids[: start // 32] = first.block_ids[: start // 32]
        # The hit ends within a block: its KV is there, in a block of the sequence's own.
        if start % 32:
            old, new = first.block_ids[start // 32], second.block_ids[start // 32]
            for shard in shards_of(loop.cache):
                shard[new, :, : start % 32] = shard[old, :, : start % 32]
        second.num_computed_tokens = start
        before = [shard[first.block_ids].clone() for shard in shards_of(loop.cache)]
        loop.step_prefill([second])
        assert_reference("llama-32", [first, second])
        after = [shard[first.block_ids] for shard in shards_of(loop.cache)]
        assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("num_chips", [1, 2])
def test_a_prompt_that_is_longer_than_the_longest_chunk(num_chips, monkeypatch):
    monkeypatch.setattr(buckets, "MAX_CHUNK", 256)
    ids = (_IDS * 4)[:700]
    with golden_generator("qwen3-32", num_chips, max_seq_len=800) as loop, poisoned(math.nan):
        fill(loop.cache, math.nan)
        assert_reference("qwen3-32", loop.generate([ids, ids[:512], ids[:513]], 2))


def test_a_batch_of_32_rows():
    prompts = [_IDS[i : 2 * i + 1] for i in range(32)]
    with golden_generator("qwen3-32", slots_per_lane=32, max_seq_len=64) as loop:
        fill(loop.cache, math.nan)
        sequences = [loop.add(prompt, 2) for prompt in prompts]
        loop.step_prefill(sequences)
        loop.step_decode(sequences)
    assert_reference("qwen3-32", sequences)


def test_a_lane_whose_sequences_are_gone_does_nothing():
    with golden_generator("llama-32", 2, num_lanes=2) as loop, poisoned(math.nan):
        sequences = [loop.add(prompt, 4) for prompt in PROMPTS[:6]]
        loop.step_prefill(sequences)
        loop.step_decode(sequences)
        left = [sequence for sequence in sequences if sequence.lane == 1]
        assert 0 < len(left) < len(sequences)
        before = [shard.clone() for shard in shards_of(loop.cache[:1])]
        fill(loop.cache[:1], math.nan)
        logits = loop.step_decode(left)
        after = shards_of(loop.cache[:1])
        assert all(shard.isnan().all() for shard in after)
        assert not logits[:4].any()
        for shard, old in zip(after, before, strict=True):
            shard.copy_(old)
        loop.step_decode(sequences)
    assert_reference("llama-32", sequences)


# ---- sampling on the device


class Stepper:
    """Prefills prompts with logits, then decodes with sampling on the device."""

    def __init__(self, loop, prompts, num_new):
        self.loop = loop
        self.sequences = [loop.add(prompt, num_new) for prompt in prompts]
        for sequence in self.sequences:
            loop.step_prefill([sequence])
        self.num_slots = loop.num_lanes * loop.slots_per_lane
        self.tokens = torch.zeros(self.num_slots, 1, dtype=torch.int32)
        self.positions = torch.full((self.num_slots,), -1, dtype=torch.int32)
        self.table = torch.zeros(self.num_slots, loop.table_width, dtype=torch.int32)
        for sequence in self.sequences:
            row = torch.tensor(sequence.block_ids)
            self.table[sequence.slot, : len(row)] = row
        self.advance()

    def step(self, sampling=None, **commands):
        """Tokens (B,), with what the host knows brought up to date."""
        out = self.loop.generator.decode_forward(
            tokens=self.tokens,
            page_table=self.table,
            kv_cache=self.loop.cache,
            start_pos=self.positions,
            enable_trace=False,
            sampling_params=sampling or params(self.num_slots),
            **commands,
        )
        tokens = out.reshape(-1).tolist()
        for sequence in self.sequences:
            sequence.token_ids.append(tokens[sequence.slot])
        return tokens

    def advance(self):
        for sequence in self.sequences:
            self.tokens[sequence.slot, 0] = sequence.token_ids[-1]
            self.positions[sequence.slot] = len(sequence.token_ids) - 1


def null_blocks(cache):
    return [shard[0] for shard in shards_of(cache)]


def outputs(stepper):
    return [sequence.output for sequence in stepper.sequences]


@pytest.mark.parametrize(("num_chips", "num_lanes"), [(1, 1), (2, 1), (4, 2), (4, 1)])
def test_greedy_on_the_device_is_the_best_of_the_host(num_chips, num_lanes):
    settings = {"num_lanes": num_lanes, "slots_per_lane": 8 // num_lanes}
    with golden_generator("llama-32", num_chips, **settings) as loop, poisoned(math.nan):
        fill(loop.cache, math.nan)
        wanted = [sequence.output for sequence in loop.generate(PROMPTS, 7)]
    with golden_generator("llama-32", num_chips, **settings) as loop, poisoned(math.nan):
        fill(loop.cache, math.nan)
        reloading = Stepper(loop, PROMPTS, 7)
        for _ in range(6):
            reloading.step(reload_inputs=True, reload_sampling_params=True)
            reloading.advance()
        assert outputs(reloading) == wanted
    with golden_generator("llama-32", num_chips, **settings) as loop, poisoned(math.nan):
        fill(loop.cache, math.nan)
        steady = Stepper(loop, PROMPTS, 7)
        for shard in null_blocks(loop.cache):
            shard.fill_(math.nan)
        steady.step(reload_inputs=True, reload_sampling_params=True)
        for _ in range(5):
            # The host's tokens are old, and the device ignores them.
            steady.step(reload_inputs=False)
        assert outputs(steady) == wanted
        # Rows without a sequence stay so: they would write to the null block.
        assert all(shard.isnan().all() for shard in null_blocks(loop.cache))


def test_a_page_table_alone_can_be_reloaded():
    # Steady decode over the end of a block, whose block is only then known.
    prompt = _IDS[:62]
    with golden_generator("llama-32") as loop, poisoned(math.nan):
        fill(loop.cache, math.nan)
        wanted = loop.generate([prompt], 6)[0].output
    with golden_generator("llama-32") as loop, poisoned(math.nan):
        fill(loop.cache, math.nan)
        steady = Stepper(loop, [prompt], 6)
        (sequence,) = steady.sequences
        last = int(steady.table[sequence.slot, 2])
        steady.table[sequence.slot, 2] = 0
        steady.step(reload_inputs=True, reload_sampling_params=True)
        steady.step(reload_inputs=False)
        steady.table[sequence.slot, 2] = last
        steady.step(reload_inputs=False, reload_page_table=True)
        for shard in null_blocks(loop.cache):
            shard.fill_(math.nan)
        for _ in range(2):
            steady.step(reload_inputs=False)
        assert outputs(steady) == [wanted]


def test_draws_have_the_distribution_that_was_asked_for():
    fields = {"temperature": 1.5, "top_k": 8, "top_p": 0.8}
    with golden_generator("llama-32", 2, slots_per_lane=8) as loop:
        stepper = Stepper(loop, [PROMPTS[2]], 3)
        (sequence,) = stepper.sequences
        # The same place in every row, so that only the seeds differ.
        for tensor in (stepper.tokens, stepper.positions, stepper.table):
            tensor[:] = tensor[sequence.slot].clone()
        logits = reference_logits(model_folder("llama-32"), sequence.token_ids)[-1]
        found = []
        for first in range(0, 512, 8):
            rows = params(8, seed=list(range(first, first + 8)), **fields)
            found += stepper.step(rows, reload_inputs=True, reload_sampling_params=True)
    best = logits.topk(8)
    probabilities = torch.softmax(best.values / 1.5, dim=-1)
    kept = probabilities * (probabilities.cumsum(-1) - probabilities < 0.8)
    kept = dict(zip(best.indices.tolist(), (kept / kept.sum()).tolist(), strict=True))
    counts = Counter(found)
    assert set(counts) <= {token for token, share in kept.items() if share}
    distance = sum(abs(counts[token] / len(found) - share) for token, share in kept.items()) / 2
    print(f"{len(counts)} tokens, total variation {distance:.3f}")
    assert distance < 0.08

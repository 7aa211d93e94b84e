"""The torch generator gives transformers' results, for every split of the work.

Greedy tokens of whole engines are in tests/equivalence.
"""

import math
from dataclasses import replace

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from replicas.generators.torch.kernels import kernels_for
from replicas.generators.torch.rope import cos_and_sin, inverse_frequencies
from tests.models import reference_model
from tests.replicas.generators.conftest import PROMPTS, make_generator
from tests.replicas.generators.paged_loop import PagedLoop
from tests.replicas.generators.tiny_models import SCALED_ROPES


def paged_loop(model, lanes, slots_per_lane, block_size, dtype=torch.float32, **device):
    generator = make_generator(
        model.config, dtype, max_batch_size=8, tt_data_parallel=lanes, **device
    )
    loop = PagedLoop(
        generator,
        model.config,
        num_lanes=lanes,
        slots_per_lane=slots_per_lane,
        block_size=block_size,
        dtype=dtype,
    )
    # A sequence must not read entries that were not written for it: all of them are NaN.
    loop.fill(math.nan)
    return loop


@pytest.mark.parametrize("attention", ["fast", "batched"])
def test_teacher_forced_float64_logits_equal_those_of_transformers(model, attention):
    loop = paged_loop(model, 4, 2, 32, torch.float64, attention=attention)
    generator = loop.generator
    texts = [list(prompt) + out for prompt, out in zip(PROMPTS, model.outputs, strict=True)]
    sequences = [loop.add(text, 1) for text in texts]
    logits = [[] for _ in texts]
    for num_tokens in (3, 1, 60):
        live = [s for s in sequences if s.num_computed_tokens < len(texts[sequences.index(s)])]
        counts = [min(num_tokens, s.num_prompt_tokens - s.num_computed_tokens) for s in live]
        batch = loop.flat_batch(live, counts, every=True)
        parts = generator.forward_mixed(batch, loop.cache).split(counts)
        for sequence, count, part in zip(live, counts, parts, strict=True):
            sequence.num_computed_tokens += count
            logits[sequences.index(sequence)].append(part)
    for text, parts in zip(texts, logits, strict=True):
        found, wanted = torch.cat(parts), model.oracle(text)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_float32_logits_are_close_to_the_float64_oracle(model):
    sequences = paged_loop(model, 1, 8, 16).generate(PROMPTS, 4)
    for sequence in sequences:
        wanted = model.oracle(sequence.token_ids[:-1])[-4:]
        found = torch.stack(sequence.logits)
        assert found.dtype == torch.float32
        assert (found.double() - wanted).abs().max() < 1e-4


def test_bfloat16_logits_are_near_the_oracle_and_not_widened(model):
    sequences = paged_loop(model, 1, 8, 16, torch.bfloat16).generate(PROMPTS, 2, mixed=True)
    for sequence in sequences:
        wanted = model.oracle(sequence.token_ids[:-1])[-2:]
        found = torch.stack(sequence.logits)
        assert found.dtype == torch.bfloat16
        spread = wanted.std()
        # Rounded otherwise, a token may go to another expert than in the oracle.
        share = 0.1 if model.config.experts is None else 0.25
        assert (found - wanted).abs().mean() < share * spread


def test_rotary_frequencies_equal_those_of_transformers_bit_for_bit(model):
    found = inverse_frequencies(model.config.rope, model.config.head_dim)
    assert torch.equal(found, model.inv_freq)


@pytest.mark.parametrize("case", SCALED_ROPES)
def test_scaled_rotary_tables_equal_those_of_transformers_bit_for_bit(tiny, case):
    """The base of dynamic ones, for the longest sequence, is float32 in transformers."""
    config = tiny(case).config
    num_positions = config.max_position_embeddings
    rotary = LlamaRotaryEmbedding(tiny(case).hf_config)
    wanted = rotary(torch.zeros(1), torch.arange(num_positions)[None])
    found = cos_and_sin(config.rope, config.head_dim, num_positions, torch.float32)
    for ours, theirs in zip(found, wanted, strict=True):
        difference = (ours - theirs[0, :, : config.head_dim // 2]).abs().max()
        assert difference <= (1e-4 if case == "dynamic" else 0.0)


@pytest.mark.parametrize("case", ["linear", "yarn"])
def test_logits_with_scaled_rotations_are_those_of_transformers(tiny, case):
    model = tiny(case)
    reference = reference_model(str(model.folder), torch.float32)
    for sequence in paged_loop(model, 1, 8, 16).generate(PROMPTS, 3):
        wanted = reference(torch.tensor([sequence.token_ids[:-1]])).logits[0, -3:]
        assert (torch.stack(sequence.logits) - wanted).abs().max() < 1e-3


def test_two_decodes_in_one_group_do_not_mix_when_one_has_nan(tiny):
    """A sequence whose own KV went bad spoils itself only."""
    loop = paged_loop(tiny("llama-gqa"), 1, 8, 16)
    good, bad = (loop.add(PROMPTS[0], 3) for _ in range(2))
    loop.step_prefill([good, bad])
    for k, v in loop.cache[0]:
        k[bad.block_ids[0], :, 1] = math.nan
        v[bad.block_ids[0], :, 1] = math.nan
    loop.step_decode([good, bad])
    assert bad.logits[-1].isnan().all()
    assert good.output == tiny("llama-gqa").outputs[0][:2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_rounds_where_that_of_transformers_does(dtype):
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(50, 96, generator=stream).to(dtype)
    weight = torch.randn(96, generator=stream).to(dtype)
    wide = x.to(torch.promote_types(dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    found, wanted = kernels_for(dtype).rms_norm(x, weight, 1e-5), weight * normed.to(dtype)
    # Sums in another order differ in the last bit; few of them are rounded to another bfloat16,
    # while rounding once instead of twice would change every fourth.
    assert torch.allclose(found, wanted, rtol=2.0**-7 if dtype is torch.bfloat16 else 1e-6)
    if dtype is torch.bfloat16:
        assert (found != wanted).double().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_may_be_changed_in_place_and_none_need_be_wanted(tiny, dtype):
    loop = paged_loop(tiny("llama-gqa"), 1, 8, 16, dtype)
    sequence = loop.add(PROMPTS[0], 2)
    batch = loop.flat_batch([sequence], [8])
    logits = loop.generator.forward_mixed(batch, loop.cache)
    logits[0, 0] = 7.0
    sequence.accept(8, logits[0])
    loop.step_decode([sequence]).div_(2.0)
    none = replace(batch, logits_indices=batch.logits_indices[:0])
    assert loop.generator.forward_mixed(none, loop.cache).shape == (0, logits.shape[1])


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_hidden_states_are_those_of_a_mixed_pass_bit_for_bit(tiny, name, dtype):
    loop = paged_loop(tiny(name), 1, 8, 16, dtype)
    generator = loop.generator
    sequences = [loop.add(prompt, 1) for prompt in PROMPTS]
    counts = [sequence.num_prompt_tokens for sequence in sequences]
    batch = loop.flat_batch(sequences, counts, every=True)
    hidden = generator.forward_hidden(batch, loop.cache).clone()
    assert hidden.shape == (sum(counts), generator._config.hidden_size)
    logits = generator.forward_mixed(batch, loop.cache)
    assert torch.equal(generator.compute_logits(hidden), logits)
    portions = torch.cat([generator.compute_logits(part) for part in hidden.split(5)])
    torch.testing.assert_close(portions, logits)
    generator.compute_logits(hidden).div_(2.0)

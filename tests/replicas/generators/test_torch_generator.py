"""The torch generator's side of the contract: lanes, padding rows, warm-up, refusals."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from replicas.errors import ConfigError
from replicas.generators.torch import generator
from replicas.generators.torch.generator import TorchGenerator
from replicas.generators.torch.inputs import from_decode, from_prefill
from tests.replicas.generators.conformance import check_generator
from tests.replicas.generators.conftest import PROMPTS, make_generator
from tests.replicas.generators.paged_loop import PagedLoop


@pytest.fixture
def config(tiny):
    return tiny("qwen3").config


def make_loop(config, lanes=1, **device):
    generator = make_generator(config, tt_data_parallel=lanes, **device)
    return PagedLoop(generator, config, num_lanes=lanes, slots_per_lane=8 // lanes, block_size=16)


def kv_bytes(cache):
    return [plane.clone() for layer in cache.planes for plane in layer]


@pytest.mark.parametrize("case", ["llama-gqa", "qwen3"])
@pytest.mark.parametrize("attention", ["fast", "batched"])
def test_torch_generator_conforms(tiny, case, attention):
    config = tiny(case).config

    def maker(**sizes):
        return make_generator(config, attention=attention, **sizes), config

    check_generator(maker)


def test_empty_slots_choose_the_lane_and_nothing_else_is_written(config):
    loop = make_loop(config, lanes=4)
    sequence = loop.add(PROMPTS[0], 1)
    loop.step_prefill([sequence])
    for lane, layers in enumerate(loop.cache):
        for k, _ in layers:
            written = k.flatten(1).any(1).nonzero().flatten().tolist()
            own = sorted(sequence.block_ids) if lane == sequence.slot // 2 else []
            assert written == own


def test_decode_writes_one_row_per_live_sequence_and_none_for_padding(config):
    loop = make_loop(config, lanes=2)
    live, waiting = (loop.add(prompt, 4) for prompt in PROMPTS[:2])
    loop.step_prefill([live, waiting])
    before = kv_bytes(loop.cache)
    position = live.num_computed_tokens
    page_table = torch.zeros(8, loop.table_width, dtype=torch.int32)
    tokens = torch.full((8, 1), 3, dtype=torch.int32)
    start_pos = torch.full((8,), -1, dtype=torch.int32)
    for sequence in (live, waiting):  # the waiting row shows its real blocks, at position -1
        row = torch.tensor(sequence.block_ids, dtype=torch.int32)
        page_table[sequence.slot, : len(row)] = row
    start_pos[live.slot] = position
    loop.generator.decode_forward(
        tokens=tokens,
        page_table=page_table,
        kv_cache=loop.cache,
        start_pos=start_pos,
        enable_trace=True,
    )
    column, offset = divmod(position, 16)
    written = [live.lane * loop.num_blocks + live.block_ids[column], offset]
    for old, new in zip(before, kv_bytes(loop.cache), strict=True):
        changed = (old != new).any(dim=(1, 3)).nonzero()
        assert changed.tolist() == [written]


def test_a_batch_of_padding_rows_alone_gives_zeros_and_writes_nothing(config):
    loop = make_loop(config)
    logits = loop.step_decode([])
    assert logits.shape == (8, 1, 160)
    assert not logits.any()
    assert not any(plane.any() for plane in kv_bytes(loop.cache))


def test_warm_up_touches_the_null_block_only(config):
    loop = make_loop(config, lanes=2)
    loop.fill(7.0)
    generator = loop.generator
    calls = []
    generator.set_layer_callbacks(calls.append, calls.append)
    generator.warmup_model_prefill(
        kv_cache=loop.cache, enable_trace=True, can_sample_on_device=False, greedy_only=True
    )
    generator.warmup_model_decode(
        kv_cache=loop.cache, enable_trace=True, max_batch_size=8, num_blocks=loop.table_width
    )
    assert calls == []
    assert all((k[1:] == 7.0).all() and (v[1:] == 7.0).all() for k, v in loop.cache[0])
    assert all((plane == 7.0).all() for layer in loop.cache[1] for plane in layer)


def test_layer_callbacks_come_before_a_layer_is_touched_and_after_it_is_done(config):
    loop = make_loop(config)
    sequence = loop.add(PROMPTS[0], 1)
    first_block = sequence.block_ids[0]
    seen = []

    def written():
        return [bool(k[first_block].all()) for k, _ in loop.cache[0]]

    loop.generator.set_layer_callbacks(
        lambda layer: seen.append(("before", layer, written())),
        lambda layer: seen.append(("after", layer, written())),
    )
    loop.step_prefill([sequence])
    assert seen == [
        ("before", 0, [False, False, False]),
        ("after", 0, [True, False, False]),
        ("before", 1, [True, False, False]),
        ("after", 1, [True, True, False]),
        ("before", 2, [True, True, False]),
        ("after", 2, [True, True, True]),
    ]


def test_what_is_loaded_just_before_a_layer_is_attended_to(config):
    """KV of a prefix may arrive layer by layer while the forward runs."""
    whole, late = make_loop(config), make_loop(config)
    block_size = whole.cache.block_size
    prompt = [(7 * i + 3) % 100 for i in range(2 * block_size + 3)]
    source = whole.add(prompt, 1)
    whole.step_prefill([source])
    hit = late.add(prompt, 1)
    hit.num_computed_tokens = 2 * block_size

    def load(layer):
        for there, here in zip(whole.cache[0][layer], late.cache[0][layer], strict=True):
            here[hit.block_ids[:2]] = there[source.block_ids[:2]]

    late.generator.set_layer_callbacks(load, None)
    late.step_prefill([hit])
    assert hit.output == source.output


def test_progress_ends_at_one(config):
    seen = []
    make_generator(config, progress=lambda stage, fraction: seen.append((stage, fraction)))
    assert seen[-1] == ("weights", 1.0)
    assert seen == sorted(seen)


def test_longest_sequence_fits_exactly(config):
    generator = make_generator(config, max_seq_len=32)
    loop = PagedLoop(generator, config, slots_per_lane=8, block_size=16, max_seq_len=32)
    loop.generate([PROMPTS[3]], 32 - len(PROMPTS[3]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tt_data_parallel": 3}, "max_batch_size=8 must be a positive multiple"),
        ({"max_seq_len": 0}, "max_seq_len=0 positive"),
        ({"attention": "slow"}, "attention 'slow' is not one of fast, batched"),
        ({"load_format": "gguf"}, "load_format 'gguf' is not one of safetensors, random"),
        ({"dtype": torch.float16}, "dtype torch.float16 is not one of"),
    ],
)
def test_impossible_settings_are_refused(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_generator(config, **{"dtype": torch.float32, **changes})


def test_another_device_is_refused(config):
    with pytest.raises(ConfigError, match="CpuDevice, not SimpleNamespace"):
        TorchGenerator.initialize_vllm_model(config, SimpleNamespace(), 8, max_seq_len=128)


@pytest.mark.parametrize(
    ("shape", "dtype", "layers"),
    [
        ((9, 4, 16, 32), torch.float32, 3),
        ((9, 2, 16, 16), torch.float32, 3),
        ((9, 2, 16, 32), torch.float32, 2),
        ((9, 2, 16, 32), torch.bfloat16, 3),
        ((0, 2, 16, 32), torch.float32, 3),
    ],
)
def test_a_cache_of_another_shape_is_refused(config, shape, dtype, layers):
    with pytest.raises(ConfigError, match="KV cache"):
        make_generator(config).allocate_kv_cache(shape, dtype, layers)


def prefill_arguments(loop, **changes):
    return {
        "tokens": torch.ones(1, 4, dtype=torch.int32),
        "page_table": torch.ones(1, 1, dtype=torch.int32),
        "kv_cache": loop.cache,
        "enable_trace": False,
        "prompt_lens": torch.tensor([4]),
        "start_pos": torch.tensor([0], dtype=torch.int32),
        "empty_slots": [0],
        **changes,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"start_pos": torch.tensor([4])},
        {"start_pos": torch.tensor([-1])},
        {"prompt_lens": torch.tensor([5])},
        {"tokens": torch.ones(1, 17), "prompt_lens": torch.tensor([17])},
        {"empty_slots": [8]},
        {"empty_slots": [-1]},
        {"sampling_params": SimpleNamespace()},
        {"page_tables_per_layer": []},
    ],
    ids=str,
)
def test_prefill_refuses_what_it_cannot_do(config, changes):
    loop = make_loop(config)
    loop.generator.prefill_forward(**prefill_arguments(loop, pixel_values=None))
    with pytest.raises(ValueError, match=r"fit|empty_slots|sampl|page_table"):
        loop.generator.prefill_forward(**prefill_arguments(loop, **changes))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"reset_batch": True}, TypeError),
        ({"reload_inputs": False}, ValueError),
        ({"sampling_params": SimpleNamespace()}, ValueError),
        ({"start_pos": torch.zeros(7)}, ValueError),
        ({"start_pos": torch.full((8,), 16)}, ValueError),
        ({"kv_cache": [[]]}, TypeError),
    ],
    ids=str,
)
def test_decode_refuses_what_it_cannot_do(config, changes, error):
    loop = make_loop(config)
    arguments = {
        "tokens": torch.ones(8, 1, dtype=torch.int32),
        "page_table": torch.ones(8, 1, dtype=torch.int32),
        "kv_cache": loop.cache,
        "start_pos": torch.zeros(8, dtype=torch.int32),
        "enable_trace": False,
    }
    loop.generator.decode_forward(**arguments, slot_remap=None)
    with pytest.raises(error):
        loop.generator.decode_forward(**{**arguments, **changes})


def test_decode_output_is_read_back_as_it_is(config):
    generator = make_generator(config)
    logits = torch.ones(8, 1, 160)
    host, events = generator.read_decode_output(logits, async_read=True)
    assert events == []
    assert generator.process_decode_output_host(host, is_tokens=False) is logits
    with pytest.raises(ValueError, match="does not sample"):
        generator.process_decode_output_host(host, is_tokens=True)


def test_a_window_as_long_as_the_longest_sequence_is_none(tiny):
    config = replace(tiny("mistral").config, sliding_window=64)
    for max_seq_len, window in ((64, None), (65, 64)):
        generator = make_generator(config, max_seq_len=max_seq_len)
        layers = generator._model._weights.layers
        assert {layer.attention.spec.window for layer in layers} == {window}


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads_of_passes(loop):
    """Return the threads of a prompt, and of a decode after it."""
    seen = []
    loop.generator.set_layer_callbacks(lambda _: seen.append(torch.get_num_threads()), None)
    sequence = loop.add(PROMPTS[0], 2)
    loop.step_prefill([sequence])
    loop.step_decode([sequence])
    assert torch.get_num_threads() == 2
    num_layers = len(loop.cache.planes)
    assert len(seen) == 2 * num_layers
    return set(seen[:num_layers]), set(seen[num_layers:])


@pytest.mark.parametrize(
    ("name", "value", "threads"),
    [
        ("LONG_PRODUCTS", 1000, ({2}, {2})),
        ("LONG_WEIGHTS", 1000, ({2}, {2})),
        ("ATTENDED", 10**9, ({1}, {2})),
    ],
)
def test_a_short_pass_takes_one_thread_and_a_long_one_all(
    config, two_threads, monkeypatch, name, value, threads
):
    assert threads_of_passes(make_loop(config)) == ({1}, {1})
    monkeypatch.setattr(generator, name, value)
    assert threads_of_passes(make_loop(config)) == threads


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("positions", 10**6, "position"),
        ("positions", -1, "position"),
        ("kv_positions", 10**6, "KV position"),
        ("block_table", 10**6, "block"),
        ("block_table", -1, "block"),
        ("seq_lens", 10**6, "sequences of"),
        ("seq_lens", 0, "sequences of"),
        ("query_start_loc", 1, "requests from"),
    ],
)
def test_what_does_not_exist_is_neither_read_nor_written(config, field, value, said):
    loop = make_loop(config)
    batch = from_decode(*(np.array(v) for v in ([5], [[[1]]], [3], [[0]])), loop.cache.block_size)
    changed = getattr(batch, field) * 0 + value
    before = kv_bytes(loop.cache)
    with pytest.raises(IndexError, match=said):
        loop.generator._forward(replace(batch, **{field: changed}), loop.cache)
    assert all(map(torch.equal, kv_bytes(loop.cache), before))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_table": np.zeros((1, 0, 1), np.int64)}, "other than 1 requests"),
        ({"seq_lens": np.array([2])}, "sequences of"),
    ],
    ids=["no table", "shorter than what is computed"],
)
def test_every_request_has_a_table_and_a_length_that_it_reaches(config, changes, said):
    loop = make_loop(config)
    arguments = ([[5, 6, 7]], [[[1]]], [0], [3], [[0]])
    batch = from_prefill(*map(np.array, arguments), loop.cache.block_size)
    before = kv_bytes(loop.cache)
    with pytest.raises(IndexError, match=said):
        loop.generator._forward(replace(batch, **changes), loop.cache)
    assert all(map(torch.equal, kv_bytes(loop.cache), before))

"""The ttnn generator's calls: accepted by ttnn, checked before it, and as few as they can be.

`test_numbers_generator.py` checks its numbers.
"""

from __future__ import annotations

import contextlib
import json
import math
from types import SimpleNamespace

import pytest
import torch
import ttnn

from replicas.errors import ConfigError, DeviceError
from replicas.generators.model_config import load_hf_config
from replicas.generators.protocol import CpuDevice
from replicas.generators.ttnn import lane_batch
from replicas.generators.ttnn.buckets import prefill_buckets
from replicas.generators.ttnn.generator import TTGenerator
from replicas.generators.ttnn.kv_cache import TTKVCache
from tests.tt.calls import BLOCK, MAX_SEQ_LEN, MODEL, NUM_BLOCKS, ROWS, Calls, note_runs
from tests.tt.golden.lanes import fill, golden_mesh, model_folder, shards_of
from tests.tt.golden.library import poisoned
from tests.tt.golden.rows import params

DRAW = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 3}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


@pytest.fixture
def mock_calls(open_mock_mesh, folder):
    """Makes generators of random weights on the mock mesh."""
    made = []

    def make(num_lanes=1, num_rows=ROWS):
        mesh = open_mock_mesh(load_format="random", trace="none", weight_cache=str(folder))
        made.append(Calls(load_hf_config(folder), mesh, num_lanes, num_rows))
        return made[-1]

    yield make
    for calls in made:
        calls.generator.close()


@contextlib.contextmanager
def two_golden_lanes():
    """A generator on two golden chips as two lanes; `library` notes every call of ttnn."""
    with golden_mesh(2) as (mesh, library):
        calls = Calls(load_hf_config(model_folder("llama-32")), mesh, num_lanes=2)
        calls.library = library
        yield calls


@pytest.fixture
def golden_calls():
    with two_golden_lanes() as calls:
        yield calls


@pytest.fixture(scope="module")
def unchanged_calls():
    """For tests whose calls are all refused; a decode has been done."""
    with two_golden_lanes() as calls:
        calls.decode()
        yield calls


# ---- on mock chips


@pytest.mark.parametrize(
    ("num_lanes", "num_rows"),
    [
        pytest.param(lanes, rows, marks=pytest.mark.board(board), id=f"{board} {lanes}x{rows}")
        for board, lanes, rows in [
            ("N150", 1, 32),
            ("N300", 1, 4),
            ("N300", 2, 1),
            ("T3K", 1, 4),
            ("T3K", 4, 8),
        ]
    ],
)
def test_no_program_is_compiled_after_the_warm_up(mock_calls, num_lanes, num_rows):
    calls = mock_calls(num_lanes, num_rows)

    def programs():
        return [lane.device.num_program_cache_entries() for lane in calls.generator._batch.lanes]

    calls.warm_up()
    warm = programs()
    assert min(warm) > 20
    last = calls.batch - 1
    longest = 0
    for bucket in prefill_buckets(MAX_SEQ_LEN):
        for length in {longest + 1, min(bucket, MAX_SEQ_LEN)}:
            assert calls.prefill([0], ends=[length]).shape == (1, 1, 300)
            for start in {length // 2, length - 1}:
                calls.prefill([last], [start], [length])
        longest = bucket
    slots = list(range(calls.batch))
    drawn = calls.prefill(slots, sampling_params=params(len(slots), **DRAW))
    assert drawn.shape == (len(slots), 1)
    for positions in ([0] * calls.batch, [MAX_SEQ_LEN - 3] + [-1] * last):
        assert calls.decode(positions).shape == (calls.batch, 1, 300)
        for temperature in (0.0, 1.3):
            step = {"sampling_params": params(calls.batch, **{**DRAW, "temperature": temperature})}
            tokens = calls.decode(positions, **step, reload_sampling_params=True)
            assert tokens.shape == (calls.batch, 1)
            calls.decode(positions, **step, reload_inputs=False)
            calls.decode(positions, **step, reload_inputs=False, reload_page_table=True)
            _, logits = calls.decode(positions, **step, logits_rows=[0])
            assert logits.shape == (1, 300)
    assert programs() == warm


@pytest.mark.board("N300")
def test_a_decode_can_be_read_later(mock_calls):
    calls = mock_calls(2)
    output = calls.decode([3] + [-1] * 7, read_from_device=False)
    host, events = calls.generator.read_decode_output(output, async_read=True)
    # A lane without a live row gets no call.
    assert len(events) == 1
    ttnn.event_synchronize(events[0])
    logits = calls.generator.process_decode_output_host(host)
    assert logits.shape == (8, 1, 300)


@pytest.mark.board("N150")
def test_what_ttnn_refuses_is_a_device_error(mock_calls):
    calls = mock_calls()
    (layer,) = calls.cache[0]
    layer[0] = ttnn.slice(layer[0], [0, 0, 0, 0], [NUM_BLOCKS, 3, BLOCK, 32])
    with pytest.raises(DeviceError, match=r"^prefill: ttnn refused a call: .*head"):
        calls.prefill()
    with pytest.raises(DeviceError, match="warming up prefill"):
        calls.warm_up()


@pytest.mark.board("N300")
@pytest.mark.parametrize("optimizations", ["performance", "accuracy"])
def test_the_cache_is_of_the_profile_and_each_chip_has_its_heads(
    open_mock_mesh, folder, optimizations
):
    mesh = open_mock_mesh(
        load_format="random", optimizations=optimizations, weight_cache=str(folder)
    )
    cache = Calls(load_hf_config(folder), mesh).cache
    assert [[len(layer) for layer in lane] for lane in cache] == [[2]]
    for plane in cache[0][0]:
        dtype = ttnn.bfloat8_b if optimizations == "performance" else ttnn.bfloat16
        assert plane.dtype == dtype
        assert plane.layout == ttnn.TILE_LAYOUT
        assert plane.memory_config() == ttnn.DRAM_MEMORY_CONFIG
        chips = ttnn.get_device_tensors(plane)
        assert [list(chip.shape) for chip in chips] == [[NUM_BLOCKS, 4, BLOCK, 32]] * 2


# ---- what cannot work


def test_what_cannot_be_set_up_is_refused(golden_calls):
    config = golden_calls.config
    with golden_mesh(2) as (mesh, _):
        wrong = {
            "CpuDevice": (CpuDevice(torch.float32), 4, 300, 1),
            "33 sequences per lane": (mesh, 33, 300, 1),
            "max_batch_size=5": (mesh, 5, 300, 2),
            "max_seq_len=0": (mesh, 4, 0, 1),
        }
        for message, (device, rows, length, lanes) in wrong.items():
            with pytest.raises(ConfigError, match=message):
                TTGenerator.initialize_vllm_model(
                    config, device, rows, max_seq_len=length, tt_data_parallel=lanes
                )
        with pytest.raises(ConfigError, match="optimizations 'fast'"):
            TTGenerator.initialize_vllm_model(
                config, mesh, 4, max_seq_len=300, optimizations="fast"
            )
    with golden_mesh(8) as (mesh, _), pytest.raises(ConfigError, match=r"4 KV heads .* 8 chips"):
        TTGenerator.initialize_vllm_model(config, mesh, 4, max_seq_len=300)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 2}, r"\(2, 32, \d\).*\(4, 32, \d\)"),
        ({"head_dim": 64}, r"\(4, 64, \d\).*\(4, 32, \d\)"),
        ({"num_layers": 9}, r"\(4, 32, 9\).*\(4, 32, \d\)"),
        ({"dtype": torch.float32}, "torch.float32, .* torch.bfloat16"),
        ({"num_blocks": 7}, r"7 blocks, .* table has 8"),
        ({"block_size": 48}, "block_size 48"),
    ],
)
def test_a_cache_of_another_model_is_refused(unchanged_calls, changes, message):
    with pytest.raises(ConfigError, match=message):
        unchanged_calls.allocate(**changes)
    # The cache before it still serves.
    assert unchanged_calls.prefill().any()


def test_a_budget_is_known_without_a_mesh():
    sizes = {"num_devices": 2, "tt_data_parallel": 2, "max_model_len": 300, "max_num_seqs": 4}
    found = TTGenerator.get_max_tokens_all_users(model_name=model_folder("llama-32"), **sizes)
    assert found == 1200
    sizes |= {"max_num_seqs": 32, "max_model_len": 10**6}
    found = TTGenerator.get_max_tokens_all_users(model_name=model_folder("llama-32"), **sizes)
    assert 1200 < found < 32 * 10**6, "what memory holds, not what was asked for"
    sizes["max_num_seqs"] = 10**9
    with pytest.raises(ConfigError, match="1000000000 slots need"):
        TTGenerator.get_max_tokens_all_users(model_name=model_folder("llama-32"), **sizes)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


STEADY = {"reload_inputs": False, "sampling_params": params(8)}
BESIDE = {"sampling_params": params(8), "reload_sampling_params": True}
WRONG_CALLS = {
    "tokens as floats": ("prefill", {"tokens": torch.ones(1, 100)}, "tokens must be integers"),
    "tokens of one dimension": ("prefill", {"tokens": int32(1, 2, 3)}, "tokens .* 2 dimensions"),
    "a token past the vocabulary": ("prefill", {"tokens": int32([*[0] * 99, 230])}, "0 to 230"),
    "a negative token": ("prefill", {"tokens": int32([*[0] * 99, -1])}, "-1 to 0"),
    "lengths as floats": ("prefill", {"prompt_lens": torch.ones(1)}, "prompt_lens must be"),
    "too few lengths": ("prefill", {"slots": [0, 1], "prompt_lens": int32(100)}, r"\(2, 2, 1\)"),
    "no rows": ("prefill", {"empty_slots": []}, "empty_slots must be"),
    "a slot past the batch": ("prefill", {"slots": [8]}, "8.* batch of 8"),
    "a negative slot": ("prefill", {"slots": [-1]}, "-1.* batch of 8"),
    "a slot twice": ("prefill", {"slots": [3, 3]}, "twice"),
    "a chunk without tokens": ("prefill", {"starts": [100]}, "100.* do not fit"),
    "a chunk backwards": ("prefill", {"starts": [101]}, "101.* do not fit"),
    "a negative start": ("prefill", {"starts": [-1]}, "-1.* do not fit"),
    "a prompt past its tokens": ("prefill", {"prompt_lens": int32(101)}, "rows of 100"),
    "a prompt past max_seq_len": ("prefill", {"ends": [301]}, "301.* rows of 300"),
    "a prompt past its blocks": (
        "prefill", {"page_table": int32([1])}, "100.* rows of 64",
    ),
    "a page table that is too wide": (
        "prefill", {"page_table": torch.ones(1, 9, dtype=torch.int32)}, "9 blocks .* 8$",
    ),
    "a page table of other rows": (
        "prefill", {"page_table": torch.ones(2, 5, dtype=torch.int32)}, "2 rows, not 1",
    ),
    "a block past the cache": ("prefill", {"page_table": int32([1, 60])}, "1 to 60, the cache 60"),
    "a negative block": ("prefill", {"page_table": int32([1, -1])}, "-1 to 1"),
    "page tables per layer": ("prefill", {"page_tables_per_layer": []}, "page_tables_per_layer"),
    "settings for other rows": ("prefill", {"sampling_params": params(2)}, "2 entries, not 1"),
    "a wide top-k": (
        "prefill", {"sampling_params": params(1, temperature=1.0, top_k=33)}, "top_k 33",
    ),
    "part of a batch": ("decode", {"tokens": int32([1], [2])}, r"\(2, 1\) .* batch of 8"),
    "part of the positions": ("decode", {"start_pos": int32(1, 2)}, "2 positions .* of 8"),
    "part of the page table": ("decode", {"page_table": int32([1])}, "1 rows, not 8"),
    "a wide page table": (
        "decode", {"page_table": torch.ones(8, 9, dtype=torch.int32)}, "9 blocks .* 8$",
    ),
    "a decoded block past the cache": (
        "decode", {"page_table": torch.full((8, 5), 60)}, "60 to 60, the cache 60",
    ),
    "a position past max_seq_len": ("decode", {"positions": [300] * 8}, "fit in 300"),
    "a position past its blocks": (
        "decode", {"positions": [64] * 8, "page_table": torch.ones(8, 1).int()}, "fit in 64",
    ),
    "a position of -2": ("decode", {"positions": [-2] * 8}, "fit in 300"),
    "a decoded token past the vocabulary": (
        "decode", {"tokens": torch.full((8, 1), 230)}, "230 to 230",
    ),
    "positions as floats": ("decode", {"start_pos": torch.ones(8)}, "start_pos must be"),
    "tables per layer": ("decode", {"page_tables_per_layer": []}, "page_tables_per_layer"),
    "both reloads": ("decode", {"reload_page_table": True}, "first includes the second"),
    "a reset alone": ("decode", {**STEADY, "reset_sampling_state": True}, "reset_sampling_state"),
    "a remap alone": ("decode", {**STEADY, "slot_remap": torch.arange(8)}, "slot_remap needs"),
    "logits without inputs": ("decode", {"reload_inputs": False}, "logits need reload_inputs"),
    "nothing to go on from": ("decode", STEADY, "set reload_inputs"),
    "no settings yet": ("decode", {"sampling_params": params(8)}, "reload_sampling_params"),
    "a remap that is no order": ("decode", {"slot_remap": torch.zeros(8).int()}, "not permute 8"),
    "penalties": (
        "decode",
        {"sampling_params": params(8, presence_penalty=0.5), "reload_sampling_params": True},
        "presence_penalty",
    ),
    "logits beside nothing": ("decode", {"logits_rows": [1]}, "without sampling_params"),
    "logits of a row past the batch": ("decode", {**BESIDE, "logits_rows": [8]}, "8.* batch of 8"),
    "logits of padding": (
        "decode", {**BESIDE, "positions": [5] * 7 + [-1], "logits_rows": [6, 7]}, r"\[7\] do not",
    ),
    "another batch to warm up": ("warm_up_decode", {"max_batch_size": 7}, "7 rows .* of 8"),
    "a wide table to warm up": ("warm_up_decode", {"num_blocks": 9}, "9 blocks .* 8$"),
}  # fmt: skip
"""Name -> method of `Calls`, what differs from a right call, and what the error says."""


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_never_reaches_the_device(unchanged_calls, name):
    method, changes, message = WRONG_CALLS[name]
    noted = len(unchanged_calls.library.calls)
    with pytest.raises(ValueError, match=message):
        getattr(unchanged_calls, method)(**changes)
    assert len(unchanged_calls.library.calls) == noted


def test_calls_that_are_of_another_kind_are_type_errors(golden_calls):
    with pytest.raises(TypeError, match="reset_batch is retired"):
        golden_calls.decode(reset_batch=True)
    old = golden_calls.cache
    golden_calls.cache = golden_calls.allocate()
    for cache in (old, list(golden_calls.cache), TTKVCache([], NUM_BLOCKS, BLOCK)):
        for call in (golden_calls.prefill, golden_calls.decode, golden_calls.warm_up_decode):
            with pytest.raises(TypeError, match="latest result of allocate_kv_cache"):
                call(kv_cache=cache)


def test_logits_are_not_read_as_tokens(golden_calls):
    output = golden_calls.decode(read_from_device=False)
    host, _ = golden_calls.generator.read_decode_output(output)
    with pytest.raises(ValueError, match="gave logits"):
        golden_calls.generator.process_decode_output_host(host, is_tokens=True)


def test_a_decode_read_later_is_the_same(golden_calls):
    wanted, generator = golden_calls.decode(), golden_calls.generator
    host, events = generator.read_decode_output(golden_calls.decode(read_from_device=False))
    assert len(events) == 2
    for event in events:
        assert generator.process_decode_output_host(host).isnan().any(), "it is not there yet"
        golden_calls.library.event_synchronize(event)
    assert torch.equal(generator.process_decode_output_host(host), wanted)


def test_rows_without_a_sequence_have_no_logits(golden_calls):
    with poisoned(math.nan):  # what the device has in rows that it does not compute
        logits = golden_calls.decode([-1, 5] + [-1] * 6)
    assert [bool(row.any()) for row in logits] == [False, True] + [False] * 6


def test_warm_up_touches_the_null_block_only(golden_calls):
    fill(golden_calls.cache, 7.0)
    golden_calls.warm_up()
    assert all((shard[1:] == 7.0).all() for shard in shards_of(golden_calls.cache))


# ---- what a step sends and in which order


def refreshed(calls, **step):
    """Shapes of the tensors that a decode sends to the device."""
    calls.library.calls.clear()
    calls.decode(**step)
    return [
        call.operands[0][0]
        for call in calls.library.calls
        if call.name == "copy_host_to_device_tensor"
    ]


def test_a_steady_step_sends_what_has_changed(golden_calls):
    greedy, drawing = params(8), params(8, **DRAW)
    tokens, positions, table = (1, 4), (4,), (4, 8)
    inputs = [tokens, positions, tokens, table]
    settings = [(4,), (4,), (4,), (1, 1, 32, 1), (4,)]
    assert refreshed(golden_calls) == inputs * 2
    first = {"sampling_params": greedy, "reload_sampling_params": True}
    assert refreshed(golden_calls, **first) == inputs * 2 + settings * 2
    assert refreshed(golden_calls, sampling_params=greedy) == inputs * 2
    steady = {"sampling_params": greedy, "reload_inputs": False}
    assert refreshed(golden_calls, **steady) == []
    assert refreshed(golden_calls, **steady, reload_page_table=True) == [table] * 2
    assert refreshed(golden_calls, **steady, reload_sampling_params=True) == settings * 2
    # Draws need their seeds, which the host has without knowing the tokens.
    steady["sampling_params"] = drawing
    golden_calls.decode(**steady, reload_sampling_params=True)
    assert refreshed(golden_calls, **steady) == [positions] * 2
    # A lane without live rows is left alone.
    half = {"positions": [5] * 4 + [-1] * 4, "sampling_params": drawing}
    assert refreshed(golden_calls, **half) == [*inputs, positions]
    assert refreshed(golden_calls, **steady) == [positions]


def test_a_steady_step_stops_at_the_full_length(golden_calls):
    golden_calls.decode(
        [MAX_SEQ_LEN - 2] + [3] * 7, sampling_params=params(8), reload_sampling_params=True
    )
    golden_calls.decode(**STEADY)
    with pytest.raises(ValueError, match="300 does not fit in 300"):
        golden_calls.decode(**STEADY)
    golden_calls.decode(sampling_params=params(8))


def test_logits_in_between_end_a_steady_run(golden_calls):
    golden_calls.decode(sampling_params=params(8), reload_sampling_params=True)
    golden_calls.decode()
    with pytest.raises(ValueError, match="drew no tokens"):
        golden_calls.decode(**STEADY)


def test_a_prefill_in_between_does_not_disturb_a_steady_run(golden_calls):
    step = {"sampling_params": params(8, **DRAW)}
    golden_calls.decode([150] * 8, **step, reload_sampling_params=True)
    wanted = golden_calls.decode(**step, reload_inputs=False)
    golden_calls.decode([150] * 8, **step)
    others = {"page_table": torch.full((2, 2), 50), "ends": [90, 90]}
    drawing = params(2, temperature=1.9, top_k=32, seed=9)
    golden_calls.prefill([2, 6], **others, sampling_params=drawing)
    assert torch.equal(golden_calls.decode(**step, reload_inputs=False), wanted)


def test_all_lanes_have_work_before_any_is_read(golden_calls, monkeypatch):
    happened = []
    note_runs(monkeypatch, golden_calls.generator, happened)
    monkeypatch.setattr(
        lane_batch,
        "ttnn",
        SimpleNamespace(event_synchronize=lambda event: happened.append("wait")),
    )
    golden_calls.prefill([0, 1, 4, 2, 5])
    assert happened == [0, 1, 0, 1, 0, "wait", "wait"]
    happened.clear()
    golden_calls.decode()
    assert happened == [0, 1, "wait", "wait"]


# ---- draws


def test_logits_of_some_rows_come_beside_the_tokens_of_the_others(golden_calls):
    positions = [9] * 6 + [-1] * 2
    plain = golden_calls.decode(positions)
    settings = params(8, **DRAW)
    step = {"sampling_params": settings, "reload_sampling_params": True}
    wanted = golden_calls.decode(positions, **step)
    for rows in ([4, 1], [5], [0, 1, 2, 3, 4, 5]):
        tokens, logits = golden_calls.decode(positions, **step, logits_rows=rows)
        assert torch.equal(tokens, wanted)
        assert torch.equal(logits, plain[rows, 0])
    # Without a reload the device continues from its own tokens.
    after = golden_calls.decode(positions, sampling_params=settings, reload_inputs=False)
    golden_calls.decode(positions, **step)
    again = golden_calls.decode(positions, sampling_params=settings, reload_inputs=False)
    assert torch.equal(after, again)


def test_only_lanes_of_which_logits_are_wanted_are_read(golden_calls):
    step = {"sampling_params": params(8), "reload_sampling_params": True}
    output = golden_calls.decode(**step, logits_rows=[5], read_from_device=False)
    assert [rows is not None for rows in output.logits] == [False, True]
    host, events = golden_calls.generator.read_decode_output(output)
    assert len(events) == 2
    tokens, logits = golden_calls.generator.process_decode_output_host(host, is_tokens=True)
    assert (tokens.shape, logits.shape) == ((8, 1), (1, golden_calls.config.vocab_size))


def test_a_draw_depends_on_seed_and_position_alone(golden_calls):
    # The same prompt in every slot; row n has seed n, or the other way about.
    table = golden_calls.table(1).repeat(8, 1)
    same = {"tokens": (torch.arange(800, dtype=torch.int32) % 97)[:100].repeat(8, 1)}
    hot = {"temperature": 1.8, "top_k": 32}
    slots = list(range(8))

    def drawn(seeds, **changes):
        settings = params(8, **hot, seed=list(seeds))
        return golden_calls.prefill(
            slots, ends=[100] * 8, page_table=table, **same, sampling_params=settings, **changes
        )[:, 0].tolist()

    wanted = drawn(range(8))
    assert len(set(wanted)) > 3
    assert drawn(range(7, -1, -1)) == wanted[::-1]
    # Decoding the last token of the prompt draws what prefill drew.
    decode = {
        "tokens": same["tokens"][:, 99:],
        "page_table": table,
        "reload_sampling_params": True,
    }
    settings = params(8, **hot, seed=list(range(8)))
    tokens = golden_calls.decode([99] * 8, **decode, sampling_params=settings)[:, 0].tolist()
    agreeing = sum(a == b for a, b in zip(tokens, wanted, strict=True))
    assert agreeing >= 6, "prefill and decode round differently, but not by that much"


def test_settings_move_with_their_slots(golden_calls):
    settings = params(8, temperature=1.8, top_k=32, seed=list(range(8)))
    table = golden_calls.table(1).repeat(8, 1)
    same = {"tokens": torch.full((8, 1), 7), "page_table": table, "sampling_params": settings}
    wanted = golden_calls.decode([9] * 8, **same, reload_sampling_params=True)[:, 0]
    remap = torch.tensor([5, 0, 1, 2, 7, 3, 4, 6], dtype=torch.int32)
    moved = golden_calls.decode([9] * 8, **same, slot_remap=remap)[:, 0]
    assert wanted.unique().numel() > 3
    assert torch.equal(moved, wanted[remap.long()])
    # It is applied once.
    assert torch.equal(golden_calls.decode([9] * 8, **same)[:, 0], moved)

"""Every trace format is read as published; malformed files say where and what."""

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lab.workloads.errors import WorkloadError
from cluster.lab.workloads.load import load_workload
from cluster.lab.workloads.mooncake import find_ticks, spread_over_ticks
from cluster.lab.workloads.request import TraceRequest
from cluster.lab.workloads.rows import random_generator

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(tmp_path, text, name="trace.jsonl"):
    path = tmp_path / name
    path.write_text(text)
    return path


def mooncake(timestamp, num_prompt=600, num_output=5, hash_ids=(0, 1), **more):
    row = {
        "timestamp": timestamp,
        "input_length": num_prompt,
        "output_length": num_output,
        "hash_ids": list(hash_ids),
        **more,
    }
    return json.dumps(row) + "\n"


def test_mooncake(tmp_path):
    text = mooncake(1, 600, 20, [3, 4], session_id="a") + "\n" + mooncake(26.5, 512, 64, [3])
    loaded = load_workload(write(tmp_path, text, "ci.jsonl"))
    assert loaded.name == "ci"
    assert loaded.block_tokens == 512
    assert loaded.requests == (
        TraceRequest(0.001, 600, 20, (3, 4)),
        TraceRequest(0.0265, 512, 64, (3,)),
    )


def test_azure(tmp_path):
    text = (
        AZURE_HEADER + "2023-11-16 23:59:59.6805900,374,44\r\n"
        "2023-11-17 00:00:00.6805901,396,109\n"
        "2024-05-10 00:00:00.009930+00:00,7,0"
    )
    loaded = load_workload(write(tmp_path, text, "azure.csv"))
    assert loaded.requests[:2] == (TraceRequest(0.0, 374, 44), TraceRequest(1.0000001, 396, 109))
    assert loaded.requests[2] == TraceRequest(15120000.32934, 7, 1), "no output asks for one token"


def test_azure_times_do_not_depend_on_the_local_time_zone(tmp_path, monkeypatch):
    text = AZURE_HEADER + "2024-03-10 01:59:59,1,1\n2024-03-10 03:00:00,1,1\n"
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        loaded = load_workload(write(tmp_path, text))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert loaded.requests[1].arrival_s == 3601.0


def test_azure_columns_are_found_by_name(tmp_path):
    text = "GeneratedTokens,Extra,TIMESTAMP,ContextTokens\n44,x,2023-11-16 18:15:46,374\n"
    assert load_workload(write(tmp_path, text)).requests == (TraceRequest(0.0, 374, 44),)


def test_aibrix(tmp_path):
    text = (
        '{"timestamp": 21, "requests": [{"Prompt Length": 9, "Output Length": 2, "Prompt": "x"}, '
        '{"Prompt Length": 7, "Output Length": 0}]}\n{"timestamp": 30, "requests": []}\n'
    )
    assert load_workload(write(tmp_path, text)).requests == (
        TraceRequest(0.021, 9, 2),
        TraceRequest(0.021, 7, 1),
    )


def test_llmservingsim(tmp_path):
    text = '{"input_toks": 2358, "output_toks": 531, "arrival_time_ns": 46926808}\n'
    assert load_workload(write(tmp_path, text)).requests == (TraceRequest(0.046926808, 2358, 531),)


def test_unsorted_arrivals_are_sorted_and_ties_keep_their_order(tmp_path):
    text = "".join(mooncake(t, 100 + i, hash_ids=()) for i, t in enumerate([30, 10, 20, 10]))
    loaded = load_workload(write(tmp_path, text))
    assert [r.num_prompt_tokens for r in loaded.requests] == [101, 103, 102, 100]


@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=60).filter(lambda t: len(set(t)) < len(t)),
    st.sampled_from([1000, 3000, 3050]),
    st.integers(0, 5),
    st.data(),
)
def test_ticks_are_spread_within_themselves_and_in_order(ordinals, tick_ms, seed, data):
    # Neighbours, so that the tick can be told from its multiples.
    ordinals = sorted([0, 0, 1, *ordinals])
    jitter = data.draw(st.lists(st.integers(-2, 2), min_size=41, max_size=41))
    timestamps = np.array([k * tick_ms + (jitter[k] if k > 0 else 0) for k in ordinals], float)
    found = find_ticks(timestamps)
    assert found is not None
    assert abs(found[1] - tick_ms) <= 4
    spread = spread_over_ticks(timestamps, random_generator(seed))
    assert (np.diff(spread) >= 0).all()
    assert ((spread - timestamps) > -10).all()
    assert ((spread - timestamps) < tick_ms + 10).all()
    assert (spread != timestamps).any()
    assert np.array_equal(spread, spread_over_ticks(timestamps, random_generator(seed)))


def test_spread_is_uniform():
    timestamps = np.repeat(np.arange(100) * 3000.0, 100)
    offsets = spread_over_ticks(timestamps, random_generator(1)) - timestamps
    counts, _ = np.histogram(offsets, bins=10, range=(0, 3000))
    assert counts.min() > 850
    assert counts.max() < 1150


@pytest.mark.parametrize(
    "timestamps",
    [[0, 0, 0], [0, 3000, 6000], [0, 0, 500, 1000], [0, 0, 3000, 7000], [0, 0, 3000, 6100], [5]],
    ids=["one tick", "nobody shares", "short", "no common tick", "far off", "one request"],
)
def test_arrivals_that_were_not_rounded_stay(timestamps):
    timestamps = np.array(timestamps, float)
    assert np.array_equal(spread_over_ticks(timestamps, random_generator(0)), timestamps)


def test_a_limit_does_not_change_how_ticks_are_spread(tmp_path):
    path = write(
        tmp_path, "".join(mooncake(3000 * (i // 4), 100 + i, hash_ids=()) for i in range(40))
    )
    whole = load_workload(path, seed=3)
    assert load_workload(path, seed=3, limit=7).requests == whole.requests[:7]
    assert load_workload(path, seed=4).requests != whole.requests


GOOD_AZURE = "2023-11-16 18:15:46.6805900,374,44\n"


@pytest.mark.parametrize(
    ("text", "line", "field", "message"),
    [
        ("", None, None, "empty"),
        (" \n\n", None, None, "empty"),
        ('{"foo": 1}\n', None, None, "choose one of mooncake"),
        ("hello\n", None, None, "choose one of mooncake"),
        (mooncake(0) + mooncake(-1), 2, "timestamp", ">= 0"),
        (mooncake(0, 0), 1, "input_length", ">= 1"),
        (mooncake(0) + "\n" + mooncake(0, -5), 3, "input_length", ">= 1"),
        (mooncake(0, 600.5), 1, "input_length", "int"),
        (mooncake(0, num_output=-1), 1, "output_length", ">= 0"),
        (mooncake(0, hash_ids=[0, -1]), 1, "hash_ids[1]", ">= 0"),
        (mooncake(0, 512, hash_ids=[0, 1]), 1, "hash_ids", "512 tokens"),
        (mooncake(0) + mooncake(float("nan")), 2, None, "malformed"),
        (mooncake(0) + '{"timestamp": 1, "input_le', 2, None, "truncated"),
        (mooncake(0) + "[]\n", 2, None, "object"),
        (mooncake(0) + '{"timestamp": 5, "input_length": 5}', 2, None, "`output_length`"),
        ('{"timestamp": 5, "requests": [{"Prompt Length": 5}]}', 1, "requests[0]", "Output Length"),
        ('{"timestamp": 5, "requests": []}', None, None, "no requests"),
        (
            '{"input_toks": 1, "output_toks": 1, "arrival_time_ns": "x"}',
            1,
            "arrival_time_ns",
            "str",
        ),
        (AZURE_HEADER, None, None, "no requests"),
        (AZURE_HEADER + GOOD_AZURE + "2023-11-16 18:15:46,nan,4\n", 3, "ContextTokens", "int"),
        (AZURE_HEADER + "2023-11-16 18:15:46,-3,4\n", 2, "ContextTokens", ">= 1"),
        (AZURE_HEADER + "2023-11-16 18:15:46,3\n", 2, None, "GeneratedTokens"),
        (AZURE_HEADER + "2023-13-16 18:15:46,3,4\n", 2, "TIMESTAMP", "2023-13-16"),
        (AZURE_HEADER + "yesterday,3,4\n", 2, "TIMESTAMP", "yesterday"),
    ],
)
def test_malformed_file_says_where_and_what(tmp_path, text, line, field, message):
    path = write(tmp_path, text)
    with pytest.raises(WorkloadError) as caught:
        load_workload(path)
    assert message in str(caught.value)
    assert (caught.value.path, caught.value.line, caught.value.field) == (str(path), line, field)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("form", ["mooncake", "aibrix", "llmservingsim"])
def test_empty_file_of_a_named_format_is_refused(tmp_path, form):
    with pytest.raises(WorkloadError, match="no requests"):
        load_workload(write(tmp_path, ""), format=form)


def test_azure_without_its_header_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match="must name this column; it has nothing"):
        load_workload(write(tmp_path, ""), format="azure")
    with pytest.raises(WorkloadError, match="field TIMESTAMP"):
        load_workload(write(tmp_path, GOOD_AZURE), format="azure")


def test_what_is_not_a_text_file_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match="cannot be read: No such file"):
        load_workload(tmp_path / "absent.jsonl")
    (tmp_path / "packed.jsonl").write_bytes(b"\x1f\x8b\x08\x00\xff")
    with pytest.raises(WorkloadError, match="unpack it"):
        load_workload(tmp_path / "packed.jsonl")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed"),
        ({"limit": 0}, "limit"),
        ({"format": "burstgpt"}, "no format 'burstgpt'"),
    ],
)
def test_arguments_that_no_file_could_satisfy_are_refused(tmp_path, arguments, message):
    with pytest.raises(WorkloadError, match=message):
        load_workload(write(tmp_path, mooncake(0)), **arguments)

"""Prefill on one kind of mesh, decode on another: the tokens of one engine that does both."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest

import replicas.platforms.platform
from kv_transfer.layout import KVLayout
from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, make_config, num_prefix_hits
from tests.models import model_folder
from tests.replicas.engine.fakes import KEYS
from tests.replicas.engine.pair import Pair

PROMPTS = [[150 - i, *((11 * j + 5 * i + i * j) % 149 for j in range(9 * i))] for i in range(12)]
"""Lengths from 1 to 100, no two beginning alike: what lands in a wrong slot shows."""

SAMPLING = [
    SamplingParams(max_tokens=6, temperature=t, top_k=40, seed=i, ignore_eos=True)
    for i, t in enumerate([0.0, 0.9] * 6)
]


def config(case="llama-gqa", *, num_shards=None, **changes):
    """An engine whose heads are on so many devices; of the CPU's plain memory without a number."""
    connector = "p2p"
    if num_shards is not None:
        connector = f"tests.kv_transfer.sharded_connector:{num_shards}"
    return make_config(
        changes.pop("folder", model_folder(case)),
        **{
            "max_batch_size": 32,
            "num_blocks": 80,
            "kv_connector": connector,
            "keys": KEYS,
            **changes,
        },
    )


@cache
def aggregated(case="llama-gqa", dtype="float32"):
    """Tokens of one engine without transfers."""
    with engine_core(config(case, kv_connector=None, dtype=dtype)) as core:
        return generate(core, PROMPTS, SAMPLING)


@pytest.fixture
def make_pair():
    """Makes pairs of cores and closes them."""
    pairs = []

    def make(prefill, decode):
        pairs.append(Pair(prefill, decode))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def received(pair):
    """Transfers that the decode core got, by path."""
    paths = pair.decode.core.metrics(0.0).transfer.paths
    return {path: counters.num_received for path, counters in paths.items()}


def assert_all_moved(pair, path=None):
    """Every prompt came from the producer, none was computed twice."""
    assert pair.failures == {}
    assert sum(received(pair).values()) == len(PROMPTS)
    assert path is None or received(pair) == {path: len(PROMPTS)}


ONE, SHARDED2, SHARDED3 = "ShardedConnector", "Sharded2", "Sharded3"
SHARDED4, SHARDED8 = "Sharded4", "Sharded8"


@pytest.mark.parametrize(
    ("case", "prefill", "decode"),
    [
        # (devices, block size, lanes)
        ("llama-gqa", (ONE, 64, 1), (SHARDED2, 32, 4)),
        ("llama-gqa", (SHARDED8, 32, 2), (SHARDED3, 128, 1)),
        ("llama-gqa", (SHARDED3, 96, 4), (SHARDED2, 64, 2)),
        ("llama-mha", (SHARDED3, 32, 1), (SHARDED4, 96, 2)),
        ("llama-mha", (SHARDED2, 128, 2), (SHARDED3, 64, 4)),
        ("llama-mha", (SHARDED4, 64, 4), (ONE, 64, 1)),
        ("llama-tied", (SHARDED2, 96, 2), (SHARDED8, 32, 4)),
        # One end in plain memory, which the other may or may not be able to map.
        ("llama-gqa", (None, 32, 2), (SHARDED2, 64, 1)),
        ("llama-gqa", (SHARDED4, 64, 1), (None, 32, 4)),
        ("llama-gqa", (None, 128, 4), (None, 32, 2)),
        # One plane of latents.
        ("deepseek-v2", (None, 96, 2), (None, 64, 1)),
        ("deepseek-v3", (ONE, 64, 1), (None, 32, 2)),
        # Experts, and windows in every other layer.
        ("qwen2-moe", (None, 64, 2), (None, 32, 1)),
        # A connector of another package moves one KV group, the built-in one as many as there are.
        ("gpt-oss", (ONE, 96, 1), (SHARDED2, 32, 2)),
        ("gpt-oss", (None, 96, 1), (None, 32, 2)),
    ],
)
def test_tokens_do_not_depend_on_how_the_two_ends_lay_out_their_kv(
    make_pair, case, prefill, decode
):
    ends = [
        config(case, num_shards=num_shards, block_size=block_size, tt_data_parallel=lanes)
        for num_shards, block_size, lanes in (prefill, decode)
    ]
    pair = make_pair(*ends)
    assert pair.generate(PROMPTS, SAMPLING) == aggregated(case)
    assert_all_moved(pair, "inline" if prefill[0] else None)


# --- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [("float32", "float64"), ("float64", "float32")])
def test_converted_kv_gives_the_same_tokens_where_nearly_nothing_is_lost(make_pair, source, target):
    pair = make_pair(
        config(num_shards=SHARDED2, dtype=source, block_size=64),
        config(num_shards=SHARDED3, dtype=target, kv_accept_dtypes=(source,)),
    )
    assert pair.generate(PROMPTS, SAMPLING) == aggregated()
    assert_all_moved(pair, "inline")


@pytest.mark.parametrize("num_shards", [None, SHARDED2])
@pytest.mark.parametrize(("source", "target"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_dtype_that_is_accepted_is_converted(make_pair, source, target, num_shards):
    pair = make_pair(
        config(num_shards=num_shards, dtype=source, block_size=64),
        config(num_shards=num_shards, dtype=target, kv_accept_dtypes=(source,)),
    )
    outputs = pair.generate(PROMPTS, SAMPLING)
    assert_all_moved(pair)
    assert [len(tokens) for tokens in outputs] == [params.max_tokens for params in SAMPLING]
    # Rounding shows in few tokens; bytes taken for another dtype would in nearly all.
    wanted = aggregated(dtype=target)
    num_equal = sum(
        a == b for x, y in zip(outputs, wanted, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert num_equal > 0.5 * sum(map(len, wanted))


@pytest.mark.parametrize("num_shards", [None, SHARDED2])
@pytest.mark.parametrize(("source", "target"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_nobody_else_is_answered_from_converted_kv(make_pair, source, target, num_shards):
    pair = make_pair(
        config(num_shards=num_shards, dtype=source, block_size=64),
        config(num_shards=num_shards, dtype=target, kv_accept_dtypes=(source,)),
    )
    pair.generate(PROMPTS, SAMPLING)
    assert_all_moved(pair)
    core = pair.decode.core
    assert num_prefix_hits(core) == 0
    # Computed by this engine, as if nothing had ever been converted.
    assert generate(core, PROMPTS, SAMPLING) == aggregated(dtype=target)
    assert num_prefix_hits(core) == 0
    # A prompt computed by this engine may be found.
    generate(core, PROMPTS, SAMPLING)
    assert num_prefix_hits(core) > 0


def test_kv_of_the_same_dtype_is_found_by_others(make_pair):
    pair = make_pair(config(block_size=64), config(kv_accept_dtypes=("bfloat16",)))
    pair.generate(PROMPTS, SAMPLING)
    assert generate(pair.decode.core, PROMPTS, SAMPLING) == aggregated()
    assert num_prefix_hits(pair.decode.core) > 0


# --- refusals ------------------------------------------------------------------------------------


def generate_refused(pair, chosen):
    """Tokens of the chosen prompts, whose KV the decode core does not take."""
    ids = [f"r{i}" for i in chosen]
    for request_id, i in zip(ids, chosen, strict=True):
        pair.start(request_id, PROMPTS[i], SAMPLING[i])
    pair.run_until(lambda: pair.finished.keys() >= set(ids), "all requests finished")
    for request_id in ids:
        pair.abort(request_id)
    pair.run_until(pair.is_idle, "everything given back")
    assert pair.failures == dict.fromkeys(ids, "layout")
    assert not received(pair)
    num_computed = pair.decode.core.metrics(0.0).kv_recompute_tokens
    assert num_computed == sum(len(PROMPTS[i]) for i in chosen)
    return [pair.outputs[request_id] for request_id in ids]


def test_another_rope_order_is_refused_and_computed_again(make_pair, monkeypatch):
    ropes = iter(["meta", "hf"])

    def layout(**fields):
        return KVLayout(**{**fields, "rope": next(ropes)})

    monkeypatch.setattr(replicas.platforms.platform, "KVLayout", layout)
    pair = make_pair(config(num_shards=SHARDED2), config(num_shards=SHARDED2))
    assert [pair.prefill.core.kv_layouts[0].rope, pair.decode.core.kv_layouts[0].rope] == [
        "meta",
        "hf",
    ]
    assert generate_refused(pair, range(len(PROMPTS))) == aggregated()


def test_another_model_is_refused_and_computed_again(make_pair, tmp_path):
    # The same weights under another configuration file: the tokens cannot tell, the KV could not.
    folder = Path(shutil.copytree(model_folder("llama-gqa"), tmp_path / "model"))
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    pair = make_pair(config(folder=str(folder)), config())
    assert generate_refused(pair, range(len(PROMPTS))) == aggregated()


@pytest.mark.parametrize("accept_dtypes", [(), ("float16",)])
def test_a_dtype_that_is_not_accepted_is_refused_and_computed_again(make_pair, accept_dtypes):
    wanted = aggregated(dtype="bfloat16")
    # The first token comes from both ends and must be the same one.
    chosen = [i for i, tokens in enumerate(wanted) if tokens[0] == aggregated()[i][0]]
    assert len(chosen) > len(PROMPTS) // 2
    pair = make_pair(config(), config(dtype="bfloat16", kv_accept_dtypes=accept_dtypes))
    assert generate_refused(pair, chosen) == [wanted[i] for i in chosen]

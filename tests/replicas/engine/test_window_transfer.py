"""KV of layers with a window goes between engines: the same tokens, by the last window's blocks.

Real cores on a small Mistral whose window is longer than two rows and no multiple of one.
"""

from __future__ import annotations

import json
import shutil

import msgspec
import pytest

from replicas.messages import Abort, LendKV, LoadKV
from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, make_config
from tests.models import model_folder
from tests.replicas.engine import test_core_lending, test_pooled_core
from tests.replicas.engine.fakes import KEYS
from tests.replicas.engine.pair import Pair
from tests.replicas.engine.test_pooled_core import SHELVES, UNIT, Alone, Shelf

WINDOW, NUM_NEW = 70, 40
PROMPTS = [[(11 * i + 5 * j + i * j) % 157 for j in range(5 + 61 * i)] for i in range(4)]
LONG = [(7 * i * i + 3 * i) % 151 for i in range(200)]
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, seed=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a model with a window."""
    path = tmp_path_factory.mktemp("models") / "mistral-wide"
    shutil.copytree(model_folder("mistral-window"), path)
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, "sliding_window": WINDOW}))
    return str(path)


@pytest.fixture
def config(folder):
    def make(**changes):
        fields = {"max_model_len": 256, "num_blocks": 60, "kv_connector": "p2p", "keys": KEYS}
        return make_config(folder, **{**fields, **changes})

    return make


@pytest.fixture(scope="module")
def local(folder):
    """Tokens of one core without a connector."""
    with engine_core(make_config(folder, max_model_len=256)) as core:
        yield lambda *prompts, sampling=GREEDY: generate(core, prompts, sampling)


@pytest.fixture
def closing():
    made = []
    yield lambda pair: made.append(pair) or pair
    for pair in made:
        pair.close()


def row_bytes(node):
    [kv_group] = node.core.facts.kv_groups
    assert kv_group.spec.window == WINDOW
    return kv_group.bytes_per_block * 32 // node.core.config.block_size


def received(node):
    return sum(p.bytes_received for p in node.core.metrics(0.0).transfer.paths.values())


def num_freed(node):
    return sum(group.window_blocks_freed for group in node.core.metrics(0.0).groups)


def num_rows(first, num_tokens):
    """Rows that go for a prompt of which the tokens before `first` are there."""
    return -(-num_tokens // 32) - max(first, num_tokens - WINDOW, 0) // 32


SHAPES = {
    "memory of the other": ({}, {}),
    "sockets": ({"role": "prefill"}, {"role": "decode"}),
    "larger to smaller blocks, lanes": ({"block_size": 64}, {"tt_data_parallel": 2}),
    "smaller to larger blocks, chunks": (
        {"max_num_batched_tokens": 40}, {"block_size": 96, "mixed_batches": False}
    ),
    "nothing is cached": ({"enable_prefix_caching": False}, {"enable_prefix_caching": False}),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_only_the_last_window_of_a_prompt_goes_and_tokens_are_the_same(
    closing, config, local, shape
):
    prefill, decode = shape
    pair = closing(Pair(config(**prefill), config(**decode)))
    prompts = [*PROMPTS, LONG, LONG[:160]]
    assert pair.generate(prompts, [GREEDY] * len(prompts)) == local(*prompts)
    assert pair.failures == {}
    # With larger blocks no prompt here is long enough.
    for node in (pair.prefill, pair.decode):
        assert node.core.config.block_size > 32 or num_freed(node) > 0
    most = sum(num_rows(0, len(prompt)) for prompt in prompts) * row_bytes(pair.decode)
    assert 0 < received(pair.decode) <= most
    assert most < sum(-(-len(prompt) // 32) for prompt in prompts) * row_bytes(pair.decode)


def test_a_loaded_window_serves_only_prefixes_that_it_covers(closing, config, local):
    """The decode engine has rows from 128 on: no shorter prefix may be hit there."""
    pair = closing(Pair(config(), config()))
    prompts = [LONG, LONG[:150], [*LONG[:192], 5, 6, 7], [*LONG[:195], 9]]
    for i, prompt in enumerate(prompts):
        pair.start(f"r{i}", prompt, GREEDY)
        pair.run_until(lambda name=f"r{i}": name in pair.finished, "finished")
        assert [pair.outputs[f"r{i}"]] == local(prompt)
    assert pair.failures == {}


def test_a_prompt_whose_transfer_ends_early_is_computed(closing, config, local):
    """Of a window a part is worth nothing: the decode engine computes the whole prompt."""
    pair = closing(Pair(config(max_num_batched_tokens=32), config()))
    pair.activate_on_first_token, pair.prefill.is_slow = False, True
    pair.start("r", LONG, GREEDY)

    def have_rows_come():
        # One chunk at a time.
        pair.prefill.handle(Abort([]))
        return any(t.done_rows for t in pair.decode.core.kv_transfers(0.0).transfers)

    pair.run_until(have_rows_come, "rows have come")
    pair.prefill.vanish()
    pair.activate("r", local(LONG)[0][:1])
    pair.outputs["r"] = local(LONG)[0][:1]
    pair.run_until(lambda: "r" in pair.finished, "finished")
    assert [pair.outputs["r"]] == local(LONG)
    assert "r" in pair.failures


@pytest.mark.parametrize("shape", [({}, {}), ({}, {"role": "decode"})], ids=["memory", "sockets"])
def test_a_stream_takes_its_window_along(closing, monkeypatch, config, local, shape):
    """The first core decodes on meanwhile, and leaves behind its window what is being sent."""
    monkeypatch.setattr(test_core_lending, "config", config)
    pair = closing(test_core_lending.HandOver(*shape))
    prompts = [LONG, PROMPTS[2], LONG[:100]]
    for i, prompt in enumerate(prompts):
        pair.begin(f"r{i}", prompt, GREEDY, 6 + i)
    for i in range(len(prompts)):
        pair.lend(f"r{i}")
        pair.until_loaded(f"r{i}")
    assert set(pair.loaded.values()) == {None}
    most = sum(num_rows(0, (len(p) + 8) // 32 * 32) for p in prompts) * row_bytes(pair.heir)
    assert 0 < received(pair.heir) <= most
    for i in range(len(prompts)):
        pair.go_on(f"r{i}")
    assert pair.end() == local(*prompts)
    assert num_freed(pair.lender) > 0


def test_what_is_lent_stays_until_it_was_read(closing, monkeypatch, config, local):
    """The other core fetches only after the first one's window has moved on by three blocks."""
    monkeypatch.setattr(test_core_lending, "config", config)
    pair = closing(test_core_lending.HandOver({}, {}))
    prompt, sampling = LONG[:120], msgspec.structs.replace(GREEDY, max_tokens=130)
    pair.begin("r", prompt, sampling, 3)
    ticket = pair.stream_ticket("r")
    pair.lender.handle(LendKV("r", ticket, 1))
    pair.heir.is_frozen = True

    def has_moved_on():
        # One step at a time.
        pair.lender.handle(Abort([]))
        return len(pair.outputs["r"]) > 100

    pair.run_until(has_moved_on, "decoded on")
    assert num_freed(pair.lender) == 0
    pair.heir.is_frozen = False
    pair.heir.handle(LoadKV("r", ticket, 1))
    pair.until_loaded("r")
    assert pair.loaded == {"r": None}
    pair.go_on("r")
    assert pair.end() == local(prompt, sampling=sampling)


@pytest.fixture
def pooled(folder, monkeypatch):
    """Makes engines that share a pool."""
    monkeypatch.setattr(test_pooled_core, "model_folder", lambda _case: folder)
    SHELVES["windows"] = Shelf()
    made = []

    def make(**changes):
        settings = test_pooled_core.config("windows", num_blocks=60, **changes)
        made.append(Alone(settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    del SHELVES["windows"]


def first_tokens(local, prompt):
    return [output[:8] for output in local(prompt)]


@pytest.mark.parametrize("budget", [512, 32], ids=["at once", "in chunks"])
def test_a_pool_gives_the_last_window_of_a_prompt(pooled, local, budget):
    first, second = (pooled(max_num_batched_tokens=budget) for _ in range(2))
    assert first.generate([LONG]) == first_tokens(local, LONG)
    longer = [*LONG, 3, 5]
    assert second.generate([longer]) == first_tokens(local, longer)
    end = len(longer) // UNIT * UNIT
    assert received(second.node) == num_rows(0, end) * row_bytes(second.node)
    assert second.generate([LONG[:150]]) == first_tokens(local, LONG[:150])


def test_a_pool_gives_a_part_of_the_window_and_the_prefill_engine_the_rest(pooled, local):
    """The pool has 128 tokens of 200: the window of 70 begins in them."""
    pooled().generate([LONG[:130]])
    settings = test_pooled_core.config("windows", "multi", keys=KEYS, num_blocks=60)
    pair = Pair(settings, settings)
    try:
        [output] = pair.generate([LONG], [GREEDY])
        assert [output] == local(LONG)
        assert pair.failures == {}
        paths = pair.decode.core.metrics(0.0).transfer.paths
        # The window of the pool's last token begins in the second of its four rows.
        assert paths["pool"].bytes_received == num_rows(0, 128) * row_bytes(pair.decode)
        assert paths["shared"].bytes_received == 3 * row_bytes(pair.decode)
    finally:
        pair.close()


def test_units_behind_a_window_that_was_hit_are_not_saved(pooled, local):
    """Their blocks are not the sequence's: the pool must not get what is in others."""
    first = pooled()
    first.generate([LONG])
    SHELVES["windows"].values.clear()
    longer = [*LONG, *range(2, 30)]
    assert first.generate([longer]) == first_tokens(local, longer)
    assert list(first.num_cached.values()) == [192]
    # The window begins at 122: of the units before 192 one is whole.
    assert len(SHELVES["windows"].values) == 1
    short = LONG[:70]
    assert pooled().generate([short]) == first_tokens(local, short)

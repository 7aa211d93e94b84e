"""Several KV groups go between engines: the same tokens, of windows by their last blocks.

Real cores on small models of layers with a window, longer than two rows and no multiple of one,
beside layers without.
"""

from __future__ import annotations

import json
import shutil

import pytest

from replicas.messages import Abort
from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, make_config
from tests.models import model_folder
from tests.replicas.engine import test_core_lending
from tests.replicas.engine.fakes import KEYS
from tests.replicas.engine.pair import Pair

WINDOW, NUM_NEW = 70, 24
PROMPTS = [[(11 * i + 5 * j + i * j) % 157 for j in range(5 + 61 * i)] for i in range(4)]
LONG = [(7 * i * i + 3 * i) % 151 for i in range(200)]
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, seed=0, ignore_eos=True)


class World:
    """A model, the tokens of one engine without a connector, and pairs of engines."""

    def __init__(self, folder):
        self.folder = folder
        self.made = []
        with engine_core(make_config(folder, max_model_len=256)) as core:
            prompts = [*PROMPTS, LONG, LONG[:160], LONG[:100]]
            outputs = generate(core, prompts, GREEDY)
        self._known = {tuple(p): output for p, output in zip(prompts, outputs, strict=True)}

    def local(self, *prompts):
        return [self._known[tuple(prompt)] for prompt in prompts]

    def config(self, **changes):
        fields = {"max_model_len": 256, "num_blocks": 60, "kv_connector": "p2p", "keys": KEYS}
        return make_config(self.folder, **{**fields, **changes})

    def pair(self, prefill, decode):
        self.made.append(Pair(self.config(**prefill), self.config(**decode)))
        return self.made[-1]


@pytest.fixture(scope="module", params=["gemma3", "gpt-oss"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / request.param
    shutil.copytree(model_folder(request.param), path)
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, "sliding_window": WINDOW}))
    return World(str(path))


@pytest.fixture
def world(model):
    yield model
    while model.made:
        model.made.pop().close()


def received(node):
    return sum(p.bytes_received for p in node.core.metrics(0.0).transfer.paths.values())


def num_freed(node):
    return sum(group.window_blocks_freed for group in node.core.metrics(0.0).groups)


def num_bytes(node, num_tokens):
    """Bytes of a prompt: its rows without a window, and the rows of its last window."""
    full, windowed = node.core.facts.kv_groups
    assert (full.spec.window, windowed.spec.window) == (None, WINDOW)
    rows = -(-num_tokens // 32)
    last = rows - max(num_tokens - WINDOW, 0) // 32
    return 32 * sum(
        count * group.bytes_per_block // group.block_size
        for count, group in ((rows, full), (last, windowed))
    )


SHAPES = {
    "same": ({"role": "prefill"}, {"role": "decode"}),
    "larger to smaller blocks, lanes": ({"block_size": 64}, {"tt_data_parallel": 2}),
    "smaller to larger blocks, chunks": (
        {"max_num_batched_tokens": 40}, {"block_size": 96, "mixed_batches": False}
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_tokens_are_those_of_one_engine_and_windows_go_as_their_last_rows(world, shape):
    pair = world.pair(*({**side, "enable_prefix_caching": False} for side in shape))
    prompts = [*PROMPTS, LONG]
    assert pair.generate(prompts, [GREEDY] * len(prompts)) == world.local(*prompts)
    assert pair.failures == {}
    assert received(pair.decode) == sum(num_bytes(pair.decode, len(p)) for p in prompts)
    assert num_freed(pair.prefill) > 0 or pair.prefill.core.config.block_size > 32


def test_what_was_loaded_and_computed_serves_later_prefixes(world):
    pair = world.pair({}, {})
    for i, prompt in enumerate([LONG[:100], LONG, LONG[:160]]):
        pair.start(f"r{i}", prompt, GREEDY)
        pair.run_until(lambda name=f"r{i}": name in pair.finished, "finished")
        assert [pair.outputs[f"r{i}"]] == world.local(prompt)
    assert pair.failures == {}
    assert received(pair.decode) < sum(num_bytes(pair.decode, n) for n in (100, 200, 160))


def test_a_prompt_whose_transfer_ends_early_is_computed(world):
    pair = world.pair({"max_num_batched_tokens": 32}, {})
    pair.activate_on_first_token, pair.prefill.is_slow = False, True
    pair.start("r", LONG, GREEDY)

    def have_rows_come():
        # One chunk at a time.
        pair.prefill.handle(Abort([]))
        return any(t.done_rows for t in pair.decode.core.kv_transfers(0.0).transfers)

    pair.run_until(have_rows_come, "rows have come")
    pair.prefill.vanish()
    [output] = world.local(LONG)
    pair.activate("r", output[:1])
    pair.outputs["r"] = output[:1]
    pair.run_until(lambda: "r" in pair.finished, "finished")
    assert pair.outputs["r"] == output
    assert "r" in pair.failures


def test_a_stream_takes_its_groups_along(world, monkeypatch):
    """The first core continues to decode, so that its windows move past rows being sent."""
    monkeypatch.setattr(test_core_lending, "config", world.config)
    pair = test_core_lending.HandOver({}, {})
    world.made.append(pair)
    prompts = [LONG, PROMPTS[2], LONG[:100]]
    for i, prompt in enumerate(prompts):
        pair.begin(f"r{i}", prompt, GREEDY, 6 + i)
    for i in range(len(prompts)):
        pair.lend(f"r{i}")
        pair.until_loaded(f"r{i}")
    assert set(pair.loaded.values()) == {None}
    assert (
        0
        < received(pair.heir)
        <= sum(num_bytes(pair.heir, (len(p) + 9) // 32 * 32) for p in prompts)
    )
    for i in range(len(prompts)):
        pair.go_on(f"r{i}")
    assert pair.end() == world.local(*prompts)

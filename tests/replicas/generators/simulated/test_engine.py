"""Whole engines on a simulated mesh give the expected tokens for every split and placement.

A token depends on every KV row of its context, so that these tests fail for any mistake in paging,
prefix caching, preemption, lanes or transfer. `tests/replicas/simulation/test_virtual_worker.py`
runs such engines in all shapes, beside the simulator's.
"""

import pytest

from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.engine.input_batch import PersistentBatch
from replicas.errors import ConfigError
from replicas.messages import Abort, AddRequest, EngineRequest, TokenOutput
from replicas.platforms import simulated
from replicas.sampling_params import SamplingParams
from tests.engines import (
    engine_core,
    generate,
    take_events,
)
from tests.replicas.engine.fakes import KEYS
from tests.replicas.engine.pair import Pair
from tests.replicas.generators.simulated.clocks import FakeClock, NullClock
from tests.replicas.generators.simulated.engines import (
    FOUR_CHIPS,
    N150,
    NUM_NEW,
    PROMPTS,
    right_tokens,
    simulated_config,
)

SAMPLING = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, seed=0, ignore_eos=True)
MISS, FOUR_LANES = {"enable_prefix_caching": False}, {"tt_data_parallel": 4}
CHUNKED = {"max_num_batched_tokens": 16}
WHOLE = {"enable_chunked_prefill": False, "max_num_batched_tokens": 256}


@pytest.fixture(autouse=True)
def _no_time(monkeypatch):
    monkeypatch.setattr(simulated, "WallClock", NullClock)


class BusyHost(FakeClock):
    """A clock on which each reading costs a tenth of a millisecond."""

    def now_s(self) -> float:
        self.time_s += 1e-4
        return self.time_s


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_the_device_does_not_wait_for_the_host_where_two_steps_are_in_flight(
    steps_in_flight, monkeypatch
):
    monkeypatch.setattr(simulated, "WallClock", BusyHost)
    config = simulated_config(steps_in_flight=steps_in_flight)
    executor = UniProcExecutor(config)
    core, timeline = EngineCore(config, executor), executor._worker._platform.device.timeline
    sampling = SamplingParams(max_tokens=60, temperature=0.0, seed=0, ignore_eos=True)
    for i in range(8):
        core.handle(b"c", AddRequest(EngineRequest(f"r{i}", [i + 1, 2, 3], sampling)), 0.0)
    for _ in range(4):
        core.step(0.0)
    free_s, busy_s = timeline.free_s, timeline.busy_s
    for _ in range(40):
        core.step(0.0)
    is_idle = timeline.free_s - free_s > timeline.busy_s - busy_s + 1e-6
    assert is_idle == (steps_in_flight == 1)
    core.shutdown()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_an_abort_or_stop_changes_no_other_requests_tokens(steps_in_flight):
    """Clients that give up in the middle of a step, stop tokens, rows of every length, seeds."""
    right = right_tokens(PROMPTS, 40)
    params = [
        SamplingParams(
            max_tokens=40 - 2 * i, temperature=1.0, top_k=3, seed=i, ignore_eos=True,
            stop_token_ids=frozenset([right[i][11]] if i % 3 == 0 else []),
        )
        for i in range(len(PROMPTS))
    ]  # fmt: skip
    with engine_core(simulated_config(steps_in_flight=steps_in_flight, **FOUR_LANES)) as core:
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, params, strict=True)):
            core.handle(b"c", AddRequest(EngineRequest(f"r{i}", prompt, sampling)), 0.0)
        found: dict[str, list[int]] = {f"r{i}": [] for i in range(len(PROMPTS))}
        for step in range(400):
            core.step(0.0)
            for output in take_events(core).get(b"c", []):
                if isinstance(output, TokenOutput):
                    found[output.request_id] += output.token_ids
            if step in (9, 12):
                core.handle(b"c", Abort([f"r{step - 8}"]), 0.0)
    for i, (tokens, wanted) in enumerate(zip(found.values(), right, strict=True)):
        length = 1 + wanted.index(wanted[11]) if i % 3 == 0 else 40 - 2 * i
        assert tokens == wanted[: len(tokens)]
        assert len(tokens) == min(length, 40 - 2 * i) or i in (1, 4)
        assert 0 < len(tokens) < 40 or i not in (1, 4)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (CHUNKED, {"tt_data_parallel": 2}),
        ({"simulated_mesh": N150}, FOUR_LANES),
    ],
    ids=["chunks to two lanes", "one board to another"],
)
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_prompt_computed_elsewhere_gives_the_same(prefill, decode, steps_in_flight):
    common = {
        "kv_connector": "p2p", "keys": KEYS, "num_blocks": 130, "max_batch_size": 16,
        "steps_in_flight": steps_in_flight,
    }  # fmt: skip
    pair = Pair(simulated_config(**common, **prefill), simulated_config(**common, **decode))
    try:
        found = pair.generate(PROMPTS, [SAMPLING] * len(PROMPTS))
        assert pair.failures == {}
    finally:
        pair.close()
    assert found == right_tokens(PROMPTS, NUM_NEW)


def test_a_stale_block_table_gives_another_token(monkeypatch):
    """All other tests assume this: the simulated model detects one wrong entry."""
    decode_inputs = PersistentBatch.decode_inputs

    def swapped(self, slots):
        inputs = decode_inputs(self, slots)
        inputs.page_tables[0, slots, 0] = 60  # a free block
        return inputs

    monkeypatch.setattr(PersistentBatch, "decode_inputs", swapped)
    prompt = list(range(200, 250))
    with engine_core(simulated_config(**WHOLE)) as core:
        (found,) = generate(core, [prompt], SAMPLING)
    (right,) = right_tokens([prompt], NUM_NEW)
    assert found[0] == right[0]
    assert found[1:] != right[1:]


def test_the_engine_takes_its_facts_from_the_profile():
    with engine_core(simulated_config(num_blocks=None, simulated_mesh=N150)) as core:
        facts = core.facts
        assert facts.max_position_embeddings == 131_072
        assert facts.vocab_size == 4096
        assert facts.kv_groups[0].num_blocks == 1 + 45_471 // 32
        assert facts.kv_groups[0].bytes_per_block == 32 * 16
        assert not facts.supports_mixed_batch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generator": "a:B"}, "generator 'a:B' and simulated_mesh exclude each other"),
        ({"mixed_batches": True}, "a mesh cannot mix"),
        ({"max_model_len": 65_536, "num_blocks": None, "simulated_mesh": N150},
         r"65536 does not fit the KV cache, which holds 45440 tokens"),
        ({"max_batch_size": 64}, "64 slots a lane, and a mesh decodes at most 32"),
        ({"max_batch_size": 24, "tt_data_parallel": 3}, "does not divide the 4 chips"),
        ({"max_model_len": 200_000}, "200000 exceeds the model's limit of 131072"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message), engine_core(simulated_config(**changes)):
        pass


def test_a_pair_of_other_models_never_shares_kv():
    other = FOUR_CHIPS.__class__(model="Mistral-7B", board="p150x4")
    common = {"kv_connector": "p2p", "keys": KEYS, "num_blocks": 130}
    configs = [simulated_config(**common), simulated_config(**common, simulated_mesh=other)]
    with engine_core(configs[0]) as core, engine_core(configs[1]) as another:
        assert core.kv_layouts[0].content_hash() != another.kv_layouts[0].content_hash()

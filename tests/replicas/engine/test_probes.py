"""A probe is a real step that leaves nothing behind, and delays no request."""

import contextlib
import time

import pytest

from replicas.launch import start_engine
from replicas.messages import Abort, AddRequest, EngineRequest, Utility, UtilityResult
from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, make_config
from tests.models import model_folder
from tests.replicas.generators.simulated.engines import simulated_config

PROMPTS = [[5, 9, 3], list(range(1, 38))]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, seed=0, ignore_eos=True)
GIVE_UP_S = 60.0


def forwards(core):
    """Every pass through the model, as it comes."""
    found = []
    execute = core._executor.collective_rpc

    def call(method, *args):
        found.extend([method] if method == "submit_step" else [])
        return execute(method, *args)

    core._executor.collective_rpc = call
    return found


def answers(core):
    return [e for e in core.take_events().get(b"c", []) if isinstance(e, UtilityResult)]


@pytest.mark.parametrize("engine", ["flat", "lanes", "simulated"])
def test_an_idle_engine_takes_one_step_for_all_who_ask_which_counts_nowhere(engine):
    if engine == "simulated":
        config = simulated_config(tt_data_parallel=2, max_batch_size=4)
    else:
        lanes = {"mixed_batches": False, "tt_data_parallel": 2} if engine == "lanes" else {}
        config = make_config(model_folder("llama-gqa"), **lanes)
    with engine_core(config) as core:
        expected = generate(core, PROMPTS, GREEDY)
        before, passes = core.metrics(0.0), forwards(core)
        core.handle(b"c", Utility(1, "probe"), 0.0)
        core.handle(b"c", Utility(2, "probe"), 0.0)
        assert not core.step(0.0)
        assert answers(core) == [UtilityResult(1, result=True), UtilityResult(2, result=True)]
        assert len(passes) == 1
        assert not core.step(0.0)
        assert len(passes) == 1
        assert core.metrics(0.0).groups == before.groups
        assert core.metrics(0.0).num_steps == before.num_steps
        core.reset_prefix_cache()
        assert generate(core, PROMPTS, GREEDY) == expected


def test_an_engine_with_requests_answers_with_its_next_step_and_takes_none_more():
    config = make_config(model_folder("llama-gqa"))
    with engine_core(config) as core:
        passes = forwards(core)
        core.handle(b"c", AddRequest(EngineRequest("r", PROMPTS[0], GREEDY)), 0.0)
        core.handle(b"c", Utility(1, "probe"), 0.0)
        core.step(0.0)
        assert answers(core) == [UtilityResult(1, result=True)]
        while core.num_live:
            core.step(0.0)
        assert len(passes) == GREEDY.max_tokens


def test_an_engine_with_reserved_places_alone_answers_without_a_step():
    config = make_config(model_folder("llama-gqa"), kv_connector="p2p")
    with engine_core(config) as core:
        passes = forwards(core)
        core.handle(b"c", AddRequest(EngineRequest("r", PROMPTS[0], GREEDY), "decode"), 0.0)
        core.step(0.0)
        passes.clear()
        core.handle(b"c", Utility(1, "probe"), 0.0)
        core.step(0.0)
        assert core.num_live == 1
        assert answers(core) == [UtilityResult(1, result=True)]
        assert not passes
        core.handle(b"c", Abort(["r"]), 0.0)
        core.step(0.0)


def test_an_engine_that_drains_and_has_nothing_left_answers_without_a_step():
    with engine_core(make_config(model_folder("llama-gqa"))) as core:
        passes = forwards(core)
        core.role_state.end()
        core.handle(b"c", Utility(1, "probe"), 0.0)
        core.step(0.0)
        assert answers(core) == [UtilityResult(1, result=True)]
        assert not passes


def test_nobody_answers_a_client_that_is_gone():
    with engine_core(make_config(model_folder("llama-gqa"))) as core:
        core.handle(b"c", Utility(1, "probe"), 0.0)
        core.client_gone(b"c")
        core.step(0.0)
        assert core.take_events() == {}


@pytest.mark.process
def test_a_device_that_hangs_is_found_out_without_a_request():
    hangs = "tests.replicas.slow_generators:Waiting"
    handle = start_engine(
        make_config(model_folder("llama-gqa"), generator=hangs, step_timeout_s=3.0)
    )
    with contextlib.ExitStack() as ends:
        ends.callback(handle.stop)
        end_s = time.monotonic() + GIVE_UP_S
        while handle.is_alive:
            assert time.monotonic() < end_s, "nobody has found out"
            handle.probe()
            time.sleep(0.2)
        assert "a step did not end" in str(handle.failure)

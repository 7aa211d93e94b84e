"""An engine core refuses what cannot run, with the numbers, and loses nothing by it."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest

from replicas import memory_profile
from replicas.config import SpeculativeConfig
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.errors import ConfigError
from replicas.generators.torch.generator import TorchGenerator
from replicas.messages import (
    NO_LOGITS,
    Abort,
    Accepted,
    Activate,
    AddRequest,
    EngineMetrics,
    EngineRequest,
    Refused,
    TokenOutput,
    Utility,
    UtilityResult,
)
from replicas.sampling_params import SamplingParams
from tests.engines import (
    CLIENT,
    GREEDY,
    engine_core,
    generate,
    make_config,
    num_prefix_hits,
    take_events,
)
from tests.models import VOCAB_SIZE, model_folder

if TYPE_CHECKING:
    import torch

    from replicas.config import EngineConfig
    from replicas.generators.protocol import ModelCapabilities
    from replicas.generators.torch.inputs import PagedBatch


def start(config: EngineConfig) -> EngineCore:
    """Start an engine core whose start must fail, so that nothing has to be shut down."""
    return EngineCore(config, UniProcExecutor(config))


class NarrowGenerator(TorchGenerator):
    """A generator that can do as little as the protocol allows."""

    model_capabilities: ClassVar[ModelCapabilities] = {
        **TorchGenerator.model_capabilities,
        "supports_prefix_caching": False,
        "supports_chunked_prefill": False,
        "supports_mixed_batch": False,
    }


NARROW = f"{__name__}:NarrowGenerator"


class BrokenGenerator(TorchGenerator):
    """A generator that computes nonsense at one position."""

    POSITION: ClassVar[int] = 40

    def _forward(self, batch: PagedBatch, *args: Any, **options: Any) -> torch.Tensor:
        logits = super()._forward(batch, *args, **options)
        logits[batch.positions[batch.logits_indices] == self.POSITION] = float("nan")
        return logits


BROKEN = f"{__name__}:BrokenGenerator"


@pytest.fixture(scope="module")
def folder():
    return model_folder("llama-gqa")


@pytest.fixture(scope="module")
def core(folder):
    with engine_core(make_config(folder, tt_data_parallel=2, num_blocks=6)) as core:
        yield core


def add(core, prompt, sampling=GREEDY, client=CLIENT, request_id="r", **message):
    request = EngineRequest(request_id, prompt, sampling)
    core.handle(client, AddRequest(request, **message), 0.0)
    return take_events(core)[client]


def run(core, num_steps=1000):
    """Every event of so many steps, or until nothing runs."""
    events = []
    while num_steps and core.step(0.0):
        num_steps -= 1
        events += take_events(core).get(CLIENT, [])
    return events


@pytest.mark.parametrize(
    ("prompt", "message", "words"),
    [
        ([], {}, ["empty"]),
        ([1] * 128, {}, ["128 tokens", "max_model_len is 128"]),
        ([1] * 1000, {}, ["1000 tokens", "max_model_len is 128"]),
        ([1, VOCAB_SIZE], {}, [f"vocabulary of {VOCAB_SIZE}"]),
        ([-1], {}, [f"vocabulary of {VOCAB_SIZE}"]),
        ([2**40], {}, [f"vocabulary of {VOCAB_SIZE}"]),
        ([1], {"dp_group": 2}, ["dp_group 2", "there are 2"]),
        ([1], {"dp_group": -2}, ["dp_group -2"]),
        ([1], {"mode": "prefill"}, ["ticket"]),
        ([1], {"ticket": b"sealed"}, ["ticket"]),
        ([1], {"mode": "prefill", "ticket": b"sealed"}, ["kv_connector"]),
        ([1], {"sampling": SamplingParams(max_tokens=0)}, ["max_tokens", "0"]),
        ([1], {"sampling": SamplingParams(temperature=float("nan"))}, ["temperature", "nan"]),
        ([1], {"sampling": SamplingParams(top_p=0.0)}, ["top_p", "0.0"]),
        ([1], {"sampling": SamplingParams(seed=2**63)}, ["seed", str(2**63)]),
    ],
)
def test_request_that_can_never_run_is_refused_with_the_reason(core, prompt, message, words):
    [refused] = add(core, prompt, **message)
    assert isinstance(refused, Refused)
    assert refused.reason == "invalid"
    for word in words:
        assert word in refused.message
    assert core.num_live == 0


def test_longest_prompt_leaves_room_for_one_token(core):
    [accepted] = add(core, [1] * 127, msgspec.structs.replace(GREEDY, ignore_eos=True))
    assert accepted == Accepted("r", -1, -1, 0, 1)
    [output] = run(core)
    assert (output.finish_reason, len(output.token_ids)) == ("length", 1)


def test_huge_top_k_is_no_limit(core):
    params = SamplingParams(max_tokens=3, seed=3)
    wide = msgspec.structs.replace(params, top_k=2**40)
    assert generate(core, [[1, 2]], wide) == generate(core, [[1, 2]], params)


def test_live_request_id_is_refused_and_works_again_afterwards(core):
    add(core, [1, 2])
    [refused] = add(core, [3])
    assert (refused.request_id, refused.reason) == ("r", "duplicate")
    assert run(core)[-1].finish_reason == "length"
    assert isinstance(add(core, [3])[0], Accepted)
    run(core)


def test_aborted_request_frees_everything_and_says_no_more(core):
    before = core.snapshot(0).groups
    add(core, [1] * 40)
    run(core, 2)
    assert core.snapshot(0).groups != before
    core.handle(CLIENT, Abort(["r", "unknown"]), 0.0)
    assert core.snapshot(0).groups == before
    assert run(core) == []


def test_client_that_is_gone_takes_only_its_own_requests_along(core):
    add(core, [1, 2], client=b"gone", request_id="a")
    add(core, [1, 2], request_id="b")
    core.step(0.0)
    core.client_gone(b"gone")
    assert core.num_live == 1
    assert take_events(core).keys() == {CLIENT}, "its events of the step are dropped"
    assert {event.request_id for event in run(core)} == {"b"}


def test_activation_of_an_unknown_request_is_ignored(core):
    core.handle(CLIENT, Activate("nobody", [[1]]), 0.0)
    assert run(core) == []


def test_metrics_count_requests_and_tokens(folder):
    with engine_core(make_config(folder)) as core:
        generate(core, [[1, 2, 3], [4, 5]], msgspec.structs.replace(GREEDY, max_tokens=5))
        add(core, [6])
        core.handle(CLIENT, Abort(["r"]), 0.0)
        core.handle(CLIENT, Utility(7, "metrics"), 0.0)
        [answer] = take_events(core)[CLIENT]
        metrics = msgspec.convert(msgspec.to_builtins(answer.result), EngineMetrics)
        [group] = metrics.groups
        assert answer.call_id == 7
        assert (group.prompt_tokens, group.generation_tokens) == (5, 10)
        assert group.requests_finished == {"length": 2, "abort": 1}
        assert metrics.num_steps == 5
        assert metrics.scheduled_tokens == 5 + 2 * 4
        parts = msgspec.structs.asdict(metrics.host_seconds)
        assert metrics.device_seconds > 0
        # Without frames and transfers.
        assert {part for part, seconds in parts.items() if seconds > 0} == {
            "schedule", "prepare", "sample", "update",
        }  # fmt: skip


def test_forgotten_prefixes_are_computed_again(folder):
    with engine_core(make_config(folder)) as core:
        prompt = list(range(1, 70))
        outputs = []
        for _ in range(2):
            add(core, prompt)
            outputs.append(run(core)[0].num_cached_tokens)
        core.handle(CLIENT, Utility(1, "reset_prefix_cache"), 0.0)
        assert take_events(core)[CLIENT] == [UtilityResult(1, True)]
        add(core, prompt)
        outputs.append(run(core)[0].num_cached_tokens)
        assert outputs == [0, 64, 0]


def test_unknown_utility_is_answered_with_an_error(core):
    core.handle(CLIENT, Utility(3, "__init__"), 0.0)
    [answer] = take_events(core)[CLIENT]
    assert (answer.call_id, answer.result) == (3, None)
    assert "__init__" in answer.error


def test_draining_core_refuses_new_requests_and_finishes_old_ones(folder):
    with engine_core(make_config(folder)) as core:
        add(core, [1, 2], request_id="old")
        core.role_state.end()
        [refused] = add(core, [3], request_id="new")
        assert (refused.reason, core.snapshot(0).draining) == ("draining", True)
        tokens = [t for e in run(core) if isinstance(e, TokenOutput) for t in e.token_ids]
        assert len(tokens) == GREEDY.max_tokens


def test_a_core_changes_its_role_once_nothing_is_left_and_refuses_whoever_believes_in_the_old_one(
    folder,
):
    with engine_core(make_config(folder, role="decode")) as core:
        add(core, [1, 2], request_id="old")
        core.role_state.change("prefill")
        [refused] = add(core, [3], request_id="new")
        assert refused.reason == "draining"
        core.step(0.0)
        snapshot = core.snapshot(0)
        assert (snapshot.role, snapshot.epoch, snapshot.draining) == ("decode", 0, True)
        assert run(core)[-1].finish_reason == "length", "what runs ends"
        snapshot = core.snapshot(0)
        assert (snapshot.role, snapshot.epoch, snapshot.draining) == ("prefill", 1, False)
        for mode in ("local", "decode"):
            [refused] = add(core, [3], request_id=mode, mode=mode)
            assert (refused.reason, core.num_live) == ("draining", 0)


def test_full_queue_refuses(folder):
    with engine_core(make_config(folder, max_batch_size=2, max_num_waiting=1)) as core:
        answers = [add(core, [1], request_id=f"r{i}")[0] for i in range(4)]
        assert [type(answer) for answer in answers] == [Accepted] * 3 + [Refused]
        assert answers[-1].reason == "queue_full"
        run(core)


def test_eos_of_the_model_ends_generation_unless_ignored(folder):
    free = msgspec.structs.replace(GREEDY, ignore_eos=True)
    with engine_core(make_config(folder)) as core:
        [tokens] = generate(core, [[5, 9, 3]], free)
        rules = core._scheduler._end_rules
        core._scheduler._end_rules = rules._replace(eos_token_ids=frozenset({tokens[4]}))
        cut = tokens.index(tokens[4]) + 1
        assert generate(core, [[5, 9, 3]], GREEDY) == [tokens[:cut]]
        assert generate(core, [[5, 9, 3]], free) == [tokens]


# --- configurations ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_model_len": 300}, ["300", "256 positions"]),
        ({"num_blocks": 4}, ["128", "96 tokens", "kv_cache_memory_bytes"]),
        ({"num_blocks": None, "kv_cache_memory_bytes": 1000}, ["1000", "bytes"]),
        ({"max_batch_size": 6, "tt_data_parallel": 4}, ["6", "4"]),
        ({"max_num_batched_tokens": 4}, ["4", "8"]),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100}, ["100", "128"]),
        ({"num_blocks": 1}, ["num_blocks", "1"]),
        ({"gpu_memory_utilization": 0.5}, ["gpu_memory_utilization 0.5", "num_blocks"]),
        (
            {"gpu_memory_utilization": 0.5, "num_blocks": None, "kv_cache_memory_bytes": 2**20},
            ["gpu_memory_utilization 0.5", "kv_cache_memory_bytes"],
        ),
        ({"gpu_memory_utilization": 1.5, "num_blocks": None}, ["gpu_memory_utilization", "1.5"]),
        ({"gpu_memory_utilization": 1e-5, "num_blocks": None}, ["no memory for KV", "raise it"]),
        ({"block_size": 0}, ["block_size", "0"]),
        ({"generator": NARROW, "enable_prefix_caching": True}, ["enable_prefix_caching"]),
        ({"generator": NARROW, "enable_chunked_prefill": True}, ["enable_chunked_prefill"]),
        ({"generator": NARROW, "mixed_batches": True}, ["mixed_batches"]),
        (
            {
                "generator": NARROW,
                "speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=2),
            },
            ["speculative_config", "forward_mixed"],
        ),
    ],
)
def test_configuration_that_cannot_work_is_refused_with_its_numbers(folder, changes, words):
    with pytest.raises(ConfigError) as caught:
        start(make_config(folder, **changes))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "max_model_len", "expected"),
    [
        ({}, 1024, 2048),
        ({}, 4096, 4096),
        ({"enable_chunked_prefill": False}, 4096, 4096),
        ({"enable_chunked_prefill": True}, 4096, 2048),
        ({"max_num_batched_tokens": 300}, 4096, 300),
        ({"max_batch_size": 4000}, 1024, 4000),
        ({"block_size": 4096, "enable_chunked_prefill": True}, 4096, 4096),
    ],
)
def test_a_step_has_room_for_a_whole_prompt_only_if_it_cannot_be_computed_in_chunks(
    changes, max_model_len, expected
):
    config = make_config("none", **changes)
    config.validate()
    assert config.token_budget(max_model_len) == expected


def test_the_longest_prompt_runs_in_one_step_of_a_generator_without_chunks(folder, tmp_path):
    settings = json.loads((Path(folder) / "config.json").read_text())
    settings["max_position_embeddings"] = 4096
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = make_config(
        str(tmp_path), generator=NARROW, load_format="random", max_model_len=4096, num_blocks=130
    )
    with engine_core(config) as core:
        [tokens] = generate(core, [[7] * 4000], msgspec.structs.replace(GREEDY, max_tokens=1))
        assert len(tokens) == 1
        assert core.metrics(0.0).num_steps == 1


def test_kv_takes_the_rest_of_a_share_of_memory(folder, monkeypatch, caplog):
    caplog.set_level("INFO")
    gc.collect()  # Other tests' memory would otherwise be freed meanwhile.
    total = memory_profile.resident_bytes() + 256 * memory_profile.MIB
    monkeypatch.setattr(memory_profile, "total_bytes", lambda: total)
    config = make_config(folder, num_blocks=None, gpu_memory_utilization=1.0)
    with engine_core(config) as core:
        [group] = core.facts.kv_groups
        kv_bytes = group.num_blocks * group.bytes_per_block
        assert 0 < kv_bytes < 320 * memory_profile.MIB
        assert len(generate(core, [[5, 9, 3]])[0]) == 12
    table = {line[2:22].strip(): line[22:].strip() for line in caplog.text.splitlines()}
    assert table["blocks"] == f"{group.num_usable_blocks:,}"
    assert table["peak of loading"].endswith("MiB")
    assert table["peak activation"].endswith("MiB")


def test_missing_model_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        start(make_config(str(tmp_path / "nowhere")))


def test_what_a_generator_cannot_do_is_left_out(folder):
    prompts = [[1] * 40, [2, 3], [1] * 40]
    with engine_core(make_config(folder)) as core:
        wanted = generate(core, prompts)
    with engine_core(make_config(folder, generator=NARROW)) as core:
        assert not core.config.enable_prefix_caching
        assert not core.config.enable_chunked_prefill
        assert not core.config.mixed_batches
        assert generate(core, prompts) == wanted


@pytest.mark.parametrize("length", [41, 36], ids=["prompt", "decode"])
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    ],
    ids=str,
)
def test_a_request_without_a_distribution_ends_alone(folder, length, how):
    sampling = SamplingParams(max_tokens=12, seed=3, ignore_eos=True, **how)
    prompts = [[5, 6, 7], list(range(10, 10 + length)), [8, 9] * 5]
    with engine_core(make_config(folder)) as core:
        wanted = generate(core, prompts, sampling)
    with engine_core(make_config(folder, generator=BROKEN)) as core:
        for _ in range(2):  # the second run does not find the blocks of the first
            for i, prompt in enumerate(prompts):
                core.handle(CLIENT, AddRequest(EngineRequest(f"r{i}", prompt, sampling)), 0.0)
            outputs = {f"r{i}": [] for i in range(len(prompts))}
            errors = {}
            while core.num_live:
                core.step(0.0)
                core.check_invariants()
                for event in take_events(core).get(CLIENT, []):
                    if isinstance(event, TokenOutput):
                        assert event.index == len(outputs[event.request_id])
                        outputs[event.request_id] += event.token_ids
                        if event.finish_reason == "error":
                            errors[event.request_id] = event.error
            assert errors == {"r1": NO_LOGITS}
            assert outputs == {
                "r0": wanted[0], "r1": wanted[1][: 41 - length], "r2": wanted[2]
            }  # fmt: skip
        assert num_prefix_hits(core) == 0

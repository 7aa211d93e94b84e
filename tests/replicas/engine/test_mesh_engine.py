"""An engine on a mesh, with a double of the device: life cycle, facts, reloads and refusals."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from replicas.config import EngineConfig, MeshConfig
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.errors import ConfigError, DeviceError, UnknownGeneratorError
from replicas.launch import child_environment
from replicas.mesh_environment import make_folders
from replicas.messages import AddRequest, EngineRequest, TokenOutput, Utility, UtilityResult
from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, num_preemptions, take_events
from tests.models import model_folder
from tests.replicas.engine.mesh_doubles import MeshGenerator, install

PROMPTS = [[7, 8, 9] * 5, [11, 3] * 40, [5] * 33, [2, 4, 6, 8], [1, 2, 3] * 25, [9, 9, 1]]
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder():
    return model_folder("qwen3")


def config(folder: str, *, mesh: dict[str, object] | None = None, **changes: object):
    settings: dict[str, object] = {
        "model": folder, "max_batch_size": 4, "max_model_len": 128, "block_size": 32,
        "num_blocks": 17, "num_threads": 1, "max_num_batched_tokens": 64,
        "mesh": MeshConfig(**{"name": "N150", **(mesh or {})}),
    }  # fmt: skip
    return EngineConfig(**{**settings, **changes})


@pytest.fixture(scope="module")
def expected(folder):
    """The CPU's tokens."""
    cpu = msgspec.structs.replace(config(folder), mesh=None, dtype="float32")
    with engine_core(cpu) as core:
        return generate(core, PROMPTS, GREEDY, stagger=3)


MODES = [
    {},
    {"sample_on_device": "none"},
    {"sample_on_device": "decode_only"},
    {"sample_on_device": "all"},
    {"sample_on_device": "all", "trace": "none"},
]


def can(**changes):
    """A generator class with other capabilities."""
    capabilities = {**MeshGenerator.model_capabilities, **changes}
    return type("Other", (MeshGenerator,), {"model_capabilities": capabilities})


DrawsAlike = can(device_draws_keep_no_state=True)
"""A generator whose draws do not depend on earlier ones, so that rows may leave."""

IN_FLIGHT = pytest.mark.parametrize(
    ("generator", "steps_in_flight"),
    [(MeshGenerator, 1), (MeshGenerator, 2), (DrawsAlike, 2)],
    ids=["one step", "two steps", "two steps, rows leave"],
)


@IN_FLIGHT
@pytest.mark.parametrize("mesh", MODES, ids=str)
def test_a_device_that_reloads_only_what_it_is_told_generates_the_same(
    monkeypatch, folder, expected, mesh, generator, steps_in_flight
):
    install(monkeypatch, generator)
    with engine_core(config(folder, mesh=mesh, steps_in_flight=steps_in_flight)) as core:
        assert generate(core, PROMPTS, GREEDY, stagger=3) == expected
        loads = core._executor._worker._generator.loads
    runs_ahead = "none" not in (mesh.get("sample_on_device"), mesh.get("trace"))
    assert ((False, False) in loads) == ((False, True) in loads) == runs_ahead


@IN_FLIGHT
def test_what_a_probe_leaves_on_the_device_is_loaded_anew(
    monkeypatch, folder, expected, generator, steps_in_flight
):
    install(monkeypatch, generator)
    idle = config(folder, mesh={"sample_on_device": "all"}, steps_in_flight=steps_in_flight)
    with engine_core(idle) as core:
        for _ in range(2):
            core.handle(b"c", Utility(1, "probe"), 0.0)
            core.step(0.0)
            assert core.take_events() == {b"c": [UtilityResult(1, result=True)]}
            assert generate(core, PROMPTS, GREEDY, stagger=3) == expected
            core.reset_prefix_cache()


@IN_FLIGHT
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [({}, {"num_blocks": 8}), ({"name": "N300"}, {"tt_data_parallel": 2})],
    ids=["preempted rows", "rows of two lanes"],
)
def test_rows_are_loaded_anew_where_they_run(
    monkeypatch, folder, expected, generator, steps_in_flight, mesh, changes
):
    install(monkeypatch, generator)
    changed = config(
        folder, mesh={"sample_on_device": "all", **mesh}, steps_in_flight=steps_in_flight, **changes
    )
    with engine_core(changed) as core:
        assert generate(core, PROMPTS, GREEDY, stagger=3) == expected
        assert (num_preemptions(core) > 0) == ("num_blocks" in changes)


def test_a_request_that_the_device_cannot_draw_for_changes_nobody_elses_tokens(
    monkeypatch, folder, expected
):
    install(monkeypatch)
    hot = SamplingParams(max_tokens=9, temperature=1.0, seed=5, ignore_eos=True)
    sampling = [hot if i == 1 else GREEDY for i in range(len(PROMPTS))]
    with engine_core(config(folder, mesh={"sample_on_device": "all"})) as core:
        found = generate(core, PROMPTS, sampling, stagger=3)
    assert [o for i, o in enumerate(found) if i != 1] == [
        o for i, o in enumerate(expected) if i != 1
    ]
    with engine_core(config(folder, mesh={"sample_on_device": "none"})) as core:
        assert generate(core, [PROMPTS[1]], [hot]) == [found[1]]


PENALISED = SamplingParams(
    max_tokens=40, temperature=0.0, ignore_eos=True,
    presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.3,
)  # fmt: skip


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("by_device", "changes"),
    [(False, {}), (True, {}), (True, {"num_blocks": 8})],
    ids=["the host", "the device", "the device, preempted rows"],
)
def test_penalties_are_the_same_whoever_applies_them(
    monkeypatch, folder, steps_in_flight, by_device, changes
):
    sampling = [PENALISED if i % 2 else GREEDY for i in range(len(PROMPTS))]
    cpu = msgspec.structs.replace(config(folder), mesh=None, dtype="float32")
    with engine_core(cpu) as core:
        expected = generate(core, PROMPTS, sampling, stagger=3)
    install(monkeypatch, can(supports_device_penalties=by_device))
    settings = config(
        folder, mesh={"sample_on_device": "all"}, steps_in_flight=steps_in_flight, **changes
    )
    with engine_core(settings) as core:
        assert generate(core, PROMPTS, sampling, stagger=3) == expected
        loads = core._executor._worker._generator.loads
        loads.clear()
        generate(core, PROMPTS[:2], PENALISED)
    assert ((False, False) in loads) == by_device, "a device that applies them runs ahead"


def logprobs_of(core, prompts, sampling):
    """Return the log probabilities of each prompt's tokens, by position."""
    for i, prompt in enumerate(prompts):
        core.handle(b"c", AddRequest(EngineRequest(f"r{i}", list(prompt), sampling[i])), 0.0)
    found, num_open = {}, len(prompts)
    while num_open:
        core.step(0.0)
        for output in take_events(core).get(b"c", []):
            if isinstance(output, TokenOutput):
                found.setdefault(output.request_id, []).extend(output.logprobs or [])
                num_open -= output.finish_reason is not None
    return found


@pytest.mark.parametrize("most", [None, 2, 8])
def test_log_probabilities_are_the_same_whoever_reads_them(monkeypatch, folder, most):
    asked = [{"logprobs": 3}, {}, {"logprobs": 0}, {"logprobs": 3, "presence_penalty": 0.5}]
    sampling = [
        SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, **fields)
        for fields in asked
    ]
    cpu = msgspec.structs.replace(config(folder), mesh=None, dtype="float32")
    with engine_core(cpu) as core:
        expected = logprobs_of(core, PROMPTS[:4], sampling)
    install(monkeypatch, can(max_device_logprobs=most))
    with engine_core(config(folder, mesh={"sample_on_device": "all"})) as core:
        found = logprobs_of(core, PROMPTS[:4], sampling)
    assert found.keys() == expected.keys()
    for request_id, positions in found.items():
        for position, wanted in zip(positions, expected[request_id], strict=True):
            assert [(e.token_id, e.rank) for e in position] == [
                (e.token_id, e.rank) for e in wanted
            ]
            assert [e.logprob for e in position] == pytest.approx(
                [e.logprob for e in wanted], abs=1e-5
            )


GivesBoth = can(
    device_draws_keep_no_state=True, gives_logits_beside_tokens=True, max_device_logprobs=None
)
"""A generator that returns the logits of some rows beside the tokens of the others."""


@pytest.mark.parametrize("generator", [MeshGenerator, GivesBoth], ids=["two calls", "one call"])
def test_a_row_of_the_host_does_not_stop_the_others_from_running_ahead(
    monkeypatch, folder, generator
):
    install(monkeypatch, generator)
    biased = SamplingParams(max_tokens=40, temperature=0.0, logit_bias={3: 4.0}, ignore_eos=True)
    sampling = [biased, GREEDY, GREEDY, GREEDY]
    found, continued = {}, {}
    for steps in (1, 2):
        settings = config(folder, mesh={"sample_on_device": "all"}, steps_in_flight=steps)
        with engine_core(settings) as core:
            loads = core._executor._worker._generator.loads
            loads.clear()
            found[steps] = generate(core, PROMPTS[:4], sampling)
            continued[steps] = sum(not inputs for inputs, _ in loads)
            alone = [
                generate(core, [prompt], one)[0]
                for prompt, one in zip(PROMPTS[:4], sampling, strict=True)
            ]
        assert found[steps] == alone
    # All have 39 tokens left: the device continues in every second step until the others end.
    assert continued[1] <= 1 < 19 <= continued[2]


def test_a_device_goes_on_without_rows_that_leave(monkeypatch, folder):
    """Rows that end one by one: the tokens of each alone; inputs are loaded until all decode."""
    install(monkeypatch, DrawsAlike)
    lengths = [30, 12, 21, 26]
    sampling = [
        SamplingParams(max_tokens=n, temperature=0.0, seed=0, ignore_eos=True) for n in lengths
    ]
    with engine_core(config(folder, mesh={"sample_on_device": "all"})) as core:
        loads = core._executor._worker._generator.loads
        loads.clear()
        found = generate(core, PROMPTS[:4], sampling)
        inputs = [inputs for inputs, _ in loads]
        assert True not in inputs[inputs.index(False) :]
        alone = [
            generate(core, [prompt], one)[0]
            for prompt, one in zip(PROMPTS[:4], sampling, strict=True)
        ]
    assert found == alone
    assert [len(tokens) for tokens in found] == lengths


def test_the_mesh_is_opened_as_asked_and_closed_after_the_generator(monkeypatch, folder):
    doubles = install(monkeypatch)
    executor = UniProcExecutor(config(folder, weights_seed=3, load_format="random"))
    core = EngineCore(executor._worker._config, executor)
    [mesh] = doubles.meshes
    assert mesh.settings.name == "N150"
    assert mesh.arguments["load_format"] == "random"
    assert mesh.arguments["seed"] == 3
    assert mesh.arguments["fabric_config"] == {"config": "FABRIC_2D"}
    generator = executor._worker._generator
    core.shutdown()
    assert generator.log == [
        "prefill False", "decode False", "prefill True", "decode True", "close"
    ]  # fmt: skip
    core.shutdown()
    assert mesh.closed == 1


def test_facts_of_a_mesh(monkeypatch, folder):
    install(monkeypatch)
    with engine_core(config(folder)) as core:
        facts = core.facts
    assert facts.chunk_alignment == 32
    assert not facts.supports_mixed_batch
    assert facts.supports_chunked_prefill
    assert facts.kv_groups[0].bytes_per_block == 2 * 3 * 2 * 32 * 32 * 1088 // 1024


class Failing(MeshGenerator):
    where: ClassVar[str]

    def __getattribute__(self, name):
        if name == type(self).where:
            raise DeviceError(f"{name} failed")
        return super().__getattribute__(name)

    @classmethod
    def initialize_vllm_model(cls, *args, **kwargs):
        if cls.where == "initialize_vllm_model":
            raise DeviceError("initialize_vllm_model failed")
        return super().initialize_vllm_model(*args, **kwargs)


@pytest.mark.parametrize(
    "where",
    [
        "initialize_vllm_model", "allocate_kv_cache", "warmup_model_prefill",
        "warmup_model_decode", "close",
    ],
)  # fmt: skip
def test_whatever_fails_at_start_the_mesh_is_closed(monkeypatch, folder, where):
    doubles = install(monkeypatch, type("Failing", (Failing,), {"where": where}))
    # The last one starts, and fails while it is closed.
    with pytest.raises(DeviceError, match=f"{where} failed"):  # noqa: PT012
        core = EngineCore(config(folder), UniProcExecutor(config(folder)))
        core.shutdown()
    [mesh] = doubles.meshes
    assert mesh.closed == 1


class FailingTwice(Failing):
    where = "warmup_model_decode"

    def close(self):
        raise DeviceError("close failed")


def test_why_an_engine_did_not_start_is_what_is_said(monkeypatch, folder):
    doubles = install(monkeypatch, FailingTwice)
    with pytest.raises(DeviceError, match="warmup_model_decode failed"):
        EngineCore(config(folder), UniProcExecutor(config(folder)))
    assert [mesh.closed for mesh in doubles.meshes] == [1]


def test_a_cache_too_small_for_a_sequence_is_refused_before_the_mesh_is_opened(monkeypatch, folder):
    doubles = install(monkeypatch)
    small = config(folder, num_blocks=4)
    with pytest.raises(ConfigError, match=r"max_model_len 128 .* 96 tokens per lane"):
        EngineCore(small, UniProcExecutor(small))
    assert doubles.meshes == []


class Small(MeshGenerator):
    """A class written for the plug-in, which declares its limits."""

    budget: ClassVar[dict[str, object]] = {}

    @classmethod
    def get_max_tokens_all_users(cls, **kwargs):
        cls.budget.update(kwargs)
        return 100


def test_a_class_that_says_too_small_a_budget_is_refused_with_both_numbers(monkeypatch, folder):
    doubles = install(monkeypatch, Small)
    foreign = config(
        folder, num_blocks=None, generator="a.b:C", max_model_len=256,
        mesh={"name": "N300"}, tt_data_parallel=2,
    )  # fmt: skip
    # ceil((100 + 32 * 2) / 32) blocks, one of them the null block.
    with pytest.raises(ConfigError, match=r"max_model_len 256 .* holds 160 tokens .*5 blocks"):
        EngineCore(foreign, UniProcExecutor(foreign))
    assert Small.budget == {
        "model_name": folder, "num_devices": 2, "tt_data_parallel": 2, "max_model_len": 256,
        "max_num_seqs": 2,
    }  # fmt: skip
    assert [mesh.closed for mesh in doubles.meshes] == [1]


def test_a_class_that_says_nothing_gets_the_plugins_budget(monkeypatch, folder):
    install(monkeypatch)
    foreign = config(folder, num_blocks=None, generator="a.b:C", block_size=64)
    with engine_core(foreign) as core:
        assert core.facts.kv_groups[0].num_blocks == (131_072 + 64 * 4) // 64


def test_a_required_block_size_of_none_is_none_at_all(monkeypatch, folder, expected):
    install(monkeypatch, can(required_block_size=None))
    with engine_core(config(folder)) as core:
        assert generate(core, PROMPTS, GREEDY, stagger=3) == expected


class Narrowed(MeshGenerator):
    """A model of its class that can less."""

    loses: ClassVar[str]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_capabilities = {**self.model_capabilities, self.loses: False}


@pytest.mark.parametrize(
    ("loses", "what"),
    [
        ("supports_sample_on_device", "on the device; set it to none"),
        ("supports_sample_in_prefill", "in prefill; set it to decode_only"),
    ],
)
def test_what_a_loaded_model_cannot_do_is_refused_though_its_class_can(
    monkeypatch, folder, loses, what
):
    doubles = install(monkeypatch, type("Narrowed", (Narrowed,), {"loses": loses}))
    drawing = config(folder, mesh={"sample_on_device": "all"})
    with pytest.raises(ConfigError, match=f"'all', but generator Narrowed does not sample {what}"):
        EngineCore(drawing, UniProcExecutor(drawing))
    assert [mesh.closed for mesh in doubles.meshes] == [1]


def test_a_loaded_model_that_cannot_run_ahead_reads_at_once(monkeypatch, folder):
    install(monkeypatch, type("Narrowed", (Narrowed,), {"loses": "supports_async_decode"}))
    with engine_core(config(folder)) as core:
        assert not core._executor._worker._runner._reads_later


@pytest.mark.parametrize(
    ("changes", "mesh", "message"),
    [
        ({"supports_sample_on_device": False}, {"sample_on_device": "decode_only"},
         "'decode_only', but generator Other does not sample on the device"),
        ({"supports_sample_in_prefill": False}, {"sample_on_device": "all"},
         "'all', but generator Other does not sample in prefill; set it to decode_only"),
        ({"required_block_size": 64}, {}, "block_size is 32, but generator Other needs 64"),
        ({"supports_chunked_prefill": False}, {},
         "max_num_batched_tokens 64 is less than max_model_len 128 and chunked"),
    ],
)  # fmt: skip
def test_what_a_generator_cannot_do_is_refused_before_the_mesh_is_opened(
    monkeypatch, folder, changes, mesh, message
):
    doubles = install(monkeypatch, can(**changes))
    wrong = config(folder, mesh=mesh)
    with pytest.raises(ConfigError, match=message):
        EngineCore(wrong, UniProcExecutor(wrong))
    assert doubles.meshes == []


class Converting(MeshGenerator):
    """A class that caches converted weights as tt-metal's do, and trusts any files there."""

    @classmethod
    def initialize_vllm_model(cls, hf_config, *args, **kwargs):
        model = os.environ["HF_MODEL"]
        named = os.environ.get("TT_CACHE_PATH") or os.path.join("model_cache", model)
        folder = Path(named, os.environ["MESH_DEVICE"])
        folder.mkdir(parents=True, exist_ok=True)
        converted = folder / "layers.0.wqkv"
        weights = hashlib.sha256((Path(model) / "model.safetensors").read_bytes()).hexdigest()
        if not converted.exists():
            converted.write_text(weights)
        assert converted.read_text() == weights, "converted of other weights"
        (folder / "empty_kcache_paged_attention").touch()
        return super().initialize_vllm_model(hf_config, *args, **kwargs)


def test_a_checkpoint_folder_may_be_read_only_and_gets_nothing_from_a_foreign_class(
    monkeypatch, folder, expected, tmp_path
):
    install(monkeypatch, Converting)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    files = sorted(path.name for path in model.iterdir())
    model.chmod(0o555)
    theirs = config(str(model), generator="theirs:Converting")
    for _ in range(2):
        environment = child_environment(theirs)
        make_folders(theirs, environment)
        for name in ("HF_MODEL", "MESH_DEVICE", "TT_CACHE_PATH"):
            monkeypatch.setenv(name, environment[name])
        with engine_core(theirs) as core:
            assert generate(core, PROMPTS, GREEDY, stagger=3) == expected
    assert sorted(path.name for path in model.iterdir()) == files
    kept = Path(environment["TT_CACHE_PATH"])
    assert sorted(path.name for path in kept.glob("N150/*")) == [
        "empty_kcache_paged_attention",
        "layers.0.wqkv",
    ]
    # Other weights in the same folder are not taken for those that were converted.
    model.chmod(0o755)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    monkeypatch.setenv("TT_CACHE_PATH", child_environment(theirs, {})["TT_CACHE_PATH"])
    with engine_core(theirs):
        pass


def test_a_model_that_names_no_architecture(monkeypatch, folder, expected, tmp_path):
    """The model type suffices on a mesh; on the CPU the architecture chooses the class."""
    install(monkeypatch)
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    raw = json.loads((model / "config.json").read_text())
    assert raw.pop("architectures")
    (model / "config.json").write_text(json.dumps(raw))
    with engine_core(config(str(model))) as core:
        assert generate(core, PROMPTS, GREEDY, stagger=3) == expected
    cpu = msgspec.structs.replace(config(str(model)), mesh=None)
    with pytest.raises(UnknownGeneratorError, match="no generator for ''"), engine_core(cpu):
        pass


def test_without_ttnn_the_error_says_where_there_is_one(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "ttnn", None)
    monkeypatch.delitem(sys.modules, "replicas.generators.ttnn.mesh", raising=False)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(
        DeviceError, match=rf"mesh N150 needs .* 3.10 and 3.12 .* Python {version} .*ttserve doctor"
    ):
        EngineCore(config(folder), UniProcExecutor(config(folder)))

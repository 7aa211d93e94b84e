"""The adapter's single calls: conversions of arguments and results, and refusals."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
import transformers

from replicas.errors import ConfigError, DeviceError
from replicas.generators.model_config import load_hf_config, parse_hf_config
from replicas.generators.plugin.adapter import adapt
from replicas.generators.plugin.outputs import host_output, is_on_host
from replicas.generators.plugin.sampling import to_tt_sampling_params
from replicas.generators.plugin.shim import SlidingWindowSpec
from replicas.generators.protocol import DeviceSamplingParams
from tests.engines import engine_core, make_config
from tests.replicas.generators.plugin.conformance import CONFIG
from tests.replicas.generators.plugin.doubles import (
    SAMPLING_FIELDS,
    VOCAB_SIZE,
    Mesh,
    WrappedMesh,
)
from tests.replicas.generators.plugin.test_signatures import Minimal

if TYPE_CHECKING:
    from pathlib import Path

HF_CONFIG = transformers.LlamaConfig(
    **{key: value for key, value in CONFIG.items() if key != "model_type"}
)


class Plain(Minimal):
    """A class that records its calls and gives scripted answers."""

    answer: ClassVar[Any] = torch.zeros(8, 1, VOCAB_SIZE)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]

    @classmethod
    def initialize_vllm_model(
        cls, hf_config: Any, mesh_device: Any, max_batch_size: Any, **kwargs: Any
    ) -> Plain:
        made = cls()
        made.calls = [("initialize", (hf_config, mesh_device, max_batch_size), kwargs)]
        return made

    def allocate_kv_cache(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(("allocate", args, kwargs))
        return None

    def warmup_model_prefill(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("warm up prefill", args, kwargs))

    def prefill_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(("prefill", args, kwargs))
        return self.answer

    def decode_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(("decode", args, kwargs))
        return self.answer


def make(
    cls: type = Plain, num_slots: int = 2, *, hf_config: Any = HF_CONFIG, chips: int = 1, **kw: Any
) -> Any:
    mesh = WrappedMesh(Mesh(chips))
    return adapt(cls).initialize_vllm_model(hf_config, mesh, num_slots, max_seq_len=64, **kw)


def last_call(generator: Any) -> dict[str, Any]:
    return generator._model.calls[-1][2]


def prefill(generator: Any, num_rows: int = 2, **changes: Any) -> Any:
    settings = {
        "tokens": torch.ones((num_rows, 3), dtype=torch.int32),
        "page_table": torch.ones((num_rows, 2), dtype=torch.int32),
        "kv_cache": None,
        "enable_trace": True,
        "prompt_lens": torch.full((num_rows,), 3),
        "start_pos": torch.zeros(num_rows, dtype=torch.int32),
        "empty_slots": list(range(num_rows)),
    }
    return generator.prefill_forward(**{**settings, **changes})


def decode(generator: Any, num_rows: int = 2, **changes: Any) -> Any:
    settings = {
        "tokens": torch.ones((num_rows, 1), dtype=torch.int32),
        "page_table": torch.ones((num_rows, 2), dtype=torch.int32),
        "kv_cache": None,
        "start_pos": torch.full((num_rows,), 3, dtype=torch.int32),
        "enable_trace": True,
    }
    return generator.decode_forward(**{**settings, **changes})


def params(num_rows: int) -> DeviceSamplingParams:
    """Return settings of a seeded and a greedy request, by turns."""
    drawn = (0.7, 20, 0.9, 0.0, 0.0, 1.0, 100, -2, False)
    greedy = (0.0, 1, 1.0, 0.0, 0.0, 1.0, -1, -2, False)
    rows = [(drawn, greedy)[row % 2] for row in range(num_rows)]
    columns = map(list, zip(*rows, strict=True))
    return DeviceSamplingParams(**dict(zip(SAMPLING_FIELDS, columns, strict=True)))


# --- set up ---------------------------------------------------------------------------------------


def test_initialize(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It gives the bare mesh and transformers' configuration, and logs switched-off features."""
    with caplog.at_level(logging.INFO):
        generator = make(hf_config=load_hf_config(folder), optimizations="performance")
    _, (config, mesh, max_batch_size), settings = generator._model.calls[0]
    assert isinstance(config, transformers.LlamaConfig)
    assert config._name_or_path == str(folder)
    assert isinstance(mesh, Mesh)
    assert max_batch_size == 2
    assert settings == {"max_seq_len": 64, "tt_data_parallel": 1, "optimizations": None}
    assert [record.getMessage().split(": ")[-1] for record in caplog.records] == [
        "the class does not declare it"
    ] * 2
    _, _, settings = make(optimizations="accuracy")._model.calls[0]
    assert settings["optimizations"] == "accuracy"


def test_class_refuses(folder: Path) -> None:
    class Refusing(Plain):
        @classmethod
        def initialize_vllm_model(cls, *args: Any, **kwargs: Any) -> Plain:
            raise ValueError("no more than 32768 on N150")

        @classmethod
        def get_max_tokens_all_users(cls, model_name: str, max_num_seqs: int) -> int:
            assert max_num_seqs <= 32, "at most 32 users"
            return 1234

    with pytest.raises(ConfigError, match=r"max_seq_len 64.*: no more than 32768 on N150"):
        make(Refusing)
    sizes = {"model_name": "m", "num_devices": 8, "tt_data_parallel": 2, "max_model_len": 64}
    adapted: Any = adapt(Refusing)
    assert adapted.get_max_tokens_all_users(**sizes, max_num_seqs=32) == 1234
    with pytest.raises(ConfigError, match="at most 32 users"):
        adapted.get_max_tokens_all_users(**sizes, max_num_seqs=33)
    (folder / "config.json").write_text('{"model_type": "nobody"}')
    ours = parse_hf_config(CONFIG, str(folder))
    with pytest.raises(ConfigError, match="transformers cannot read the configuration"):
        make(hf_config=ours)


@pytest.mark.parametrize(
    ("chips", "lanes", "heads"), [(1, 1, 8), (2, 1, 4), (8, 2, 2), (8, 1, 1), (32, 1, 1)]
)
def test_heads_of_one_chip(chips: int, lanes: int, heads: int) -> None:
    generator = make(num_slots=8, chips=chips, tt_data_parallel=lanes)
    generator.allocate_kv_cache((9, 8, 64, 128), torch.bfloat16, 4)
    assert generator._model.calls[-1][1] == ((9, heads, 64, 128), torch.bfloat16, 4)
    assert generator.kv_dtype == "bfloat8_b"
    assert generator.kv_rope == "meta"


def test_lanes_that_do_not_divide_the_chips() -> None:
    with pytest.raises(ConfigError, match="tt_data_parallel 4 does not divide the 2 chips"):
        make(num_slots=8, chips=2, tt_data_parallel=4)


def test_dtype_of_the_cache() -> None:
    """The class decides it, and the planes show it."""

    class Own(Plain):
        def allocate_kv_cache(self, *args: Any, **kwargs: Any) -> Any:
            return [[[torch.zeros(1, dtype=torch.bfloat16)] * 2]]

    generator = make(Own)
    generator.allocate_kv_cache((9, 2, 32, 16), torch.bfloat16, 1)
    assert generator.kv_dtype == "bfloat16"


def test_required_block_size() -> None:
    cls = type("Blocks", (Plain,), {"model_capabilities": {"required_block_size": 64}})
    generator = make(cls)
    with pytest.raises(ConfigError, match="needs block_size 64, but block_size is 32"):
        generator.allocate_kv_cache((9, 2, 32, 16), torch.bfloat16, 3)
    generator.allocate_kv_cache((9, 2, 64, 16), torch.bfloat16, 3)


class Narrowed(Plain):
    """A class whose models lose capabilities while they load."""

    model_capabilities: ClassVar[dict[str, Any]] = {
        "supports_prefix_caching": True,
        "supports_chunked_prefill": True,
        "supports_sample_on_device": True,
        "max_device_top_k": 32,
        "max_device_logprobs": 20,
        "fabric_config": {"config": "FABRIC_1D"},
    }
    of_instance: ClassVar[Any]

    def __init__(self) -> None:
        self.model_capabilities = self.of_instance


def narrowed(of_instance: Any) -> Any:
    return make(type("Narrowed", (Narrowed,), {"of_instance": of_instance}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"supports_sample_on_device": False}, {"supports_sample_on_device": False}),
        ({"max_device_top_k": 8}, {"max_device_top_k": 8}),
        ({"required_block_size": 64}, {"required_block_size": 64}),
        # Neither more than the class says, nor what its methods cannot do.
        ({"max_device_top_k": 64, "supports_device_grammar": True}, {}),
        ({"max_device_top_k": None, "supports_async_decode": True}, {}),
        ({"max_device_logprobs": None}, {"max_device_logprobs": None}),
        ({"max_device_logprobs": 2}, {"max_device_logprobs": 2}),
        # Penalties are possible unless class or model deny them.
        ({"supports_device_penalties": False}, {"supports_device_penalties": False}),
    ],
)
def test_instance_that_can_less_than_its_class(
    changes: dict[str, Any], expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    generator = narrowed({**Narrowed.model_capabilities, **changes})
    of_class = adapt(type("Narrowed", (Narrowed,), {})).model_capabilities
    found = dict(generator.model_capabilities)
    assert found == {**of_class, **expected}
    assert of_class["supports_sample_on_device"], "other models of the class are as they were"
    for key, value in expected.items():
        assert f"{key} is {value}: the loaded model declares it" in caplog.text


def test_what_an_instance_leaves_out_it_cannot() -> None:
    found = narrowed({"supports_chunked_prefill": True, "max_device_top_k": 32})
    assert found.model_capabilities["supports_chunked_prefill"]
    assert not found.model_capabilities["supports_prefix_caching"]
    assert not found.model_capabilities["supports_sample_on_device"]


def test_instance_whose_capabilities_are_broken() -> None:
    with pytest.raises(ConfigError, match="model_capabilities is a list, not a dictionary"):
        narrowed(["supports_prefix_caching"])


class Windows(Plain):
    """Every second layer attends to a window, with heads of its own."""

    @classmethod
    def get_kv_cache_spec(cls, vllm_config: Any) -> Any:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        size = {"block_size": vllm_config.cache_config.block_size, "dtype": torch.bfloat16}
        assert vllm_config.model_config.get_num_kv_heads(vllm_config.parallel_config) == 8
        full = FullAttentionSpec(num_kv_heads=1, head_size=512, **size)
        window = SlidingWindowSpec(num_kv_heads=8, head_size=256, sliding_window=32, **size)
        return {f"model.layers.{i}.self_attn": [full, window][i % 2] for i in (3, 2, 1, 0)}

    def allocate_kv_cache_per_layer(self, layers: Any) -> Any:
        self.calls.append(("allocate per layer", (layers,), {}))


def test_layers_that_differ() -> None:
    """Each layer gets its own shape, and the page table, which all layers share."""
    generator = make(Windows, chips=4)
    generator.allocate_kv_cache((9, 8, 32, 128), torch.bfloat16, 4)
    assert generator._model.calls[-1][1] == (
        [
            ((9, 1, 32, 512), torch.bfloat16, 0),
            ((9, 2, 32, 256), torch.bfloat16, 1),
            ((9, 1, 32, 512), torch.bfloat16, 2),
            ((9, 2, 32, 256), torch.bfloat16, 3),
        ],
    )
    for call in (prefill, decode):
        call(generator)
        tables = last_call(generator)["page_tables_per_layer"]
        assert len(tables) == 4
        assert all(table is last_call(generator)["page_table"] for table in tables)
    plain = make()
    prefill(plain)
    assert "page_tables_per_layer" not in last_call(plain)


def test_layers_that_differ_need_the_method() -> None:
    cls = type("NoMethod", (Windows,), {"allocate_kv_cache_per_layer": None})
    with pytest.raises(
        ConfigError, match=r"layers have different KV, .*\[\(1, 512\), \(8, 256\)\]"
    ):
        make(cls).allocate_kv_cache((9, 8, 32, 128), torch.bfloat16, 4)


def test_config_asks_for_what_the_class_lacks(folder: Path) -> None:
    """The engine refuses a class that lacks an explicitly configured feature."""
    name = "tests.replicas.generators.plugin.doubles:AdaptedSeed"
    config = make_config(str(folder), generator=name, enable_prefix_caching=True)
    reason = "enable_prefix_caching is on but the generator does not support it"
    with pytest.raises(ConfigError, match=reason), engine_core(config):
        pass


# --- warm-up --------------------------------------------------------------------------------------


def test_warm_up_with_a_list() -> None:
    """The list has each kind of sampling, and None for sampling on the host."""

    class Listed(Plain):
        def warmup_model_prefill(
            self, kv_cache: Any, enable_trace: bool, sampling_params: list[Any]
        ) -> None:
            self.calls.append(("warm up prefill", (), {"sampling_params": sampling_params}))

    generator = make(Listed)
    generator.warmup_model_prefill(kv_cache=None, enable_trace=False)
    assert last_call(generator)["sampling_params"] == [None]
    generator.warmup_model_prefill(kv_cache=None, enable_trace=True, can_sample_on_device=True)
    greedy, drawn, host = last_call(generator)["sampling_params"]
    assert greedy.temperature == [0.0, 0.0]
    assert drawn.temperature == [1.0, 1.0]
    assert drawn.top_k == [32, 32]
    assert host is None


@pytest.mark.parametrize("draws", [False, True])
def test_warm_up_announces_sampling_on_the_device(draws: bool) -> None:
    generator = make()
    generator.warmup_model_prefill(kv_cache=None, enable_trace=True, can_sample_on_device=draws)
    assert last_call(generator) == {
        "kv_cache": None, "enable_trace": True, "can_sample_on_device": draws,
    }  # fmt: skip


def test_decode_warm_up_of_a_class_that_always_draws() -> None:
    """Warm up logits and draws; results of a warm-up are discarded."""
    generator = make()
    generator._model.answer = torch.ones((2, 1), dtype=torch.int32)
    sizes = {"kv_cache": None, "enable_trace": False, "max_batch_size": 2, "num_blocks": 3}
    generator.warmup_model_decode(**sizes, can_sample_on_device=True)
    logits, draws = (arguments for _, _, arguments in generator._model.calls[1:])
    assert "sampling_params" not in logits
    assert draws["sampling_params"].temperature == [0.0, 0.0]
    assert draws["reset_batch"] is True


# --- forward --------------------------------------------------------------------------------------


def test_a_legacy_class_is_given_one_row_a_call() -> None:
    """Slots above the number of rows occur as soon as lower slots decode."""

    class Last(Plain):
        def prefill_forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(("prefill", args, kwargs))
            return kwargs["tokens"][:, -1]

    generator = make(Last, 8)
    output = prefill(
        generator,
        tokens=torch.tensor([[5, 6, 7, 0], [8, 9, 10, 11], [12, 13, 0, 0]], dtype=torch.int32),
        page_table=torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32),
        prompt_lens=torch.tensor([3, 4, 2]),
        start_pos=torch.zeros(3, dtype=torch.int32),
        empty_slots=[1, 6, 7],
        sampling_params=params(3),
    )
    assert output.tolist() == [[7], [11], [13]]
    calls = [arguments for _, _, arguments in generator._model.calls[1:]]
    assert [call["tokens"].tolist() for call in calls] == [
        [[5, 6, 7]],
        [[8, 9, 10, 11]],
        [[12, 13]],
    ]
    assert [call["page_table"].tolist() for call in calls] == [[[1, 2]], [[3, 4]], [[5, 6]]]
    assert [call["empty_slots"] for call in calls] == [[1], [6], [7]]
    assert [call["sampling_params"].temperature for call in calls] == [[0.7], [0.0], [0.7]]


def test_a_class_without_start_pos_is_given_all_rows_in_one_call() -> None:
    """Its page table has the blocks of the longest prompt."""

    class Whole(Plain):
        def prefill_forward(
            self, tokens: Any, page_table: Any, kv_cache: Any, prompt_lens: Any, empty_slots: Any
        ) -> Any:
            self.calls.append(("prefill", (), {"table": page_table, "slots": empty_slots}))
            return self.answer

    generator = make(Whole, 8)
    generator.allocate_kv_cache((9, 2, 2, 16), torch.bfloat16, 3)
    prefill(
        generator,
        tokens=torch.tensor([[5, 6, 7], [8, 0, 0]], dtype=torch.int32),
        page_table=torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0]], dtype=torch.int32),
        prompt_lens=torch.tensor([3, 1]),
        empty_slots=[6, 1],
    )
    assert last_call(generator)["table"].tolist() == [[1, 2], [3, 0]]
    assert last_call(generator)["slots"] == [6, 1]


def test_log_probabilities_of_rows_that_came_one_by_one() -> None:
    class Both(Plain):
        def prefill_forward(self, *args: Any, **kwargs: Any) -> Any:
            token = kwargs["tokens"][:, -1]
            return token, torch.tensor([-0.5]) * token

    settings = dataclasses.replace(params(2), enable_log_probs=[True, True])
    tokens = torch.tensor([[3], [4]], dtype=torch.int32)
    found, log_probs = prefill(
        make(Both), tokens=tokens, prompt_lens=torch.tensor([1, 1]), sampling_params=settings
    )
    assert found.tolist() == [[3], [4]]
    assert log_probs.tolist() == [-1.5, -2.0]


def test_start_pos_that_the_class_does_not_take() -> None:
    class Whole(Plain):
        def prefill_forward(
            self, tokens: Any, page_table: Any, kv_cache: Any, prompt_lens: Any
        ) -> Any:
            return self.answer

    generator = make(Whole)
    generator.allocate_kv_cache((9, 2, 32, 16), torch.bfloat16, 3)
    assert prefill(generator).shape == (2, 1, VOCAB_SIZE)
    with pytest.raises(ConfigError, match="start_pos and cannot continue after 2 tokens"):
        prefill(generator, start_pos=torch.tensor([0, 2], dtype=torch.int32))
    with pytest.raises(ConfigError, match="does not accept sampling_params: set sample_on_device"):
        prefill(generator, sampling_params=params(2))
    with pytest.raises(ConfigError, match="does not accept pixel_values: it is for text only"):
        prefill(generator, pixel_values=[torch.zeros(1)] * 2)


def test_images_that_the_class_requires() -> None:
    """A text-only batch has none, which these classes know from None."""

    class Vision(Plain):
        def prefill_forward(
            self, tokens: Any, images: Any, page_table: Any, kv_cache: Any, prompt_lens: Any
        ) -> Any:
            self.calls.append(("prefill", (), {"images": images}))
            return self.answer

    generator = make(Vision)
    generator.allocate_kv_cache((9, 2, 32, 16), torch.bfloat16, 3)
    prefill(generator)
    prefill(generator, images=["a", "b"])
    calls = generator._model.calls
    given = [arguments["images"] for call, _, arguments in calls if call == "prefill"]
    assert given == [[None, None], ["a", "b"]]


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_deltas(key: str) -> None:
    """Deltas go to the slots of the rows, and to the model once after a change."""
    config = SimpleNamespace(vocab_size=VOCAB_SIZE, **{key: {"mrope_section": [16, 24, 24]}})
    generator = make(num_slots=3, hf_config=SimpleNamespace(text_config=config))
    for slot, delta in ((2, 5), (0, 7)):
        generator._model.answer = (torch.zeros(1, 1, VOCAB_SIZE), torch.tensor([[delta]]))
        assert prefill(generator, 1, empty_slots=[slot]).shape == (1, 1, VOCAB_SIZE)
    generator._model.answer = torch.zeros(3, 1, VOCAB_SIZE)
    decode(generator, 3)
    assert last_call(generator)["rope_deltas_all_users"] == [7, 0, 5]
    decode(generator, 3)
    assert last_call(generator)["rope_deltas_all_users"] is None
    generator.release_request(2)
    assert generator._rope_deltas == [7, 0, 0]


@pytest.mark.parametrize("traces", [False, True])
def test_forward_calls_of_a_class_follow_the_engines_trace(traces: bool) -> None:
    generator = make()
    for call in (prefill, decode):
        call(generator, enable_trace=traces)
        assert last_call(generator)["enable_trace"] is traces


def test_prefill_starts_where_each_row_continues() -> None:
    generator = make()
    prefill(generator, start_pos=torch.tensor([0, 2], dtype=torch.int32))
    starts = [arguments["start_pos"].tolist() for _, _, arguments in generator._model.calls[1:]]
    assert starts == [[0], [2]]


def test_rows_move_only_in_a_class_that_can_follow_them() -> None:
    remap = torch.tensor([1, 0], dtype=torch.int32)
    generator = make()
    decode(generator)
    assert "slot_remap" not in last_call(generator)
    decode(generator, slot_remap=remap)
    assert last_call(generator)["slot_remap"] is remap
    with pytest.raises(ConfigError, match="does not accept slot_remap: it is not for engines that"):
        decode(make(Eager), slot_remap=remap)


def test_legacy_reset_batch() -> None:
    """It is given only with sampling on the device, without the four commands."""
    generator = make()
    decode(generator)
    assert not {"reset_batch", "reload_inputs", "sampling_params"} & set(last_call(generator))
    generator._model.answer = torch.zeros(2, dtype=torch.int32)
    for reset in (True, False):
        decode(
            generator,
            sampling_params=params(2),
            reload_sampling_params=reset,
            reset_sampling_state=reset,
            prompt_tokens=torch.zeros(2, 3),
            output_tokens=torch.zeros(2, 1),
        )
        arguments = last_call(generator)
        assert arguments["reset_batch"] is reset
        assert "reload_inputs" not in arguments
        assert arguments["prompt_tokens"].shape == (2, 3)
    with pytest.raises(TypeError, match="reset_batch is retired"):
        decode(generator, reset_batch=True)


def test_a_legacy_class_may_keep_the_page_table() -> None:
    """The class compares tables of two steps, but the engine rewrites one tensor in place."""
    generator, table = make(), torch.ones((2, 2), dtype=torch.int32)
    decode(generator, page_table=table)
    kept = last_call(generator)["page_table"]
    table[1, 1] = 9
    assert kept.tolist() == [[1, 1], [1, 1]]
    decode(generator, page_table=table)
    assert last_call(generator)["page_table"].tolist() == [[1, 1], [1, 9]]


class Eager(Plain):
    """A class of contract 1 that, like some, changes its arguments in place."""

    decode_input_update_contract = 1
    model_capabilities: ClassVar[Any] = {
        "supports_async_decode": True, "supports_sample_on_device": True,
    }  # fmt: skip

    def decode_forward(
        self, *, tokens: Any, page_table: Any, kv_cache: Any, start_pos: Any, enable_trace: Any,
        read_from_device: Any, reload_inputs: Any, reload_page_table: Any,
        reload_sampling_params: Any, reset_sampling_state: Any, sampling_params: Any = None,
    ) -> Any:  # fmt: skip
        if reload_sampling_params:
            self.calls.append(("decode", (), {"temperature": list(sampling_params.temperature)}))
            sampling_params.temperature[0] = 1 / sampling_params.temperature[0]
        else:
            self.calls.append(("decode", (), {"given": sampling_params}))
        return torch.zeros(2, dtype=torch.int32)

    def read_decode_output(self, tt_out: Any, async_read: bool) -> Any: ...

    def process_decode_output_host(self, tt_out: Any, is_tokens: bool) -> Any: ...


def test_settings_are_rebuilt_only_when_the_class_reads_them() -> None:
    generator, given = make(Eager), params(2)
    afresh = {"reload_sampling_params": True, "reset_sampling_state": True}
    decode(generator, sampling_params=given, **afresh)
    assert last_call(generator) == {"temperature": [0.7, 0.0]}
    decode(generator, sampling_params=given, reload_inputs=False)
    first = last_call(generator)["given"]
    decode(generator, sampling_params=given, reload_inputs=False)
    assert last_call(generator)["given"] is first
    decode(generator, sampling_params=given, **afresh)
    assert last_call(generator) == {"temperature": [0.7, 0.0]}


def test_commands_that_cannot_be() -> None:
    generator = make()
    with pytest.raises(AssertionError):
        decode(generator, reload_inputs=True, reload_page_table=True)
    with pytest.raises(AssertionError):
        decode(generator, reload_inputs=False, reset_sampling_state=True)
    with pytest.raises(AssertionError, match="must reload every step"):
        decode(generator, reload_inputs=False)


def test_output_stays_on_the_device() -> None:
    generator = make()
    generator._model.answer = object()
    with pytest.raises(DeviceError, match="lacks read_decode_output"):
        decode(generator)


def test_read_out_without_events() -> None:
    class NoEvents(Plain):
        def read_decode_output(self, tt_out: Any, async_read: bool) -> Any:
            return [torch.zeros(2, 1, VOCAB_SIZE)]

        def process_decode_output_host(self, tt_out: Any, is_tokens: bool) -> Any: ...

    generator = make(NoEvents)
    generator._model.answer = [object()]
    with pytest.raises(DeviceError, match="returned list, not a pair of output and events"):
        decode(generator)


def test_hooks() -> None:
    class Hooked(Plain):
        def release_request(self, row: int) -> None:
            self.calls.append(("release", (row,), {}))

        def release_persistent_capture(self) -> None:
            self.calls.append(("close", (), {}))

    generator = make(Hooked)
    generator.release_request(1)
    generator.close()
    assert generator._model.calls[1:] == [("release", (1,), {}), ("close", (), {})]
    plain = make()
    plain.release_request(1)
    plain.close()
    assert len(plain._model.calls) == 1


def test_cleanup_comes_whatever_the_hook_before_it_does() -> None:
    class Failing(Plain):
        def release_persistent_capture(self) -> None:
            raise RuntimeError("trace in use")

        def cleanup(self) -> None:
            self.calls.append(("cleanup", (), {}))

    generator = make(Failing)
    with pytest.raises(RuntimeError, match="trace in use"):
        generator.close()
    assert generator._model.calls[1:] == [("cleanup", (), {})]
    generator.close()
    assert len(generator._model.calls) == 2


# --- settings and outputs -------------------------------------------------------------------------


def test_sampling_params_are_padded() -> None:
    padded = to_tt_sampling_params(params(2), 4)
    assert padded.temperature == [0.7, 0.0, 0.0, 0.0]
    assert padded.top_k == [20, 1, 1, 1]
    assert padded.top_p == [0.9, 1.0, 1.0, 1.0]
    assert padded.repetition_penalty == [1.0] * 4
    assert padded.seed == [100, None, None, None]
    assert padded.num_logprobs == [-2] * 4
    assert padded.enable_log_probs == [False] * 4
    assert not padded.wants_log_probs


def give(output: object, *, is_tokens: bool = False, wants_log_probs: bool = False) -> Any:
    return host_output(output, 2, 5, is_tokens=is_tokens, wants_log_probs=wants_log_probs)


@pytest.mark.parametrize("shape", [(2, 5), (2, 1, 5), (4, 1, 8), (3, 6), (2, 3, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forms_of_logits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits = torch.arange(64.0).reshape(-1)[: int(torch.tensor(shape).prod())].reshape(shape)
    expected = logits.reshape(shape[0], -1, shape[-1])[:2, -1:, :5]
    for output in (logits.to(dtype), (logits.to(dtype), None)):
        found = give(output)
        assert found.dtype == dtype
        assert torch.equal(found.float(), expected)


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 1, 1), (4, 1)])
def test_forms_of_tokens(shape: tuple[int, ...]) -> None:
    tokens = torch.arange(shape[0], dtype=torch.int32).reshape(shape)
    log_probs = torch.arange(float(shape[0])).reshape(shape)
    assert give(tokens, is_tokens=True).tolist() == [[0], [1]]
    assert give((tokens, log_probs), is_tokens=True).tolist() == [[0], [1]]
    found, found_log_probs = give((tokens, log_probs), is_tokens=True, wants_log_probs=True)
    assert found.tolist() == [[0], [1]]
    assert found_log_probs.tolist() == [0.0, 1.0]


def test_the_likeliest_tokens_beside_those_that_the_device_has_drawn() -> None:
    tokens = torch.zeros(4, dtype=torch.int32)
    values, token_ids = torch.rand(4, 8).bfloat16(), torch.ones((4, 8), dtype=torch.int32)
    output = (tokens, (values, token_ids))
    assert is_on_host(output)
    _, found = give(output, is_tokens=True, wants_log_probs=True)
    assert [part.tolist() for part in found] == [values[:2].tolist(), token_ids[:2].tolist()]


@pytest.mark.parametrize(
    "log_probs", [None, torch.zeros(1), torch.zeros(2, 3), (torch.zeros(2, 3), torch.zeros(2, 4))]
)
def test_other_forms_of_log_probabilities(log_probs: object) -> None:
    output = (torch.zeros(2, dtype=torch.int32), log_probs)
    with pytest.raises(DeviceError, match="neither one for each of 2 rows nor the likeliest"):
        give(output, is_tokens=True, wants_log_probs=True)


@pytest.mark.parametrize(
    ("output", "is_tokens", "reason"),
    [
        (torch.zeros(2, 5), True, r"torch\.float32 \(2, 5\), not a token for each of 2 rows"),
        (torch.zeros(1, dtype=torch.int32), True, "not a token for each of 2 rows"),
        (torch.zeros((2, 3), dtype=torch.int32), True, "not a token for each of 2 rows"),
        (torch.zeros(2, 4), False, r"logits \(2, 4\) for 2 rows of a vocabulary of 5"),
        (torch.zeros(1, 5), False, r"logits \(1, 5\) for 2 rows"),
        (torch.zeros(5), False, r"logits \(5,\) for 2 rows"),
        ((1, 2, 3), False, "returned 3 values"),
        ("text", False, "returned str"),
    ],
)
def test_other_forms(output: object, is_tokens: bool, reason: str) -> None:
    with pytest.raises(DeviceError, match=reason):
        give(output, is_tokens=is_tokens)

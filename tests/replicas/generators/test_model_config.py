"""Reading config.json: today's keys, older keys, and refusals."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from replicas.config import EngineConfig, MeshConfig
from replicas.errors import ConfigError
from replicas.generators.model_config import (
    RopeConfig,
    load_engine_model,
    load_foreign_config,
    load_hf_config,
    parse_hf_config,
    read_architecture,
    to_model_config,
)
from replicas.kv_groups import KVSpec

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
MISTRAL = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def parse(**changes):
    return parse_hf_config(RAW | changes, "folder")


def test_a_minimal_configuration_gets_the_defaults_of_its_family():
    config = parse()
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert config.max_position_embeddings == 2048
    assert config.rope == RopeConfig("default", 10000.0)
    assert config.eos_token_id == ()
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("stated", "longest"),
    [
        ({"max_sequence_length": 4096}, 4096),
        ({"seq_length": 512, "max_position_embeddings": None}, 512),
        ({"max_position_embeddings": 8192, "model_max_length": 4096}, 4096),
    ],
)
def test_longest_sequence_is_read_from_every_key_that_configurations_use(stated, longest):
    assert parse(**stated).max_position_embeddings == longest


@pytest.mark.parametrize(
    ("name", "settings", "longest"),
    [
        ("Llama-2-7b", {"max_position_embeddings": 4096}, 4096),
        ("Meta-Llama-3-8B", {"max_position_embeddings": 8192, "rope_theta": 5e5}, 8192),
        ("Llama-3.1-8B", {"max_position_embeddings": 131_072, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}}, 131_072),
        ("Llama-3.2-1B", {"max_position_embeddings": 131_072, "rope_scaling": {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}, 131_072),
        ("vicuna-7b-v1.5-16k", {"max_position_embeddings": 4096, "max_sequence_length": 16_384,
            "rope_scaling": {"type": "linear", "factor": 4.0}}, 16_384),
        ("deepseek-coder-6.7b", {"max_position_embeddings": 16_384, "rope_theta": 1e5,
            "rope_scaling": {"type": "linear", "factor": 4.0}}, 65_536),
        ("LLaMA-2-7B-32K", {"max_position_embeddings": 32_768,
            "rope_scaling": {"type": "linear", "factor": 8.0}}, 262_144),
        ("a Llama with dynamic scaling", {"max_position_embeddings": 4096,
            "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192),
        ("Yarn-Llama-2-7b-128k", {"max_position_embeddings": 131_072, "rope_scaling": {
            "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
            "finetuned": True}}, 131_072),
        ("Qwen2.5-7B-Instruct", {**QWEN2, "max_position_embeddings": 32_768}, 32_768),
        ("Qwen2.5-7B-Instruct, extended", {**QWEN2, "max_position_embeddings": 32_768,
            "rope_scaling": {"type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 32_768}}, 131_072),
        ("Qwen3-8B", {**QWEN3, "max_position_embeddings": 40_960}, 40_960),
        ("Qwen3-8B, extended", {**QWEN3, "max_position_embeddings": 40_960, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
            "original_max_position_embeddings": 32_768}}, 131_072),
        ("a yarn of a ratio", {"max_position_embeddings": 8192, "rope_scaling": {
            "rope_type": "yarn", "factor": None, "original_max_position_embeddings": 2048}}, 8192),
        ("Mistral-7B-v0.1", {**MISTRAL, "max_position_embeddings": 32_768,
            "sliding_window": 4096}, 32_768),
        ("Mixtral-8x7B", {**MIXTRAL, "max_position_embeddings": 32_768}, 32_768),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_longest_sequence_includes_rope_scaling_as_in_vllm(name, settings, longest):
    assert parse(**settings).max_position_embeddings == longest, name


def test_a_folder_without_a_longest_sequence_takes_its_familys():
    assert parse().max_position_embeddings == 2048
    assert not parse().states_max_positions
    assert parse(seq_length=100).states_max_positions


def test_reading_a_folder_agrees_with_transformers(model):
    theirs, ours = model.hf_config, model.config
    for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.name_or_path == str(model.folder)
    assert ours.dtype == "float32"


def test_a_transformers_object_reads_like_its_folder(tiny):
    model = tiny("llama3-rope")
    ours = to_model_config(model.hf_config)
    blank = {"name_or_path": "", "architectures": (), "dtype": ""}
    assert replace(ours, **blank) == replace(model.config, **blank)
    assert to_model_config(model.config) is model.config


def test_older_keys_mean_the_same():
    new = parse(
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, dtype="bfloat16"
    )
    for key in ("type", "rope_type"):
        old = parse(rope_theta=5e5, rope_scaling={key: "llama3", **LLAMA3}, torch_dtype="bfloat16")
        assert old == new
    assert new.rope == RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 64)
    assert new.dtype == "bfloat16"
    assert parse(rope_theta=5e5, rope_scaling=None).rope == RopeConfig("default", 5e5)


def test_end_tokens_come_from_both_files_once_each(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW | {"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert load_hf_config(tmp_path).eos_token_id == (7, 9)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 8}, None),
        (MISTRAL, 4096),
        (MISTRAL | {"sliding_window": 8}, 8),
        (MISTRAL | {"sliding_window": None}, None),
        (QWEN2 | {"sliding_window": 8}, None),
        (QWEN2 | {"sliding_window": 8, "use_sliding_window": False}, None),
        (QWEN2 | {"sliding_window": 8, "use_sliding_window": True}, None),
        (QWEN2 | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, 8),
        (
            QWEN2
            | {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 2,
            },
            None,
        ),
    ],
)
def test_a_window_counts_where_the_family_uses_it(changes, window):
    assert parse(**changes).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not one of Llama",
        ),
        ({"architectures": []}, "architecture None"),
        ({"architectures": "Phi3ForCausalLM"}, "list of names, got 'Phi3ForCausalLM'"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "rope type 'spiral'.*'longrope'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "no 'short_factor'"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}},
            "short_factor has 7 numbers for 8 frequencies",
        ),
        ({"layer_types": ["full_attention"], **MISTRAL}, "1 layer_types for num_hidden_layers 2"),
        ({"rope_scaling": {"type": "linear"}}, "no 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope factor 0.5 .* at least 1"),
        ({"rope_scaling": {"type": "yarn", "factor": float("nan")}}, "rope factor nan"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "head_dim=2"),
        ({"rope_parameters": {"full_attention": {}}}, "per layer type"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "no 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"num_hidden_layers": 2**53}, "num_hidden_layers 9007199254740992 is not from 1 to 4096"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0 is not from 1"),
        ({**MIXTRAL, "num_local_experts": 2**53}, "or this is over 65536"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 15}, "odd"),
        ({"hidden_size": "wide"}, "invalid literal"),
        ({"hidden_size": None}, "config.json: "),
        ({"num_attention_heads": 0, "num_key_value_heads": 2}, "config.json: .*zero"),
        ({"rope_scaling": "x"}, "config.json: "),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse(**changes)


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match=r"folder/config.json has no 'vocab_size'"):
        parse_hf_config({key: value for key, value in RAW.items() if key != "vocab_size"}, "folder")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[" * 10**5, "is not JSON"), ("[]", "a JSON object")],
)
def test_a_broken_file_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_hf_config(tmp_path)


def test_a_folder_without_configuration_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        load_hf_config(tmp_path)


def test_an_object_that_is_no_configuration_is_refused():
    with pytest.raises(ConfigError, match="got SimpleNamespace"):
        to_model_config(SimpleNamespace())


def test_older_settings_of_olmo3_scale_the_rotation_of_layers_without_a_window_alone():
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    raw = {
        **RAW, "architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 6,
        "rope_theta": 3e5, "rope_scaling": yarn, "sliding_window": 9,
    }  # fmt: skip
    config = parse_hf_config(raw, "folder")
    assert [config.has_window(index) for index in range(6)] == [True] * 3 + [False] + [True] * 2
    assert (config.rope.rope_type, config.rope.factor, config.rope.theta) == ("yarn", 8.0, 3e5)
    assert config.local_rope == RopeConfig("default", 3e5)
    assert config.max_position_embeddings == 8 * 8192


def write_gemma3(folder):
    """An image-text model: its text part is a configuration inside the configuration."""
    from transformers import Gemma3Config, Gemma3TextConfig

    text = Gemma3TextConfig(
        num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        hidden_size=320, intermediate_size=640, vocab_size=2048, max_position_embeddings=4096,
        eos_token_id=1,
    )  # fmt: skip
    config = Gemma3Config(text_config=text, architectures=["Gemma3ForConditionalGeneration"])
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')


def test_a_model_that_another_package_computes_is_read_by_its_sizes(tmp_path):
    write_gemma3(tmp_path)
    with pytest.raises(ConfigError, match="Gemma3ForConditionalGeneration"):
        load_hf_config(tmp_path)
    config = load_foreign_config(tmp_path)
    assert config.architectures == ("Gemma3ForConditionalGeneration",)
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (6, 4, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (2048, 4096)
    assert {1, 106} <= set(config.eos_token_id)
    mesh = MeshConfig(name="N150")
    theirs = EngineConfig(model=str(tmp_path), mesh=mesh, generator="tt-metal")
    assert load_engine_model(theirs) == config
    with pytest.raises(ConfigError, match="Gemma3"):
        load_engine_model(EngineConfig(model=str(tmp_path), mesh=mesh))


@pytest.mark.parametrize(
    ("sizes", "heads", "head_dim"),
    [
        ({"num_key_value_heads": 1}, 1, 512),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 1}, 4, 256),
    ],
)
def test_where_layers_differ_the_one_with_the_most_kv_gives_the_sizes(
    sizes, heads, head_dim, tmp_path
):
    """Every layer gets all the blocks, so that memory is reckoned with the widest."""
    from transformers import Gemma4Config, Gemma4TextConfig

    text = Gemma4TextConfig(num_hidden_layers=6, vocab_size=2048, **sizes)
    whole = Gemma4Config(text_config=text, architectures=["Gemma4ForConditionalGeneration"])
    whole.save_pretrained(tmp_path)
    config = load_foreign_config(tmp_path)
    assert config.architectures == ("Gemma4ForConditionalGeneration",)
    assert (config.num_hidden_layers, config.vocab_size) == (6, 2048)
    assert (config.num_key_value_heads, config.head_dim) == (heads, head_dim)


def test_a_configuration_that_does_not_say_whether_its_embedding_is_tied_is_read(tmp_path):
    from transformers import MllamaConfig

    MllamaConfig(architectures=["MllamaForConditionalGeneration"]).save_pretrained(tmp_path)
    config = load_foreign_config(tmp_path)
    assert config.architectures == ("MllamaForConditionalGeneration",)
    assert not config.tie_word_embeddings


PHI3 = RAW | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 0, "head_dim": None}, "zero"),
        ({"layer_types": ["crosswise"]}, "ClassValidationError: .*layer_types?"),
        ({"rope_scaling": "x"}, "cannot read the configuration"),
        ({"rope_scaling": {"type": "su", "short_factor": 1}}, "cannot read the configuration"),
        ({"model_type": "unheard-of"}, "unheard-of"),
        ({"architectures": "Phi3ForCausalLM"}, "list of names, got 'Phi3ForCausalLM'"),
        ({"architectures": [3]}, r"list of names, got \[3\]"),
    ],
)
def test_what_transformers_cannot_read_is_refused_with_its_reason(changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PHI3))
    load_foreign_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(PHI3 | changes))
    with pytest.raises(ConfigError, match=message):
        load_foreign_config(tmp_path)


def test_a_missing_folder_is_named_for_own_and_foreign_models(tmp_path):
    for folder in (tmp_path, tmp_path / "absent" / "of" / "many"):
        with pytest.raises(ConfigError, match=r"cannot read .*config\.json: No such file"):
            load_foreign_config(folder)


def test_a_class_on_the_cpu_may_compute_what_ours_do_not(tmp_path):
    write_gemma3(tmp_path)
    theirs = EngineConfig(model=str(tmp_path), generator="some.module:Gemma3")
    config = load_engine_model(theirs)
    assert config == load_foreign_config(tmp_path)
    with pytest.raises(ConfigError, match="'Gemma3ForConditionalGeneration' is not one of"):
        to_model_config(config)
    with pytest.raises(ConfigError, match="Gemma3"):
        load_engine_model(EngineConfig(model=str(tmp_path)))


def test_a_class_that_extends_ours_gets_all_that_ours_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW | QWEN2))
    for mesh in (None, MeshConfig(name="N150")):
        named = EngineConfig(model=str(tmp_path), mesh=mesh, generator="some.module:Extended")
        assert load_engine_model(named) == load_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "architecture"),
    [(RAW, "LlamaForCausalLM"), ({"model_type": "llama"}, None), ({"architectures": []}, None)],
)
def test_the_architecture_alone(content, architecture, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_architecture(tmp_path) == architecture
    with pytest.raises(ConfigError, match="cannot read"):
        read_architecture(tmp_path / "absent")


def test_architectures_that_are_no_list_have_no_first_letter(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": "Phi3ForCausalLM"}')
    with pytest.raises(ConfigError, match="list of names"):
        read_architecture(tmp_path)


def test_what_neither_reading_understands_says_both_reasons(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    theirs = EngineConfig(model=str(tmp_path), generator="some.module:Class")
    with pytest.raises(ConfigError, match="transformers cannot read") as refused:
        load_engine_model(theirs)
    assert isinstance(refused.value.__cause__, ConfigError)
    assert "'no-such-model' is not one of" in str(refused.value.__cause__)


def test_latents_take_an_eighth_of_the_kv_of_plain_heads():
    raw = {
        "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "vocab_size": 102400,
        "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16,
        "q_lora_rank": None, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    }  # fmt: skip
    config = parse_hf_config(raw, "folder")
    (spec, *_) = specs = config.kv_specs("bfloat16")
    assert len(specs) == 27
    assert (spec.kind, spec.planes, spec.width) == ("latent", 1, 576)
    # Of 16 heads with keys of 128 + 64 and values of 128 channels.
    plain = KVSpec(heads=16, width=(192 + 128) // 2, dtype="bfloat16")
    assert 8 * spec.bytes_per_block(64) <= plain.bytes_per_block(64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_method": "best"}, "topk_method 'best'"),
        ({"scoring_func": "tanh"}, "scoring_func 'tanh'"),
        ({"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        (
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
            "6 experts of a token from topk_group 1 of n_group 3, of 64",
        ),
    ],
)
def test_experts_and_latents_that_are_not_computed_are_refused(change, message):
    raw = {
        "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 64, "vocab_size": 128,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_experts_per_tok": 6,
    }  # fmt: skip
    assert parse_hf_config(raw, "folder").latent is not None
    with pytest.raises(ConfigError, match=message):
        parse_hf_config(raw | change, "folder")

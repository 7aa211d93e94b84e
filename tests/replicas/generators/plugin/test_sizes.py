"""Sizes that classes of tt_transformers refuse, by class and by route."""

import pytest

from replicas.config import EngineConfig, MeshConfig
from replicas.errors import ConfigError
from replicas.generators.plugin.sizes import check_class_sizes, check_route_sizes

MODULE = "models.tt_transformers.tt.generator_vllm"
Llama = type("LlamaForCausalLM", (), {"__module__": MODULE})
Extended = type("Mine", (Llama,), {"__module__": "mine"})
Adapted = type("Adapted", (), {"plugin_class": Extended})
GptOss = type("GptOssForCausalLM", (), {"__module__": MODULE})


def config(lanes=1, rows=32, generator="tt-metal"):
    return EngineConfig(
        model="/models/Llama-3.1-8B", generator=generator, tt_data_parallel=lanes,
        max_batch_size=rows * lanes, block_size=64, mesh=MeshConfig(name="T3K"),
    )  # fmt: skip


@pytest.mark.parametrize("length", [128, 1024, 2048, 32_768, 131_072, 200_000])
def test_powers_of_two_and_what_is_longer_than_any_chunk_may_be(length, caplog):
    check_class_sizes(config(), Adapted, length)
    assert not caplog.records


def test_other_lengths_are_refused_with_those_that_will_do(caplog):
    with pytest.raises(
        ConfigError, match=r"is 1280, .* powers of two: set max_model_len to 1024 or 2048"
    ):
        check_class_sizes(config(), Adapted, 1280)
    # An n150 computes 4,096 tokens at once, a T3K 131,072: not known here.
    check_class_sizes(config(), Adapted, 40_960)
    assert "set max_model_len to 32768 or 65536" in caplog.text
    check_class_sizes(config(), GptOss, 1280)


def test_batches_that_tt_transformers_does_not_take_are_refused():
    with pytest.raises(
        ConfigError, match=r"48 in 4 lanes gives 12 slots a lane; .* 1, 2, 4, 8, 16, 32"
    ):
        check_class_sizes(config(lanes=4, rows=12), Adapted, 2048)
    check_class_sizes(config(lanes=4, rows=12), GptOss, 2048)


@pytest.mark.parametrize(
    ("generator", "architecture", "is_refused"),
    [
        ("tt-metal", "LlamaForCausalLM", True),
        ("tt-metal", "Qwen3ForCausalLM", True),
        ("tt-metal", "GptOssForCausalLM", False),
        ("tt-metal", "Unknown", False),
        ("tt-transformers", "LlamaForCausalLM", False),
        ("llama3_70b_galaxy", "LlamaForCausalLM", False),
        (f"{MODULE}:LlamaForCausalLM", "LlamaForCausalLM", False),
        (None, "LlamaForCausalLM", False),
    ],
)
def test_a_route_is_checked_without_its_class(generator, architecture, is_refused):
    engine = config(generator=generator)
    check_route_sizes(engine, (architecture,), 1024)
    if not is_refused:
        check_route_sizes(engine, (architecture,), 1280)
        return
    check_route_sizes(engine, (), 1280)
    with pytest.raises(ConfigError, match=r"set max_model_len to 1024 or 2048"):
        check_route_sizes(engine, (architecture,), 1280)

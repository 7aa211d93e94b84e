"""Sizes that foreign classes require: checked against the chips, and reported before loading."""

import msgspec
import pytest

from replicas.config import EngineConfig, MeshConfig
from replicas.engine.facts import model_facts
from replicas.errors import ConfigError
from replicas.generators.model_config import parse_hf_config
from replicas.generators.plugin.limits import (
    check_block_output,
    comes_from,
    foreign_token_budget,
    warn_of_name,
)
from tests.replicas.generators.test_ttnn_budget import LLAMA_8B


class Named:
    """A class like tt_transformers' Llama, whose limits depend on the model's name."""

    @classmethod
    def get_max_tokens_all_users(cls, *, model_name, num_devices, **_):
        return 32_768 if "Llama-3.1-8B" in model_name and num_devices == 1 else 131_072


Base = type("Generator", (), {"__module__": "models.tt_transformers.tt.generator"})
OfMetal = type("Llama", (Base,), {"__module__": "models.demos.other"})
Adapted = type("Adapted", (), {"plugin_class": OfMetal})


def config(folder="/models/Llama-3.1-8B-Instruct", mesh="N150", lanes=1, rows=32, **settings):
    return EngineConfig(
        model=folder, generator="tt-metal", tt_data_parallel=lanes, max_batch_size=rows * lanes,
        block_size=64, mesh=MeshConfig(name=mesh, **settings),
    )  # fmt: skip


def budget(generator=Named, max_seq_len=32_768, raw=LLAMA_8B, **changes):
    engine = config(**changes)
    model = parse_hf_config(raw, "model")
    return foreign_token_budget(engine, engine.mesh, model, generator, max_seq_len)


def kv_bytes(tokens, chips=1):
    """Compute the bytes of keys and values of 32 layers and 8 heads in bfloat8_b."""
    return tokens * 32 * 2 * 8 * 128 * 1.0625 / chips


def test_a_renamed_folder_gets_no_more_than_the_chip_holds(caplog):
    assert budget() == 32_768
    assert not caplog.records
    renamed = budget(folder="/models/mine")
    assert "declares 131072 tokens of KV a lane" in caplog.text
    assert 32_768 < renamed < 131_072
    # The weights of 8.03 billion elements, were they all of four bits, leave so much of 12 GiB.
    free = 12 * 2**30 - 8.03e9 * 0.5625
    assert kv_bytes(renamed) < free
    assert kv_bytes(131_072) > free


def test_more_chips_have_room_for_what_is_said(caplog):
    assert budget(mesh="N300", folder="/models/mine") == 131_072
    assert budget(mesh="T3K", folder="/models/mine") == 131_072
    assert budget(mesh="T3K", lanes=8, folder="/models/mine") < 131_072


def test_a_class_that_says_nothing_is_held_to_the_same():
    silent = type("Silent", (), {})
    assert budget(silent, mesh="N300") == 131_072
    assert budget(silent) == budget(folder="/models/mine")


def test_what_our_arithmetic_cannot_judge_is_believed(caplog):
    # Heads that do not divide: such classes repeat them.
    assert budget(mesh="Galaxy", folder="/models/mine") == 131_072
    assert not caplog.records
    huge = {**LLAMA_8B, "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672}
    assert budget(raw=huge) == 32_768
    assert "with a KV cache does not fit mesh N150 in 1 lanes" in caplog.text


# --- before it loads -----------------------------------------------------------------------------


def test_where_a_class_comes_from():
    assert comes_from(Adapted, "models")
    assert comes_from(OfMetal, "models.tt_transformers")
    assert not comes_from(Named, "models")
    assert not comes_from(type("X", (), {"__module__": "models_of_mine"}), "models")


@pytest.mark.parametrize(
    ("folder", "is_known"),
    [
        ("/models/Llama-3.1-8B-Instruct", True),
        ("/models/meta-llama/Llama-3.3-70B-Instruct", True),
        ("/models/Qwen3-8B", True),
        ("/models/Qwen3-VL-32B-Instruct", True),
        ("/models/Qwen3.5-27B", True),
        ("/models/DeepSeek-V3-0324", True),
        ("/models/DeepSeek-R1-0528", True),
        ("/models/DeepSeek-R1-mine", False),
        ("/models/mine", False),
        ("/hub/models--Qwen--Qwen3-8B/snapshots/b968826d9c46", True),
        ("/hub/models--me--mine/snapshots/b968826d9c46", False),
    ],
)
def test_a_name_that_hugging_face_does_not_have_is_warned_of(folder, is_known, caplog):
    warn_of_name(config(folder), Adapted)
    assert ("tt-metal's classes identify models by this name" in caplog.text) != is_known


def test_no_other_class_is_warned_of_names(caplog):
    warn_of_name(config("/models/mine"), Named)
    assert not caplog.records


SOLO = {"output_tokens_per_step": 4, "supports_sample_in_prefill": True}
ADAPTIVE = {"output_tokens_per_step": 4, "tt_adaptive_block_output": True}


@pytest.mark.parametrize(
    ("can", "settings", "problem"),
    [
        ({}, {"rows": 32, "sample_on_device": "none"}, None),
        (ADAPTIVE, {"rows": 32}, None),
        (ADAPTIVE, {"rows": 32, "sample_on_device": "decode_only"}, None),
        (ADAPTIVE, {"rows": 1, "sample_on_device": "none"}, "remove mesh.sample_on_device"),
        (SOLO, {"rows": 1}, None),
        (SOLO, {"rows": 2}, "max_batch_size is 2; set it to 1"),
        (SOLO, {"rows": 1, "sample_on_device": "decode_only"}, "sample_on_device must be all"),
    ],
)
def test_settings_for_several_tokens_a_step(can, settings, problem):
    engine = config(**settings)
    if problem is None:
        check_block_output(engine, engine.mesh, can)
    else:
        with pytest.raises(ConfigError, match=problem):
            check_block_output(engine, engine.mesh, can)


def test_kv_of_a_state_of_its_own_does_not_move():
    engine = msgspec.structs.replace(config(rows=1), kv_connector="p2p")
    with pytest.raises(ConfigError, match="remove kv_connector 'p2p'"):
        check_block_output(engine, engine.mesh, SOLO)


def test_several_tokens_a_step_and_several_passes_exclude_each_other():
    engine = msgspec.structs.replace(config(rows=32), num_scheduler_steps=2)
    check_block_output(engine, engine.mesh, {})
    with pytest.raises(ConfigError, match="num_scheduler_steps 2 is for generators of one"):
        check_block_output(engine, engine.mesh, ADAPTIVE)


def test_several_tokens_a_step_need_a_mesh():
    engine = EngineConfig(model="m", generator="module:Class")
    with pytest.raises(ConfigError, match=r"gives 4 tokens a step, .*; set engine\.mesh"):
        model_facts(engine, parse_hf_config(LLAMA_8B, "model"), ADAPTIVE)

"""Options of vLLM are translated, refused by name, or dropped with a line in the log."""

import msgspec
import pytest

from replicas.config import EngineConfig, MeshConfig
from replicas.errors import ConfigError
from replicas.vllm_options import OPTIONS, engine_options

MESH = {"name": "N150"}
FIELDS = {field.name for field in msgspec.structs.fields(EngineConfig)}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"block_size": 64, "dtype": "bfloat16"}, {"block_size": 64, "dtype": "bfloat16"}),
        ({"load_format": "dummy"}, {"load_format": "random"}),
        ({"load_format": "auto"}, {"load_format": "safetensors"}),
        ({"load_format": "gguf"}, {"load_format": "gguf"}),
        ({"dtype": "float16"}, {"dtype": "float32"}),
        ({"dtype": "half"}, {"dtype": "float32"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"enforce_eager": True}, {}),
        ({"enforce_eager": False, "mesh": MESH}, {"mesh": MESH}),
        ({"enforce_eager": True, "mesh": MESH}, {"mesh": {**MESH, "trace": "none"}}),
        (
            {"enforce_eager": True, "mesh": MeshConfig(name="N150")},
            {"mesh": MeshConfig(name="N150", trace="none")},
        ),
    ],
)
def test_options_are_translated(given, expected):
    assert engine_options(given) == expected


@pytest.mark.parametrize("name", [o.name for o in OPTIONS if o.effect == "without effect"])
def test_options_without_effect_are_dropped_with_a_line(caplog, name):
    assert engine_options({name: 1}) == {}
    assert f"{name} has no effect: " in caplog.text


def test_float16_is_reported(caplog):
    engine_options({"dtype": "float16"})
    assert "float16 is computed in float32" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({o.name: 1}, f"{o.name} of vLLM is refused") for o in OPTIONS if o.effect == "refused"),
        ({"enforce_eager": "yes"}, "enforce_eager must be true or false, got 'yes'"),
        (
            {"enforce_eager": True, "mesh": {**MESH, "trace": "all"}},
            "enforce_eager true and mesh.trace 'all' exclude each other",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(given, message):
    with pytest.raises(ConfigError, match=message):
        engine_options(given)


def test_only_options_of_the_same_name_are_fields():
    for option in OPTIONS:
        is_field = option.name in FIELDS
        assert is_field == (option.effect == "same" or option.name in {"dtype", "load_format"})

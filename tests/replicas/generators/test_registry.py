"""Generators are found by architecture or by "module:Class", and checked before use."""

import subprocess
import sys
from typing import Any, ClassVar

import pytest

from replicas.errors import ConfigError, UnknownGeneratorError
from replicas.generators.registry import (
    REQUIRED_METHODS,
    known_generators,
    register_generator,
    resolve_generator,
)
from replicas.generators.torch.generator import TorchGenerator


class Complete:
    """A generator as small as can be."""

    model_capabilities: ClassVar[dict[str, Any]] = {}


for _name in REQUIRED_METHODS:
    setattr(Complete, _name, lambda self: None)


class Mixing(Complete):
    model_capabilities: ClassVar[dict[str, Any]] = {
        "supports_mixed_batch": True,
        "supports_layer_callbacks": True,
    }


class Incomplete:
    model_capabilities: ClassVar[dict[str, Any]] = {}

    def prefill_forward(self):
        pass


class Silent(Complete):
    model_capabilities = None


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"],
)
def test_known_architectures_use_the_torch_generator(architecture):
    assert resolve_generator(architecture) is TorchGenerator


def test_a_class_is_found_by_module_and_name():
    assert resolve_generator(f"{__name__}:Complete") is Complete


def test_a_registered_architecture_is_known():
    register_generator("TinyForCausalLM", f"{__name__}:Complete")
    assert resolve_generator("TinyForCausalLM") is Complete
    assert "TinyForCausalLM" in known_generators()


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(UnknownGeneratorError, match=r"'GPT2LMHeadModel'; known: Llama.*Qwen3"):
        resolve_generator("GPT2LMHeadModel")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module:Class", "No module named 'no_such_module'"),
        (f"{__name__}:Missing", "no class 'Missing'"),
        (f"{__name__}:REQUIRED_METHODS", "no class 'REQUIRED_METHODS'"),
    ],
)
def test_a_class_that_is_not_there_is_refused(target, message):
    with pytest.raises(UnknownGeneratorError, match=message):
        resolve_generator(target)


@pytest.mark.parametrize("target", ["module:", ":Class", "module:a b"])
def test_a_malformed_target_is_refused(target):
    with pytest.raises(ConfigError, match="not of the form"):
        resolve_generator(target)
    with pytest.raises(ConfigError, match="not of the form"):
        register_generator("TinyForCausalLM", target)


def test_missing_methods_are_named():
    with pytest.raises(ConfigError) as caught:
        resolve_generator(f"{__name__}:Incomplete")
    missing = [name for name in REQUIRED_METHODS if name != "prefill_forward"]
    assert str(caught.value).endswith(f"lacks {', '.join(missing)}")


def test_a_promised_capability_needs_its_method():
    with pytest.raises(ConfigError, match="lacks forward_mixed, set_layer_callbacks"):
        resolve_generator(f"{__name__}:Mixing")


def test_a_class_without_capabilities_is_refused():
    with pytest.raises(ConfigError, match="model_capabilities"):
        resolve_generator(f"{__name__}:Silent")


def test_the_protocol_and_the_registry_import_without_torch():
    code = (
        "import sys; import replicas.generators.protocol, replicas.generators.multimodal, "
        "replicas.generators.registry, replicas.generators.model_config; "
        "print([m for m in ('torch', 'ttnn', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

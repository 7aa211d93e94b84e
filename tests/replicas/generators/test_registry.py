"""Generators are found by architecture or by "module:Class", and checked before use."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from replicas.config import EngineConfig, MeshConfig, SimulatedMeshConfig
from replicas.errors import ConfigError, UnknownGeneratorError
from replicas.generators import registry
from replicas.generators.model_config import parse_hf_config
from replicas.generators.plugin.adapter import AdaptedGenerator
from replicas.generators.registry import (
    REQUIRED_METHODS,
    resolve_generator,
    resolve_mesh_generator,
)
from replicas.generators.targets import (
    known_generators,
    register_generator,
    with_registered_generator,
)
from replicas.generators.torch.generator import TorchGenerator
from replicas.llm import LLM
from replicas.sampling_params import SamplingParams
from tests.models import model_folder
from tests.replicas.generators.plugin.test_signatures import Minimal as Plugin


class Complete:
    """A generator as small as can be."""

    model_capabilities: ClassVar[dict[str, Any]] = {}


for _name in REQUIRED_METHODS:
    setattr(Complete, _name, lambda self: None)


class Mixing(Complete):
    model_capabilities: ClassVar[dict[str, Any]] = {
        "supports_mixed_batch": True,
        "supports_hidden_states": True,
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
    [
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "MixtralForCausalLM",
        "Qwen3MoeForCausalLM",
    ],
)
def test_known_architectures_use_the_torch_generator(architecture):
    assert resolve_generator(architecture) is TorchGenerator


def test_a_class_is_found_by_module_and_name():
    assert resolve_generator(f"{__name__}:Complete") is Complete


def test_a_registered_architecture_is_known():
    register_generator("TinyForCausalLM", f"{__name__}:Complete")
    assert resolve_generator("TinyForCausalLM") is Complete
    assert "TinyForCausalLM" in known_generators()


def write_config(folder, architecture):
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return EngineConfig(model=str(folder))


def test_what_was_registered_goes_to_the_engine_in_its_configuration(tmp_path):
    """An engine is a process of its own, in which nothing is registered."""
    target = f"{__name__}:Complete"
    register_generator("TinyForCausalLM", target)
    config = write_config(tmp_path, "TinyForCausalLM")
    assert with_registered_generator(config).generator == target
    on_mesh = msgspec.structs.replace(config, mesh=MESH)
    assert with_registered_generator(on_mesh).generator == target
    named = msgspec.structs.replace(config, generator="other:Class")
    assert with_registered_generator(named) is named


def test_an_unregistered_architecture_is_left_to_the_engine(tmp_path):
    for architecture in ("LlamaForCausalLM", "NobodysForCausalLM"):
        config = write_config(tmp_path, architecture)
        assert with_registered_generator(config) is config
    absent = EngineConfig(model=str(tmp_path / "absent"))
    assert with_registered_generator(absent) is absent
    simulated = EngineConfig(
        model=str(tmp_path), simulated_mesh=SimulatedMeshConfig(board="n150", model="Llama-3.1-8B")
    )
    assert with_registered_generator(simulated) is simulated


class OwnLlama(TorchGenerator):
    """A Llama by another name, which ours do not know."""

    @classmethod
    def initialize_vllm_model(cls, hf_config, *args, **kwargs):
        raw = json.loads(Path(hf_config.name_or_path, "config.json").read_text())
        assert raw["architectures"] == ["OwnLlamaForCausalLM"]
        known = parse_hf_config(
            raw | {"architectures": ["LlamaForCausalLM"]}, hf_config.name_or_path
        )
        return super().initialize_vllm_model(known, *args, **kwargs)


def test_a_registered_architecture_that_ours_do_not_know_is_served(tmp_path):
    """It is served by an engine process and by an engine on this thread."""
    own = shutil.copytree(model_folder("llama-gqa"), tmp_path / "own")
    raw = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(raw | {"architectures": ["OwnLlamaForCausalLM"]}))
    register_generator("OwnLlamaForCausalLM", f"{__name__}:OwnLlama")
    settings = {"skip_tokenizer_init": True, "num_threads": 1, "max_model_len": 64}
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    found = []
    for multiprocess in (True, False):
        with LLM(str(own), multiprocess=multiprocess, **settings) as llm:
            [output] = llm.generate([[7, 8, 9]], params, use_tqdm=False)
            found.append(output.outputs[0].token_ids)
    assert found[0] == found[1]
    assert len(found[0]) == 5


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(UnknownGeneratorError, match=r"'GPT2LMHeadModel'; known: Deepseek.*Qwen3"):
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
    with pytest.raises(
        ConfigError, match="lacks forward_mixed, forward_hidden, compute_logits, set"
    ):
        resolve_generator(f"{__name__}:Mixing")


def test_a_class_without_capabilities_is_refused():
    with pytest.raises(ConfigError, match="model_capabilities"):
        resolve_generator(f"{__name__}:Silent")


MESH = MeshConfig(name="N150")


def resolve_mesh(name, architecture, mesh=MESH, **changes):
    """The class of an engine on a mesh."""
    config = EngineConfig(model="/models/some", generator=name, mesh=mesh, **changes)
    return resolve_mesh_generator(config, architecture)


def test_a_class_of_the_plugin_is_adapted_on_a_mesh():
    found = resolve_mesh(f"{__name__}:Plugin", "LlamaForCausalLM")
    assert issubclass(found, AdaptedGenerator)
    assert found.plugin_class is Plugin


def test_a_class_that_extends_ours_is_taken_as_it_is(monkeypatch):
    monkeypatch.setattr(registry, "NATIVE_TT_GENERATOR", f"{__name__}:Complete")
    child = f"{__name__}:Child"
    assert resolve_mesh(child, "LlamaForCausalLM") is Child
    assert resolve_mesh(None, "LlamaForCausalLM") is Complete
    assert resolve_mesh(f"{__name__}:Complete", "LlamaForCausalLM") is Complete


class Child(Complete):
    pass


def test_a_bundle_is_found_by_its_architecture(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "vllm_metadata.json").write_text(
        json.dumps({"arch": "TTMineForCausalLM", "main_class": f"{__name__}:Plugin"})
    )
    mesh = MeshConfig(name="N150", extra_models_dir=str(tmp_path))
    found = resolve_mesh("MineForCausalLM", "LlamaForCausalLM", mesh)
    assert found.plugin_class is Plugin


def test_tt_metal_has_a_class_for_the_architecture_and_must_be_there():
    with pytest.raises(
        UnknownGeneratorError, match=r"generator_vllm:QwenForCausalLM.*TT_METAL_HOME"
    ):
        resolve_mesh("tt-metal", "Qwen3ForCausalLM")


def test_a_route_is_no_architecture_and_refuses_what_it_has_no_class_for():
    with pytest.raises(ConfigError, match="'llama3_70b_galaxy' runs on the 32 chips of a Galaxy"):
        resolve_mesh("llama3_70b_galaxy", "LlamaForCausalLM")
    with pytest.raises(ConfigError, match="no class for 'Gemma3ForCausalLM'"):
        resolve_mesh("tt-transformers", "Gemma3ForCausalLM")
    with pytest.raises(ConfigError, match="encoder-decoder models are not supported yet"):
        resolve_mesh("TTMllamaForConditionalGeneration", "MllamaForConditionalGeneration")


def test_the_protocol_and_the_registry_import_without_torch():
    code = (
        "import sys; import replicas.generators.protocol, replicas.generators.multimodal, "
        "replicas.generators.registry, replicas.generators.model_config, "
        "replicas.generators.plugin.routes; "
        "print([m for m in ('torch', 'ttnn', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

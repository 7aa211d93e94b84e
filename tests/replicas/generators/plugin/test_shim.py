"""A file with the import lines of tt-metal's generator_vllm.py files, imported without vLLM."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from replicas.errors import ConfigError
from replicas.generators.plugin.adapter import adapt
from replicas.generators.plugin.find import find_plugin_class
from replicas.generators.plugin.kv_layers import kv_cache_spec, layer_caches
from replicas.generators.plugin.routes import ROUTES
from replicas.generators.plugin.shim import MissingVLLMError, vllm_config, vllm_stand_in
from replicas.generators.plugin.sources import PluginPaths

if TYPE_CHECKING:
    from collections.abc import Iterator

GENERATOR_VLLM = '''
"""Import lines and decorators as in tt-metal, 2025 and 2026; nothing else of it."""
import vllm.envs as envs
from vllm.inputs import INPUT_REGISTRY, DecoderOnlyInputs, InputContext, TokenInputs, token_inputs
from vllm.model_executor.models.gemma3_mm import (
    Gemma3DummyInputsBuilder,
    Gemma3MultiModalProcessor,
    Gemma3ProcessingInfo,
)
from vllm.model_executor.models.interfaces import SupportsMultiModal, SupportsV0Only
from vllm.model_executor.models.mistral3 import (
    Mistral3DummyInputsBuilder,
    Mistral3MultiModalProcessor,
    Mistral3ProcessingInfo,
)
from vllm.model_executor.models.mllama import MllamaProcessingInfo
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargs
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import BaseMultiModalProcessor, EncDecMultiModalProcessor
from vllm.multimodal.processing import BaseDummyInputsBuilder, PromptUpdate
from vllm.multimodal.profiling import BaseDummyInputsBuilder as OlderDummyInputsBuilder

try:
    from vllm.inputs import MultiModalDataDict
except ImportError:
    from vllm.multimodal.inputs import MultiModalDataDict


class Info(MllamaProcessingInfo):
    pass


class Processor(EncDecMultiModalProcessor[Info]):
    pass


class DummyInputs(BaseDummyInputsBuilder):
    pass


class Generator:
    def __init__(self, name):
        self.name = name

    @classmethod
    def initialize_vllm_model(cls, hf_config, mesh_device, max_batch_size, max_seq_len, **kwargs):
        return cls("made")

    def allocate_kv_cache(self, *args, **kwargs):
        return None

    def warmup_model_prefill(self, kv_cache, enable_trace, **kwargs):
        pass

    def prefill_forward(self, tokens, page_table, kv_cache, prompt_lens):
        pass

    def decode_forward(self, tokens, start_pos, page_table, kv_cache):
        pass


@INPUT_REGISTRY.register_input_processor(lambda context, inputs: inputs)
class LlamaForCausalLM(Generator):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

    @classmethod
    def get_kv_cache_spec(cls, vllm_config):
        from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        model, cache = vllm_config.model_config, vllm_config.cache_config
        dtype = (
            model.dtype
            if cache.cache_dtype == "auto"
            else STR_DTYPE_TO_TORCH_DTYPE[cache.cache_dtype]
        )
        spec = FullAttentionSpec(
            block_size=cache.block_size,
            num_kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
            head_size=model.get_head_size(),
            dtype=dtype,
        )
        return {f"model.layers.{i}.self_attn": spec for i in range(2)}


@MULTIMODAL_REGISTRY.register_processor(
    Gemma3MultiModalProcessor if envs.VLLM_USE_V1 else Processor,
    info=Gemma3ProcessingInfo,
    dummy_inputs=Gemma3DummyInputsBuilder,
)
class Gemma3ForConditionalGeneration(Generator, SupportsMultiModal):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
'''

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="vLLM is installed"
)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginPaths]:
    """A tt-metal checkout with only that file."""
    package = tmp_path / "models" / "tt_transformers" / "tt"
    package.mkdir(parents=True)
    (package / "generator_vllm.py").write_text(GENERATOR_VLLM)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield PluginPaths(tt_metal_home=str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "models"]:
        del sys.modules[name]


def test_class_is_imported_and_made(paths: PluginPaths) -> None:
    """The import leaves no trace of vLLM."""
    llama = find_plugin_class("LlamaForCausalLM", paths)
    gemma = find_plugin_class("Gemma3ForConditionalGeneration", paths)
    assert not [name for name in sys.modules if name.partition(".")[0] == "vllm"]
    assert importlib.util.find_spec("vllm") is None
    for found in (llama, gemma):
        assert found("made").name == "made"
        assert adapt(found).entry.model.has_kv_cache_spec == (found is llama)


VLLM_IMPORTS = {
    "models.tt_transformers.tt.generator_vllm": GENERATOR_VLLM,
    "models.demos.deepseek_v3.tt.generator_vllm": "",
    "models.demos.gemma4.tt.generator_vllm": (
        "from models.tt_transformers.tt.generator_vllm import LlamaForCausalLM\n"
    ),
    "models.demos.qwen25_vl.tt.generator_vllm": """
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLDummyInputsBuilder as DummyInputs,
    Qwen2_5_VLMultiModalProcessor as Processor,
    Qwen2_5_VLProcessingInfo as Info,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
""",
    "models.demos.qwen3_vl.tt.generator_vllm": """
import vllm.envs as envs
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder as DummyInputs,
    Qwen3VLMultiModalProcessor as Processor,
    Qwen3VLProcessingInfo as Info,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
""",
    "models.demos.blackhole.qwen36.tt.qwen36_vllm": """
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.qwen3_5 import (
    Qwen3_5ProcessingInfo as Info,
    Qwen3VLDummyInputsBuilder as DummyInputs,
    Qwen3VLMultiModalProcessor as Processor,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
""",
}
"""What the modules of the table import of vLLM at their top, in 2026."""
REGISTERED = """
class SomeInfo(Info):
    pass
@MULTIMODAL_REGISTRY.register_processor(Processor, info=SomeInfo, dummy_inputs=DummyInputs)
"""


@pytest.mark.parametrize("architecture", ROUTES["tt-metal"].classes)
def test_every_class_of_the_table_is_imported(architecture: str, paths: PluginPaths) -> None:
    module, _, name = ROUTES["tt-metal"].classes[architecture].partition(":")
    assert paths.tt_metal_home is not None
    for path, imports in VLLM_IMPORTS.items():
        file = Path(paths.tt_metal_home, *path.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        registers = REGISTERED if "as Processor" in imports else ""
        bases = "(SupportsMultiModal)" if "SupportsMultiModal" in imports else ""
        body = f"class {name}{bases}:\n    pass\n" if path == module else ""
        file.write_text(imports + (registers + body if body else ""))
    assert find_plugin_class(architecture, paths).__module__ == module


def test_class_imports_more_later(paths: PluginPaths) -> None:
    """It imports records of KV caches inside the method that makes them."""
    llama = find_plugin_class("LlamaForCausalLM", paths)
    sizes = {"num_kv_heads": 8, "head_size": 64, "block_size": 32, "dtype": torch.bfloat16}
    config = vllm_config(None, **sizes)
    with vllm_stand_in():
        specs = llama.get_kv_cache_spec(config)
    spec = specs["model.layers.1.self_attn"]
    assert {name: getattr(spec, name) for name in sizes} == sizes
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        llama.get_kv_cache_spec(config)


class WholePrompts:
    """What Gemma 4's class for a QuietBox 2 asks of vLLM and its plug-in."""

    @classmethod
    def get_kv_cache_spec(cls, vllm_config: Any) -> Any:
        from vllm.v1.kv_cache_interface import FullAttentionSpec
        from vllm_tt_plugin.whole_prompt_cache import (
            WholePromptSlidingWindowSpec,
            validate_whole_prompt_cache,
        )

        validate_whole_prompt_cache(vllm_config)
        text = vllm_config.model_config.hf_text_config
        block_size = vllm_config.cache_config.block_size
        size = {"block_size": block_size, "dtype": torch.bfloat16, "page_size_padded": 4096}
        full = FullAttentionSpec(num_kv_heads=1, head_size=64, **size)
        window = WholePromptSlidingWindowSpec(
            num_kv_heads=text.num_key_value_heads, head_size=32, sliding_window=64, **size
        )
        return {"model.layers.0.self_attn": full, "model.layers.1.self_attn": window}


CONFIGURATION = SimpleNamespace(text_config=SimpleNamespace(num_key_value_heads=4))
SHAPE = (9, 4, 128, 32)


def spec_of(cls: type, configuration: object = CONFIGURATION) -> Any:
    signature: Any = SimpleNamespace(
        class_name=cls.__name__, has_kv_cache_spec=True, allocates_per_layer=True
    )
    specs = kv_cache_spec(cls, signature, configuration, SHAPE, torch.bfloat16)
    return layer_caches(
        signature, specs, shape=SHAPE, dtype=torch.bfloat16, num_layers=2, num_chips=4
    )


def test_class_that_computes_prompts_whole() -> None:
    caches = spec_of(WholePrompts)
    assert caches.has_windows
    assert [shape for shape, _, _ in caches.layers] == [(9, 1, 128, 64), (9, 1, 128, 32)]


def test_errors_of_a_class_are_typed_and_name_it() -> None:
    said = "generator WholePrompts: get_kv_cache_spec fails"
    with pytest.raises(ConfigError, match=f"{said}: AttributeError: .*num_key_value_heads"):
        spec_of(WholePrompts, SimpleNamespace())

    class Newer:
        @classmethod
        def get_kv_cache_spec(cls, vllm_config: Any) -> Any:
            import vllm.v1.kv_cache_interface as interface

            return interface.MambaSpec(block_size=1)

    with pytest.raises(ConfigError, match="generator Newer: get_kv_cache_spec fails: vLLM is not"):
        spec_of(Newer)


def test_missing_names() -> None:
    """The error says that the stand-in lacks the name; a probe gets the usual error."""
    with vllm_stand_in():
        import vllm.envs
        import vllm.multimodal

        with pytest.raises(MissingVLLMError, match=r"has no vllm\.LLM: .* install vLLM"):
            from vllm import LLM  # noqa: F401
        with pytest.raises(MissingVLLMError, match=r"has no vllm\.envs\.VLLM_PORT"):
            _ = vllm.envs.VLLM_PORT
        with pytest.raises(ModuleNotFoundError, match=r"vllm\.worker"):
            import vllm.worker
        assert not hasattr(vllm, "__wrapped__")
        assert vllm.multimodal.MULTIMODAL_REGISTRY.register_processor(1, info=2)(3) == 3
        from vllm.multimodal.processing import BaseMultiModalProcessor

        with pytest.raises(MissingVLLMError, match="needs its BaseMultiModalProcessor"):
            BaseMultiModalProcessor()


def test_real_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is not used if vLLM is installed, or already imported."""
    real = types.ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", real)
    with vllm_stand_in():
        assert sys.modules["vllm"] is real
        assert "vllm.envs" not in sys.modules
    assert sys.modules["vllm"] is real


def test_stand_in_goes_with_an_error() -> None:
    def fail() -> None:
        with vllm_stand_in():
            assert "vllm" in sys.modules
            raise ConfigError

    with pytest.raises(ConfigError):
        fail()
    assert "vllm" not in sys.modules

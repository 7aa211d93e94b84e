"""Stand-in for vLLM and its plug-in, so that tt-metal's classes can be imported without them.

tt-metal's ``generator_vllm.py`` files import vLLM at the top: decorators that register image
processors, marker base classes, and records of KV cache layouts. A text-only engine calls none of
them. `vllm_stand_in` puts modules with exactly these names into ``sys.modules`` and removes them
after the import; names bound by the imported module stay.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

T = TypeVar("T")


class MissingVLLMError(ImportError):
    """Use of a vLLM name that the stand-in lacks; says which and what to do.

    An ImportError, because ``from vllm.x import y`` hides the message of an AttributeError.
    """


@contextlib.contextmanager
def vllm_stand_in() -> Iterator[None]:
    """Let the body import vLLM's names; does nothing if vLLM itself is installed.

    Not thread-safe, as ``sys.modules`` is global.
    """
    if not _is_needed():
        yield
        return
    modules = _make_modules()
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def _is_needed() -> bool:
    return "vllm" not in sys.modules and importlib.util.find_spec("vllm") is None


class _Module(ModuleType):
    """Module of the stand-in; also a package, so that its submodules can be imported."""

    def __init__(self, name: str, contents: Mapping[str, object]) -> None:
        super().__init__(name, "Stand-in of ttserve; vLLM is not installed.")
        # `importlib.util.find_spec` fails on modules without a specification.
        vars(self).update(contents, __path__=[], __spec__=ModuleSpec(name, None, is_package=True))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingVLLMError(
            f"vLLM is not installed, and its stand-in has no {self.__name__}.{name}: remove this "
            "import from the generator class, or install vLLM beside ttserve",
            name=self.__name__,
        )


def _make_modules() -> dict[str, ModuleType]:
    modules: dict[str, ModuleType] = {}
    for path in _CONTENTS:
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in modules:
                modules[name] = _Module(name, _CONTENTS.get(name, {}))
                if depth > 1:
                    setattr(modules[".".join(parts[: depth - 1])], parts[depth - 1], modules[name])
    return modules


# --- what the modules hold ------------------------------------------------------------------------


class _Registry:
    """Registry whose decorators return the decorated class unchanged."""

    def _decorate(self, *_args: object, **_settings: object) -> Callable[[T], T]:
        return lambda decorated: decorated

    register_processor = _decorate
    register_input_processor = _decorate
    register_image_input_mapper = _decorate


def _marker(name: str) -> type:
    """Return an empty base class, which does not interfere with other bases' ``__init__``."""
    return type(name, (), {"__doc__": f"Stand-in for vLLM's {name}."})


def _processor(name: str) -> type:
    """Return a class that can be subclassed and subscripted, but not instantiated."""

    def refuse(self: object, *_args: object, **_settings: object) -> None:
        raise MissingVLLMError(f"vLLM is not installed: {type(self).__name__} needs its {name}")

    return type(
        name,
        (),
        {
            "__doc__": f"Stand-in for vLLM's {name}.",
            "__init__": refuse,
            "__class_getitem__": classmethod(lambda cls, _item: cls),
        },
    )


@dataclass(frozen=True)
class FullAttentionSpec:
    """KV of a layer with full attention.

    Attributes:
        block_size: Tokens per block.
        num_kv_heads: KV heads of the whole model, not of one chip.
        head_size: Elements of one head.
        dtype: Of the elements.
        sliding_window: The layer's window, if any; the cache still holds all tokens.
        page_size_padded: Bytes that vLLM counts for a block, so that layers of different sizes
            share a pool. Of no effect here, as each layer has a pool of its own.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    sliding_window: int | None = None
    page_size_padded: int | None = None


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    """KV of a layer with an attention window."""


@dataclass(frozen=True)
class WholePromptSlidingWindowSpec(SlidingWindowSpec):
    """KV of a layer with a window in a model that computes each prompt in one call."""


def _accept_whole_prompts(_vllm_config: object) -> None:
    """Accept the configuration: vLLM's settings that the plug-in checks here do not exist.

    A class that computes prompts whole declares neither prefix caching nor chunks, which are
    therefore off.
    """


def _processors(prefix: str) -> dict[str, object]:
    kinds = ("DummyInputsBuilder", "MultiModalProcessor", "ProcessingInfo")
    return {prefix + kind: _processor(prefix + kind) for kind in kinds}


def _markers(*names: str) -> dict[str, object]:
    return {name: _marker(name) for name in names}


_REGISTRY = _Registry()
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}
_INPUTS = _markers(
    "DecoderOnlyInputs", "EncoderDecoderInputs", "InputContext", "MultiModalDataDict",
    "TokenInputs", "token_inputs",
)  # fmt: skip
_MULTIMODAL_INPUTS = _markers(
    "MultiModalDataDict", "MultiModalEncDecInputs", "MultiModalFieldConfig", "MultiModalInputs",
    "MultiModalKwargs", "MultiModalKwargsItems",
)  # fmt: skip
_PROCESSING = {
    name: _processor(name)
    for name in ("BaseDummyInputsBuilder", "BaseMultiModalProcessor", "BaseProcessingInfo",
                 "EncDecMultiModalProcessor", "PromptReplacement", "PromptUpdate")
}  # fmt: skip
_ATTENTION_SPECS: dict[str, object] = {
    "FullAttentionSpec": FullAttentionSpec,
    "SlidingWindowSpec": SlidingWindowSpec,
    "KVCacheSpec": FullAttentionSpec,
}
_CONTENTS: Mapping[str, Mapping[str, object]] = {
    "vllm.config": _markers("VllmConfig"),
    "vllm.envs": {"VLLM_USE_V1": True},
    "vllm.inputs": {"INPUT_REGISTRY": _REGISTRY, **_INPUTS},
    "vllm.model_executor.models.gemma3_mm": _processors("Gemma3"),
    "vllm.model_executor.models.interfaces": _markers("SupportsMultiModal", "SupportsV0Only"),
    "vllm.model_executor.models.mistral3": _processors("Mistral3"),
    "vllm.model_executor.models.mllama": _processors("Mllama"),
    "vllm.model_executor.models.qwen2_5_vl": _processors("Qwen2_5_VL"),
    "vllm.model_executor.models.qwen2_vl": _processors("Qwen2VL"),
    "vllm.model_executor.models.qwen3_5": {
        **_processors("Qwen3VL"),
        "Qwen3_5ProcessingInfo": _processor("Qwen3_5ProcessingInfo"),
    },
    "vllm.model_executor.models.qwen3_vl": _processors("Qwen3VL"),
    "vllm.multimodal": {"MULTIMODAL_REGISTRY": _REGISTRY},
    "vllm.multimodal.inputs": _MULTIMODAL_INPUTS,
    "vllm.multimodal.parse": _markers("MultiModalDataItems"),
    "vllm.multimodal.processing": _PROCESSING,
    "vllm.multimodal.profiling": {
        "BaseDummyInputsBuilder": _PROCESSING["BaseDummyInputsBuilder"],
    },
    "vllm.utils.torch_utils": {"STR_DTYPE_TO_TORCH_DTYPE": _DTYPES},
    "vllm.v1.kv_cache_interface": _ATTENTION_SPECS,
    "vllm_tt_plugin.whole_prompt_cache": {
        "WholePromptSlidingWindowSpec": WholePromptSlidingWindowSpec,
        "validate_whole_prompt_cache": _accept_whole_prompts,
    },
}
"""Module -> names, exactly those that tt-metal's ``generator_vllm.py`` files import."""


def vllm_config(
    hf_config: Any,  # noqa: ANN401 - a transformers configuration: no base worth naming
    *,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
) -> SimpleNamespace:
    """Return the part of a ``VllmConfig`` that the classes' ``get_kv_cache_spec`` reads.

    Args:
        hf_config: The model's transformers configuration.
        num_kv_heads: KV heads of the whole model.
        head_size: Elements of one head.
        block_size: Tokens per block.
        dtype: Of the cache.
    """
    model = SimpleNamespace(
        hf_config=hf_config,
        hf_text_config=getattr(hf_config, "text_config", hf_config),
        dtype=dtype,
        get_num_kv_heads=lambda _parallel_config: num_kv_heads,
        get_head_size=lambda: head_size,
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=block_size),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )

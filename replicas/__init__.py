"""One mesh, one engine: everything between token ids and the device. No Ray, HTTP or pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replicas.async_llm import AsyncLLM
    from replicas.beam_search import BeamSearchParams
    from replicas.llm import LLM
    from replicas.llm_engine import LLMEngine, RequestOutput
    from replicas.sampling_params import SamplingParams, StructuredOutputs

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]

_HOMES = {
    "LLM": "replicas.llm",
    "AsyncLLM": "replicas.async_llm",
    "BeamSearchParams": "replicas.beam_search",
    "LLMEngine": "replicas.llm_engine",
    "RequestOutput": "replicas.llm_engine",
    "SamplingParams": "replicas.sampling_params",
    "StructuredOutputs": "replicas.sampling_params",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the public names are
    """Import a public name on first use, so that the pure cores do not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'replicas' has no attribute {name!r}")
    import importlib

    from replicas.kernel_settings import settle_here

    settle_here()
    return getattr(importlib.import_module(_HOMES[name]), name)

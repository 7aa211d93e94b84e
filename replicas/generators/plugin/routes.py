"""Routes: families of Tenstorrent's classes, by architecture, with their required settings.

A configuration may name a route as its generator instead of a class. Upstream selects these
families by environment variables; here the variables' values are the names of routes. This module
only has tables: it imports no class and sets nothing. Source: vllm-tt-plugin ``platform.py``; the
settings for a Galaxy are those of its documents.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from replicas.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replicas.config import EngineConfig, MeshConfig

_IN_TT_METAL = "models.tt_transformers.tt.generator_vllm"
_GEMMA4 = "models.demos.gemma4.tt.generator_vllm:Gemma4ForCausalLM"
_GALAXY = "models.demos.llama3_70b_galaxy.tt.generator_vllm"
_GALAXY_SHAPE, _GALAXY_LANES, _GALAXY_SLOTS = (8, 4), 4, 32


@dataclass(frozen=True, slots=True)
class GeneratorRoute:
    """Family of generator classes.

    Attributes:
        classes: Architecture of a config.json -> "module:Class".
        package: The package that contains them, for messages.
        environment: Defaults of environment variables of the engine process.
        mesh: Fields of `MeshConfig` -> value, used where the configuration has the default.
        is_for_galaxy: Whether they run only on the 32 chips of a Galaxy, with a lane per column.
    """

    classes: Mapping[str, str]
    package: str
    environment: Mapping[str, str] = field(default_factory=dict)
    mesh: Mapping[str, object] = field(default_factory=dict)
    is_for_galaxy: bool = False


ROUTES: Mapping[str, GeneratorRoute] = {
    "tt-metal": GeneratorRoute(
        {
            "DeepseekV3ForCausalLM": (
                "models.demos.deepseek_v3.tt.generator_vllm:DeepseekV3ForCausalLM"
            ),
            "Gemma3ForConditionalGeneration": f"{_IN_TT_METAL}:Gemma3ForConditionalGeneration",
            "Gemma4ForCausalLM": _GEMMA4,
            "Gemma4ForConditionalGeneration": _GEMMA4,
            "Gemma4UnifiedForConditionalGeneration": _GEMMA4,
            "GptOssForCausalLM": f"{_IN_TT_METAL}:GptOssForCausalLM",
            "LlamaForCausalLM": f"{_IN_TT_METAL}:LlamaForCausalLM",
            "Mistral3ForConditionalGeneration": f"{_IN_TT_METAL}:Mistral3ForConditionalGeneration",
            "MistralForCausalLM": f"{_IN_TT_METAL}:MistralForCausalLM",
            "Qwen2ForCausalLM": f"{_IN_TT_METAL}:QwenForCausalLM",
            "Qwen2_5_VLForConditionalGeneration": (
                "models.demos.qwen25_vl.tt.generator_vllm:Qwen2_5_VLForConditionalGeneration"
            ),
            "Qwen3ForCausalLM": f"{_IN_TT_METAL}:QwenForCausalLM",
            "Qwen3VLForConditionalGeneration": (
                "models.demos.qwen3_vl.tt.generator_vllm:Qwen3VLForConditionalGeneration"
            ),
            "Qwen3_5ForConditionalGeneration": (
                "models.demos.blackhole.qwen36.tt.qwen36_vllm:Qwen36ForCausalLM"
            ),
        },
        package="tt-metal",
    ),
    "tt-transformers": GeneratorRoute(
        {
            architecture: f"tt_transformers.vllm_registry:{architecture}"
            for architecture in (
                "LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM",
                "Qwen3ForCausalLM",
            )
        },
        package="tt-transformers",
    ),
    "llama3_70b_galaxy": GeneratorRoute(
        {"LlamaForCausalLM": f"{_GALAXY}:LlamaForCausalLM"},
        package="tt-metal",
        environment={"TT_LLAMA_TEXT_VER": "llama3_70b_galaxy"},
        mesh={
            "worker_l1_size": 1_344_544, "dispatch_core_axis": "col",
            "trace_region_size": 216_580_672,
        },
        is_for_galaxy=True,
    ),
    "qwen3_32b_galaxy": GeneratorRoute(
        {"Qwen3ForCausalLM": f"{_GALAXY}:QwenForCausalLM"},
        package="tt-metal",
        environment={"TT_QWEN3_TEXT_VER": "qwen3_32b_galaxy"},
        mesh={
            "worker_l1_size": 1_345_000, "dispatch_core_axis": "col",
            "trace_region_size": 184_915_840,
        },
        is_for_galaxy=True,
    ),
}  # fmt: skip
"""Routes by the name that a configuration gives as its generator."""

_ENCODER_DECODERS = ("MllamaForConditionalGeneration",)
"""Architectures whose tt-metal classes need a page table for an encoder's KV in prefill."""


def class_of_route(name: str, architecture: str) -> str:
    """Return the class with which a route serves an architecture, as "module:Class".

    Args:
        name: Name of the route.
        architecture: With or without the plug-in's prefix "TT".

    Raises:
        ConfigError: The route has none; lists its architectures.
    """
    check_decoder(architecture)
    classes = ROUTES[name].classes
    for known in architecture, architecture.removeprefix("TT"):
        if known in classes:
            return classes[known]
    raise ConfigError(
        f"generator {name!r} has no class for {architecture!r}; it has classes for "
        f"{', '.join(sorted(classes))}"
    )


def check_decoder(architecture: str) -> None:
    """Refuse an architecture with an encoder beside its decoder.

    Raises:
        ConfigError: It has one.
    """
    if architecture.removeprefix("TT") in _ENCODER_DECODERS:
        raise ConfigError(
            f"{architecture} attends to the KV of an image encoder (its class needs a "
            "cross_page_table); encoder-decoder models are not supported yet. Serve the "
            "text-only model of the same family"
        )


def check_route(config: EngineConfig, architecture: str) -> None:
    """Refuse configurations that the classes of their route can never serve.

    Args:
        config: The engine's configuration; accepted if its generator is not a route.
        architecture: The model's architecture.

    Raises:
        ConfigError: The route has no class for the architecture; or it is for a Galaxy and the mesh
            has other chips, lanes, slots or precision, or KV transfer is configured; names both.
    """
    name, mesh = config.generator, config.mesh
    if name is None or name not in ROUTES or mesh is None:
        return
    class_of_route(name, architecture)
    if not ROUTES[name].is_for_galaxy:
        return
    _check_galaxy(name, config, mesh)


def _check_galaxy(name: str, config: EngineConfig, mesh: MeshConfig) -> None:
    spec = mesh.spec
    if spec.arch != "wormhole" or spec.shape != _GALAXY_SHAPE:
        raise ConfigError(
            f"generator {name!r} runs on the 32 chips of a Galaxy, but mesh {mesh.name} has "
            f"{spec.shape[0]} rows of {spec.shape[1]} {spec.arch} chips; use a mesh of 8 rows of 4 "
            "wormhole chips (TG), or generator: tt-transformers or tt-metal"
        )
    if mesh.optimizations != "performance":
        raise ConfigError(
            f"generator {name!r} has a fixed precision, but mesh.optimizations is "
            f"{mesh.optimizations!r}; remove it"
        )
    if config.tt_data_parallel != _GALAXY_LANES:
        raise ConfigError(
            f"generator {name!r} has a lane for each of a Galaxy's {_GALAXY_LANES} columns, but "
            f"tt_data_parallel is {config.tt_data_parallel}; set it to {_GALAXY_LANES}"
        )
    if config.max_batch_size > _GALAXY_SLOTS:
        raise ConfigError(
            f"generator {name!r} decodes {_GALAXY_SLOTS} rows on a Galaxy, but max_batch_size is "
            f"{config.max_batch_size}; set it to {_GALAXY_SLOTS}"
        )
    if config.kv_connector is not None:
        raise ConfigError(
            f"generator {name!r} keeps the KV of all lanes in one cache, from which "
            f"kv_connector {config.kv_connector!r} cannot read a single lane; run it in one pool "
            "without kv_connector"
        )


def route_mesh(name: str | None, mesh: MeshConfig) -> MeshConfig:
    """Return a mesh's settings with the defaults of a route filled in.

    Args:
        name: The configuration's generator.
        mesh: The configured settings; values other than the defaults are kept. Without traces no
            trace region is set.
    """
    route = ROUTES.get(name or "")
    usual = type(mesh)(name=mesh.name)
    wanted = {} if route is None else route.mesh
    changes = {
        key: value
        for key, value in wanted.items()
        if getattr(mesh, key) == getattr(usual, key)
        and (key != "trace_region_size" or mesh.trace != "none")
    }
    return msgspec.structs.replace(mesh, **changes)


def route_environment(name: str | None) -> Mapping[str, str]:
    """Return default environment variables for a route's classes."""
    route = ROUTES.get(name or "")
    return {} if route is None else route.environment

"""Find a generator class by Hugging Face architecture name or by "module:Class".

Modules are imported only when their generator is requested.
"""

from __future__ import annotations

import importlib
import itertools
from typing import TYPE_CHECKING, cast

from replicas.config import NATIVE_TT_GENERATOR
from replicas.errors import ConfigError, UnknownGeneratorError
from replicas.generators.targets import known_generators, split_target, target_of

if TYPE_CHECKING:
    from replicas.config import EngineConfig
    from replicas.generators.protocol import Generator

REQUIRED_METHODS = (
    "initialize_vllm_model",
    "allocate_kv_cache",
    "warmup_model_prefill",
    "warmup_model_decode",
    "prefill_forward",
    "decode_forward",
    "read_decode_output",
    "process_decode_output_host",
)
_CAPABILITY_METHODS = {
    "supports_mixed_batch": ("forward_mixed",),
    "supports_hidden_states": ("forward_hidden", "compute_logits"),
    "supports_layer_callbacks": ("set_layer_callbacks",),
}


def resolve_generator(name_or_architecture: str) -> type[Generator]:
    """Import and check a generator class.

    Args:
        name_or_architecture: "module:Class", or a registered architecture name.

    Raises:
        UnknownGeneratorError: It is neither, or the module or the class does not exist.
        ConfigError: The class lacks methods of the interface; the message names them.
    """
    target = target_of(name_or_architecture) or name_or_architecture
    if ":" not in target:
        raise UnknownGeneratorError(
            f"no generator for {name_or_architecture!r}; known: {', '.join(known_generators())}; "
            "or name a class as 'module:Class'"
        )
    module_name, class_name = split_target(target)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UnknownGeneratorError(f"cannot import {target!r}: {error}") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise UnknownGeneratorError(f"module {module_name!r} has no class {class_name!r}")
    _check_interface(target, found)
    return cast("type[Generator]", found)


def resolve_mesh_generator(config: EngineConfig, architecture: str) -> type[Generator]:
    """Return the generator class for a Tenstorrent mesh.

    A class written for Tenstorrent's vLLM plug-in is adapted to our protocol. A subclass of this
    package's own generator is returned unchanged.

    Args:
        config: With a mesh, which gives the folders of bundles and tt-metal. Its generator is None
            for this package's own; one of `ROUTES` for the class that serves the architecture
            there; "module:Class"; or the architecture of a bundle.
        architecture: The model's architecture.

    Raises:
        UnknownGeneratorError: There is no such class; says what to set.
        ConfigError: The class cannot serve text, or this model, or this mesh; says why.
    """
    name, mesh = config.generator, config.mesh
    if name is None or name == NATIVE_TT_GENERATOR:
        return resolve_generator(NATIVE_TT_GENERATOR)
    # Imported here because they import torch, which most callers of this module do not need.
    from replicas.generators.plugin.adapter import adapt
    from replicas.generators.plugin.find import find_plugin_class
    from replicas.generators.plugin.routes import check_route
    from replicas.generators.plugin.sources import PluginPaths

    assert mesh is not None
    check_route(config, architecture)
    paths = PluginPaths(mesh.tt_metal_home, mesh.extra_models_dir)
    found = find_plugin_class(name, paths, architecture)
    bases = (f"{base.__module__}:{base.__qualname__}" for base in found.__mro__)
    if NATIVE_TT_GENERATOR in bases:
        _check_interface(name, found)
        return cast("type[Generator]", found)
    adapted = adapt(found)
    adapted.check_checkpoint(config.model)
    return adapted


def _check_interface(target: str, found: type) -> None:
    capabilities = getattr(found, "model_capabilities", None)
    if not isinstance(capabilities, dict):
        raise ConfigError(f"generator {target!r} has no dictionary model_capabilities")
    promised = [names for key, names in _CAPABILITY_METHODS.items() if capabilities.get(key)]
    wanted = (*REQUIRED_METHODS, *itertools.chain(*promised))
    missing = [name for name in wanted if not callable(getattr(found, name, None))]
    if missing:
        raise ConfigError(f"generator {target!r} lacks {', '.join(missing)}")

"""Find a generator class by Hugging Face architecture name or by "module:Class".

Owner: the table of registered architectures, filled at import time and by ``register_generator``.
Modules are imported only when their generator is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from replicas.config import NATIVE_TT_GENERATOR
from replicas.errors import ConfigError, UnknownGeneratorError
from replicas.generators.model_config import FAMILIES

if TYPE_CHECKING:
    from replicas.config import MeshConfig
    from replicas.generators.protocol import Generator

_TORCH_GENERATOR = "replicas.generators.torch.generator:TorchGenerator"
TT_METAL = "tt-metal"
"""What a configuration calls the class of tt-metal that serves the model's architecture."""

_targets: dict[str, str] = dict.fromkeys(FAMILIES, _TORCH_GENERATOR)

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
    "supports_mixed_batch": "forward_mixed",
    "supports_layer_callbacks": "set_layer_callbacks",
}


def register_generator(architecture: str, target: str) -> None:
    """Serve ``architecture`` with the class at ``target`` from now on.

    Args:
        architecture: Name as in a config.json's ``architectures``.
        target: "module:Class", imported when first asked for. Replaces an earlier target.

    Raises:
        ConfigError: ``target`` is not of the form "module:Class".
    """
    _split(target)
    _targets[architecture] = target


def known_generators() -> tuple[str, ...]:
    """Return the registered architecture names, sorted."""
    return tuple(sorted(_targets))


def resolve_generator(name_or_architecture: str) -> type[Generator]:
    """Import and check a generator class.

    Args:
        name_or_architecture: "module:Class", or a registered architecture name.

    Raises:
        UnknownGeneratorError: Neither, or the module or the class does not exist.
        ConfigError: The class lacks methods of the interface; the message names them.
    """
    target = _targets.get(name_or_architecture, name_or_architecture)
    if ":" not in target:
        raise UnknownGeneratorError(
            f"no generator for {name_or_architecture!r}; known: {', '.join(known_generators())}; "
            "or name a class as 'module:Class'"
        )
    module_name, class_name = _split(target)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UnknownGeneratorError(f"cannot import {target!r}: {error}") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise UnknownGeneratorError(f"module {module_name!r} has no class {class_name!r}")
    _check_interface(target, found)
    return cast("type[Generator]", found)


def resolve_mesh_generator(
    name: str | None, architecture: str, mesh: MeshConfig
) -> type[Generator]:
    """Import the generator class of a Tenstorrent mesh.

    A class that was written for Tenstorrent's vLLM plug-in is put behind our protocol. One that
    extends this package's own is taken as it is.

    Args:
        name: None for this package's own; "tt-metal" for the class that serves the architecture
            there; "module:Class"; or the architecture of a bundle.
        architecture: Of the model.
        mesh: Where bundles and tt-metal are.

    Raises:
        UnknownGeneratorError: No such class; says what to set.
        ConfigError: The class cannot serve text; says why.
    """
    if name is None or name == NATIVE_TT_GENERATOR:
        return resolve_generator(NATIVE_TT_GENERATOR)
    # They import torch, which most that ask this module for something do without.
    from replicas.generators.plugin.adapter import adapt
    from replicas.generators.plugin.find import PluginPaths, find_plugin_class

    if name == TT_METAL:
        found = find_plugin_class(architecture, PluginPaths(mesh.tt_metal_home))
    else:
        found = find_plugin_class(name, PluginPaths(mesh.tt_metal_home, mesh.extra_models_dir))
    bases = (f"{base.__module__}:{base.__qualname__}" for base in found.__mro__)
    if NATIVE_TT_GENERATOR in bases:
        _check_interface(name, found)
        return cast("type[Generator]", found)
    adapted = adapt(found)
    if mesh.sample_on_device == "all" and not adapted.signature.prefill.takes("sampling_params"):
        raise ConfigError(
            f"generator {adapted.signature.class_name} does not sample in prefill: its "
            "prefill_forward takes no sampling_params; set mesh.sample_on_device: decode_only"
        )
    return adapted


def _split(target: str) -> tuple[str, str]:
    module_name, _, class_name = target.partition(":")
    if not module_name or not class_name.isidentifier():
        raise ConfigError(f"generator {target!r} is not of the form 'module:Class'")
    return module_name, class_name


def _check_interface(target: str, found: type) -> None:
    capabilities = getattr(found, "model_capabilities", None)
    if not isinstance(capabilities, dict):
        raise ConfigError(f"generator {target!r} has no dictionary model_capabilities")
    promised = [name for key, name in _CAPABILITY_METHODS.items() if capabilities.get(key)]
    wanted = (*REQUIRED_METHODS, *promised)
    missing = [name for name in wanted if not callable(getattr(found, name, None))]
    if missing:
        raise ConfigError(f"generator {target!r} lacks {', '.join(missing)}")

"""Find a generator class by Hugging Face architecture name or by "module:Class".

Owner: the table of registered architectures, filled at import time and by ``register_generator``.
Modules are imported only when their generator is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from replicas.errors import ConfigError, UnknownGeneratorError
from replicas.generators.model_config import FAMILIES

if TYPE_CHECKING:
    from replicas.generators.protocol import Generator

_TORCH_GENERATOR = "replicas.generators.torch.generator:TorchGenerator"
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

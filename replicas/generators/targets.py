"""Table of the generator class that serves each architecture by default.

Owns the table of registered architectures, filled at import time and by ``register_generator``. The
table belongs to this process; an engine process gets a registered class through its configuration
(``with_registered_generator``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from replicas.errors import ConfigError
from replicas.generators.model_config import FAMILIES, read_architecture

if TYPE_CHECKING:
    from replicas.config import EngineConfig

_TORCH_GENERATOR = "replicas.generators.torch.generator:TorchGenerator"

_targets: dict[str, str] = dict.fromkeys(FAMILIES, _TORCH_GENERATOR)


def register_generator(architecture: str, target: str) -> None:
    """Serve ``architecture`` with the class at ``target`` from now on.

    Args:
        architecture: Name as in a config.json's ``architectures``.
        target: "module:Class", imported when first needed, also by engine processes. Replaces an
            earlier target.

    Raises:
        ConfigError: ``target`` is not of the form "module:Class".
    """
    split_target(target)
    _targets[architecture] = target


def target_of(architecture: str) -> str | None:
    """Return the class registered for an architecture as "module:Class", or None."""
    return _targets.get(architecture)


def known_generators() -> tuple[str, ...]:
    """Return the registered architecture names, sorted."""
    return tuple(sorted(_targets))


def with_registered_generator(config: EngineConfig) -> EngineConfig:
    """Set the generator of a configuration to the class registered for its model's architecture.

    An engine process sees only its configuration, not this table. The configuration is returned
    unchanged if it names a generator or a simulated mesh, or if the architecture is not registered
    or unreadable, which the engine then reports.
    """
    if config.generator is not None or config.simulated_mesh is not None:
        return config
    try:
        target = target_of(read_architecture(config.model) or "")
    except ConfigError:
        return config
    if target in (None, _TORCH_GENERATOR):
        return config
    return msgspec.structs.replace(config, generator=target)


def split_target(target: str, what: str = "generator") -> tuple[str, str]:
    """Split "module:Class".

    Args:
        target: The text to split.
        what: What the text names, for error messages.

    Raises:
        ConfigError: The text is not of that form.
    """
    module_name, _, class_name = target.partition(":")
    if not module_name or not class_name.isidentifier():
        raise ConfigError(f"{what} {target!r} is not of the form 'module:Class'")
    return module_name, class_name

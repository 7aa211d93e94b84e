"""Which class serves an architecture where a configuration names none.

Owner: the table of registered architectures, filled at import time and by ``register_generator``.
It is this process's: what was registered goes to an engine's process in its configuration
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
        target: "module:Class", imported when first asked for, by engines in processes of their own
            too. Replaces an earlier target.

    Raises:
        ConfigError: ``target`` is not of the form "module:Class".
    """
    split_target(target)
    _targets[architecture] = target


def target_of(architecture: str) -> str | None:
    """The class that serves an architecture, as "module:Class"; None if nobody registered any."""
    return _targets.get(architecture)


def known_generators() -> tuple[str, ...]:
    """Return the registered architecture names, sorted."""
    return tuple(sorted(_targets))


def with_registered_generator(config: EngineConfig) -> EngineConfig:
    """Name the class in a configuration that its model's architecture was registered with.

    An engine is mostly a process of its own, to which a configuration is all that comes. One that
    names a generator, a simulated mesh, an architecture that nobody registered and a folder that
    cannot be read are left to the engine.
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
    """Return the module and class of "module:Class".

    Args:
        target: To be split.
        what: It is, for messages.

    Raises:
        ConfigError: It is not of that form.
    """
    module_name, _, class_name = target.partition(":")
    if not module_name or not class_name.isidentifier():
        raise ConfigError(f"{what} {target!r} is not of the form 'module:Class'")
    return module_name, class_name

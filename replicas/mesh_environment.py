"""Environment variables of an engine on a mesh, read by ttnn and by third-party classes.

Only the variables for boards and model are fixed. All others are defaults, which the caller's
environment overrides.

Sources: what tt-inference-server sets for each device and model (workflows/model_spec.py and its
model_specs), and how tt_transformers' model_config.py reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from replicas.errors import ConfigError
from replicas.generators.fingerprint import conversion_source
from replicas.generators.model_config import read_architecture
from replicas.generators.plugin.routes import ROUTES, route_environment
from replicas.generators.plugin.sources import PluginPaths, check_source, find_source
from replicas.generators.targets import with_registered_generator
from replicas.model_name import model_name
from replicas.tt.boards import METAL_HOME, VISIBLE_DEVICES
from replicas.tt.triage import find_triage, timeout_variables
from replicas.tt.ttnn_package import find_ttnn
from replicas.user_cache import NO_HOME, user_cache
from replicas.watchdog import KNOWN_STEP_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replicas.config import EngineConfig, MeshConfig

MODEL = "HF_MODEL"
CACHE = "TT_CACHE_PATH"
"""Folder in which tt-metal's classes keep converted weights and zeros for KV caches. Without it
they write beside a checkpoint named by its path, and use any file that they find there."""

_ARCH_NAMES = {"wormhole": "wormhole_b0", "blackhole": "blackhole"}
_DISPATCH_ON_ETHERNET = "wormhole_b0_80_arch_eth_dispatch.yaml"
"""Dispatches commands from Ethernet cores, so that all 64 other cores compute."""
_HAS_ETHERNET_DISPATCH = frozenset({"N300", "T3K", "GalaxyT3K"})
_THROTTLE = "5"
"""Throttling level of matrix products on a Galaxy, which limits swings of the chips' current."""
_DESCRIPTORS = {"P300": "p300", "GalaxyT3K": "t3k"}
"""Meshes that are part of a larger machine, which ttnn would otherwise open as a whole."""


def mesh_environment(config: EngineConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the complete environment of an engine.

    Args:
        config: The engine's configuration; without a mesh, `inherited` is returned unchanged.
        inherited: The caller's environment.

    Raises:
        ConfigError: A third-party class needs a link in the user's cache, but there is no home
        folder.
    """
    mesh = config.mesh
    if mesh is None:
        return dict(inherited)
    defaults = {
        **_file_defaults(inherited),
        **_timeouts(config, mesh, inherited),
        **_power_and_fabric(config, mesh, inherited),
    }
    if not config.uses_native_generator:
        defaults |= _foreign_defaults(config, mesh, inherited)
    return {**defaults, **inherited, **_bindings(config, mesh)}


def with_places(config: EngineConfig, environment: Mapping[str, str]) -> EngineConfig:
    """Fill in where third-party classes are found, from the variables of Tenstorrent's tools.

    Args:
        config: The engine's configuration; fields that it sets are kept.
        environment: Environment of the process that starts the engine.
    """
    mesh = config.mesh
    if mesh is None or config.uses_native_generator:
        return config
    mesh = msgspec.structs.replace(
        mesh,
        tt_metal_home=mesh.tt_metal_home or environment.get(METAL_HOME) or None,
        extra_models_dir=mesh.extra_models_dir or environment.get("EXTRA_MODELS_DIR") or None,
    )
    return msgspec.structs.replace(config, mesh=mesh)


def check_generator(config: EngineConfig, environment: Mapping[str, str]) -> None:
    """Refuse a third-party generator class that cannot be found in this host's files.

    Args:
        config: The engine's configuration.
        environment: Environment of the process that would start the engine.

    Raises:
        ConfigError: The generator is not a known name, or the class's module is missing; says what
            to write or to set.
    """
    config = with_places(with_registered_generator(config), environment)
    mesh, name = config.mesh, config.generator
    if mesh is None or name is None or config.uses_native_generator:
        return
    paths = PluginPaths(mesh.tt_metal_home, mesh.extra_models_dir)
    check_source(find_source(name, paths, read_architecture(config.model) or ""), paths)


def make_folders(config: EngineConfig, environment: Mapping[str, str]) -> None:
    """Create the model link and the cache folder that the environment of a foreign class names.

    Args:
        config: The engine's configuration.
        environment: The result of `mesh_environment`.

    Raises:
        ConfigError: One of them cannot be created; says what to set.
    """
    if config.mesh is None or config.uses_native_generator:
        return
    name = Path(environment[MODEL])
    if str(name) != config.model:
        try:
            name.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                name.symlink_to(Path(config.model).absolute(), target_is_directory=True)
        except OSError as error:
            raise ConfigError(
                f"cannot create the link {name} to model {config.model}: {error.strerror}; use a "
                f"model folder that is called {name.name}"
            ) from error
    if CACHE not in environment:
        if config.mesh.weight_cache_folder is None:
            raise ConfigError(
                f"tt-metal's classes have no folder for converted weights: {NO_HOME}, "
                "or set mesh.weight_cache"
            )
        return
    folder = Path(environment[CACHE])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("this user may not write there")
    except OSError as error:
        raise ConfigError(
            f"{CACHE} {folder}, the folder for tt-metal's converted weights, cannot be used: "
            f"{error}; set mesh.weight_cache to a writable folder"
        ) from error


def _file_defaults(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return defaults that keep ttnn from leaving files in shared or current folders."""
    # ttnn initialises MPI in every process, and MPI's shared-memory transport leaves a file in
    # /dev/shm each time. An engine is one process and sends no MPI messages, so "self" is enough.
    defaults = {"OMPI_MCA_btl": "self"}
    cache = user_cache(inherited.get("HOME"))
    if cache is not None:
        # Otherwise ttnn creates a folder `generated` in the engine's working folder.
        defaults["TT_METAL_LOGS_PATH"] = str(cache / "ttnn-logs")
    return defaults


def _timeouts(
    config: EngineConfig, mesh: MeshConfig, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return defaults that make ttnn report a hung device before the engine is killed."""
    package = find_ttnn()
    folder = None if package is None else package.folder
    # Foreign classes have longer steps before they are killed. A device that makes no progress for
    # a third of the shorter time hangs in any class.
    kill_s = min(config.step_timeout_s or KNOWN_STEP_S, KNOWN_STEP_S)
    return timeout_variables(find_triage(_metal_home(mesh, inherited), folder), kill_s)


def _power_and_fabric(
    config: EngineConfig, mesh: MeshConfig, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return defaults that depend on the boards, for any generator class."""
    spec = mesh.spec
    defaults = {}
    route = ROUTES.get(config.generator or "")
    is_made_for_it = route is not None and route.is_for_galaxy
    if spec.board in {"galaxy-wormhole", "galaxy-blackhole"} and not is_made_for_it:
        defaults["TT_MM_THROTTLE_PERF"] = _THROTTLE
    if spec.name in _DESCRIPTORS:
        name = f"{_DESCRIPTORS[spec.name]}_mesh_graph_descriptor.textproto"
        descriptor = _mesh_graph_descriptor(name, _metal_home(mesh, inherited))
        if descriptor is not None:
            defaults["TT_MESH_GRAPH_DESC_PATH"] = str(descriptor)
    return defaults


def _metal_home(mesh: MeshConfig, inherited: Mapping[str, str]) -> str | None:
    """Return the tt-metal checkout that the engine uses, or None."""
    return mesh.tt_metal_home or inherited.get(METAL_HOME) or None


def _mesh_graph_descriptor(name: str, metal_home: str | None) -> Path | None:
    """Return the descriptor's path in the tt-metal checkout, else in the ttnn package, or None."""
    package = find_ttnn()
    roots = (
        Path(metal_home) if metal_home is not None else None,
        package.folder if package is not None else None,
    )
    folder = "tt_metal/fabric/mesh_graph_descriptors"
    files = (root / folder / name for root in roots if root is not None)
    return next((file for file in files if file.is_file()), None)


def _foreign_defaults(
    config: EngineConfig, mesh: MeshConfig, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return defaults that tt-metal's classes read while they load."""
    spec = mesh.spec
    defaults = {"ARCH_NAME": _ARCH_NAMES[spec.arch], **route_environment(config.generator)}
    if spec.name in _HAS_ETHERNET_DISPATCH:
        defaults["WH_ARCH_YAML"] = _DISPATCH_ON_ETHERNET
    cache = _cache_folder(config, mesh, _metal_home(mesh, inherited))
    if cache is not None:
        defaults[CACHE] = str(cache)
    return defaults


def _cache_folder(config: EngineConfig, mesh: MeshConfig, metal_home: str | None) -> Path | None:
    """Return a folder specific to these weights, this class, mesh and precision.

    None if the model is unreadable (the engine reports that in detail) or the user has no cache.
    """
    folder = mesh.weight_cache_folder
    try:
        weights = conversion_source(config)
    except OSError:
        return None
    if folder is None:
        return None
    package = find_ttnn()
    version = None if package is None else package.version
    # Different releases of a class may convert to different layouts.
    source = (config.generator, metal_home, version)
    digest = hashlib.blake2b(repr((*weights, source)).encode(), digest_size=12)
    spec = mesh.spec
    words = (model_name(config.model), spec.name, spec.arch, f"{config.tt_data_parallel} lanes")
    readable = (re.sub(r"[^\w.]+", "-", word).strip("-") for word in (*words, mesh.optimizations))
    return folder / "tt-metal" / "-".join((*readable, digest.hexdigest()))


def _bindings(config: EngineConfig, mesh: MeshConfig) -> dict[str, str]:
    """Return variables that the configuration fixes, overriding the environment."""
    variables: dict[str, str] = {}
    if mesh.visible_devices is not None:
        variables[VISIBLE_DEVICES] = ",".join(map(str, mesh.visible_devices))
    if not config.uses_native_generator:
        variables |= {MODEL: _named_model(config.model), "MESH_DEVICE": mesh.spec.mesh_device}
        if mesh.tt_metal_home is not None:
            variables[METAL_HOME] = mesh.tt_metal_home
    return variables


def _named_model(folder: str) -> str:
    """Return a path of the model that ends in its name, by which tt-metal's classes identify it.

    That is the folder itself, or a link to it that `make_folders` creates.

    Raises:
        ConfigError: A link is needed, but there is no home folder for it.
    """
    name = model_name(folder)
    if name == Path(folder).name:
        return folder
    target = str(Path(folder).absolute())
    digest = hashlib.blake2b(target.encode(), digest_size=8).hexdigest()
    cache = user_cache()
    if cache is None:
        raise ConfigError(f"cannot create a link called {name} to {folder}: {NO_HOME}")
    return str(cache / "names" / digest / name)

"""What an engine on a mesh finds in its environment: read by ttnn, and by classes of others.

Everything but the boards and the model is a default: what the caller's environment says goes
before it.

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

from replicas.boards import METAL_HOME, VISIBLE_DEVICES
from replicas.errors import ConfigError
from replicas.generators.fingerprint import conversion_source
from replicas.generators.model_config import read_architecture
from replicas.generators.plugin.routes import ROUTES, route_environment
from replicas.generators.plugin.sources import PluginPaths, check_source, find_source
from replicas.generators.targets import with_registered_generator
from replicas.model_name import model_name
from replicas.ttnn_package import find_ttnn
from replicas.user_cache import NO_HOME, user_cache

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replicas.config import EngineConfig, MeshConfig

MODEL = "HF_MODEL"
CACHE = "TT_CACHE_PATH"
"""Where classes of tt-metal keep converted weights and zeros for KV caches. Without it they write
beside a checkpoint that is named by its path, and they take whatever lies there for their own."""

_ARCH_NAMES = {"wormhole": "wormhole_b0", "blackhole": "blackhole"}
_DISPATCH_ON_ETHERNET = "wormhole_b0_80_arch_eth_dispatch.yaml"
"""Commands go out from cores of the Ethernet, so that all 64 others compute."""
_HAS_ETHERNET_DISPATCH = frozenset({"N300", "T3K", "GalaxyT3K"})
_THROTTLE = "5"
"""How much matrix products are held back on a Galaxy, against swings of its chips' current."""
_DESCRIPTORS = {"P300": "p300", "GalaxyT3K": "t3k"}
"""Of meshes that are a part of a larger machine, which ttnn would take for the whole of it."""


def mesh_environment(config: EngineConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of an engine.

    Args:
        config: The engine's configuration; without a mesh nothing is added.
        inherited: What the caller gives.

    Raises:
        ConfigError: A class of others would need a link in the cache of a user who has none.
    """
    mesh = config.mesh
    if mesh is None:
        return dict(inherited)
    defaults = {**_file_defaults(inherited), **_power_and_fabric(config, mesh, inherited)}
    if not config.uses_native_generator:
        defaults |= _foreign_defaults(config, mesh, inherited)
    return {**defaults, **inherited, **_bindings(config, mesh)}


def with_places(config: EngineConfig, environment: Mapping[str, str]) -> EngineConfig:
    """With where a mesh's class of others comes from, as Tenstorrent's own tools are told it.

    Args:
        config: The engine's configuration; what it says itself is left.
        environment: Of whoever starts it.
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
    """Refuse a mesh's class of others that is not on this host, as far as files tell.

    Args:
        config: The engine's configuration.
        environment: Of whoever would start it.

    Raises:
        ConfigError: Its generator is no name that stands for a class, or the class's module is not
            here; says what to write or to set.
    """
    config = with_places(with_registered_generator(config), environment)
    mesh, name = config.mesh, config.generator
    if mesh is None or name is None or config.uses_native_generator:
        return
    paths = PluginPaths(mesh.tt_metal_home, mesh.extra_models_dir)
    check_source(find_source(name, paths, read_architecture(config.model) or ""), paths)


def make_folders(config: EngineConfig, environment: Mapping[str, str]) -> None:
    """Make what a foreign class finds by its environment: a model's other name, and its cache.

    Args:
        config: The engine's configuration.
        environment: Of `mesh_environment`.

    Raises:
        ConfigError: It cannot be written; says what to set.
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
                f"cannot name {config.model} by a link {name}: {error.strerror}; give a folder "
                f"that is called {name.name} as the model"
            ) from error
    if CACHE not in environment:
        if config.mesh.weight_cache_folder is None:
            raise ConfigError(
                f"classes of tt-metal would keep converted weights beside the model, as {NO_HOME}, "
                "or mesh.weight_cache"
            )
        return
    folder = Path(environment[CACHE])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("this user may not write there")
    except OSError as error:
        raise ConfigError(
            f"{CACHE} {folder}, where classes of tt-metal keep converted weights, cannot be used: "
            f"{error}; set mesh.weight_cache to a folder that can be written"
        ) from error


def _file_defaults(inherited: Mapping[str, str]) -> dict[str, str]:
    """What keeps ttnn from leaving files where they are in the way."""
    # ttnn starts its MPI library in every process, whose shared-memory transport leaves a file in
    # /dev/shm after each, for ever. An engine is one process and sends to nobody by MPI.
    defaults = {"OMPI_MCA_btl": "self"}
    cache = user_cache(inherited.get("HOME"))
    if cache is not None:
        # It would make a folder `generated` in whatever folder the engine is started from.
        defaults["TT_METAL_LOGS_PATH"] = str(cache / "ttnn-logs")
    return defaults


def _power_and_fabric(
    config: EngineConfig, mesh: MeshConfig, inherited: Mapping[str, str]
) -> dict[str, str]:
    """What the boards need, whoever's class runs on them."""
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
    """The checkout of tt-metal that the engine finds, or None."""
    return mesh.tt_metal_home or inherited.get(METAL_HOME) or None


def _mesh_graph_descriptor(name: str, metal_home: str | None) -> Path | None:
    """The file in the checkout of tt-metal, or else in the ttnn package."""
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
    """What classes of tt-metal read while they load."""
    spec = mesh.spec
    defaults = {"ARCH_NAME": _ARCH_NAMES[spec.arch], **route_environment(config.generator)}
    if spec.name in _HAS_ETHERNET_DISPATCH:
        defaults["WH_ARCH_YAML"] = _DISPATCH_ON_ETHERNET
    cache = _cache_folder(config, mesh, _metal_home(mesh, inherited))
    if cache is not None:
        defaults[CACHE] = str(cache)
    return defaults


def _cache_folder(config: EngineConfig, mesh: MeshConfig, metal_home: str | None) -> Path | None:
    """A folder that belongs to these weights, this class, mesh and precision alone.

    None without a readable model, of which the engine says more, or a place for it.
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
    # Releases of a class may convert to other layouts.
    source = (config.generator, metal_home, version)
    digest = hashlib.blake2b(repr((*weights, source)).encode(), digest_size=12)
    spec = mesh.spec
    words = (model_name(config.model), spec.name, spec.arch, f"{config.tt_data_parallel} lanes")
    readable = (re.sub(r"[^\w.]+", "-", word).strip("-") for word in (*words, mesh.optimizations))
    return folder / "tt-metal" / "-".join((*readable, digest.hexdigest()))


def _bindings(config: EngineConfig, mesh: MeshConfig) -> dict[str, str]:
    """What the configuration decides, whatever the environment says."""
    variables: dict[str, str] = {}
    if mesh.visible_devices is not None:
        variables[VISIBLE_DEVICES] = ",".join(map(str, mesh.visible_devices))
    if not config.uses_native_generator:
        variables |= {MODEL: _named_model(config.model), "MESH_DEVICE": mesh.spec.mesh_device}
        if mesh.tt_metal_home is not None:
            variables[METAL_HOME] = mesh.tt_metal_home
    return variables


def _named_model(folder: str) -> str:
    """A path of a model whose last part is the model's name: classes of tt-metal go by that alone.

    The folder's own; or one for a link to it, which `make_folders` makes.

    Raises:
        ConfigError: There is no place for a link.
    """
    name = model_name(folder)
    if name == Path(folder).name:
        return folder
    target = str(Path(folder).absolute())
    digest = hashlib.blake2b(target.encode(), digest_size=8).hexdigest()
    cache = user_cache()
    if cache is None:
        raise ConfigError(f"cannot name {folder} by a link that is called {name}: {NO_HOME}")
    return str(cache / "names" / digest / name)

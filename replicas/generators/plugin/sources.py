"""Location of third-party generator classes, without importing any.

There are three places. "module:Class" names a class on Python's path, or one of a tt-metal
checkout. A route (`routes`) stands for its class for an architecture, and an architecture's name
for that of tt-metal. A folder of bundles adds architectures: each bundle is a folder with its
modules and a ``vllm_metadata.json`` of {"arch", "main_class": "module:Class"}. The environment is
not read here; the places are arguments. Source of the bundle format: vllm-tt-plugin
``platform.py``.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from replicas.errors import ConfigError, UnknownGeneratorError
from replicas.generators.plugin.routes import ROUTES, check_decoder, class_of_route
from replicas.generators.targets import split_target

METADATA = "vllm_metadata.json"


@dataclass(frozen=True, slots=True)
class PluginPaths:
    """Places to search for classes besides Python's path.

    Attributes:
        tt_metal_home: Root of a tt-metal checkout.
        extra_models_dir: Folder of model bundles.
    """

    tt_metal_home: str | None = None
    extra_models_dir: str | None = None


@dataclass(frozen=True, slots=True)
class Bundle:
    """Bundle in a folder of ``extra_models_dir``.

    Attributes:
        folder: The bundle's folder, appended to Python's path to import its modules.
        architecture: The architecture that the bundle serves.
        target: "module:Class".
    """

    folder: Path
    architecture: str
    target: str


@dataclass(frozen=True, slots=True)
class Source:
    """Location of a class that is not imported yet.

    Attributes:
        target: "module:Class".
        bundle: The bundle that contains it, if any.
    """

    target: str
    bundle: Bundle | None = None

    @property
    def module(self) -> str:
        """Dotted name of its module."""
        return split_target(self.target)[0]

    @property
    def package(self) -> str:
        """Root package of its module; "models" is tt-metal's model code."""
        return self.module.partition(".")[0]


def find_source(name: str, paths: PluginPaths, architecture: str = "") -> Source:
    """Return the class that a configuration's generator stands for.

    Args:
        name: One of `ROUTES`; "module:Class"; or an architecture of a bundle or of tt-metal, with
            or without the plug-in's prefix "TT". Bundles take precedence over tt-metal.
        paths: Places to search besides Python's path.
        architecture: The model's architecture, which selects a route's class.

    Raises:
        UnknownGeneratorError: The name is none of these; lists the known ones.
        ConfigError: A bundle is broken, or the architecture cannot be served; says why.
    """
    if name in ROUTES:
        return Source(class_of_route(name, architecture))
    bundles = find_bundles(paths.extra_models_dir)
    if ":" in name:
        of_bundle = (bundle for bundle in bundles.values() if bundle.target == name)
        return Source(name, next(of_bundle, None))
    served = name.removeprefix("TT")
    if served in bundles:
        return Source(bundles[served].target, bundles[served])
    check_decoder(served)
    in_tt_metal = ROUTES["tt-metal"].classes
    if served not in in_tt_metal:
        known = sorted({*bundles, *in_tt_metal})
        raise UnknownGeneratorError(
            f"no generator class for {name!r}: neither a bundle of extra_models_dir "
            f"{paths.extra_models_dir!r} nor tt-metal serves it; known: {', '.join(known)}; or "
            f"one of {', '.join(ROUTES)}"
        )
    return Source(in_tt_metal[served])


def check_source(source: Source, paths: PluginPaths) -> None:
    """Refuse a class whose module is not on this host.

    Raises:
        UnknownGeneratorError: The module or its package is missing; says what to do.
        ConfigError: tt_metal_home is not a tt-metal checkout.
    """
    check_package(source, paths)
    if not any(_has_module(folder, source.module) for folder in _folders(source, paths)):
        raise UnknownGeneratorError(
            f"generator {source.target!r}: there is no module {source.module!r} on this host; "
            "correct its name, or put its folder on PYTHONPATH"
        )


def _folders(source: Source, paths: PluginPaths) -> list[Path]:
    """Return the folders that may contain the class's root package."""
    if source.bundle is not None:
        return [source.bundle.folder]
    if source.package == "models" and paths.tt_metal_home is not None:
        return [Path(paths.tt_metal_home)]
    spec = importlib.util.find_spec(source.package)
    if spec is None:
        return []
    inside = [Path(place).parent for place in spec.submodule_search_locations or ()]
    return inside or ([] if spec.origin is None else [Path(spec.origin).parent])


def _has_module(folder: Path, module: str) -> bool:
    path = folder.joinpath(*module.split("."))
    # Also matches compiled modules, whose suffix is longer than ".py".
    return path.is_dir() or any(path.parent.glob(f"{path.name}.*"))


def check_package(source: Source, paths: PluginPaths) -> None:
    """Refuse a class whose Tenstorrent package is missing; errors as in `check_source`."""
    package, target, home = source.package, source.target, paths.tt_metal_home
    if source.bundle is not None:
        return
    if package == "tt_transformers" and importlib.util.find_spec(package) is None:
        raise UnknownGeneratorError(
            f"generator {target!r} is part of tt-transformers, which is missing: install "
            "github.com/tenstorrent/tt-transformers with the ttnn that it requires, or put its "
            "folder src on PYTHONPATH"
        )
    if package != "models":
        return
    if home is not None and not (Path(home) / "models").is_dir():
        raise ConfigError(
            f"tt_metal_home {home} is not a tt-metal checkout: it has no folder models"
        )
    if home is None and importlib.util.find_spec(package) is None:
        raise UnknownGeneratorError(
            f"generator {target!r} is part of tt-metal, which is missing (the ttnn wheel does "
            "not contain it): clone github.com/tenstorrent/tt-metal at the release of the ttnn "
            "wheel and set TT_METAL_HOME or mesh.tt_metal_home to it, or put it on PYTHONPATH"
        )


def find_bundles(extra_models_dir: str | None) -> dict[str, Bundle]:
    """Read the metadata of every bundle.

    Args:
        extra_models_dir: Folder of the bundles; folders in it without metadata are ignored.

    Returns:
        Architecture without the prefix "TT" -> bundle.

    Raises:
        ConfigError: The folder does not exist, a metadata file is broken, or two bundles serve the
            same architecture; names the files.
    """
    if extra_models_dir is None:
        return {}
    root = Path(extra_models_dir)
    if not root.is_dir():
        raise ConfigError(f"extra_models_dir {extra_models_dir} is not a folder")
    bundles: dict[str, Bundle] = {}
    for metadata in sorted(root.glob(f"*/{METADATA}")):
        bundle = _read_bundle(metadata)
        other = bundles.setdefault(bundle.architecture, bundle)
        if other is not bundle:
            raise ConfigError(
                f"{other.folder / METADATA} and {metadata} both serve {bundle.architecture}; "
                "remove one"
            )
    return bundles


def _read_bundle(metadata: Path) -> Bundle:
    try:
        content = json.loads(metadata.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {metadata}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{metadata} is not JSON: {error}") from error
    values = content if isinstance(content, dict) else {}
    for key in ("arch", "main_class"):
        if not (isinstance(values.get(key), str) and values[key]):
            raise ConfigError(f"{metadata} has no string {key!r}")
    split_target(values["main_class"], f"{metadata}: main_class")
    return Bundle(metadata.parent, values["arch"].removeprefix("TT"), values["main_class"])

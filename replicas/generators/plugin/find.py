"""Finds generator classes that are not ours: in tt-metal, in model bundles, anywhere on the path.

Three places. "module:Class" names a class that Python can import (``PYTHONPATH``), or one of a
tt-metal checkout, whose root is put on the path. A route (`routes`) stands for the class that it
serves an architecture with, an architecture's name for that of tt-metal. A folder of bundles gives
further architectures: each bundle is a folder with a ``vllm_metadata.json`` of
{"arch", "main_class": "module:Class"} beside its modules.
Nothing is read from the environment here: the places are arguments.
Source of the bundle format: vllm-tt-plugin ``platform.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from replicas.errors import ConfigError, UnknownGeneratorError
from replicas.generators.plugin.routes import ROUTES, check_decoder, class_of_route
from replicas.generators.plugin.shim import vllm_stand_in
from replicas.generators.targets import split_target

METADATA = "vllm_metadata.json"


@dataclass(frozen=True, slots=True)
class PluginPaths:
    """Where classes are looked for besides Python's own path.

    Attributes:
        tt_metal_home: Root of a tt-metal checkout.
        extra_models_dir: Folder of model bundles.
    """

    tt_metal_home: str | None = None
    extra_models_dir: str | None = None


@dataclass(frozen=True, slots=True)
class Bundle:
    """One folder of ``extra_models_dir``.

    Attributes:
        folder: Goes on Python's path, so that the class's module is found.
        architecture: The architecture that the bundle serves.
        target: "module:Class".
    """

    folder: Path
    architecture: str
    target: str


def find_route_class(route: str, architecture: str, paths: PluginPaths) -> type:
    """Import the class that a route serves an architecture with.

    Args:
        route: One of `ROUTES`.
        architecture: Of the model.
        paths: Where to look besides Python's path.

    Raises:
        UnknownGeneratorError: The package that has the class is not there; says what to do.
        ConfigError: The route has no class for the architecture, or the class is broken.
    """
    return _import_class(class_of_route(route, architecture), paths)


def find_plugin_class(name: str, paths: PluginPaths) -> type:
    """Import a generator class.

    Args:
        name: "module:Class", or an architecture of a bundle or of tt-metal, with or without the
            plugin's "TT" before it. A bundle goes before tt-metal.
        paths: Where to look besides Python's path.

    Raises:
        UnknownGeneratorError: No such architecture or module, tt-metal is not there; says what to
            set.
        ConfigError: A bundle, a module or a class is broken; names the file and the reason. Or the
            architecture cannot be served.
    """
    bundles = find_bundles(paths.extra_models_dir)
    if ":" in name:
        for bundle in bundles.values():
            if bundle.target == name:
                return _import_bundle(bundle)
        return _import_class(name, paths)
    architecture = name.removeprefix("TT")
    if architecture in bundles:
        return _import_bundle(bundles[architecture])
    check_decoder(architecture)
    in_tt_metal = ROUTES["tt-metal"].classes
    if architecture not in in_tt_metal:
        known = sorted({*bundles, *in_tt_metal})
        raise UnknownGeneratorError(
            f"no generator class for {name!r}: neither a bundle of extra_models_dir "
            f"{paths.extra_models_dir!r} nor tt-metal serves it; known: {', '.join(known)}; or "
            f"one of {', '.join(ROUTES)}"
        )
    return find_route_class("tt-metal", architecture, paths)


def find_bundles(extra_models_dir: str | None) -> dict[str, Bundle]:
    """Read the metadata of every bundle.

    Args:
        extra_models_dir: Their folder; folders in it without metadata are no bundles.

    Returns:
        Architecture, without "TT" before it -> bundle.

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


def _import_bundle(bundle: Bundle) -> type:
    _append_to_path(bundle.folder)
    return _import(bundle.target, f"{bundle.folder / METADATA}: main_class {bundle.target!r}")


def _import_class(target: str, paths: PluginPaths) -> type:
    module_name, _ = split_target(target)
    package = module_name.partition(".")[0]
    if package == "tt_transformers" and importlib.util.find_spec(package) is None:
        raise UnknownGeneratorError(
            f"generator {target!r} is part of tt-transformers, which is not there: install "
            "github.com/tenstorrent/tt-transformers beside the ttnn that it asks for, or put its "
            "folder src on PYTHONPATH"
        )
    if package != "models":
        return _import(target, f"generator {target!r}")
    _reach_tt_metal(target, paths.tt_metal_home)
    found = _import(target, f"generator {target!r}")
    _check_origin(module_name, paths.tt_metal_home)
    return found


def _reach_tt_metal(target: str, tt_metal_home: str | None) -> None:
    """Make ``models``, the root package of tt-metal's model code, importable."""
    if tt_metal_home is not None:
        root = Path(tt_metal_home)
        if not (root / "models").is_dir():
            raise ConfigError(
                f"tt_metal_home {tt_metal_home} is not a tt-metal checkout: it has no folder models"
            )
        _append_to_path(root)
    elif importlib.util.find_spec("models") is None:
        raise UnknownGeneratorError(
            f"generator {target!r} is part of tt-metal, which is not there (the ttnn wheel does "
            "not hold it): clone github.com/tenstorrent/tt-metal at the release of the ttnn wheel "
            "and set TT_METAL_HOME to it, or put it on PYTHONPATH"
        )


def _check_origin(module_name: str, tt_metal_home: str | None) -> None:
    if tt_metal_home is None:
        return
    root, file = Path(tt_metal_home).resolve(), Path(_file_of(module_name)).resolve()
    if not file.is_relative_to(root):
        raise ConfigError(
            f"tt_metal_home {tt_metal_home} has it too, but {file} goes first on Python's path; "
            "take that folder off PYTHONPATH, or do not set tt_metal_home"
        )


def _append_to_path(folder: Path) -> None:
    """At the end: an installed package of the same name goes first, as without us."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import(target: str, what: str) -> type:
    module_name, class_name = split_target(target)
    try:
        with vllm_stand_in():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if module_name == error.name or module_name.startswith(f"{error.name}."):
            raise UnknownGeneratorError(f"{what}: there is no module {error.name!r}") from error
        raise ConfigError(f"{what}: its imports lack {error.name!r}: {error}") from error
    except Exception as error:  # a foreign module may fail in every way
        where = f" ({_file_of(module_name)})"
        raise ConfigError(f"{what}{where} cannot be imported: {_reason(error)}") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise UnknownGeneratorError(f"{what}: {module.__file__} has no class {class_name!r}")
    return found


def _file_of(module_name: str) -> str:
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        spec = None
    return str(spec.origin) if spec is not None else module_name


def _reason(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    return f"{type(error).__name__}: {error}"

"""Import of third-party generator classes from tt-metal, model bundles and Python's path.

`sources` maps a name to a class and its location.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from replicas.errors import ConfigError, UnknownGeneratorError
from replicas.generators.plugin.shim import vllm_stand_in
from replicas.generators.plugin.sources import METADATA, check_package, find_source
from replicas.generators.targets import split_target

if TYPE_CHECKING:
    from replicas.generators.plugin.sources import PluginPaths


def find_plugin_class(name: str, paths: PluginPaths, architecture: str = "") -> type:
    """Import a generator class.

    Args:
        name: See `sources.find_source`.
        paths: Where to look besides Python's path.
        architecture: See `sources.find_source`.

    Raises:
        UnknownGeneratorError: There is no such architecture, module or package; says what to set.
        ConfigError: A bundle, module or class is broken (names file and reason), or the
            architecture cannot be served.
    """
    source = find_source(name, paths, architecture)
    check_package(source, paths)
    if source.bundle is not None:
        folder = source.bundle.folder
        _append_to_path(folder)
        return _import(source.target, f"{folder / METADATA}: main_class {source.target!r}")
    if source.package == "models" and paths.tt_metal_home is not None:
        _append_to_path(Path(paths.tt_metal_home))
    found = _import(source.target, f"generator {source.target!r}")
    if source.package == "models":
        _check_origin(source.module, paths.tt_metal_home)
    return found


def _check_origin(module_name: str, tt_metal_home: str | None) -> None:
    if tt_metal_home is None:
        return
    root, file = Path(tt_metal_home).resolve(), Path(_file_of(module_name)).resolve()
    if not file.is_relative_to(root):
        raise ConfigError(
            f"module {module_name} is in tt_metal_home {tt_metal_home}, but {file} comes first on "
            "Python's path; remove that folder from PYTHONPATH, or unset tt_metal_home"
        )


def _append_to_path(folder: Path) -> None:
    """Append a folder to Python's path, so that installed packages keep precedence."""
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
        raise ConfigError(f"{what}: it imports the missing {error.name!r}: {error}") from error
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

"""Build backend of the package: setuptools, after the kernel library of the torch generator.

The library needs a C compiler. Where the host has none, the build requires the ziglang package,
which holds one. Where that cannot be had either, the package is installed without the library, and
the torch generator computes with PyTorch's operators, slower.
"""

from __future__ import annotations

import sys
import sysconfig
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from replicas.generators.torch import build_kernels

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_COMPILER = "ziglang>=0.13"
_Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    """Return setuptools' requirements, and a compiler where the host has none."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _compiler()


def get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    """Return setuptools' requirements, and a compiler where the host has none."""
    return build_meta.get_requires_for_build_editable(config_settings) + _compiler()


def build_wheel(
    wheel_directory: str,
    config_settings: _Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Build a wheel; with the library it is one for this platform alone."""
    settings = dict(config_settings or {})
    if _build_library():
        options = settings.get("--build-option", [])
        options = [options] if isinstance(options, str) else list(options)
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        settings["--build-option"] = [*options, f"--plat-name={platform}"]
    return build_meta.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: _Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the library in the source tree, and an editable wheel."""
    _build_library()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def _compiler() -> list[str]:
    return [] if build_kernels.find_compiler() else [_COMPILER]


def _build_library() -> bool:
    """Build the library; return False, with a message, where that is not possible."""
    try:
        build_kernels.build()
    except build_kernels.BuildError as error:
        build_kernels.LIBRARY.unlink(missing_ok=True)
        sys.stderr.write(
            f"ttserve is installed without compiled kernels, and its torch generator will be "
            f"several times slower: {error}\n"
        )
        return False
    return True

"""Build backend of the package: setuptools, after the kernel library of the torch generator.

The library needs a C compiler. Where the host has none, the build requires the ziglang package,
which holds one. Where no library can be built, the package is installed without it, and the torch
generator computes with PyTorch's batched operations, slower. With TTSERVE_REQUIRE_KERNELS in the
environment, as in the image's build, the installation fails instead, and also where the compiler
does not know an instruction set.
"""

from __future__ import annotations

import os
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
    """Return whether there is a library of these sources; says why it could not be built."""
    # Not a process that serves.
    is_required = bool(os.environ.get("TTSERVE_REQUIRE_KERNELS"))  # noqa: TID251
    try:
        build_kernels.build(requires_all=is_required)
    except build_kernels.BuildError as error:
        if is_required:
            raise
        fits = build_kernels.is_current(build_kernels.LIBRARY)
        said = "the earlier library of the same sources stays" if fits else build_kernels.WITHOUT
        sys.stderr.write(f"{said}: {error}\n")
        if not fits:
            build_kernels.LIBRARY.unlink(missing_ok=True)
        return fits
    return True

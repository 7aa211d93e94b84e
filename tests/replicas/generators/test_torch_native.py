"""The C kernels: how they are built, loaded and chosen, and what calls they refuse."""

import ctypes
import importlib
import shutil
import sys
import types

import numpy as np
import pytest
import torch

from replicas.generators.torch import build_kernels, native
from replicas.generators.torch.native import Feature, NativeError


def test_kernels_need_no_feature_that_is_masked():
    had = native.load().features
    assert native.kernel_set().features == had
    assert native.kernel_set(without=native.ALL_FEATURES).name == "portable"
    if Feature.AVX2 in had:
        assert native.kernel_set(without=Feature.AVX512 | Feature.AMX).name == "avx2"


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "foreign"])
def test_a_library_that_cannot_be_used_is_an_error_with_its_cure(tmp_path, damage):
    path = tmp_path / "_kernels.so"
    if damage != "missing":
        whole = build_kernels.LIBRARY.read_bytes()
        path.write_bytes({"empty": b"", "cut": whole[:3000], "foreign": whole[1:]}[damage])
    with pytest.raises(NativeError, match=r"cannot load .* run `python -m .*build_kernels`"):
        native.Library(path)


def test_a_library_of_other_structures_is_refused(monkeypatch):
    class Shorter(ctypes.Structure):
        _fields_ = native.NormCall._fields_[:-1]

    monkeypatch.setitem(native._MIRRORS, "norm_call", Shorter)
    with pytest.raises(NativeError, match=r"other sources, see norm_call, norm_call\.weight_off"):
        native.Library()


def test_a_library_of_other_sources_is_refused(monkeypatch):
    monkeypatch.setattr(native, "is_current", lambda: False)
    native.load.cache_clear()
    try:
        with pytest.raises(NativeError, match="built from other sources"):
            native.load()
    finally:
        native.load.cache_clear()


def test_a_host_without_a_compiler_builds_nothing_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_kernels.importlib.util, "find_spec", lambda name: None)
    assert build_kernels.find_compiler() is None
    with pytest.raises(build_kernels.BuildError, match="no C compiler"):
        build_kernels.build(tmp_path / "_kernels.so")
    assert not list(tmp_path.iterdir())


def test_the_compiler_of_pypi_is_used_where_the_host_has_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_kernels.importlib.util, "find_spec", lambda name: name)
    assert build_kernels.find_compiler()[1:4] == ["-m", "ziglang", "cc"]


def test_a_compiler_that_fails_leaves_the_earlier_library(monkeypatch, tmp_path):
    library = tmp_path / "_kernels.so"
    library.write_bytes(b"earlier")
    monkeypatch.setattr(build_kernels, "find_compiler", lambda: [shutil.which("false")])
    with pytest.raises(build_kernels.BuildError, match="failed"):
        build_kernels.build(library)
    assert library.read_bytes() == b"earlier"
    assert [path.name for path in tmp_path.iterdir()] == ["_kernels.so"]


def norm_call(**changes):
    x = np.zeros((2, 8), np.float32)
    fields = {"dtype": 0, "x": x.ctypes.data, "stride": 8, "weight": x.ctypes.data,
              "out": x.ctypes.data, "size": 8, **changes}  # fmt: skip
    return native.NormCall(tasks=native.Tasks(0, fields.pop("rows", 2)), **fields)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"dtype": 3}, "not something that the kernels compute"),
        ({"size": 0}, "sizes that contradict"),
        ({"rows": -1}, "sizes that contradict"),
        ({"x": None}, "lacks an array"),
    ],
    ids=str,
)
def test_a_call_that_does_not_fit_is_an_error(changes, error):
    status = native.load().check_norm(ctypes.byref(norm_call(**changes)))
    with pytest.raises(ValueError, match=error):
        native.require(status, "a norm")


def test_an_unsupported_call_can_be_told_from_a_wrong_one():
    with pytest.raises(native.UnsupportedCallError):
        native.require(1, "a norm")


def test_tensors_that_do_not_lie_in_a_row_are_refused():
    with pytest.raises(ValueError, match="in a row"):
        native.address(torch.zeros(4, 4).T[:2], torch.float32)
    with pytest.raises(ValueError, match="in a row"):
        native.rows_address(torch.zeros(4, 4), torch.float64)
    with pytest.raises(ValueError, match="in a row"):
        native.array_address(np.zeros(4, np.int32))


@pytest.fixture
def build_backend(monkeypatch):
    """Return the build backend over a stand-in for setuptools, which would change sys.path."""
    setuptools, build_meta = (types.ModuleType(name) for name in ("setuptools", "build_meta"))
    setuptools.build_meta = build_meta
    for kind in ("wheel", "editable", "sdist"):
        setattr(build_meta, f"build_{kind}", lambda *given: [*given])
        for prefix in ("get_requires", "prepare_metadata"):
            setattr(build_meta, f"{prefix}_for_build_{kind}", lambda _settings: [])
    monkeypatch.setitem(sys.modules, "setuptools", setuptools)
    monkeypatch.setitem(sys.modules, "setuptools.build_meta", build_meta)
    monkeypatch.delitem(sys.modules, "build_backend", raising=False)
    yield importlib.import_module("build_backend")
    del sys.modules["build_backend"]


def test_the_build_requires_a_compiler_only_where_the_host_has_none(monkeypatch, build_backend):
    asked = (
        build_backend.get_requires_for_build_wheel,
        build_backend.get_requires_for_build_editable,
    )
    monkeypatch.setattr(build_kernels, "find_compiler", lambda: ["cc"])
    assert not any("ziglang" in name for ask in asked for name in ask())
    monkeypatch.setattr(build_kernels, "find_compiler", lambda: None)
    assert [sum("ziglang" in name for name in ask()) for ask in asked] == [1, 1]


def test_an_installation_without_a_compiler_works_and_says_what_it_lacks(
    monkeypatch, build_backend, tmp_path, capfd
):
    library = tmp_path / "_kernels.so"
    library.write_bytes(b"of an earlier version")
    monkeypatch.setattr(build_kernels, "find_compiler", lambda: None)
    monkeypatch.setattr(build_kernels, "LIBRARY", library)
    assert build_backend.build_wheel("dist") == ["dist", {}, None]
    assert "without compiled kernels" in capfd.readouterr().err
    assert not library.exists()


def test_a_wheel_with_the_library_is_for_one_platform(monkeypatch, build_backend):
    monkeypatch.setattr(build_kernels, "build", lambda: None)
    _, settings, _ = build_backend.build_wheel("dist", {"--build-option": "--verbose"})
    verbose, platform = settings["--build-option"]
    assert verbose == "--verbose"
    assert platform.startswith("--plat-name=linux_")

"""The C kernels: how they are built, loaded and chosen, and what calls they refuse."""

import ctypes
import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from replicas.generators.torch import build_kernels, native
from replicas.generators.torch.native import Feature, NativeError

ROOT = Path(__file__).parents[3]


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


def test_the_list_of_sources_is_whole_and_a_foreign_file_changes_nothing(tmp_path):
    held = {path.name for path in build_kernels.SOURCES.iterdir() if path.name[0] != "."}
    assert held == set(build_kernels.FILES)
    sources = tmp_path / "csrc"
    shutil.copytree(build_kernels.SOURCES, sources)
    (sources / ".check.c.swp").write_bytes(b"an editor's")
    assert build_kernels.source_hash(sources) == build_kernels.source_hash()
    (sources / "check.c").write_bytes(b"changed")
    assert build_kernels.source_hash(sources) != build_kernels.source_hash()


def test_sources_that_cannot_be_read_are_an_error_with_its_cure(monkeypatch, tmp_path):
    with pytest.raises(build_kernels.BuildError, match=r"cannot be read: .*attention\.c"):
        build_kernels.source_hash(tmp_path)
    monkeypatch.setattr(native, "is_current", lambda: build_kernels.source_hash(tmp_path))
    native.load.cache_clear()
    try:
        with pytest.raises(NativeError, match="install ttserve again"):
            native.load()
    finally:
        native.load.cache_clear()


def test_a_compiler_without_an_intrinsic_leaves_its_instruction_set_out(tmp_path, capfd):
    compiler = tmp_path / "old-cc"
    compiler.write_text("#!/bin/sh\n! grep -q _tile_dpbf16ps\n")
    compiler.chmod(0o755)
    sets = build_kernels._instruction_sets()
    taken = [one.name for one in sets if build_kernels._accepts([str(compiler)], one)]
    assert taken == [one.name for one in sets if one.name not in {"avx512", "amx"}]
    if len(taken) < len(sets):
        assert "lack avx512, which" in capfd.readouterr().err


def test_a_build_that_requires_all_instruction_sets_names_those_that_lack(monkeypatch, tmp_path):
    compiler = tmp_path / "old-cc"
    compiler.write_text("#!/bin/sh\n! grep -q _mm")
    compiler.chmod(0o755)
    monkeypatch.setattr(build_kernels, "find_compiler", lambda: [str(compiler)])
    monkeypatch.setattr(build_kernels.platform, "machine", lambda: "x86_64")
    with pytest.raises(build_kernels.BuildError, match=r"old-cc cannot compile avx2, avx512, amx"):
        build_kernels.build(tmp_path / "_kernels.so", requires_all=True)
    assert not list(tmp_path.glob("_kernels*"))


def test_a_source_that_changed_is_compiled_before_serving():
    """A copied file may be older than the stamp of the installation, which make goes by."""
    done = subprocess.run(
        ["make", "--dry-run", "--old-file=.venv/.installed", "serve"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    build, serve = done.stdout.splitlines()
    assert "build_kernels --if-changed" in build
    assert "ttserve serve" in serve


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False,
        env={key: os.environ[key] for key in ("HOME", "PATH") if key in os.environ} | environment,
    )  # fmt: skip


@pytest.mark.slow
def test_a_source_distribution_can_be_installed_with_and_without_a_compiler(tmp_path):
    tree = tmp_path / "tree"
    for name in ("cluster", "configs", "kv_transfer", "replicas"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "MANIFEST.in", "README.md", "build_backend.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    made = run("-c", f"import os; os.chdir({str(tree)!r}); import build_backend; "
               f"build_backend.build_sdist({str(tmp_path)!r})", PYTHONPATH=str(tree))  # fmt: skip
    assert made.returncode == 0, made.stderr
    [source] = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as whole:
        assert not any(name.endswith(".so") for name in whole.getnames())

    options = ["--no-index", "--no-deps", "--no-compile", "--no-build-isolation", "--target"]

    def install(target, **environment):
        return run("-m", "pip", "install", *options, tmp_path / target, source, **environment)

    done = install("with")
    assert done.returncode == 0, done.stderr
    found = run("-c", "from replicas.generators.torch.native import load; print(load().features)",
                PYTHONPATH=str(tmp_path / "with"))  # fmt: skip
    assert found.stdout.strip() == str(native.load().features), found.stderr
    done = install("without", PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("without/**/_kernels.so"))
    done = install("required", PATH=str(tmp_path), TTSERVE_REQUIRE_KERNELS="1")
    assert done.returncode != 0
    assert "no C compiler" in done.stderr + done.stdout


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
    assert "has no compiled kernels" in capfd.readouterr().err
    assert not library.exists()


def test_a_build_that_fails_leaves_a_library_that_fits(monkeypatch, build_backend, capfd):
    before = build_kernels.LIBRARY.read_bytes()
    monkeypatch.setattr(build_kernels, "find_compiler", lambda: [shutil.which("false")])
    _, settings, _ = build_backend.build_wheel("dist")
    assert settings["--build-option"][0].startswith("--plat-name")
    assert "library of the same sources stays" in capfd.readouterr().err
    assert build_kernels.LIBRARY.read_bytes() == before


def test_an_installation_that_requires_the_kernels_fails_without_them(monkeypatch, build_backend):
    monkeypatch.setenv("TTSERVE_REQUIRE_KERNELS", "1")
    monkeypatch.setattr(build_kernels, "find_compiler", lambda: None)
    with pytest.raises(build_kernels.BuildError, match="no C compiler"):
        build_backend.build_editable("dist")


def test_the_image_requires_the_kernels():
    assert "ENV TTSERVE_REQUIRE_KERNELS=1" in (ROOT / "Dockerfile").read_text().splitlines()


def test_a_wheel_with_the_library_is_for_one_platform(monkeypatch, build_backend):
    monkeypatch.setattr(build_kernels, "build", lambda **_: None)
    _, settings, _ = build_backend.build_wheel("dist", {"--build-option": "--verbose"})
    verbose, platform = settings["--build-option"]
    assert verbose == "--verbose"
    assert platform.startswith("--plat-name=linux_")

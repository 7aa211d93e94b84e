"""Installation of the stand-in for ttnn's kernel compiler, and its refusals."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from scripts import tt_mock
from scripts.tt_mock import (
    COMPILER,
    SetUpError,
    compiler_folder,
    find_python,
    install_binutils,
    install_toolchain,
    ttnn_package,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of PATH, beside the system's: has an assembler that writes its arguments."""
    folder = tmp_path / "tools"
    folder.mkdir()
    _program(folder / "riscv64-unknown-elf-as", 'for last; do :; done; echo "$@" > "$last"')
    monkeypatch.setenv("PATH", str(folder))
    return folder


def _program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_the_stand_in_is_installed_and_replaced(tmp_path: Path, tools: Path) -> None:
    assert install_toolchain(tmp_path)
    compiler = compiler_folder(tmp_path) / COMPILER
    first = compiler.read_text()
    compiler.write_text(f"{first}\n# an older one")
    assert install_toolchain(tmp_path)
    assert compiler.read_text() == first
    assert "-march=rv32im" in (compiler.parent / "kernel.o").read_text()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_real_compiler_is_left_as_it_is(tmp_path: Path, tools: Path, kind: str) -> None:
    folder = compiler_folder(tmp_path)
    folder.mkdir(parents=True)
    real = tmp_path / "real" if kind == "link" else folder / COMPILER
    real.write_bytes(b"\x7fELF real")
    if kind == "link":
        (folder / COMPILER).symlink_to(real)
    assert not install_toolchain(tmp_path)
    assert real.read_bytes() == b"\x7fELF real"
    assert [path.name for path in folder.iterdir()] == [COMPILER]


def test_what_is_missing_is_said(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_binutils()
    (tools / "riscv64-unknown-elf-as").unlink()
    with pytest.raises(SetUpError, match="apt-get install -y binutils-riscv64-unknown-elf"):
        install_toolchain(tmp_path)
    with pytest.raises(SetUpError, match="apt-get install -y binutils-riscv64-unknown-elf"):
        install_binutils()
    _program(tools / "python", "exit 0")
    with pytest.raises(SetUpError, match="has no ttnn"):
        ttnn_package(str(tools / "python"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SetUpError, match=r"Python 3\.12 .* none on PATH and none under"):
        find_python()


def test_binutils_are_installed_by_root(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tools / "riscv64-unknown-elf-as").unlink()
    monkeypatch.setattr(tt_mock.os, "geteuid", lambda: 0)
    _program(tools / "apt-get", f'echo "$@" >> {tools}/asked')
    install_binutils()
    asked = (tools / "asked").read_text().splitlines()
    assert asked == ["update", "install -y -o DPkg::Lock::Timeout=600 binutils-riscv64-unknown-elf"]
    _program(tools / "apt-get", "exit 100")
    with pytest.raises(SetUpError, match="`apt-get update` failed"):
        install_binutils()


def test_a_python_that_cannot_run_is_passed_over(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As pyenv's python3.12 on PATH does where another version is selected.
    _program(tools / "python3.12", "exit 127")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    for version, script in (("3.12.0", "exit 1"), ("3.12.1", "exit 0")):
        folder = tmp_path / "versions" / version / "bin"
        folder.mkdir(parents=True)
        _program(folder / "python3.12", script)
    assert find_python() == str(tmp_path / "versions" / "3.12.1" / "bin" / "python3.12")


@pytest.mark.skipif(
    shutil.which("riscv64-unknown-elf-as") is None
    or shutil.which("riscv64-unknown-elf-ld") is None,
    reason="no binutils for RISC-V: apt-get install binutils-riscv64-unknown-elf",
)
def test_the_stand_in_compiles_and_links_as_ttnn_asks(tmp_path: Path) -> None:
    install_toolchain(tmp_path)
    compiler = str(compiler_folder(tmp_path) / COMPILER)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [compiler, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "15.1.0" in run("--version").stdout
    assert run("-O3", "-DA='b c'", "-I.", "-c", "-o", "k.o", "k.cc").returncode == 0
    assert (tmp_path / "k.d").read_text() == "k.o:\n"
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "part.ld").write_text("ENTRY(_start)\n")
    (tmp_path / "whole.ld").write_text(
        "INCLUDE part.ld\nSECTIONS { .text BASE : { *(.start) *(.text) } .data : { *(.data) } }\n"
    )
    linked = run("-Lscripts", "-Twhole.ld", "-Wl,--defsym=BASE=4096", "k.o", "-o", "k.elf")
    assert linked.returncode == 0, linked.stderr
    assert (tmp_path / "k.elf").read_bytes()[:4] == b"\x7fELF"
    assert run("-c", "k.cc").returncode == 2

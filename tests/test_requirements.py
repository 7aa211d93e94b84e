"""Locked requirements follow constraints.txt and pyproject.toml; the SBOM is complete."""

import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads the project file")

ROOT = Path(__file__).resolve().parents[1]
LOCKED = sorted((ROOT / "requirements").glob("*.txt"))
PYTHONS = ["3.10", "3.11", "3.12"]
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}(?=\s|$)")


def requirements(path):
    """Return (requirement, hashes) of each entry of a requirements file."""
    text = re.sub(r"(?m)^#.*\n", "", path.read_text()).replace("\\\n", " ")
    return [
        (Requirement(line.partition(" --hash")[0]), HASH.findall(line))
        for line in text.splitlines()
    ]


def pins(path, python, machine="x86_64"):
    """Return the versions that a file pins for a Python on Linux, by name."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found = {}
    for requirement, _ in requirements(path):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            (pin,) = requirement.specifier
            name = canonicalize_name(requirement.name)
            assert pin.operator == "=="
            assert name not in found
            found[name] = pin.version
    return found


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.stem)
def test_every_locked_requirement_has_a_hash(path):
    found = requirements(path)
    assert found
    assert [str(requirement) for requirement, hashes in found if not hashes] == []


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", PYTHONS)
def test_the_image_has_the_versions_of_the_constraints(python, machine):
    allowed = pins(ROOT / "constraints.txt", python, machine)
    locked = pins(ROOT / "requirements/runtime.txt", python, machine)
    assert locked.items() - allowed.items() == set(), "after a change of constraints.txt: make lock"


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_of_the_project_is_locked(python):
    locked = pins(ROOT / "requirements/runtime.txt", python)
    for line in project()["project"]["dependencies"]:
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate(
            {"python_version": python, "sys_platform": "linux", "platform_machine": "x86_64"}
        ):
            assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), line


@pytest.mark.parametrize("group", ["build", "tools"])
def test_every_build_tool_is_locked(group):
    locked = pins(ROOT / f"requirements/{group}.txt", "3.11")
    for line in project()["dependency-groups"][group]:
        wanted = Requirement(line)
        assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), line


@pytest.mark.parametrize("path", [ROOT / "constraints.txt", *LOCKED], ids=lambda path: path.name)
def test_no_file_names_an_index(path):
    assert "://" not in path.read_text()
    assert "--index" not in path.read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sbom_names_every_installed_package(tmp_path):
    """Installs the tools by their hashes, as the target does; it validates what it writes."""
    tools, made = tmp_path / "tools", tmp_path / "sbom.json"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tools], check=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", tools / "bin/python", "install", "--quiet",
         "--no-compile", "--require-hashes", "--only-binary", ":all:",
         "--requirement", ROOT / "requirements/tools.txt"],
        check=True,
    )  # fmt: skip
    command = _recipe("sbom", f"VENV={sys.prefix}", f"VENV_TOOLS={tools}")
    assert "--validate" in command
    command[command.index("--output-file") + 1] = str(made)
    subprocess.run(command, cwd=ROOT, check=True)
    components = json.loads(made.read_text())["components"]
    named = {(canonicalize_name(c["name"]), c["version"]) for c in components}
    installed = {(canonicalize_name(d.name), d.version) for d in distributions(path=sys.path)}
    installed = {(name, version) for name, version in installed if name != "ttserve"}
    assert installed - named == set()
    assert len(installed) > 100


def _recipe(target, *variables):
    """Return the last command that make would run for a target."""
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "--always-make", target, *variables],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return shlex.split(done.stdout.splitlines()[-1])

"""The image has the variables of `ttserve environment`, and installs nothing without a hash."""

import os
import re
import shlex
import subprocess
from pathlib import Path

from cluster.lifecycle import haproxy

ROOT = Path(__file__).parents[3]
# Instructions, each in one line.
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
# The last stage is the image.
(_ENV,) = re.findall(r"^ENV (.*)$", DOCKERFILE.rpartition("\nFROM ")[2], re.MULTILINE)
IMAGE_VARIABLES = dict(word.split("=", 1) for word in shlex.split(_ENV))
PROFILE = "/etc/profile.d/ttserve.sh"
STUB = """#!/bin/sh
echo "$(basename "$0") $* [${PIP_REQUIRE_HASHES:-0} ${PIP_ONLY_BINARY:-}]" >> calls
"""


def run_instruction(stage):
    """Return the RUN instruction of a stage."""
    (body,) = re.findall(rf"^FROM .* AS {stage}$(.*?)^FROM", DOCKERFILE, re.MULTILINE | re.DOTALL)
    (command,) = re.findall(r"^RUN (.*)$", body, re.MULTILINE)
    return command


def install_dependencies(folder, **arguments):
    """Run what installs the dependencies, with programs that only record how they were called."""
    (folder / "requirements.txt").write_text("ray[serve]==2.60.0\ntorch==2.13.0\n")
    for name in ("pip", "python3"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", run_instruction("installed")],
        cwd=folder, env={"PATH": f"{folder}:{os.defpath}", **arguments},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done, [line for line in (folder / "calls").read_text().splitlines() if "pip " in line]


def test_the_image_has_the_variables_that_serve_reads_when_ray_starts():
    expected = haproxy.environment(Path("/run/ttserve"), "/opt/ttserve/bin/ttserve-haproxy")
    assert {name: IMAGE_VARIABLES.get(name) for name in expected} == expected
    read = {name for name in IMAGE_VARIABLES if name.startswith(("RAY_SERVE_", "RAY_worker_"))}
    assert read == set(expected)
    assert "VOLUME /run/ttserve\n" in DOCKERFILE


def test_every_package_is_a_wheel_with_a_known_hash(tmp_path):
    done, installs = install_dependencies(tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(installs) == 2
    assert all(call.endswith("[1 :all:]") for call in installs)
    assert "--constraint runtime.txt --requirement requirements.txt" in installs[1]


def test_torch_of_another_index_comes_by_its_own_hash(tmp_path):
    index, sha256 = "https://index.example/cpu", "5" * 64
    done, installs = install_dependencies(tmp_path, TORCH_INDEX=index, TORCH_SHA256=sha256)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "torch.txt").read_text() == f"torch==2.13.0 --hash=sha256:{sha256}\n"
    assert f"--no-deps --index-url {index} --requirement torch.txt [1 :all:]" in installs[1]


def test_torch_of_another_index_without_its_hash_is_refused(tmp_path):
    done, installs = install_dependencies(tmp_path, TORCH_INDEX="https://index.example/cpu")
    assert done.returncode != 0
    assert "TORCH_SHA256" in done.stderr
    assert not [call for call in installs if "index" in call]


def test_the_projects_own_wheel_is_built_without_an_index():
    """Build isolation would fetch the newest setuptools, whatever it is."""
    assert {"--no-index", "--no-deps", "--no-build-isolation"} <= {*run_instruction("code").split()}


def test_the_kernels_are_compiled_for_the_image():
    assert " gcc " in run_instruction("compiler")
    assert "FROM compiler AS code\n" in DOCKERFILE
    assert "build_backend.py" in DOCKERFILE


def test_what_ray_writes_in_a_pod_is_closed_to_other_users(tmp_path):
    """KubeRay starts Ray with `bash -c`, which reads the file that BASH_ENV names."""
    profile = tmp_path / "profile.sh"
    (write,) = re.findall(r"printf '[^']*' > /etc/profile\.d/ttserve\.sh", DOCKERFILE)
    subprocess.run(["sh", "-c", write.replace(PROFILE, str(profile))], check=True)
    assert IMAGE_VARIABLES["BASH_ENV"] == PROFILE
    said = subprocess.run(
        ["bash", "-c", "--", "umask; echo $PATH"],
        env={"PATH": os.defpath, "BASH_ENV": str(profile)},
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert said[0] == "0077"
    assert said[1].startswith("/opt/ttserve/bin:")

"""Clients that others wrote, as they come, against a server with recorded answers.

`make test-clients` installs them beside ours. Each program ends with an error if an answer is not
what the client's users would expect.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.scripted_model import scripted_server

HERE = Path(__file__).parent
CLIENTS = HERE.parents[1] / ".venv-clients"
PYTHON_PROGRAMS = ["instructor_objects", "langchain_chat", "litellm_completion", "llm_prompt"]
NODE_PROGRAMS = ["ai_sdk", "claude_code_edit", "codex_edit", "opencode_edit"]


@pytest.fixture(scope="module")
def url():
    with scripted_server() as port:
        yield f"http://127.0.0.1:{port}/v1"


def run(*command, cwd=None):
    """Run a client without our packages on its path; its output is shown if it fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, timeout=200, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("name", PYTHON_PROGRAMS)
def test_python_client(url, name):
    run(CLIENTS / "bin" / "python", HERE / "programs" / f"{name}.py", url)


@pytest.mark.parametrize("name", NODE_PROGRAMS)
def test_node_client(url, name):
    if not (CLIENTS / "js" / "node_modules").is_dir():
        pytest.skip("these clients need Node.js 20 and npm: make test-clients")
    # A module finds its packages beside itself.
    program = CLIENTS / "js" / f"{name}.mjs"
    shutil.copy(HERE / "programs" / program.name, program)
    run("node", program, url, cwd=program.parent)

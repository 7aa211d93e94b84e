"""That the tests of this folder fail where they should: the kit of `conftest.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]

_FILE = """
import os
import pytest

pytestmark = pytest.mark.board("N150")

def test_passes():
    assert os.environ["TTSERVE_MOCK_BOARD"] == "N150"

def test_fails():
    print("seen before")
    assert 1 == 2

def test_crashes():
    os.abort()

def test_goes_on():
    pass

@pytest.mark.skip(reason="of no interest")
def test_skips():
    pass
"""


@pytest.fixture
def run_file(tmp_path: Path) -> object:
    """Runs a test file with the kit's conftest; returns what pytest printed."""
    folder = tmp_path / "tt"
    folder.mkdir()
    (folder / "conftest.py").write_text("from tests.tt.conftest import *\n")

    def run(text: str) -> str:
        (folder / "test_it.py").write_text(text)
        done = subprocess.run(
            [
                sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                "--rootdir", str(tmp_path), "-c", str(_ROOT / "pyproject.toml"), str(folder),
            ],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(_ROOT)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    return run


def test_a_crash_is_of_one_test(run_file: object) -> None:
    said = run_file(_FILE)
    assert "2 failed, 2 passed, 1 skipped" in said, said
    assert "assert 1 == 2" in said
    assert "seen before" in said
    assert "the process of board N150 ended here (signal 6)" in said


def test_a_child_that_cannot_begin_fails_all(run_file: object) -> None:
    only_in_parent = 'import os\nassert "TTSERVE_MOCK_REPORTS" not in os.environ, "no way"\n'
    said = run_file(only_in_parent + _FILE)
    assert "5 failed" in said, said
    assert "no way" in said


def test_a_board_that_is_not_described(run_file: object) -> None:
    said = run_file(_FILE.replace("N150", "N9000"))
    assert "no board N9000" in said, said

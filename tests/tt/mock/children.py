"""Runs the tests of one file and board in a child process and shows their reports here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.tt.mock.boards import BOARD_VARIABLE, DESCRIPTIONS, environment

REPORTS_VARIABLE = "TTSERVE_MOCK_REPORTS"
_REPORTS = pytest.StashKey[dict[str, list[pytest.TestReport]]]()


def board_of(item: pytest.Item) -> str | None:
    """The board that a test asks for."""
    marker = item.get_closest_marker("board")
    if marker is None:
        return None
    (name,) = marker.args
    if name.upper() not in DESCRIPTIONS:
        raise pytest.UsageError(f"{item.nodeid}: no board {name}; there are {list(DESCRIPTIONS)}")
    return str(name)


def run(item: pytest.Item, board: str) -> bool:
    """Report one test; its child, which runs all of its file and board, is started for the first.

    Returns:
        True, so that no other plugin runs the test.
    """
    reports = item.session.stash.setdefault(_REPORTS, {})
    if item.nodeid not in reports:
        peers = [
            other.nodeid
            for other in item.session.items
            if other.path == item.path and board_of(other) == board
        ]
        reports |= _run_children(item.config, peers, board)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports.pop(item.nodeid):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run_children(
    config: pytest.Config, nodeids: list[str], board: str
) -> dict[str, list[pytest.TestReport]]:
    """Run tests until each has its reports, in another child after each crash."""
    done: dict[str, list[pytest.TestReport]] = {}
    while left := [nodeid for nodeid in nodeids if nodeid not in done]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "reports"
            path.touch()
            child = _start(config, left, board, path)
            reports = _read(config, path)
        running = [i for i, parts in reports.items() if not parts or parts[-1].when != "teardown"]
        # A child in which no test began cannot run any.
        victims = running if reports else left
        done |= reports
        for nodeid in victims:
            done[nodeid] = [*reports.get(nodeid, ()), _crash_report(nodeid, board, child)]
    return done


def _start(
    config: pytest.Config, nodeids: list[str], board: str, reports: Path
) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    variables |= environment(board)
    variables |= {BOARD_VARIABLE: board, REPORTS_VARIABLE: str(reports)}
    # A call into ttnn that hangs is ended with its process; a signal would wait for it. What ttnn
    # itself prints is not captured, so that it is there after a crash.
    options = ["--capture=sys", "-o", "timeout_method=thread"]
    options += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, *nodeids],
        cwd=config.rootpath, env=variables, check=False, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def _read(config: pytest.Config, path: Path) -> dict[str, list[pytest.TestReport]]:
    """The reports of every test that began."""
    reports: dict[str, list[pytest.TestReport]] = {}
    for line in path.read_text().splitlines():
        data = json.loads(line)
        if "began" in data:
            reports[data["began"]] = []
        else:
            if isinstance(data["longrepr"], list):
                # Where and why a test was skipped: a tuple, which JSON has not.
                data["longrepr"] = tuple(data["longrepr"])
            restore = config.hook.pytest_report_from_serializable
            reports[data["nodeid"]].append(restore(config=config, data=data))
    return reports


def _crash_report(
    nodeid: str, board: str, child: subprocess.CompletedProcess[str]
) -> pytest.TestReport:
    last = "\n".join(child.stdout.splitlines()[-60:])
    how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit {child.returncode}"
    return pytest.TestReport(
        nodeid=nodeid,
        location=(nodeid.partition("::")[0], None, nodeid),
        keywords={},
        outcome="failed",
        longrepr=f"the process of board {board} ended here ({how}); its last lines:\n{last}",
        when="call",
    )


class ReportWriter:
    """In a child: writes for the parent which test begins, and every report."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"began": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        to_data = self._config.hook.pytest_report_to_serializable
        self._write(to_data(config=self._config, report=report))

    def _write(self, data: dict[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(data) + "\n")

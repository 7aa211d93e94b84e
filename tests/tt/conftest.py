"""Tests that need ttnn: on its mock device, or on its host side and golden functions alone.

A test that opens a device says on which board:

    @pytest.mark.board("N300")
    def test_something(open_mock_mesh):
        mesh = open_mock_mesh()                  # an N300; or open_mock_mesh("N150", trace="none")
        (lane,) = mesh.lanes(1)

A process has one mock board for life, because ttnn reads the description once. So the tests of one
file and one board run in a child process of their own: pytest again, with the board's description
bound (`boards.py`), whose reports are shown here as if they had run here. ttnn is imported once per
file and board, a failure looks like any other, and a crash of ttnn fails the one test that was
running; the rest of the file runs in another child. Everything else about a test (parameters,
fixtures of any scope, monkeypatch) is as usual. Tests without the marker run in this process and
must not open a device.

To have one board's tests in this very process, for a debugger or print:

    TTSERVE_MOCK_BOARD=N300 pytest tests/tt/test_mesh.py

Where ttnn or its compiler is missing every file is skipped, before it is imported; with
TTSERVE_REQUIRE_TTNN=1 (`make test-tt`) that is an error.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.tt.mock import boards, children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from replicas.generators.ttnn.mesh import TTMesh
    from tests.tt.golden.library import GoldenLibrary

_MISSING = boards.what_is_missing()
_HERE = os.environ.get(boards.BOARD_VARIABLE)

if not _MISSING:
    # ttnn reads these when it is imported, which is when the first test file is.
    os.environ.update(boards.environment(_HERE))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "board(name): needs ttnn's mock device as that board")
    if reports := os.environ.get(children.REPORTS_VARIABLE):
        config.pluginmanager.register(children.ReportWriter(config, Path(reports)))


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> object:
    if not _MISSING:
        return None
    return _MissingModule.from_parent(parent, path=module_path)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    board = children.board_of(item)
    if board is None or board == _HERE:
        return None
    # The child runs all tests of a file, each with a limit of its own.
    item.ihook.pytest_timeout_cancel_timer(item=item)
    is_done = children.run(item, board)
    # Tear down the fixtures of earlier tests of this process that the next test does not need.
    item.session._setupstate.teardown_exact(nextitem)
    return is_done


@pytest.fixture
def open_mock_mesh(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., TTMesh]]:
    """Opens meshes as the engine does; takes a name (the board's) and `MeshConfig`'s fields.

    A mesh is closed when the test ends, also a failed one.
    """
    import tempfile

    from replicas.config import MeshConfig
    from replicas.generators.ttnn.mesh import open_mesh

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    board = children.board_of(request.node)
    opened: list[TTMesh] = []

    def open_one(name: str | None = None, **settings: object) -> TTMesh:
        arguments = {
            key: settings.pop(key)
            for key in ("fabric_config", "load_format", "seed", "progress")
            if key in settings
        }
        mesh = open_mesh(MeshConfig(name=name or board, **settings), **arguments)
        opened.append(mesh)
        return mesh

    yield open_one
    for mesh in reversed(opened):
        mesh.close()


@pytest.fixture
def golden() -> Iterator[GoldenLibrary]:
    """The generator's modules have the golden kit for ttnn, whose calls it notes."""
    from tests.tt.golden.library import GoldenLibrary, installed

    with installed(GoldenLibrary()) as library:
        yield library


class _MissingModule(pytest.Module):
    """A test file that cannot be imported here."""

    def collect(self) -> list[pytest.Item]:
        if os.environ.get("TTSERVE_REQUIRE_TTNN") == "1":
            raise self.CollectError(_MISSING)
        pytest.skip(_MISSING, allow_module_level=True)

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from replicas.errors import DeviceError
from replicas.generators.ttnn.board_locks import BoardLocks

if TYPE_CHECKING:
    from pathlib import Path


def test_a_board_has_one_owner(tmp_path: Path) -> None:
    first = BoardLocks(["0", "1"], tmp_path)
    first.mark_open()
    with pytest.raises(DeviceError, match=f"board 1 is in use by process {os.getpid()}; end it"):
        BoardLocks(["1", "2"], tmp_path)
    BoardLocks(["2"], tmp_path)  # The attempt that failed kept nothing.
    first.release()
    first.release()
    assert BoardLocks(["0", "1"], tmp_path).boards == ("0", "1")


def test_a_lock_without_a_recorded_owner(tmp_path: Path) -> None:
    owner = BoardLocks(["0"], tmp_path)
    with pytest.raises(DeviceError, match="in use by another process"):
        BoardLocks(["0"], tmp_path)
    owner.release()


def test_boards_left_open_by_a_dead_process_are_reported(tmp_path: Path) -> None:
    closed, left = BoardLocks(["0"], tmp_path), BoardLocks(["1", "2"], tmp_path)
    for locks in (closed, left):
        assert locks.left_open == ()
        locks.mark_open()
    closed.mark_closed()
    closed.release()
    left.release()
    again = BoardLocks(["2", "1", "0"], tmp_path)
    assert again.left_open == ("1", "2")
    again.mark_closed()
    again.release()
    assert BoardLocks(["0", "1", "2"], tmp_path).left_open == ()


def test_no_boards_need_no_folder(tmp_path: Path) -> None:
    locks = BoardLocks([], tmp_path / "none")
    locks.mark_open()
    locks.release()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["", "../0", "0/1", "a b"])
def test_a_name_that_is_no_board(tmp_path: Path, name: str) -> None:
    with pytest.raises(DeviceError, match="is not a board"):
        BoardLocks([name], tmp_path)


def test_the_folder_of_another(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(DeviceError, match=r"is not a folder of this user.*TMPDIR"):
        BoardLocks(["0"], tmp_path / "link")


def test_a_lock_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "0.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(DeviceError, match="cannot lock boards 0"):
        BoardLocks(["0"], tmp_path)


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    BoardLocks(["0"]).release()
    folder = tmp_path / f"ttserve-boards-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == ["0.lock"]

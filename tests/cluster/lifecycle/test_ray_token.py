"""Whose token Ray uses, and which token files are refused."""

import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from cluster.config.ray_auth import token_file
from cluster.lifecycle.private_files import UnsafeFileError
from cluster.lifecycle.ray_token import (
    judge_tokens,
    own_token,
    require_private_token,
)


@pytest.fixture
def home():
    """A home folder that others may enter, in a folder as /tmp is."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def put_token(home, mode, folder_mode=0o755):
    path = home / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("secret")
    path.chmod(mode)
    path.parent.chmod(folder_mode)
    return path


@pytest.mark.parametrize(
    ("environment", "file"),
    [
        ({"HOME": "/h"}, "/h/.ray/auth_token"),
        ({"HOME": "/h", "RAY_AUTH_TOKEN_PATH": "/p/t"}, "/p/t"),
        ({"HOME": "/h", "RAY_AUTH_TOKEN_PATH": "/p/t", "RAY_AUTH_TOKEN": "x"}, None),
        ({"HOME": "/h", "RAY_AUTH_MODE": "disabled"}, None),
        ({}, None),
    ],
)
def test_the_file_that_ray_reads_the_token_from(environment, file):
    assert token_file(environment) == (None if file is None else Path(file))


@pytest.mark.parametrize(
    ("mode", "folder_mode", "reason"),
    [
        (0o600, 0o755, None),
        (0o640, 0o755, None),
        (0o644, 0o700, None),
        (0o644, 0o755, "can be used by other users (mode 0644)"),
        (0o604, 0o711, "can be used by other users (mode 0604)"),
        (0o660, 0o755, "can be used by other users (mode 0660)"),
        (0o600, 0o777, ".ray can be written by other users"),
        (0o600, 0o775, ".ray can be written by other users"),
    ],
)
def test_a_token_that_others_could_read_or_replace_is_refused(home, mode, folder_mode, reason):
    path = put_token(home, mode, folder_mode)
    environment = {"HOME": str(home)}
    findings = judge_tokens([environment, {"RAY_AUTH_TOKEN_PATH": str(path)}])
    if reason is None:
        require_private_token(environment)
        assert not findings
        return
    with pytest.raises(UnsafeFileError) as caught:
        require_private_token(environment)
    assert reason in str(caught.value)
    assert "ray get-auth-token --generate" in str(caught.value)
    [finding] = findings
    assert (finding.level, finding.subject) == ("missing", "Ray's token")
    assert reason in finding.text
    assert any("chmod 600" in step for step in finding.advice)


def test_a_token_that_is_not_there_is_no_finding(home):
    require_private_token({"HOME": str(home)})
    assert judge_tokens([{"HOME": str(home)}]) == ()


def test_a_link_is_checked_by_its_target(home):
    path = put_token(home, 0o644)
    (home / "link").symlink_to(path)
    environment = {"RAY_AUTH_TOKEN_PATH": str(home / "link")}
    with pytest.raises(UnsafeFileError, match=r"auth_token can be used by other users"):
        require_private_token(environment)
    path.chmod(0o600)
    require_private_token(environment)


def test_a_server_has_its_own_token_despite_its_callers_variables(home):
    inherited = {
        "RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "theirs", "RAY_AUTH_TOKEN_PATH": "/theirs",
        "RAY_ENABLE_K8S_TOKEN_AUTH": "1", "OTHER": "kept",
    }  # fmt: skip
    folders = [home / "a", home / "b"]
    tokens = []
    for folder in folders:
        folder.mkdir(0o700)
        environment = own_token(folder, inherited)
        path = Path(environment["RAY_AUTH_TOKEN_PATH"])
        assert environment == {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path), "OTHER": "kept",
        }  # fmt: skip
        assert path.parent == folder
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        tokens.append(path.read_text())
    assert len({*tokens, "theirs"}) == 3
    assert all(len(token) >= 64 for token in tokens)


def test_a_server_is_refused_a_folder_that_others_can_write(home):
    home.chmod(0o777)
    folder = home / "a"
    folder.mkdir(0o755)
    with pytest.raises(UnsafeFileError, match=r"can be written by other users.*TMPDIR"):
        own_token(folder, {})

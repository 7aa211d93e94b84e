"""Creates the token of a Ray cluster, and checks that other users cannot read it.

With the token, a process can run any program as the cluster's user. Ray creates the file with the
umask of its process, and does not check the file's mode when it reads it.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from cluster.config.ray_auth import MODE, PATH, VARIABLES, token_file
from cluster.lifecycle.findings import Finding
from cluster.lifecycle.private_files import UnsafeFileError, require_secret

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_TOKEN_BYTES = 32
_ADVICE = (
    "`chmod 600` the file and `chmod go-w` its folders",
    "if others could have read it, remove it and make a new one: `ray get-auth-token --generate`",
    "copy it to every host (`scp -p`), and start Ray again",
)


def own_token(folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Make a token for one server, and return the environment of the processes that share it.

    Args:
        folder: Private folder of the server.
        inherited: Environment to start from; its settings of a token or of authentication are
            dropped.

    Raises:
        UnsafeFileError: Another user could read the token, or put another one in its place.
    """
    path = folder / "token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(_TOKEN_BYTES))
    require_secret(path, "Set TMPDIR to a folder that other users cannot write to")
    kept = {name: value for name, value in inherited.items() if name not in VARIABLES}
    return {**kept, MODE: "token", PATH: str(path)}


def require_private_token(environment: Mapping[str, str]) -> None:
    """Refuse a token that another user could read or replace; a missing token is accepted.

    Args:
        environment: The environment of Ray's processes.

    Raises:
        UnsafeFileError: The message has the file or folder, the reason, and what to do.
    """
    path = token_file(environment)
    if path is not None and path.exists():
        require_secret(path, "; ".join(_ADVICE))


def judge_tokens(environments: Iterable[Mapping[str, str]]) -> tuple[Finding, ...]:
    """Return one finding for each token file of these environments that is not private."""
    files = {path for environment in environments if (path := token_file(environment)) is not None}
    return tuple(finding for path in sorted(files) for finding in _judge(path))


def _judge(path: Path) -> tuple[Finding, ...]:
    try:
        if path.exists():
            require_secret(path)
    except UnsafeFileError as error:
        return (Finding("missing", "Ray's token", str(error), _ADVICE),)
    except PermissionError:
        # A path that this user cannot look at belongs to a cluster of another user.
        pass
    return ()

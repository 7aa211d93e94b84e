"""The file of a deployment's secrets, `args.key_file`: read on each host, never stored by Ray."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from pathlib import Path

from cluster.errors import ClusterConfigError
from kv_transfer.keys import MIN_KEY_BYTES, KeyRing

_NOT_FOR_OTHERS = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})+")


def key_ring(key_file: str) -> KeyRing:
    """Read the secrets of a file, which must be this user's or root's and closed to all others.

    Its group may read it, as a Kubernetes Secret's can with `fsGroup`.

    Args:
        key_file: One secret a line, in hexadecimal or base64; the first seals, each of them opens.
            Empty lines and lines that begin with # are passed over.

    Raises:
        ClusterConfigError: The file cannot be used; says where and why, and shows nothing of it.
    """
    try:
        with Path(key_file).open(encoding="ascii") as file:
            # Of what is open: a path could lead to another file by then.
            _require_closed(key_file, os.fstat(file.fileno()))
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        # The error of a decoder has what it could not decode.
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise ClusterConfigError(f"args.key_file: cannot read {key_file}: {reason}") from None
    found = [
        _secret(line.strip(), f"args.key_file: {key_file}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not found:
        raise ClusterConfigError(f"args.key_file: {key_file} holds no secret")
    return KeyRing(tuple(found))


def _require_closed(key_file: str, info: os.stat_result) -> None:
    if info.st_uid not in {0, os.geteuid()}:
        why = f"belongs to user {info.st_uid}, neither to this one ({os.geteuid()}) nor to root"
    elif info.st_mode & _NOT_FOR_OTHERS:
        why = f"has mode {stat.S_IMODE(info.st_mode):04o}: others than its owner can use it"
    else:
        return
    raise ClusterConfigError(
        f"args.key_file: {key_file} {why}; `chmod 600` it, and put new secrets in if others could "
        "have read it. Its group may read it and not write: of a Kubernetes Secret take "
        "`defaultMode: 0440` with `fsGroup`"
    )


def _secret(text: str, where: str) -> bytes:
    """One line's secret: hexadecimal if it can be, else base64."""
    if _HEX.fullmatch(text):
        secret = bytes.fromhex(text)
    else:
        try:
            secret = base64.b64decode(text, validate=True)
        except binascii.Error:
            raise ClusterConfigError(f"{where} is neither hexadecimal nor base64") from None
    if len(secret) < MIN_KEY_BYTES:
        raise ClusterConfigError(
            f"{where} has {len(secret)} bytes; a secret has at least {MIN_KEY_BYTES}: make one "
            "with `openssl rand -hex 32`"
        )
    return secret

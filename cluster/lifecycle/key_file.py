"""Reads the file of a deployment's secrets, `args.key_file`, on each host; Ray never stores it."""

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
    """Read the secrets of a file that belongs to this user or root and is closed to all others.

    Its group may read it, as with a Kubernetes Secret and `fsGroup`.

    Args:
        key_file: Path of the file. It has one secret a line, in hexadecimal or base64; the first
            one seals, each of them opens. Empty lines and lines that begin with # are ignored.

    Raises:
        ClusterConfigError: The file cannot be used. The message has the reason and no content.
    """
    try:
        with Path(key_file).open(encoding="ascii") as file:
            # Check the open file: the path could lead to another one by now.
            _require_closed(key_file, os.fstat(file.fileno()))
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        # A decoder's error message would show the bytes that it could not decode.
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
        "have read it. Its group may read it but not write: mount a Kubernetes Secret with "
        "`defaultMode: 0440` and `fsGroup`"
    )


def _secret(text: str, where: str) -> bytes:
    """Decode one line's secret: as hexadecimal if possible, else as base64."""
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

"""Location of Ray's token, and the proof that HAProxy derives from it.

Source: Ray 2.60 takes the first of the variable RAY_AUTH_TOKEN, the file at RAY_AUTH_TOKEN_PATH,
and ~/.ray/auth_token.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MODE, TOKEN, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
KUBERNETES = "RAY_ENABLE_K8S_TOKEN_AUTH"
VARIABLES = frozenset({MODE, TOKEN, PATH, KUBERNETES})
"""Variables that decide whether a Ray process requires a token, and which one."""

_PROOF_BYTES = 16


def token_file(environment: Mapping[str, str]) -> Path | None:
    """Return the file that Ray reads the token from; None if it reads none."""
    if environment.get(TOKEN) or environment.get(MODE, "").lower() == "disabled":
        return None
    if environment.get(PATH):
        return Path(environment[PATH])
    home = environment.get("HOME")
    return Path(home, ".ray", "auth_token") if home else None


def front_proof(environment: Mapping[str, str]) -> str:
    """Return the value by which HAProxy proves that a request came through it.

    It is a hash of Ray's token, which all hosts of a cluster have and clients do not; "" if there
    is no token.
    """
    if environment.get(MODE, "").lower() == "disabled":
        return ""
    token = environment.get(TOKEN, "")
    path = token_file(environment)
    if not token and path is not None and path.is_file():
        token = path.read_text()
    token = token.strip()
    if not token:
        return ""
    hashed = hashlib.blake2b(token.encode(), digest_size=_PROOF_BYTES, person=b"ttserve-front")
    return hashed.hexdigest()

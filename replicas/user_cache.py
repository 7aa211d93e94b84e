"""The folder that keeps what engines of this user need again: nobody else spells it."""

from __future__ import annotations

from pathlib import Path

NO_HOME = "this user has no home folder for caches: set HOME"


def user_cache(home: str | None = None) -> Path | None:
    """The folder; None for a user without a home.

    Args:
        home: What HOME says in the environment that is meant; None or empty for this process's.
    """
    try:
        return Path(home or Path.home()) / ".cache" / "ttserve"
    except RuntimeError:
        return None

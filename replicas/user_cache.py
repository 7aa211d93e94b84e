"""Cache folder of this user's engines; the only place that spells its path."""

from __future__ import annotations

from pathlib import Path

NO_HOME = "this user has no home folder for caches: set HOME"


def user_cache(home: str | None = None) -> Path | None:
    """Return the cache folder; None for a user without a home folder.

    Args:
        home: HOME of the environment in question; None or empty for this process's own.
    """
    try:
        return Path(home or Path.home()) / ".cache" / "ttserve"
    except RuntimeError:
        return None

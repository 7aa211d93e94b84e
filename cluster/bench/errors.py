"""The error and the exit codes of `ttserve bench`."""

from __future__ import annotations

FAILED = 1
"""The engine or the server failed."""
STOPPED = 130
"""Ctrl-C, as shells say it."""


class BenchError(Exception):
    """An option, a file or a server cannot be used; the message says what to change."""

"""The error of `ttserve bench`."""

from __future__ import annotations


class BenchError(Exception):
    """An option, a file or a server cannot be used; the message says what to change."""

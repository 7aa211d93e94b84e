"""Errors of reading an output and of building a grammar."""

from __future__ import annotations


class TruncatedCallError(Exception):
    """The text has ended inside a tool call."""


class MalformedCallError(Exception):
    """The text looked like a tool call, but is none."""

"""Where the tests of this folder ask a cluster for what operators read: debug pages and metrics."""

from __future__ import annotations


def operations_url(url: str) -> str:
    """The address, without a path, of the pages for operators of a cluster that serves at `url`."""
    host, _, port = url.rpartition(":")
    return f"{host}:{int(port) + 1}"

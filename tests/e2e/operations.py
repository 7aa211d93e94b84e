"""Address of a cluster's pages for operators: debug pages and metrics."""

from __future__ import annotations


def operations_url(url: str) -> str:
    """Return the address, without a path, of the operators' pages of a cluster at `url`."""
    host, _, port = url.rpartition(":")
    return f"{host}:{int(port) + 1}"

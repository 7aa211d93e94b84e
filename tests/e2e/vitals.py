"""Measurements of a running server: HAProxy's view of ingresses, and processes' memory."""

from __future__ import annotations

import csv
import http.client
import re
import socket
import urllib.request
from pathlib import Path
from typing import NamedTuple

from tests.e2e import harness

INGRESS = "ServeReplica:ttserve:ingress"
HAPROXY = "haproxy -db"


def processes(footprint: harness.Footprint, word: str) -> set[int]:
    """Ids of a server's processes whose command line contains a word."""
    table = harness.process_table()
    return {p for p in footprint.look() if p in table and word in table[p].command}


def haproxy_folder(process_id: int) -> Path:
    """The private folder of a HAProxy's files."""
    arguments = Path(f"/proc/{process_id}/cmdline").read_text().split("\0")
    return Path(arguments[arguments.index("-f") + 1]).parent


class Backend(NamedTuple):
    """An ingress as HAProxy's statistics show it.

    Attributes:
        status: Such as "UP".
        num_down: How often it was taken out of the load balancer.
        down_s: Seconds for which it was out.
        num_failed: Failed health checks.
    """

    status: str
    num_down: int
    down_s: int
    num_failed: int


def backends(folder: Path) -> dict[str, Backend]:
    """Every ingress by its name, asked for over HAProxy's admin socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(folder / "admin.sock"))
        client.sendall(b"show stat\n")
        raw = b""
        while chunk := client.recv(65536):
            raw += chunk
    rows = csv.DictReader(raw.decode().removeprefix("# ").splitlines())
    return {
        row["svname"]: Backend(
            row["status"],
            int(row["chkdown"] or 0),
            int(row["downtime"] or 0),
            int(row["chkfail"] or 0),
        )
        for row in rows
        if row["svname"].startswith("SERVE_REPLICA")
    }


def peak_mib(process_id: int) -> int:
    """The most physical memory that a process has had since it began or `forget_peak`."""
    status = Path(f"/proc/{process_id}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert found, status
    return int(found[1]) // 1024


def forget_peak(process_id: int) -> None:
    """Let `peak_mib` begin with the memory that a process has now."""
    Path(f"/proc/{process_id}/clear_refs").write_text("5")


def metrics_page(port: int) -> bytes:
    """Return the page /metrics of a loopback port; empty if there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
            page: bytes = reply.read()
    except (OSError, http.client.HTTPException):
        return b""
    return page

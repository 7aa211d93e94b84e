"""Check that a stuck receiver costs the sender no more memory than the credits allow."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from benchmarks.kv.contest import ConnectorPair
from kv_transfer.config import TransferConfig

if TYPE_CHECKING:
    from benchmarks.kv.contest import Blocks

WATCH_S = 2.0
"""Shorter than the silence after which a transfer is given up."""

Receiver = Literal["core stands still", "process is stopped"]


class Growth(NamedTuple):
    """Peak growth of both ends' memory, in bytes.

    Attributes:
        receiver: The receiver's fault.
        num_transfers: At once.
        allowed: Windows of all of them.
        source: The sender's growth.
        target: The receiver's.
    """

    receiver: Receiver
    num_transfers: int
    allowed: int
    source: int
    target: int


def measure_growth(blocks: Blocks, receiver: Receiver, num_transfers: int) -> Growth:
    """Start transfers of all blocks to a receiver that takes next to nothing, and watch."""
    config = TransferConfig()
    row_bytes = blocks.layout.row_bytes
    pair = ConnectorPair("slow receiver", blocks, schemes="tcp", config=config)
    try:
        ends = pair.source, pair.target
        before = [anonymous_bytes(end.pid) for end in ends]
        for number in range(num_transfers):
            pair.start(f"slow-{number}")
        if receiver == "core stands still":
            pair.target.ask("freeze")
        else:
            while "waiting" in pair.source.ask("states")["states"]:
                time.sleep(0.001)
            os.kill(pair.target.pid, signal.SIGSTOP)
        most = before
        end_s = time.monotonic() + WATCH_S
        while time.monotonic() < end_s:
            most = [max(a, anonymous_bytes(b.pid)) for a, b in zip(most, ends, strict=True)]
            time.sleep(0.01)
    finally:
        pair.kill()
    source, target = (a - b for a, b in zip(most, before, strict=True))
    allowed = num_transfers * config.window_rows(row_bytes) * row_bytes
    return Growth(receiver, num_transfers, allowed, source, target)


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process that is neither a file's nor shared, as far as it is there."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s*(\d+) kB", status)
    return 1024 * int(found[1]) if found else 0

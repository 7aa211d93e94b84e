"""One end of a peer's transfer, in a process of its own: NIXL or Mooncake, each as it is installed.

Runs under the peers' interpreter, which has only numpy, xxhash and the two peers; so nothing of
this project is imported. ``source`` holds the bytes, ``target`` gets them. The peer decides which
side starts the transfer (the target reads, the source writes). Buffers are contiguous and all
their blocks move in one shuffled order, as separate descriptors.

Commands are JSON lines on standard input, answers JSON lines on standard output. Times are of the
monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable

HOST = "127.0.0.1"
SPAN_BYTES = 1 << 20
"""Bytes of one hash. Hashing block by block would cost small blocks much of their rate."""

MOONCAKE_BATCH = 1024
"""Entries of one Mooncake batch: over TCP, batches of 2,048 to 4,096 entries fail."""


class Engine(Protocol):
    """Operations of both peers."""

    def hello(self) -> dict[str, Any]:
        """Return what the other end must know."""

    def connect(self, hello: dict[str, Any], order: np.ndarray) -> None:
        """Prepare everything that does not belong to one transfer."""

    def transfer(self) -> None:
        """Move every block once."""


class Mooncake:
    """Mooncake's transfer engine over TCP, its synchronous batch calls."""

    def __init__(self, buffer: np.ndarray, block_bytes: int, operation: str) -> None:
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        self._buffer = buffer
        self._block_bytes = block_bytes
        self._operation = operation
        if self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
            raise SystemExit("Mooncake did not start")
        if self._engine.register_memory(buffer.ctypes.data, buffer.nbytes):
            raise SystemExit("Mooncake did not register the buffer")

    def hello(self) -> dict[str, Any]:
        """Return what the other end must know."""
        port = self._engine.get_rpc_port()
        return {"session": f"{HOST}:{port}", "address": self._buffer.ctypes.data}

    def connect(self, hello: dict[str, Any], order: np.ndarray) -> None:
        """Prepare everything that does not belong to one transfer."""
        self._session = hello["session"]
        offsets = order.astype(np.int64) * self._block_bytes
        mine = (self._buffer.ctypes.data + offsets).tolist()
        theirs = (hello["address"] + offsets).tolist()
        sizes = [self._block_bytes] * len(mine)
        self._batches = [
            tuple(values[start : start + MOONCAKE_BATCH] for values in (mine, theirs, sizes))
            for start in range(0, len(mine), MOONCAKE_BATCH)
        ]

    def transfer(self) -> None:
        """Move every block once."""
        calls = {
            "read": self._engine.batch_transfer_sync_read,
            "write": self._engine.batch_transfer_sync_write,
        }
        for mine, theirs, sizes in self._batches:
            if calls[self._operation](self._session, mine, theirs, sizes):
                raise SystemExit("a Mooncake batch failed")


class Nixl:
    """NIXL on its UCX backend with prepared descriptor lists."""

    def __init__(self, buffer: np.ndarray, block_bytes: int, operation: str) -> None:
        from nixl import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(f"bench-{os.getpid()}", nixl_agent_config(backends=["UCX"]))
        self._buffer = buffer
        self._block_bytes = block_bytes
        self._operation = operation.upper()
        self._agent.register_memory([(buffer.ctypes.data, buffer.nbytes, 0, "kv")], "DRAM")

    def hello(self) -> dict[str, Any]:
        """Return what the other end must know."""
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self._buffer.ctypes.data}

    def connect(self, hello: dict[str, Any], order: np.ndarray) -> None:
        """Prepare everything that does not belong to one transfer."""
        name = self._agent.add_remote_agent(base64.b64decode(hello["metadata"]))
        self._order = order.astype(np.int32)
        self._mine = self._descriptors("NIXL_INIT_AGENT", self._buffer.ctypes.data)
        self._theirs = self._descriptors(
            name.decode() if isinstance(name, bytes) else name, hello["address"]
        )

    def _descriptors(self, agent: str, address: int) -> object:
        num_blocks = len(self._order)
        offsets = np.arange(num_blocks, dtype=np.uint64) * np.uint64(self._block_bytes)
        table = np.zeros((num_blocks, 3), np.uint64)
        table[:, 0] = np.uint64(address) + offsets
        table[:, 1] = self._block_bytes
        return self._agent.prep_xfer_dlist(agent, table, "DRAM")

    def transfer(self) -> None:
        """Move every block once."""
        order = self._order
        handle = self._agent.make_prepped_xfer(
            self._operation, self._mine, order, self._theirs, order
        )
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise SystemExit(f"a NIXL transfer ended as {state}")
        self._agent.release_xfer_handle(handle)


ENGINES: dict[str, Callable[[np.ndarray, int, str], Engine]] = {"mooncake": Mooncake, "nixl": Nixl}


def digests(buffer: np.ndarray) -> list[int]:
    """Hash a buffer span by span."""
    return [
        xxhash.xxh3_64_intdigest(buffer[start : start + SPAN_BYTES].data)
        for start in range(0, buffer.nbytes, SPAN_BYTES)
    ]


def run(engine: Engine, buffer: np.ndarray, role: str, *, starts: bool) -> list[int]:
    """Take part in one transfer; the source hashes during it, the target afterwards."""
    if role == "target":
        if starts:
            engine.transfer()
        return digests(buffer) if starts else []
    found: list[int] = []
    hashing = threading.Thread(target=lambda: found.extend(digests(buffer)))
    hashing.start()
    if starts:
        engine.transfer()
    hashing.join()
    return found


def main() -> None:
    """Answer commands until standard input closes."""
    name, operation, role = sys.argv[1:4]
    block_bytes, num_blocks, seed = (int(text) for text in sys.argv[4:7])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # The peers print to standard output.
    num_bytes = block_bytes * num_blocks
    buffer = np.random.default_rng(seed if role == "source" else 0).integers(
        0, 256, num_bytes, np.uint8
    )
    order = np.random.default_rng(seed).permutation(num_blocks)
    engine: Engine = ENGINES[name](buffer, block_bytes, operation)
    starts = (operation == "read") == (role == "target")
    answers.write(json.dumps(engine.hello()) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {"start_s": time.monotonic()}
        cpu_s = time.process_time()
        if command["do"] == "connect" and starts:
            engine.connect(command["hello"], order)
        elif command["do"] == "clear":
            buffer.fill(0)
        elif command["do"] == "run":
            answer["digests"] = run(engine, buffer, role, starts=starts)
        elif command["do"] == "digests":
            answer["digests"] = digests(buffer)
        answer["end_s"] = time.monotonic()
        answer["cpu_s"] = time.process_time() - cpu_s
        answers.write(json.dumps(answer) + "\n")
    os._exit(0)  # Neither peer's threads end by themselves.


if __name__ == "__main__":
    main()

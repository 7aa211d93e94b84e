"""One end of a transfer of this project, in a process of its own: the whole connector, no engine.

A core thread runs the step loop that an engine runs, over KV blocks in the memory that an engine
on the CPU would have them in. ``source`` holds a request's KV computed already, ``target`` loads
it; both have the request's blocks in one shuffled order. Commands and answers are JSON lines, as
those of ``peer_process``.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from kv_transfer.config import KVNetwork, TransferConfig
from kv_transfer.connector import (
    ConnectorSettings,
    SaveProgress,
    TransferRequest,
    load_connector,
)
from kv_transfer.host_blocks import HostBlocks
from kv_transfer.keys import KeyRing
from kv_transfer.layout import KVLayout
from kv_transfer.shared_region import RegionLayout, SharedRegion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

KEYS = KeyRing((b"of a benchmark, hence no secret!",))


class EndArguments(msgspec.Struct, frozen=True):
    """Start arguments of an end.

    Attributes:
        name: Its incarnation.
        role: "source" or "target".
        layout: Of its blocks.
        num_blocks: Blocks of the one request, which fill its cache.
        seed: Of the shuffled order, and of the source's bytes.
        config: The connector's.
        network: Whether TCP traffic is encrypted.
    """

    name: str
    role: str
    layout: KVLayout
    num_blocks: int
    seed: int
    config: TransferConfig
    network: KVNetwork


class HostIO:
    """KV blocks of one lane in shared memory (a ``KVDeviceIO``)."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        piece_bytes = num_blocks * layout.piece_bytes
        offsets = tuple(index * piece_bytes for index in range(layout.num_pieces))
        self.layout = layout
        self.shared_region = SharedRegion.create(layout.num_pieces * piece_bytes)
        self.region_layout = RegionLayout(
            layout.block_size, num_blocks, layout.content_hash(), (offsets,)
        )
        self.memory = self.shared_region.memory
        self.host_blocks = [HostBlocks.within(layout, self.memory, offsets, num_blocks)]

    def read_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, num_rows: int
    ) -> NDArray[np.uint8]:
        """Copy rows out."""
        return self.host_blocks[lane].read_rows(block_ids, first_row, num_rows)

    def write_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, data: NDArray[np.uint8]
    ) -> None:
        """Copy rows in."""
        self.host_blocks[lane].write_rows(block_ids, first_row, data)


class ConnectorEnd:
    """An engine's core without an engine.

    Owner: the main thread, which plays the core thread.
    """

    def __init__(self, arguments: EndArguments) -> None:
        self._role = arguments.role
        self._num_tokens = arguments.num_blocks * arguments.layout.block_size
        self._io = HostIO(arguments.layout, arguments.num_blocks)
        random = np.random.default_rng(arguments.seed)
        self._table = tuple(random.permutation(arguments.num_blocks).tolist())
        if self._role == "source":
            self._io.memory[:] = random.integers(0, 256, self._io.memory.nbytes, np.uint8)
        settings = ConnectorSettings(
            incarnation=arguments.name,
            config=arguments.config,
            keys=KEYS,
            network=arguments.network,
            unix_now_s=time.time,
            step_now_s=time.monotonic,
        )
        self._notified = threading.Event()
        self._commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        connector = load_connector("p2p")
        self._worker = connector.create_worker(settings, self._notified.set)
        self._worker.register_kv_caches([self._io])
        self._scheduler = connector.create_scheduler(settings, [arguments.layout])
        self._progress: list[SaveProgress] = []
        self._running: dict[str, tuple[float, float]] = {}
        self._is_frozen = False

    def hello(self) -> dict[str, Any]:
        """Return what tickets need."""
        return {"endpoints": self._worker.endpoints}

    def read_commands(self) -> None:
        """Read standard input until it closes; in a thread of its own."""
        for line in sys.stdin:
            self._commands.put(json.loads(line))
            self._notified.set()
        self._commands.put(None)
        self._notified.set()

    def run(self) -> None:
        """Step whenever there is something to do; return when standard input has closed."""
        while True:
            self._notified.wait()
            self._notified.clear()
            while not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    self._worker.close(5.0)
                    return
                self._handle(command)
            if not self._is_frozen:
                self._step()

    def _handle(self, command: dict[str, Any]) -> None:
        if command["do"] == "run":
            self._start(command["request"], base64.b64decode(command["ticket"]))
        elif command["do"] == "clear":
            self._io.memory.fill(0)
            answer()
        elif command["do"] == "digests":
            answer(digests=[xxhash.xxh3_64_intdigest(self._io.memory.data)])
        elif command["do"] == "states":
            answer(states=[x.state for x in self._worker.transfers(time.monotonic())])
        elif command["do"] == "freeze":
            # Begin the requested loads, then take no steps: the transport's thread runs alone.
            self._step()
            self._is_frozen = True
            answer()
        elif command["do"] == "paths":
            answer(paths=sorted(self._worker.stats(time.monotonic()).paths))

    def _start(self, request_id: str, ticket: bytes) -> None:
        """Offer or load the request."""
        self._running[request_id] = (time.monotonic(), time.process_time())
        request = TransferRequest(request_id, range(self._num_tokens), ticket)
        self._scheduler.on_new_request(request, time.monotonic())
        if self._role == "source":
            self._progress.append(SaveProgress(request_id, 0, (self._table,), self._num_tokens))
            return
        num_tokens, _ = self._scheduler.get_num_new_matched_tokens(request_id, 0)
        self._scheduler.update_state_after_alloc(request_id, 0, [self._table], num_tokens or 0)

    def _step(self) -> None:
        meta = self._scheduler.build_connector_meta(self._progress)
        self._progress = []
        self._worker.start_load_kv(meta, time.monotonic())
        self._worker.mark_ready(meta, time.monotonic())
        self._worker.wait_for_save()
        results = self._worker.get_transfer_results(time.monotonic())
        self._scheduler.update_connector_output(results)
        if results.failed:
            raise SystemExit(f"a transfer failed: {results.failed}")
        for request_id in results.sent | results.received:
            start_s, cpu_s = self._running.pop(request_id)
            answer(start_s=start_s, end_s=time.monotonic(), cpu_s=time.process_time() - cpu_s)


def answer(**fields: object) -> None:
    """Write one answer."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer commands until standard input closes."""
    end = ConnectorEnd(msgspec.json.decode(sys.argv[1], type=EndArguments))
    answer(**end.hello())
    threading.Thread(target=end.read_commands, daemon=True).start()
    end.run()
    os._exit(0)  # The thread that reads standard input may still be in it.


if __name__ == "__main__":
    main()

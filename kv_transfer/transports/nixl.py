"""Payload between hosts over NIXL: the producer stages rows, and the consumer reads them there.

Only the payload takes this path. Leases, credit, headers and checksums are those of every other
path, so the checksum in the header detects a read that came too late or was torn. No engine writes
into another's memory. Only an engine's own read that does not end needs quarantine: its landing
slot is not reused.

NIXL can block, and over some networks never reports that a peer is frozen. So one thread makes all
calls of NIXL, and each read has a deadline. ``agent`` and ``handle`` are NIXL's names for itself
and for a read.
"""

import contextlib
import importlib
import importlib.util
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_transfer.errors import TransferError
from kv_transfer.messages import Data, Staged

logger = logging.getLogger(__name__)

_START_S = 60.0
"""Time in which an agent must come up; after it payload takes another path."""

_POLL_S = 0.0005
"""Interval at which reads under way are polled."""

_RETAINED_S = 0.1
"""Interval at which NIXL is asked again to release failed reads."""


def is_installed() -> bool:
    """Return whether NIXL can be imported."""
    return importlib.util.find_spec("nixl") is not None


def has_rdma_device() -> bool:
    """Return whether this host has an RDMA device, without which NIXL brings nothing."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


Tag = tuple[str, Data]
"""Purpose of a read: the producer's endpoint and the header of the rows."""


class RemoteRows(NamedTuple):
    """Bytes in the staging memory of a producer whose agent is known here."""

    endpoint: str
    address: int
    num_bytes: int


class FinishedRead(NamedTuple):
    """Read that has ended; ``payload`` is None if it failed."""

    tag: Tag
    payload: NDArray[np.uint8] | None


@dataclass(slots=True, eq=False)
class _Read:
    tag: Tag
    rows: RemoteRows
    give_up_s: float
    slot: int = -1
    handle: Any = None


@dataclass(slots=True, eq=False)
class _Introduce:
    endpoint: str
    metadata: bytes


@dataclass(slots=True, eq=False)
class _DropAgent:
    endpoint: str


class NixlEnd:
    """NIXL agent of one engine, with its staging and landing memory.

    Owner: its thread owns the agent and the landing memory; the transport's I/O thread owns the
    staging memory and calls all public methods.
    """

    def __init__(
        self,
        name: str,
        *,
        slot_bytes: int,
        num_slots: int,
        deadline_s: float,
        wake: Callable[[], None],
    ) -> None:
        """Start the agent.

        Args:
            name: Unique in the cluster.
            slot_bytes: Most bytes of one payload.
            num_slots: Payloads that can be staged, and others that can be under way to here.
            deadline_s: How long a read may take.
            wake: Called when ``take_reads`` has something.

        Raises:
            TransferError: NIXL does not come up here.
        """
        self._name = name
        self._slot_bytes = slot_bytes
        self._deadline_s = deadline_s
        self._wake = wake
        # Staging slots come first, landing slots behind them, so one registration covers both.
        self._memory = np.zeros(2 * num_slots * slot_bytes, np.uint8)
        self._base = self._memory.ctypes.data
        self._free_staging = list(range(num_slots))
        self._free_landing = list(range(num_slots, 2 * num_slots))
        self._lost_slots = 0
        self._metadata = b""
        self._agent: Any = None
        self._peers: dict[str, str] = {}
        self._inbox: deque[_Read | _Introduce | _DropAgent] = deque()
        self._waiting: deque[_Read] = deque()
        self._under_way: list[_Read] = []
        self._retained: list[_Read] = []
        self._finished: deque[FinishedRead] = deque()
        self._is_broken = False
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._work = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()
        if not self._ready.wait(_START_S) or not self._metadata:
            self._stopping.set()
            raise TransferError(
                f"NIXL did not start (waited for up to {_START_S:g} s; see the log for its error); "
                "payload takes another path"
            )

    # ---- I/O thread: producer

    @property
    def metadata(self) -> bytes:
        """Metadata that a consumer needs in order to read here."""
        return self._metadata

    def stage(self, payload: NDArray[np.uint8]) -> tuple[int, int] | None:
        """Copy payload to memory that consumers can read.

        Returns:
            The slot, to be freed with ``free``, and its address; None when there is no room.
        """
        if self._is_broken or not self._free_staging or payload.nbytes > self._slot_bytes:
            return None
        slot = self._free_staging.pop()
        start = slot * self._slot_bytes
        self._memory[start : start + payload.nbytes] = payload.reshape(-1)
        return slot, self._base + start

    def free(self, slot: int) -> None:
        """Free a staging slot for other payload."""
        self._free_staging.append(slot)

    # ---- I/O thread: consumer

    @property
    def num_lost_slots(self) -> int:
        """Landing slots of reads that never ended; they are not reused."""
        return self._lost_slots

    def introduce(self, endpoint: str, metadata: bytes) -> None:
        """Add the agent of the producer at an endpoint."""
        self._submit(_Introduce(endpoint, metadata))

    def drop_agent(self, endpoint: str) -> None:
        """Drop the agent of a producer that is gone."""
        self._submit(_DropAgent(endpoint))

    def read(self, tag: Tag, rows: RemoteRows, now_s: float) -> None:
        """Start a read; ``take_reads`` returns its end, within the deadline."""
        self._submit(_Read(tag, rows, now_s + self._deadline_s))

    def take_reads(self) -> list[FinishedRead]:
        """Return and clear the reads that have ended."""
        finished = []
        while self._finished:
            finished.append(self._finished.popleft())
        return finished

    def close(self, deadline_s: float) -> None:
        """Stop the thread; one that hangs in NIXL is left behind, as a daemon."""
        self._stopping.set()
        self._work.set()
        self._thread.join(deadline_s)

    def _submit(self, job: _Read | _Introduce | _DropAgent) -> None:
        self._inbox.append(job)
        self._work.set()
        if self._is_broken:
            self._fail_all()

    # ---- NIXL's thread

    def _run(self) -> None:
        try:
            self._start()
        except Exception:  # Any error of a native library: without NIXL there is another path.
            logger.exception("NIXL failed to start; payload takes another path")
        finally:
            self._ready.set()
        try:
            while not self._stopping.is_set() and self._metadata:
                is_busy = bool(self._under_way or self._waiting)
                self._work.wait(_POLL_S if is_busy else _RETAINED_S if self._retained else None)
                self._work.clear()
                self._turn(time.monotonic())
        except Exception:  # The top of a thread: every read fails from now on.
            logger.exception("NIXL has failed; not using it any more, reads come over TCP instead")
            self._is_broken = True
            self._fail_all()

    def _fail_all(self) -> None:
        """Report every read as failed; their landing slots are lost."""
        while self._inbox:
            job = self._inbox.popleft()
            if isinstance(job, _Read):
                self._waiting.append(job)
        for read in [*self._under_way, *self._waiting]:
            self._finish(read, None)
        self._under_way.clear()
        self._waiting.clear()

    def _start(self) -> None:
        api = importlib.import_module("nixl._api")
        self._agent = api.nixl_agent(self._name, api.nixl_agent_config(backends=["UCX"]))
        region = [(self._base, self._memory.nbytes, 0, "")]
        self._agent.register_memory(region, "DRAM")
        self._metadata = self._agent.get_agent_metadata()

    def _turn(self, now_s: float) -> None:
        while self._inbox:
            job = self._inbox.popleft()
            if isinstance(job, _Read):
                self._waiting.append(job)
            else:
                # An unusable agent is ignored here: each read from its peer fails on its own.
                with contextlib.suppress(*_errors()):
                    self._meet(job) if isinstance(job, _Introduce) else self._part(job.endpoint)
        while self._waiting and self._free_landing:
            self._begin(self._waiting.popleft())
        for read in list(self._under_way):
            self._look_at(read, now_s)
        for read in [x for x in self._waiting if now_s >= x.give_up_s]:
            self._waiting.remove(read)
            self._finish(read, None)
        self._retained = [read for read in self._retained if not self._release(read)]

    def _meet(self, job: _Introduce) -> None:
        name = self._agent.add_remote_agent(job.metadata)
        self._peers[job.endpoint] = name.decode() if isinstance(name, bytes) else name

    def _part(self, endpoint: str) -> None:
        name = self._peers.pop(endpoint, None)
        if name is not None:
            self._agent.remove_remote_agent(name)

    def _begin(self, read: _Read) -> None:
        peer = self._peers.get(read.rows.endpoint)
        if peer is None or read.rows.num_bytes > self._slot_bytes:
            self._finish(read, None)
            return
        read.slot = self._free_landing.pop()
        start, size = read.slot * self._slot_bytes, read.rows.num_bytes
        try:
            local = self._agent.get_xfer_descs([(self._base + start, size, 0)], "DRAM")
            remote = self._agent.get_xfer_descs([(read.rows.address, size, 0)], "DRAM")
            read.handle = self._agent.initialize_xfer("READ", local, remote, peer)
            self._under_way.append(read)
            if self._agent.transfer(read.handle) == "ERR":
                self._fail(read)
        except _errors() as error:  # The rows are asked for again.
            logger.warning(
                "NIXL cannot start to read from %s, asking for its rows again: %s",
                read.rows.endpoint,
                error,
            )
            self._fail(read)

    def _look_at(self, read: _Read, now_s: float) -> None:
        try:
            state = self._agent.check_xfer_state(read.handle)
        except _errors() as error:
            logger.warning(
                "NIXL read from %s failed, asking for its rows again: %s", read.rows.endpoint, error
            )
            state = "ERR"
        if state == "DONE":
            start = read.slot * self._slot_bytes
            payload = self._memory[start : start + read.rows.num_bytes].copy()
            self._under_way.remove(read)
            self._retire(read)
            self._finish(read, payload)
        elif state == "ERR" or now_s >= read.give_up_s:
            self._fail(read)

    def _fail(self, read: _Read) -> None:
        if read in self._under_way:
            self._under_way.remove(read)
        self._retire(read)
        self._finish(read, None)

    def _retire(self, read: _Read) -> None:
        """Release a read; its landing slot is reused only once NIXL has released it, too."""
        if not self._release(read):
            self._retained.append(read)
            self._lost_slots += 1

    def _release(self, read: _Read) -> bool:
        if read.handle is not None:
            try:
                self._agent.release_xfer_handle(read.handle)
            except _errors():  # Still in use: tried again in every turn.
                return False
            read.handle = None
            if read in self._retained:
                self._lost_slots -= 1
        self._free_landing.append(read.slot)
        return True

    def _finish(self, read: _Read, payload: NDArray[np.uint8] | None) -> None:
        self._finished.append(FinishedRead(read.tag, payload))
        self._wake()


@dataclass(slots=True, eq=False)
class _StagedRows:
    end_row: int = 0
    slots: deque[tuple[int, int]] = field(default_factory=deque)
    """(End row, slot), in the order of sending."""


class Staging:
    """Staging slots whose rows a consumer may still read.

    Owner: the transport's I/O thread. A slot is reused once the consumer has written as many rows
    as were sent up to it, or the transfer has ended. A consumer that reads later detects it by the
    checksum.
    """

    def __init__(self, end: NixlEnd) -> None:
        self._end = end
        self._transfers: dict[bytes, _StagedRows] = {}

    def stage(self, data: Data, payload: NDArray[np.uint8]) -> Staged | None:
        """Copy rows to where their consumer can read them.

        Returns:
            The announcement; None when the rows must travel behind their header. Then there is no
            room, or the rows are sent once more, possibly because reading them failed.
        """
        rows = self._transfers.setdefault(data.transfer_id, _StagedRows())
        place = self._end.stage(payload) if data.first_row >= rows.end_row else None
        rows.end_row = max(rows.end_row, data.first_row + data.num_rows)
        if place is None:
            return None
        slot, address = place
        rows.slots.append((rows.end_row, slot))
        return Staged(data, address, payload.nbytes)

    def free_consumed(self, consumed_row: Callable[[bytes], int | None]) -> None:
        """Free the slots that no consumer needs any more.

        Args:
            consumed_row: Returns one past the last row that a transfer's consumer has released;
                None when the transfer has ended.
        """
        for transfer_id, rows in list(self._transfers.items()):
            done_row = consumed_row(transfer_id)
            while rows.slots and (done_row is None or rows.slots[0][0] <= done_row):
                self._end.free(rows.slots.popleft()[1])
            if done_row is None:
                del self._transfers[transfer_id]


def _errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that calls of NIXL raise."""
    bindings = importlib.import_module("nixl._bindings")
    own = [x for name, x in vars(bindings).items() if name.endswith("Error")]
    return (*own, RuntimeError, ValueError)

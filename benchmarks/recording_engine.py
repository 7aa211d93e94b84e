"""The engine process, with a record of each of its turns.

Process, threads, sockets, core, scheduler and generator are the production's. The parts that
`replicas.engine_process.process` connects are replaced by subclasses that record the time of each
call, which costs a few microseconds of a turn. The record is written when the engine stops.

    python -m benchmarks.recording_engine FILE (then as `python -m replicas.engine_process.process`)
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from benchmarks.fitted_timing import Copy, EngineRecord, Turn
from replicas.columns import ColumnReader
from replicas.engine.executor import UniProcExecutor
from replicas.engine_process import process, sockets
from replicas.generators.torch.kv_io import TorchKVIO
from replicas.messages import AddRequest, EngineFrame, TokenOutput
from replicas.platforms import cpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    import zmq
    from numpy.typing import NDArray

    from replicas.config import EngineConfig
    from replicas.engine.step import ScheduledBatch
    from replicas.engine_process.parent import Inbox, InboxItem
    from replicas.engine_process.server import EngineServer
    from replicas.engine_process.sockets import Sender


class _Recorder:
    """The record of this process; the core thread writes turns, other threads append to lists."""

    def __init__(self) -> None:
        self.record = EngineRecord()
        self._turn = Turn()
        self._cpu_s = 0.0
        self._rows: dict[int, tuple[int, int]] = {}

    def begin_turn(self) -> None:
        """Record that the core has read its inbox, perhaps after waiting there."""
        self._turn = Turn(start_s=time.monotonic())
        self._cpu_s = time.thread_time()

    def end_turn(self) -> None:
        """Record that the core has handed out its frames and reads its inbox again."""
        turn = self._turn
        if turn.start_s and (turn.chunks or turn.rows or turn.copy_s or turn.moved_kv):
            turn.end_s = time.monotonic()
            turn.cpu_s = time.thread_time() - self._cpu_s
            self.record.turns.append(turn)

    def step(self, batch: ScheduledBatch, device_s: float) -> None:
        """Record a step that ran; rows as `VirtualWorker` counts them."""
        for seq in batch.new:
            self._rows[seq.slot] = (seq.dp_group, seq.num_computed_tokens)
        turn = self._turn
        turn.device_s = device_s
        for slot, count in zip(batch.slots, batch.num_scheduled_tokens, strict=True):
            lane, start = self._rows[slot]
            self._rows[slot] = (lane, start + count)
            if batch.kind != "prefill" and count == 1:
                turn.rows.append((lane, start + 1))
            else:
                turn.chunks.append((lane, start, start + count))

    def received(self, item: InboxItem) -> None:
        """Record the arrival of a message; the last call for it counts."""
        if isinstance(item[1], AddRequest):
            self.record.received[item[1].request.request_id] = time.monotonic()

    def moved_kv(self) -> None:
        """Record that the connector had work in this turn."""
        self._turn.moved_kv = True

    @contextlib.contextmanager
    def copying(self, direction: Literal["read", "write"], num_bytes: int) -> Iterator[None]:
        """Time the body, in which the core thread copies KV blocks."""
        start_s, cpu_s = time.monotonic(), time.thread_time()
        yield
        copy = Copy(direction, start_s, time.monotonic(), num_bytes)
        self.record.copies.append(copy)
        self._turn.copy_s += copy.end_s - copy.start_s
        self._cpu_s += time.thread_time() - cpu_s


_recorder = _Recorder()


class _Executor(UniProcExecutor):
    def __init__(
        self,
        config: EngineConfig,
        incarnation: str,
        notify: Callable[[], None],
        progress: Callable[[str, float], None],
    ) -> None:
        def tell() -> None:
            _recorder.record.wakes_s.append(time.monotonic())
            notify()

        super().__init__(config, incarnation, tell, progress)
        self._submitted: deque[ScheduledBatch] = deque()

    def collective_rpc(self, method: str, *args: object) -> list[Any]:
        results = super().collective_rpc(method, *args)
        if method == "submit_step" and args[0] is not None:
            self._submitted.append(args[0])  # type: ignore[arg-type]
        elif method == "collect_step":
            _recorder.step(self._submitted.popleft(), results[0].device_s)
        elif method == "end_step":
            _recorder.moved_kv()
        elif method == "load_model":
            _recorder.record.facts = results[0]
        return results


class _CoreInbox:
    """The inbox as the core thread sees it: the first look of a turn may wait."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def get(self, *, block: bool, timeout: float | None) -> InboxItem:
        _recorder.end_turn()
        try:
            item = self._inbox.get(block=block, timeout=timeout)
        finally:
            _recorder.begin_turn()
        if block:
            # Waking up is a part of the way, not of the turn.
            _recorder.received(item)
        return item


class _CoreSender:
    """The sender as the core thread sees it."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.forget = sender.forget
        self._columns: defaultdict[bytes, ColumnReader] = defaultdict(ColumnReader)

    def send(self, client: bytes, frame: EngineFrame) -> None:
        self._sender.send(client, frame)
        now_s = time.monotonic()
        for event in self._columns[client].read(frame.events):
            if isinstance(event, TokenOutput):
                _recorder.record.sent.append((event.request_id, event.index, now_s))


class _Process(process.EngineProcess):
    def __init__(
        self,
        server: EngineServer,
        inbox: Inbox,
        sender: Sender,
        on_drained: Callable[[], None],
    ) -> None:
        seen = _CoreInbox(inbox), _CoreSender(sender)
        super().__init__(server, *seen, on_drained)  # type: ignore[arg-type]


class _ReceiverInbox:
    """The inbox as the receiving thread sees it."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def put_message(self, item: InboxItem, num_bytes: int) -> None:
        _recorder.received(item)
        self._inbox.put_message(item, num_bytes)


class _Receiver(sockets.Receiver):
    def __init__(self, socket: zmq.Socket[bytes], inbox: Inbox) -> None:
        super().__init__(socket, _ReceiverInbox(inbox))  # type: ignore[arg-type]


class _KVIO(TorchKVIO):
    """Device memory, as is simulated: its payload travels, and both copies are recorded."""

    host_blocks = None  # type: ignore[assignment]
    shared_region = None
    region_layout = None

    def read_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, num_rows: int
    ) -> NDArray[np.uint8]:
        with _recorder.copying("read", num_rows * self.layout.row_bytes):
            return super().read_rows(lane, block_ids, first_row, num_rows)

    def write_rows(
        self, lane: int, block_ids: Sequence[int], first_row: int, data: NDArray[np.uint8]
    ) -> None:
        with _recorder.copying("write", data.nbytes):
            super().write_rows(lane, block_ids, first_row, data)


def main() -> None:
    """Run an engine until its parent closes stdin; then write the record."""
    vars(process).update(UniProcExecutor=_Executor, EngineProcess=_Process, Receiver=_Receiver)
    vars(cpu).update(TorchKVIO=_KVIO)
    process.main()
    Path(sys.argv[1]).write_bytes(msgspec.msgpack.encode(_recorder.record))


if __name__ == "__main__":
    main()

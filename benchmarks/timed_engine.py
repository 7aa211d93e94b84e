"""The engine process, on a device whose steps all take the same, with a record of first tokens.

Everything is the production's but the device: a simulated mesh each of whose steps takes `STEP_S`,
which no published decode step beats. Of each request it writes down how long it took from the
moment at which its message had been read from the socket to that at which the frame with its first
token had been sent.

    python -m benchmarks.timed_engine      (then as `python -m replicas.engine_process.process`)
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from replicas.engine_process import process, sockets
from replicas.generators.simulated.device import SimulatedMesh
from replicas.messages import Accepted, AddRequest, TokenColumns, TokenOutput
from replicas.platforms import simulated

if TYPE_CHECKING:
    import zmq

    from replicas.engine_process.parent import Inbox, InboxItem
    from replicas.messages import EngineFrame

STEP_S = 0.01
FOLDER = "TIMED_ENGINE_FOLDER"
"""Variable that says where to write: each engine has a file of its own."""


def read_times(folder: Path) -> dict[str, float]:
    """Seconds of each request whose first token has been sent, by the engine's id of it."""
    seconds = {}
    for file in folder.glob("*.times"):
        for line in file.read_text(encoding="utf-8").splitlines():
            request_id, _, taken_s = line.rpartition(" ")
            seconds[request_id] = float(taken_s)
    return seconds


class FirstTokens:
    """Requests that have come and have no token yet.

    Owner: this process. The receiving thread adds requests, the sending one removes them.
    """

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._came_s: dict[str, float] = {}
        self._by_handle: dict[int, str] = {}

    def came(self, request_id: str, now_s: float) -> None:
        """Record that a request's message has been read."""
        self._came_s[request_id] = now_s

    def sent(self, frame: EngineFrame, now_s: float) -> None:
        """Record that a frame has been sent, perhaps with some requests' first tokens."""
        if not self._came_s:
            return
        begun: list[str] = []
        for event in frame.events:
            if isinstance(event, Accepted):
                self._by_handle[event.handle] = event.request_id
            elif isinstance(event, TokenOutput):
                begun.append(event.request_id)
            elif isinstance(event, TokenColumns):
                begun += [self._by_handle.get(handle, "") for handle in event.handles]
        lines = [
            f"{request_id} {now_s - self._came_s.pop(request_id)}\n"
            for request_id in begun
            if request_id in self._came_s
        ]
        if lines:
            os.write(self._file, "".join(lines).encode())


class _Mesh(SimulatedMesh):
    def submit(self, device_s: float) -> float:
        del device_s
        return super().submit(STEP_S)


class _Inbox:
    """The inbox as the receiving thread sees it."""

    def __init__(self, inbox: Inbox, firsts: FirstTokens) -> None:
        self._inbox = inbox
        self._firsts = firsts

    def put_message(self, item: InboxItem, num_bytes: int) -> None:
        if isinstance(item[1], AddRequest):
            self._firsts.came(item[1].request.request_id, time.monotonic())
        self._inbox.put_message(item, num_bytes)


def main() -> None:
    """Run an engine until its parent closes stdin."""
    firsts = FirstTokens(Path(os.environ[FOLDER]) / f"{os.getpid()}.times")

    class Receiver(sockets.Receiver):
        def __init__(self, socket: zmq.Socket[bytes], inbox: Inbox) -> None:
            super().__init__(socket, _Inbox(inbox, firsts))  # type: ignore[arg-type]

    class Sender(sockets.Sender):
        def send(self, client: bytes, frame: EngineFrame) -> None:
            super().send(client, frame)
            firsts.sent(frame, time.monotonic())

    vars(process).update(Receiver=Receiver, Sender=Sender)
    vars(simulated).update(SimulatedMesh=_Mesh)
    process.main()


if __name__ == "__main__":
    main()

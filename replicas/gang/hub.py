"""Hub of a gang: admits the ranks, coordinates every turn, and announces a loss.

Runs in the process that started rank 0's engine, so that it outlives that engine. Owns the `Waves`,
under one lock, and the connections. Listens only until all ranks have joined.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import TYPE_CHECKING

import msgspec

from replicas.gang.lockstep import Declaration, LockstepError, Loss, SilenceWatch, Waves
from replicas.gang.wire import (
    BEAT_S,
    SILENT_LOOKS,
    Beat,
    Complete,
    Drained,
    Join,
    admit,
    decode_up,
    receive,
    send,
)

if TYPE_CHECKING:
    from kv_transfer.keys import KeyRing
    from replicas.gang.wire import Down

logger = logging.getLogger(__name__)


class GangHub:
    """Server that coordinates the ranks of one gang.

    Args:
        gang: Name of the gang, never reused.
        size: Number of ranks.
        keys: The deployment's secrets.
        host: Address to listen on, on a free port.

    Attributes:
        address: The hub's "host:port", for `GangConfig.hub`.

    Raises:
        OSError: The hub cannot listen on this host.
    """

    def __init__(self, gang: str, size: int, keys: KeyRing, host: str = "127.0.0.1") -> None:
        self._gang = gang
        self._keys = keys
        self._waves = Waves(size)
        self._watch = SilenceWatch(size, SILENT_LOOKS)
        self._ranks: dict[int, socket.socket] = {}
        self._store = ""
        # rank -> seconds that it has been stalled, to explain its loss.
        self._stalled_s: dict[int, float] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._listener.getsockname()[1]}"
        for work in (self._accept, self._beat):
            threading.Thread(target=work, name="gang-hub", daemon=True).start()

    @property
    def loss(self) -> Loss | None:
        """The loss that ended the gang, or None."""
        return self._waves.loss

    @property
    def num_turns(self) -> int:
        """Number of turns that have started."""
        return self._waves.number

    @property
    def num_waves(self) -> int:
        """Number of waves: how often turns have begun after a pause."""
        return self._waves.num_waves

    def close(self) -> None:
        """End the gang, and with it all remaining ranks. Idempotent."""
        self._closed.set()
        self._stop_listening()
        with self._lock:
            for connection in self._ranks.values():
                _hang_up(connection)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed: all ranks have joined, or the gang has ended
            while not self._closed.is_set():
                connection, _ = self._listener.accept()
                threading.Thread(
                    target=self._serve, args=(connection,), name="gang-rank", daemon=True
                ).start()

    def _serve(self, connection: socket.socket) -> None:
        """Handle one rank's messages until its connection ends."""
        rank: int | None = None
        reason = "its connection closed"
        try:
            rank = self._join(connection, admit(connection, self._keys, self._gang))
            while not self._closed.is_set():
                self._hear(rank, receive(connection))
        except (OSError, msgspec.MsgspecError, LockstepError) as error:
            if not isinstance(error, OSError):
                reason = str(error)
        finally:
            if rank is not None:
                self._lose(rank, reason)
            _hang_up(connection)

    def _join(self, connection: socket.socket, raw: bytes) -> int:
        said = decode_up(raw)
        with self._lock:
            size = self._watch.size
            if not isinstance(said, Join) or not 0 <= said.rank < size or said.rank in self._ranks:
                raise ConnectionError(f"{said} does not come from a rank that has yet to join")
            self._ranks[said.rank] = connection
            self._watch.record_message(said.rank)
            self._store = said.store or self._store
            if self._waves.loss is not None:
                send(connection, self._waves.loss)
            if len(self._ranks) == size:
                self._broadcast(Complete(self._store))
                self._stop_listening()
        return said.rank

    def _hear(self, rank: int, raw: bytes) -> None:
        said = decode_up(raw)
        with self._lock:
            self._watch.record_message(rank)
            if isinstance(said, Declaration):
                turn = self._waves.declare(rank, said)
                if turn is not None:
                    self._broadcast(turn)
            elif isinstance(said, Drained) and self._waves.drain(rank):
                self._broadcast(Drained())
            elif isinstance(said, Beat):
                self._stalled_s[rank] = said.stalled_s

    def _beat(self) -> None:
        while self.loss is None and not self._closed.wait(BEAT_S):
            with self._lock:
                for rank in self._watch.look():
                    if rank in self._ranks:
                        self._end(rank, f"it sent nothing for {BEAT_S * SILENT_LOOKS:g} s")
                self._broadcast(Beat())

    def _lose(self, rank: int, reason: str) -> None:
        with self._lock:
            stalled_s = self._stalled_s.get(rank, 0.0)
            self._end(rank, reason + (f" after {stalled_s:.0f} s in one step" if stalled_s else ""))

    def _end(self, rank: int, reason: str) -> None:
        """Announce a loss to all ranks, once. The caller holds the lock."""
        loss = self._waves.lose(rank, reason)
        if loss is not None and not self._closed.is_set():
            logger.error("gang %s ends because rank %d was lost: %s", self._gang, rank, reason)
            self._broadcast(loss)

    def _broadcast(self, message: Down) -> None:
        for connection in self._ranks.values():
            with contextlib.suppress(OSError):  # the thread that reads this connection notices
                send(connection, message)

    def _stop_listening(self) -> None:
        # `close` alone does not wake a thread that is blocked in accept.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()

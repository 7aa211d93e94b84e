"""The hub of a gang: joins the ranks, agrees with them on every turn, tells all of a loss.

It runs in the process that started rank 0's engine, so that it outlives the engine. Owner: the
`Waves`, under one lock, and the connections. It listens only until all ranks have joined.
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
    """See the module docstring.

    Args:
        gang: Name of the gang, never used again.
        size: Ranks.
        keys: The deployment's secrets.
        host: Address to listen on, on a free port.

    Attributes:
        address: "host:port" for `GangConfig.hub`.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(self, gang: str, size: int, keys: KeyRing, host: str = "127.0.0.1") -> None:
        self._gang = gang
        self._keys = keys
        self._waves = Waves(size)
        self._watch = SilenceWatch(size, SILENT_LOOKS)
        self._ranks: dict[int, socket.socket] = {}
        self._store = ""
        # Who stalls, for how long: asked for when it is gone.
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
        """Why the gang has ended, if it has."""
        return self._waves.loss

    @property
    def num_turns(self) -> int:
        """Turns that have started."""
        return self._waves.number

    @property
    def num_waves(self) -> int:
        """How often they have begun after a pause."""
        return self._waves.num_waves

    def close(self) -> None:
        """End the gang: every rank that is left ends, too. Idempotent."""
        self._closed.set()
        self._stop_listening()
        with self._lock:
            for connection in self._ranks.values():
                _hang_up(connection)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed: all are here, or nobody is to come any more
            while not self._closed.is_set():
                connection, _ = self._listener.accept()
                threading.Thread(
                    target=self._serve, args=(connection,), name="gang-rank", daemon=True
                ).start()

    def _serve(self, connection: socket.socket) -> None:
        """Hear one rank until it is gone."""
        rank: int | None = None
        reason = "its process is gone"
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
                raise ConnectionError(f"{said} is no rank that is missing")
            self._ranks[said.rank] = connection
            self._watch.hear(said.rank)
            self._store = said.store or self._store
            if self._waves.loss is not None:
                send(connection, self._waves.loss)
            if len(self._ranks) == size:
                self._tell(Complete(self._store))
                self._stop_listening()
        return said.rank

    def _hear(self, rank: int, raw: bytes) -> None:
        said = decode_up(raw)
        with self._lock:
            self._watch.hear(rank)
            if isinstance(said, Declaration):
                turn = self._waves.declare(rank, said)
                if turn is not None:
                    self._tell(turn)
            elif isinstance(said, Drained) and self._waves.drain(rank):
                self._tell(Drained())
            elif isinstance(said, Beat):
                self._stalled_s[rank] = said.stalled_s

    def _beat(self) -> None:
        while self.loss is None and not self._closed.wait(BEAT_S):
            with self._lock:
                for rank in self._watch.look():
                    if rank in self._ranks:
                        self._end(rank, f"it was silent for {BEAT_S * SILENT_LOOKS:g} s")
                self._tell(Beat())

    def _lose(self, rank: int, reason: str) -> None:
        with self._lock:
            stalled_s = self._stalled_s.get(rank, 0.0)
            self._end(rank, reason + (f" after {stalled_s:.0f} s in one step" if stalled_s else ""))

    def _end(self, rank: int, reason: str) -> None:
        """Tell everybody, under the lock, unless they know."""
        loss = self._waves.lose(rank, reason)
        if loss is not None and not self._closed.is_set():
            logger.error("gang %s ends: rank %d was lost: %s", self._gang, rank, reason)
            self._tell(loss)

    def _tell(self, message: Down) -> None:
        for connection in self._ranks.values():
            with contextlib.suppress(OSError):  # whoever hears it notices
                send(connection, message)

    def _stop_listening(self) -> None:
        # Not closed alone: a thread that waits in accept would wait on.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()

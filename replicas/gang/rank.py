"""A rank's connection to its gang: declarations to the hub, turns from it.

`replicas.gang.lockstep` decides, and the hub (`replicas.gang.hub`) announces when a turn starts.
The core thread declares its batch and computes, one thread reads from the hub, and one sends it
beats. When a rank is lost this process ends at once, even if its core thread is blocked, so that
its clients get an error and do not hang.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from replicas.errors import GangLostError
from replicas.gang.lockstep import LockstepError, Loss, Rank, SilenceWatch, Turn
from replicas.gang.wire import (
    BEAT_S,
    SILENT_LOOKS,
    Beat,
    Complete,
    Drained,
    Join,
    connect,
    decode_down,
    receive,
    send,
)
from replicas.generators.torch.exchange import GlooExchange, open_store, reach_store

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from replicas.config import EngineConfig
    from replicas.gang.wire import Down, Up
    from replicas.watchdog import Watchdog

EXPLAIN_S = 10.0
"""Seconds to wait for the hub's reason after a collective has failed."""


class GangRank:
    """An engine's connection to its gang: declarations to the hub, turns from it.

    Args:
        config: The engine's configuration, with a place in a gang.
        host: Address of this engine, at which rank 0 opens its rendezvous store.
        watchdog: Progress of the core thread; tells the hub which rank hangs.
        wake: Called from another thread when a turn of other ranks starts.
        on_loss: Called once, from another thread, with the reason why the gang has ended.
        on_drained: Called from another thread once no rank has a request left. From then on the
            end of a rank is not a loss.
    """

    def __init__(
        self,
        config: EngineConfig,
        host: str,
        watchdog: Watchdog,
        *,
        wake: Callable[[], None],
        on_loss: Callable[[str], None],
        on_drained: Callable[[], None],
    ) -> None:
        assert config.gang is not None
        self._config = config.gang
        self._keys = config.keys
        self._host = host
        self._watchdog = watchdog
        self._wake = wake
        self._on_loss = on_loss
        self._on_drained = on_drained
        self._rank = Rank(self._config.rank)
        self._watch = SilenceWatch(1, SILENT_LOOKS)
        self._complete: queue.SimpleQueue[Complete] = queue.SimpleQueue()
        self._turns: queue.SimpleQueue[Turn] = queue.SimpleQueue()
        self._loss: str | None = None
        self._is_drained = False
        self._is_lost = threading.Event()
        self._sending = threading.Lock()
        self._connection: socket.socket

    def join(self) -> GlooExchange:
        """Wait for all ranks and connect to them.

        Raises:
            GangLostError: There is no such gang.
        """
        store, at = open_store(self._host) if self._config.rank == 0 else (None, "")
        self._connection = connect(self._config.hub, self._keys, self._config.name)
        self._send(Join(self._config.rank, at))
        for work in (self._read_hub, self._beat):
            threading.Thread(target=work, name="gang", daemon=True).start()
        complete = self._complete.get()
        store = store or reach_store(complete.store)
        return GlooExchange(
            store, self._config.rank, self._config.size, self._host, self._explain,
            self._watchdog.waiting,
        )  # fmt: skip

    def idle(self) -> None:
        """Declare that this rank has no batch, unless it has done so already."""
        self._declare(0)

    def compute(self, num_tokens: int, serve: Callable[[Turn], None]) -> Turn:
        """Return the turn for the rank's batch; call `serve` for other ranks' turns before it."""
        self._declare(num_tokens)
        while not self._rank.enter_turn(turn := self._next_turn()):
            serve(turn)
            self._declare(num_tokens)
        return turn

    def follow(self, serve: Callable[[Turn], None]) -> None:
        """Call `serve` for the turn of other ranks that has started, if there is one."""
        try:
            turn = self._turns.get_nowait()
        except queue.Empty:
            return
        if self._rank.enter_turn(turn):
            raise LockstepError(f"{turn} starts without the batch of rank {self._config.rank}")
        serve(turn)

    def drained(self) -> None:
        """Tell the hub that no request is left here; serve others until no rank has one left."""
        self._send(Drained())

    def _next_turn(self) -> Turn:
        with self._watchdog.waiting():
            return self._turns.get()

    def _declare(self, num_tokens: int) -> None:
        said = self._rank.declare(num_tokens)
        if said is not None:
            self._send(said)

    def _send(self, message: Up) -> None:
        try:
            with self._sending:
                send(self._connection, message)
        except OSError as error:
            raise GangLostError(f"the gang has ended: {self._explain()}") from error

    def _read_hub(self) -> None:
        while True:
            try:
                said: Down = decode_down(receive(self._connection))
            except (OSError, msgspec.MsgspecError) as error:
                self._end(f"its hub is gone: {error}")
                return
            self._watch.record_message(0)
            match said:
                case Turn():
                    self._turns.put(said)
                    if not said.num_tokens[self._config.rank]:
                        self._wake()
                case Complete():
                    self._complete.put(said)
                case Drained():
                    self._is_drained = True
                    self._on_drained()
                case Loss(rank, reason):
                    self._end(f"rank {rank} was lost: {reason}")
                case Beat():
                    pass

    def _beat(self) -> None:
        while not self._is_lost.wait(BEAT_S):
            if self._watch.look():
                self._end(f"its hub was silent for {BEAT_S * SILENT_LOOKS:g} s")
            is_own = self._watchdog.count % 2 == 1
            stalled_s = self._watchdog.stalled_s(time.monotonic()) if is_own else 0.0
            try:
                with self._sending:
                    send(self._connection, Beat(stalled_s))
            except OSError:  # the reading thread reports the reason
                return

    def _end(self, reason: str) -> None:
        if not self._is_lost.is_set() and not self._is_drained:
            self._loss = f"the gang {self._config.name} has ended: {reason}"
            self._is_lost.set()
            self._on_loss(self._loss)

    def _explain(self) -> str:
        self._is_lost.wait(EXPLAIN_S)
        return self._loss or "a collective failed, and no rank is known to be lost"

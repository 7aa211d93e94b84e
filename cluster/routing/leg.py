"""A leg: one engine's part in one request, from the question to the moment it is let go of.

Owner: the request's `Run`. A leg owns its hold in the pool state, until the engine has answered,
and its stream, until it is closed; closing it gives both back whatever state it is in.
"""

from __future__ import annotations

import contextlib
import enum
from collections import deque
from typing import TYPE_CHECKING, Protocol

from replicas.errors import EngineDeadError

if TYPE_CHECKING:
    from cluster.routing.placement import Placement
    from cluster.routing.pools import PoolState
    from cluster.routing.tickets import Transfer
    from replicas.messages import AddRequest, ClientMessage, EngineEvent
    from replicas.streams import EngineStream, Inbox


class EngineClient(Protocol):
    """What a leg needs of the connections to the engines."""

    def open_stream(
        self, incarnation: str, request_id: str, message: ClientMessage, inbox: Inbox | None = None
    ) -> EngineStream:
        """See `AsyncMPClient.open_stream`."""
        ...

    def send(self, incarnation: str, message: ClientMessage) -> None:
        """See `AsyncMPClient.send`."""
        ...


class LegState(enum.Enum):
    """Where a leg is."""

    ASKED = "asked"
    """The engine was sent the request, which counts against its view."""
    OPEN = "open"
    """It has answered: its snapshots count the request from now on."""
    CLOSED = "closed"
    """Nobody listens to it any more."""


_SUCCESSORS = {
    LegState.ASKED: {LegState.OPEN, LegState.CLOSED},
    LegState.OPEN: {LegState.OPEN, LegState.CLOSED},
    LegState.CLOSED: {LegState.CLOSED},
}


class Leg:
    """See the module docstring; making one asks the engine.

    Args:
        client: Connections to the engines.
        pools: Where the request is held.
        placement: Where it goes, and is held.
        message: What the engine is asked.
        inbox: Where its events go.
        offer: For a prefill leg: the transfer, if any, that its engine keeps the KV of the prompt
            for until some decode engine comes.

    Attributes:
        state: Where it is.
        mode: Which part of the request runs there.
        incarnation: The engine.
        stream: Its events, as they come into the inbox.
        early: What the engine said while another leg was waited for.
        offer: As given. Once a decode engine has begun to fetch it, the loss of that engine is the
            transfer's end, which the next one is told of by prefill.

    Raises:
        EngineDeadError: The engine is not connected.
    """

    def __init__(
        self,
        client: EngineClient,
        pools: PoolState,
        placement: Placement,
        message: AddRequest,
        inbox: Inbox,
        offer: Transfer | None = None,
    ) -> None:
        self.state = LegState.ASKED
        self.mode = message.mode
        self.incarnation = placement.incarnation
        self.early: deque[EngineEvent] = deque()
        self.offer = offer
        self._client = client
        self._pools = pools
        self._request_id = message.request.request_id
        try:
            self.stream = client.open_stream(self.incarnation, self._request_id, message, inbox)
        except EngineDeadError:
            self._pools.release(self._request_id, self.incarnation)
            raise

    def __repr__(self) -> str:
        return f"Leg({self.mode} on {self.incarnation}, {self.state.value})"

    def answered(self) -> None:
        """The engine has answered: let go of the hold. Idempotent."""
        self._go(LegState.OPEN)
        self._pools.release(self._request_id, self.incarnation)

    def send(self, message: ClientMessage) -> None:
        """Tell the engine more of the request; if it is gone the stream will say so."""
        with contextlib.suppress(EngineDeadError):
            self._client.send(self.incarnation, message)

    def close(self, *, abort: bool) -> None:
        """Let go of everything; with `abort`, the engine drops the request too. Idempotent."""
        self._go(LegState.CLOSED)
        self._pools.release(self._request_id, self.incarnation)
        self.stream.close(abort=abort)

    def _go(self, state: LegState) -> None:
        assert state in _SUCCESSORS[self.state], f"{self!r} cannot become {state.value}"
        self.state = state

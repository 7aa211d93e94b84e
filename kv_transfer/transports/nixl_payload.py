"""What a ZMQ transport does with NIXL: announce staged rows, read announced ones."""

import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kv_transfer.connector import ConnectorSettings
from kv_transfer.errors import TransferError
from kv_transfer.messages import Agent, Data, Staged, encode
from kv_transfer.producer import SendToConsumer
from kv_transfer.sessions import TransferSessions
from kv_transfer.transports.nixl import (
    NixlEnd,
    RemoteRows,
    Staging,
    has_rdma_device,
    is_installed,
)

logger = logging.getLogger(__name__)


def start_nixl(
    settings: ConnectorSettings, slot_bytes: int, wake: Callable[[], None]
) -> NixlEnd | None:
    """Start NIXL where it is and gains something; where it fails, payload goes another way.

    Args:
        settings: The engine's.
        slot_bytes: Most bytes of one payload.
        wake: Called when something was read.
    """
    config = settings.config
    if not (is_installed() and has_rdma_device()):
        return None
    if settings.network != "plain":
        logger.info(
            "KV transfer: NIXL and an RDMA device are here and stay unused, as kv_network is "
            "encrypted and NIXL carries plain text"
        )
        return None
    try:
        return NixlEnd(
            settings.incarnation,
            slot_bytes=slot_bytes,
            num_slots=max(2, config.max_inflight_bytes // slot_bytes),
            deadline_s=config.no_progress_s,
            wake=wake,
        )
    except TransferError as error:
        logger.warning("%s", error)
        return None


class NixlPayload:
    """Payload of both halves of an engine's transfers, as far as it goes over NIXL.

    Owner: the transport's I/O thread.
    """

    def __init__(self, end: NixlEnd, incarnation: str, sessions: TransferSessions) -> None:
        """Have met nobody.

        Args:
            end: The agent.
            incarnation: This engine's.
            sessions: Whose payload it is.
        """
        self._end = end
        self._staging = Staging(end)
        self._incarnation = incarnation
        self._sessions = sessions
        self._met: set[bytes] = set()

    def free_consumed(self) -> None:
        """Use the memory of rows again that their consumers have."""
        self._staging.free_consumed(self._sessions.producer.consumed_row)

    def stage(self, send: SendToConsumer) -> Staged | None:
        """Put payload where its consumer reads it; None where it travels behind its header."""
        message, producer = send.message, self._sessions.producer
        if send.payload is None or not isinstance(message, Data):
            return None
        if producer.path(message.transfer_id) != "nixl":
            return None
        return self._staging.stage(message, send.payload)

    def hello(self) -> tuple[bytes, bytes]:
        """Return what a consumer has to hear before its first staged rows."""
        return encode(Agent(self._incarnation)), self._end.metadata

    def has_met(self, peer: bytes) -> bool:
        """Tell whether a consumer has."""
        return peer in self._met

    def met(self, peer: bytes) -> None:
        """Note that it is on its way to a consumer."""
        # Those that no transfer belongs to any more are gone, or will be greeted anew.
        self._met = (self._met & self._sessions.producer.peers) | {peer}

    def on_message(
        self,
        endpoint: str,
        message: Staged | Agent,
        payload: NDArray[np.uint8] | None,
        now_s: float,
    ) -> bool:
        """Meet a producer's agent, or begin to read what it has staged; False for nonsense."""
        if isinstance(message, Agent) != (payload is not None):
            return False
        if payload is not None:
            self._end.introduce(endpoint, payload.tobytes())
            return True
        assert isinstance(message, Staged)
        if not self._sessions.consumer.expects(message.data, message.num_bytes):
            return False
        rows = RemoteRows(endpoint, message.address, message.num_bytes)
        self._end.read((endpoint, message.data), rows, now_s)
        return True

    def take_reads(self, avoid: Callable[[str], None], now_s: float) -> None:
        """Hand in what was read; what could not be is asked for again, to come another way.

        Args:
            avoid: Called with the endpoint of a producer from which a read has failed.
            now_s: Monotonic clock.
        """
        for read in self._end.take_reads():
            endpoint, data = read.tag
            if read.payload is not None:
                self._sessions.consumer.on_message(endpoint, data, read.payload, now_s, "nixl")
            else:
                avoid(endpoint)
                self._sessions.consumer.lost(data, now_s)

    def forget(self, endpoint: str) -> None:
        """Drop the agent of a producer that is gone."""
        self._end.forget(endpoint)

    def close(self) -> None:
        """Stop the agent's thread, if NIXL lets it go."""
        self._end.close(1.0)

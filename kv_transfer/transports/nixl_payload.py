"""Use of NIXL by the ZMQ transport: announce staged rows, read announced ones."""

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
    """Start NIXL if it is installed and useful; return None if not, or if it fails to start.

    Args:
        settings: The engine's.
        slot_bytes: Most bytes of one payload.
        wake: Called when a read has ended.
    """
    config = settings.config
    if not (is_installed() and has_rdma_device()):
        return None
    if settings.network != "plain":
        logger.info(
            "KV transfer: NIXL and an RDMA device are present but not used: NIXL cannot encrypt, "
            "and kv_network is encrypted"
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
        logger.warning("KV transfer without NIXL: %s", error)
        return None


class NixlPayload:
    """Payload of an engine's transfers, in both roles, as far as it goes over NIXL.

    Owner: the transport's I/O thread.
    """

    def __init__(self, end: NixlEnd, incarnation: str, sessions: TransferSessions) -> None:
        """Start without known consumers.

        Args:
            end: The agent.
            incarnation: This engine's.
            sessions: Sessions whose payload it carries.
        """
        self._end = end
        self._staging = Staging(end)
        self._incarnation = incarnation
        self._sessions = sessions
        self._met: set[bytes] = set()

    def free_consumed(self) -> None:
        """Free the staging slots of rows that their consumers have released."""
        self._staging.free_consumed(self._sessions.producer.consumed_row)

    def stage(self, send: SendToConsumer) -> Staged | None:
        """Stage payload for its consumer; None where it travels behind its header."""
        message, producer = send.message, self._sessions.producer
        if send.payload is None or not isinstance(message, Data):
            return None
        if producer.path(message.transfer_id) != "nixl":
            return None
        return self._staging.stage(message, send.payload)

    def hello(self) -> tuple[bytes, bytes]:
        """Return the frames that a consumer must receive before its first staged rows."""
        return encode(Agent(self._incarnation)), self._end.metadata

    def has_met(self, peer: bytes) -> bool:
        """Return whether a consumer was sent ``hello``."""
        return peer in self._met

    def met(self, peer: bytes) -> None:
        """Record that ``hello`` was sent to a consumer."""
        # Consumers without a transfer are dropped: they are gone, or get another hello later.
        self._met = (self._met & self._sessions.producer.peers) | {peer}

    def on_message(
        self,
        endpoint: str,
        message: Staged | Agent,
        payload: NDArray[np.uint8] | None,
        now_s: float,
    ) -> bool:
        """Add a producer's agent, or read its staged rows; False for an invalid message."""
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
        """Pass finished reads to the sessions; request rows of failed ones over another path.

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

    def drop_agent(self, endpoint: str) -> None:
        """Drop the agent of a producer that is gone."""
        self._end.drop_agent(endpoint)

    def close(self) -> None:
        """Stop the agent's thread, within 1 s."""
        self._end.close(1.0)

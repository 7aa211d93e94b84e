"""Tickets: permits to fetch KV. Only this module makes them.

Only a router makes tickets, and only they let an engine fetch another one's KV. A request's body
brings neither: no row of `cluster.edge.openai_fields` that acts is a ticket or an endpoint.
"""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kv_transfer.config import TransferConfig
from kv_transfer.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.keys import KeyRing
    from replicas.messages import EngineDescription, EngineRequest

_random_transfer_id = partial(secrets.token_bytes, 16)


class Transfer(NamedTuple):
    """KV that an engine is asked to keep for one attempt of a request.

    Attributes:
        transfer_id: Name of the transfer at both ends.
        epoch: Number of the attempt within the request.
        request: The request whose KV moves.
        producer: The prefill engine, or the decode engine that hands a stream over.
        num_tokens: Number of leading tokens whose KV it is.
    """

    transfer_id: bytes
    epoch: int
    request: EngineRequest
    producer: EngineDescription
    num_tokens: int


class TicketOffice:
    """Creates transfers and seals their tickets.

    Args:
        keys: Keys that seal; the engines need the same.
        config: Times of a hand-over. A ticket is valid for the time in which a producer waits for
            its consumer, and for one lease.
        new_transfer_id: Makes 16 bytes that cannot be guessed.
        unix_now_s: The wall clock.
    """

    def __init__(
        self,
        keys: KeyRing,
        config: TransferConfig | None = None,
        new_transfer_id: Callable[[], bytes] = _random_transfer_id,
        unix_now_s: Callable[[], float] = time.time,
    ) -> None:
        config = config or TransferConfig()
        self._keys = keys
        self._lifetime_s = config.rendezvous_s + config.lease_s
        self._new_transfer_id = new_transfer_id
        self._unix_now_s = unix_now_s

    def __repr__(self) -> str:
        return f"TicketOffice({self._keys!r})"

    def begin(
        self,
        request: EngineRequest,
        epoch: int,
        producer: EngineDescription,
        num_tokens: int | None = None,
    ) -> Transfer:
        """Create a transfer of an engine's KV of the prompt, or of `num_tokens` leading tokens."""
        num_tokens = len(request.prompt_token_ids) if num_tokens is None else num_tokens
        return Transfer(self._new_transfer_id(), epoch, request, producer, num_tokens)

    def seal(self, transfer: Transfer, consumer: str = "") -> bytes:
        """Return a sealed ticket for a transfer.

        Args:
            transfer: The transfer.
            consumer: Incarnation of the engine that may fetch; "" while it is not chosen. Such a
                ticket lets the prefill engine keep the KV, and no engine fetch it.

        Raises:
            TicketError: There is no key to seal it with, or it is too long to travel.
        """
        producer = transfer.producer
        ticket = Ticket(
            transfer_id=transfer.transfer_id,
            request_id=transfer.request.request_id,
            epoch=transfer.epoch,
            producer_endpoints=producer.kv_endpoints or (),
            producer_incarnation=producer.incarnation,
            consumer=consumer,
            num_tokens=transfer.num_tokens,
            layout_hash=producer.kv_layout_hash or "",
            expires_ms=int((self._unix_now_s() + self._lifetime_s) * 1000),
        )
        return self._keys.seal(ticket)

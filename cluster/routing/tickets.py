"""Permits to fetch KV, and the one place that makes them.

Only a router makes tickets, and only they let an engine fetch another one's KV. A request's body
brings neither tickets nor endpoints: `cluster.edge.openai_fields` refuses whatever looks like one.
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
    """What an engine is asked to keep for one attempt of a request.

    Attributes:
        transfer_id: Names it to both ends.
        epoch: Counts the attempts of the request.
        request: Whose KV moves.
        producer: The prefill engine, or the decode engine that hands a stream over.
        num_tokens: Leading tokens whose KV that is.
    """

    transfer_id: bytes
    epoch: int
    request: EngineRequest
    producer: EngineDescription
    num_tokens: int


class TicketOffice:
    """Begins transfers and seals their tickets.

    Args:
        keys: What seals; the engines need the same.
        config: How long a hand-over may take: a ticket is good for the time in which a producer
            waits for its consumer, and for one lease.
        new_transfer_id: Makes 16 bytes that nobody can guess.
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
        """A new transfer from an engine: of the prompt, or of so many leading tokens."""
        num_tokens = len(request.prompt_token_ids) if num_tokens is None else num_tokens
        return Transfer(self._new_transfer_id(), epoch, request, producer, num_tokens)

    def seal(self, transfer: Transfer, consumer: str = "") -> bytes:
        """A ticket of a transfer, sealed.

        Args:
            transfer: Which.
            consumer: Incarnation of the engine that may fetch; "" while it is not chosen: good for
                the prefill engine to keep the KV, and for nobody to fetch it.

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

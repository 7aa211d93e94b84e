"""Permits to fetch KV: the secrets that seal them, and the one place that makes them.

Only a router makes tickets, and only they let an engine fetch another one's KV. A request's body
brings neither tickets nor endpoints: `cluster.edge.openai_fields` refuses whatever looks like one.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import secrets
import stat
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cluster.errors import ClusterConfigError
from kv_transfer.config import TransferConfig
from kv_transfer.keys import MIN_KEY_BYTES, KeyRing
from kv_transfer.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable

    from replicas.messages import EngineDescription, EngineRequest

_random_transfer_id = partial(secrets.token_bytes, 16)
_NOT_FOR_OTHERS = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})+")


def key_ring(key_file: str) -> KeyRing:
    """The secrets of a file, which must be this user's or root's and closed to all others.

    Its group may read it, as a Kubernetes Secret's can with `fsGroup`.

    Args:
        key_file: One secret a line, in hexadecimal or base64; the first seals, each of them opens.
            Empty lines and lines that begin with # are passed over.

    Raises:
        ClusterConfigError: The file cannot be used; says where and why, and shows nothing of it.
    """
    try:
        with Path(key_file).open(encoding="ascii") as file:
            # Of what is open: a path could lead to another file by then.
            _require_closed(key_file, os.fstat(file.fileno()))
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        # The error of a decoder has what it could not decode.
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise ClusterConfigError(f"args.key_file: cannot read {key_file}: {reason}") from None
    found = [
        _secret(line.strip(), f"args.key_file: {key_file}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not found:
        raise ClusterConfigError(f"args.key_file: {key_file} holds no secret")
    return KeyRing(tuple(found))


def _require_closed(key_file: str, info: os.stat_result) -> None:
    if info.st_uid not in {0, os.geteuid()}:
        why = f"belongs to user {info.st_uid}, neither to this one ({os.geteuid()}) nor to root"
    elif info.st_mode & _NOT_FOR_OTHERS:
        why = f"has mode {stat.S_IMODE(info.st_mode):04o}: others than its owner can use it"
    else:
        return
    raise ClusterConfigError(
        f"args.key_file: {key_file} {why}; `chmod 600` it, and put new secrets in if others could "
        "have read it. Its group may read it and not write: of a Kubernetes Secret take "
        "`defaultMode: 0440` with `fsGroup`"
    )


def _secret(text: str, where: str) -> bytes:
    """One line's secret: hexadecimal if it can be, else base64."""
    if _HEX.fullmatch(text):
        secret = bytes.fromhex(text)
    else:
        try:
            secret = base64.b64decode(text, validate=True)
        except binascii.Error:
            raise ClusterConfigError(f"{where} is neither hexadecimal nor base64") from None
    if len(secret) < MIN_KEY_BYTES:
        raise ClusterConfigError(
            f"{where} has {len(secret)} bytes; a secret has at least {MIN_KEY_BYTES}: make one "
            "with `openssl rand -hex 32`"
        )
    return secret


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

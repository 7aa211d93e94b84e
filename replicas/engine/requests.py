"""Handling of clients' messages about requests: add, load, lend, activate, abort.

Owner: the engine core, its only caller. Also keeps requests whose id is still used by an aborted
one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeAlias

from kv_transfer.connector import TransferRequest
from kv_transfer.errors import TransferError
from replicas.engine.kv_loads import failure_word
from replicas.engine.sequence import KVPlace, Sequence
from replicas.messages import (
    Abort,
    Accepted,
    Activate,
    AddRequest,
    KVLoaded,
    LendKV,
    LoadKV,
    Refused,
)

if TYPE_CHECKING:
    from replicas.engine.duty import Duty
    from replicas.engine.outputs import ClientEvents
    from replicas.engine.request_checks import RequestChecks
    from replicas.engine.scheduler import Scheduler
    from replicas.messages import RefusalReason

logger = logging.getLogger(__name__)

RequestMessage: TypeAlias = AddRequest | LoadKV | LendKV | Activate | Abort

_REFUSALS: dict[RefusalReason, str] = {
    "no_slot": "no decode slot is free in the asked DP group",
    "no_blocks": "the KV cache has no room for the prompt now",
    "queue_full": "the queue is full",
    "draining": "the engine takes no more such requests: it drains, or has another role now",
    "duplicate": "a request of this id is live already",
}


class RequestHandler:
    """Handler of clients' messages about requests.

    Args:
        scheduler: Scheduler that runs the requests.
        checks: Checks of new requests.
        events: Receives the answers.
        duty: The engine's role.
    """

    def __init__(
        self, scheduler: Scheduler, checks: RequestChecks, events: ClientEvents, duty: Duty
    ) -> None:
        self._scheduler = scheduler
        self._checks = checks
        self._events = events
        self._duty = duty
        self._next_handle = 1
        # Requests whose id an aborted one still uses, because the connector holds its blocks.
        self._successors: dict[str, tuple[bytes, AddRequest]] = {}

    def handle(self, client: bytes, message: RequestMessage, now_s: float) -> None:
        """Handle a client's message, unless it is about another client's request."""
        match message:
            case AddRequest():
                self._add(client, message, now_s)
            case LoadKV() | LendKV():
                if self._scheduler.table.is_of(client, message.request_id):
                    self._transfer(client, message, now_s)
            case Activate():
                if self._scheduler.table.is_of(client, message.request_id):
                    self._activate(message, now_s)
            case Abort():
                for request_id in message.request_ids:
                    self._abort(client, request_id, message)

    def client_gone(self, client: bytes) -> None:
        """Drop the requests of a client that wait for their id."""
        self._successors = {i: (c, m) for i, (c, m) in self._successors.items() if c != client}

    def go_on(self, now_s: float) -> None:
        """Add the waiting requests whose id is free now."""
        for request_id in [i for i in self._successors if not self._scheduler.table.is_ending(i)]:
            self._add(*self._successors.pop(request_id), now_s)

    def _add(self, client: bytes, message: AddRequest, now_s: float) -> None:
        """Add or refuse a request.

        One with the id of an aborted request waits until the connector has released that one's
        blocks, because clients cannot know when this happens.
        """
        request = message.request
        problem = self._checks.problem(message)
        if problem is not None:
            self._events[client].append(Refused(request.request_id, "invalid", problem))
            return
        if not self._duty.takes(message.mode):
            self._refuse(client, request.request_id, "draining")
            return
        is_ending = self._scheduler.table.is_ending(request.request_id)
        if is_ending and request.request_id not in self._successors:
            self._successors[request.request_id] = client, message
            return
        sequences = _new_sequences(client, message, transfers=self._checks.has_connector)
        seq = sequences[0]
        enter = self._scheduler.reserve if message.mode == "decode" else self._scheduler.add
        try:
            refusal = enter(seq, now_s, sequences[1:])
        except TransferError as error:
            self._events[client].append(Refused(request.request_id, "invalid", str(error)))
            return
        if refusal is not None:
            self._refuse(client, request.request_id, refusal)
            return
        for each in sequences:
            each.handle = self._next_handle
            self._next_handle += 1
        accepted = Accepted(
            request.request_id,
            seq.place.dp_group,
            seq.place.slot,
            max(seq.place.num_cached_tokens, 0),
            seq.handle,
            len(sequences),
        )
        self._events[client].append(accepted)

    def _refuse(self, client: bytes, request_id: str, reason: RefusalReason) -> None:
        self._events[client].append(Refused(request_id, reason, _REFUSALS[reason]))

    def _transfer(self, client: bytes, message: LoadKV | LendKV, now_s: float) -> None:
        request_id, ticket = message.request_id, message.ticket
        try:
            if isinstance(message, LoadKV):
                self._scheduler.load(request_id, ticket, message.epoch, now_s)
            else:
                self._scheduler.lend(request_id, ticket, now_s)
        except TransferError as error:
            logger.warning("refused the ticket of request %s: %s", message.request_id, error)
            failed = KVLoaded(message.request_id, message.epoch, failure_word(error))
            self._events[client].append(failed)

    def _abort(self, client: bytes, request_id: str, message: Abort) -> None:
        """Drop a request, or the choices that are named; the last one may be all that is left."""
        if message.choices:
            if self._scheduler.table.is_of(client, request_id):
                for choice in message.choices:
                    self._scheduler.abort_choice(request_id, choice, message.reason)
            return
        if request_id in self._successors and self._successors[request_id][0] == client:
            del self._successors[request_id]
            self._refuse(client, request_id, "duplicate")
        if self._scheduler.table.is_of(client, request_id):
            self._scheduler.abort(request_id, message.reason)

    def _activate(self, message: Activate, now_s: float) -> None:
        """Start a reserved request; fail it if its tokens cannot come from this model."""
        choices = self._scheduler.table.choices(message.request_id)
        problem = self._checks.activation_problem(choices, message)
        if problem is not None:
            seq = choices[0]
            self._scheduler.abort(message.request_id)
            self._events.fail(seq, problem)
            return
        ended = self._scheduler.activate(message.request_id, message.token_ids, now_s)
        if ended is not None:
            self._events.fail_transfer(ended)


def _new_sequences(client: bytes, message: AddRequest, *, transfers: bool) -> list[Sequence]:
    """Return the choices of a request, in order."""
    request, transfer = message.request, None
    if transfers:
        ticket = message.ticket or b""
        transfer = TransferRequest(
            request.request_id,
            request.prompt_token_ids,
            ticket,
            request.cache_salt,
            request.adapter,
            request.images,
        )
    outputs = message.token_ids or [[]] * request.sampling.n
    sequences: list[Sequence] = []
    for choice, output in enumerate(outputs):
        seq = Sequence(
            request,
            message.mode,
            client,
            [*request.prompt_token_ids, *output],
            place=KVPlace(dp_group=message.dp_group),
            transfer=None if choice else transfer,
            choice=choice,
            parent=sequences[0] if choice else None,
        )
        sequences.append(seq)
    return sequences

"""Streams that another ingress may take over: what an event's `id:` says, and going on from it.

Nothing is kept for a client that is gone: the same request with the same seed has the same tokens,
on any ingress and any engine, so an id says which request it is, its seed, and how many tokens its
client has. Whoever gets it back as `Last-Event-ID`, with the same body, lets the request run again
and leaves these out. Owner: a `ResumableChunks` belongs to one stream. Nothing here waits.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cluster.errors import BadRequestError

if TYPE_CHECKING:
    from cluster.edge.openai import Usage
    from cluster.edge.openai_responses import ChunkWriter
    from replicas.messages import EngineRequest
    from replicas.output_processor import OutputDelta

LAST_EVENT_ID = "last-event-id"
BEGINNING = "0"
"""What a client says that has nothing yet, and wants ids."""
_ID = re.compile(r"([0-9a-f]{16})-([0-9a-f]{1,16})-([0-9]{1,9})(\.end)?")


class Position(NamedTuple):
    """How far a client has come.

    Attributes:
        seed: Of the request's random numbers.
        num_tokens: How many tokens it has.
        has_end: Whether it has the event with the finish reason, too.
    """

    seed: int
    num_tokens: int = 0
    has_end: bool = False


def resumed(request: EngineRequest, given: str) -> tuple[EngineRequest, Position]:
    """The request that a client goes on with, and from where on.

    Args:
        request: What its body says, with a seed.
        given: Its `Last-Event-ID`.

    Raises:
        BadRequestError: It is no id of this request's stream, or there are several choices.
    """
    sampling = request.sampling
    assert sampling.seed is not None, "the edge gives everybody one"
    if sampling.n > 1:
        raise BadRequestError(
            f"a stream of {sampling.n} choices has no {LAST_EVENT_ID}", param=LAST_EVENT_ID
        )
    if given == BEGINNING:
        return request, Position(sampling.seed)
    match = _ID.fullmatch(given)
    if match is None:
        raise BadRequestError(f"{given[:64]!r} is no id of an event", param=LAST_EVENT_ID)
    digest, seed, num_tokens, end = match.groups()
    if digest != _digest(request):
        raise BadRequestError(
            f"{LAST_EVENT_ID} is of another request: send the same body again", param=LAST_EVENT_ID
        )
    position = Position(int(seed, 16) - 2**63, int(num_tokens), end is not None)
    sampling = msgspec.structs.replace(sampling, seed=position.seed)
    return msgspec.structs.replace(request, sampling=sampling), position


def _digest(request: EngineRequest) -> str:
    """Tells a request from others, whatever its seed."""
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    encoded = msgspec.msgpack.encode(
        (request.prompt_token_ids, sampling, request.cache_salt, request.adapter), order="sorted"
    )
    return blake2b(encoded, digest_size=8).hexdigest()


class ResumableChunks:
    """A `ChunkWriter` whose events have ids, from a position on.

    Args:
        chunks: Makes the events.
        request: What they are of.
        position: How far the client has come.
    """

    def __init__(self, chunks: ChunkWriter, request: EngineRequest, position: Position) -> None:
        self._chunks = chunks
        self._position = position
        # Seeds are int64.
        self._head = f"id: {_digest(request)}-{position.seed + 2**63:x}-"
        self._num_tokens = position.num_tokens
        if position.num_tokens:
            chunks.skip(position.num_tokens)

    def add(self, delta: OutputDelta) -> bytes:
        """See `ChunkWriter.add`; the delta is of what the client does not have."""
        self._num_tokens += len(delta.token_ids)
        chunk = self._chunks.add(delta)
        return self._id("") + chunk if chunk else b""

    def finish(self, usage: Usage) -> bytes:
        """See `ChunkWriter.finish`."""
        end = self._chunks.finish(usage)
        if self._position.has_end:
            return end.partition(b"\n\n")[2]
        return self._id(".end") + end

    def _id(self, end: str) -> bytes:
        return f"{self._head}{self._num_tokens}{end}\n".encode()

"""Streams that another ingress may take over: what an event's `id:` says, and going on from it.

Nothing is kept for a client that is gone: the same request with the same seed has the same tokens,
on any ingress and any engine, so an id says which request it is, its seed, how many tokens its
client has, and a checksum of them. Whoever gets it back as `Last-Event-ID`, with the same body,
lets the request run again and leaves these out, unless they are others, as rounding may make them.
Owner: a `ResumableChunks`, and a `ReplayCheck`, belong to one stream. Nothing here waits.
"""

from __future__ import annotations

import re
import zlib
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cluster.errors import BadRequestError, TokensDifferError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.edge.openai import Usage
    from cluster.edge.openai_responses import ChunkWriter
    from replicas.messages import EngineRequest, TokenOutput
    from replicas.output_processor import OutputDelta

LAST_EVENT_ID = "last-event-id"
FROM_START = "0"
"""What a client says that has nothing yet, and wants ids."""
_ID = re.compile(r"([0-9a-f]{16})-([0-9a-f]{1,16})-([0-9]{1,9})-([0-9a-f]{8})(\.end)?")


class StreamPosition(NamedTuple):
    """How far a client has come.

    Attributes:
        seed: Of the request's random numbers.
        num_tokens: How many tokens it has.
        checksum: Of these.
        has_end: Whether it has the event with the finish reason, too.
    """

    seed: int
    num_tokens: int = 0
    checksum: int = 0
    has_end: bool = False


def resume_request(request: EngineRequest, given: str) -> tuple[EngineRequest, StreamPosition]:
    """The request that a client goes on with, and from where on.

    Args:
        request: What its body says, with a seed.
        given: Its `Last-Event-ID`.

    Raises:
        BadRequestError: It is no id of this request's stream, or of no place that an event of it
            can have, or there are several choices.
    """
    sampling = request.sampling
    assert sampling.seed is not None, "the edge gives everybody one"
    if sampling.n > 1:
        raise BadRequestError(
            f"a stream of {sampling.n} choices has no {LAST_EVENT_ID}", param=LAST_EVENT_ID
        )
    if given == FROM_START:
        return request, StreamPosition(sampling.seed)
    match = _ID.fullmatch(given)
    if match is None:
        raise BadRequestError(f"{given[:64]!r} is no id of an event", param=LAST_EVENT_ID)
    digest, seed, num_tokens, checksum, end = match.groups()
    if digest != _digest(request):
        raise BadRequestError(
            f"{LAST_EVENT_ID} is of another request: send the same body again", param=LAST_EVENT_ID
        )
    if not 0 < int(num_tokens) <= sampling.max_tokens:
        raise BadRequestError(
            f"{LAST_EVENT_ID} is behind {int(num_tokens)} tokens; this stream has events behind "
            f"1 to {sampling.max_tokens}; send {FROM_START} to begin",
            param=LAST_EVENT_ID,
        )
    position = StreamPosition(
        int(seed, 16) - 2**63, int(num_tokens), int(checksum, 16), end is not None
    )
    sampling = msgspec.structs.replace(sampling, seed=position.seed)
    return msgspec.structs.replace(request, sampling=sampling), position


def _digest(request: EngineRequest) -> str:
    """Tells a request from others, whatever its seed."""
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    encoded = msgspec.msgpack.encode(
        (request.prompt_token_ids, sampling, request.cache_salt, request.adapter), order="sorted"
    )
    return blake2b(encoded, digest_size=8).hexdigest()


def _checksum(token_ids: Iterable[int], before: int) -> int:
    """CRC-32 of tokens and those before them, however they came."""
    return zlib.crc32(b"".join(i.to_bytes(4, "little") for i in token_ids), before)


class ReplayCheck:
    """A request that runs again: whether it has the tokens that its client has.

    Args:
        position: How far the client has come.
    """

    def __init__(self, position: StreamPosition) -> None:
        self._position = position
        self._num_tokens = self._checksum = 0

    def check_next(self, output: TokenOutput) -> None:
        """Look at the next output, of one token, or an ending.

        Raises:
            TokensDifferError: Nothing that follows would fit to what the client has.
        """
        position = self._position
        if self._num_tokens < position.num_tokens:
            self._num_tokens += len(output.token_ids)
            self._checksum = _checksum(output.token_ids, self._checksum)
            is_there = self._num_tokens == position.num_tokens
            is_over = is_there or output.finish_reason is not None
            if is_over and not (is_there and self._checksum == position.checksum):
                raise TokensDifferError(
                    f"the request has other tokens this time than the {position.num_tokens} that "
                    f"{LAST_EVENT_ID} stands for; begin anew without it",
                    param=LAST_EVENT_ID,
                )


class ResumableChunks:
    """A `ChunkWriter` whose events have ids, from a position on.

    Args:
        chunks: Makes the events.
        request: What they are of.
        position: How far the client has come.
    """

    def __init__(
        self, chunks: ChunkWriter, request: EngineRequest, position: StreamPosition
    ) -> None:
        self._chunks = chunks
        self._position = position
        # Seeds are int64.
        self._head = f"id: {_digest(request)}-{position.seed + 2**63:x}-"
        self._num_tokens, self._checksum = position.num_tokens, position.checksum
        self._num_skipped = 0

    def add(self, delta: OutputDelta) -> bytes:
        """See `ChunkWriter.add`; a delta of tokens that the client has gives no event."""
        if self._num_skipped < self._position.num_tokens and delta.finish_reason is None:
            self._num_skipped += len(delta.token_ids)
            self._chunks.skip(delta)
            return b""
        self._num_tokens += len(delta.token_ids)
        self._checksum = _checksum(delta.token_ids, self._checksum)
        chunk = self._chunks.add(delta)
        return self._id("") + chunk if chunk else b""

    def finish(self, usage: Usage) -> bytes:
        """See `ChunkWriter.finish`."""
        end = self._chunks.finish(usage)
        if self._position.has_end:
            return end.partition(b"\n\n")[2]
        return self._id(".end") + end

    def _id(self, end: str) -> bytes:
        return f"{self._head}{self._num_tokens}-{self._checksum:08x}{end}\n".encode()

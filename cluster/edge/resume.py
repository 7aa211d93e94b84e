"""Resumable streams: event ids, and resuming from one on any ingress.

Ingresses keep no state for disconnected clients, because the same request with the same seed gives
the same tokens on any ingress and engine. An event's `id:` has a digest of the request, its seed,
the number of tokens that the client has, and their checksum. A client that sends the id back as
`Last-Event-ID`, with the same body, makes any ingress run the request again and skip these tokens.
If the rerun gives other tokens, as rounding may, the request fails.

Owner: a `ResumableChunks` and a `ReplayCheck` belong to one stream. Nothing here does I/O.
"""

from __future__ import annotations

import re
import zlib
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cluster.errors import BadRequestError, IngressLeavingError, TokensDifferError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.edge.api import StreamWriter
    from cluster.edge.openai import Usage
    from cluster.errors import ServingError
    from replicas.messages import EngineRequest, TokenOutput
    from replicas.output_processor import OutputDelta

LAST_EVENT_ID = "last-event-id"
FROM_START = "0"
"""`Last-Event-ID` of a client that has no events yet and wants ids."""
_ID = re.compile(r"([0-9a-f]{16})-([0-9a-f]{1,16})-([0-9]{1,9})-([0-9a-f]{8})(\.end)?")


class StreamPosition(NamedTuple):
    """Part of a stream that a client already has.

    Attributes:
        seed: Seed of the request.
        num_tokens: Number of tokens that the client has.
        checksum: Checksum of these tokens.
        has_end: Whether the client also has the event with the finish reason.
    """

    seed: int
    num_tokens: int = 0
    checksum: int = 0
    has_end: bool = False


def resume_request(request: EngineRequest, given: str) -> tuple[EngineRequest, StreamPosition]:
    """Return the request to rerun, with its original seed, and the client's position.

    Args:
        request: The request of the body, with a seed.
        given: The client's `Last-Event-ID`.

    Raises:
        BadRequestError: The id is malformed, of another request, or of an impossible position, or
            the request has several choices.
    """
    sampling = request.sampling
    assert sampling.seed is not None, "the edge gives each request a seed"
    if sampling.n > 1:
        raise BadRequestError(
            f"a stream of {sampling.n} choices cannot be resumed with {LAST_EVENT_ID}",
            param=LAST_EVENT_ID,
        )
    if given == FROM_START:
        return request, StreamPosition(sampling.seed)
    match = _ID.fullmatch(given)
    if match is None:
        raise BadRequestError(f"{given[:64]!r} is not an event id", param=LAST_EVENT_ID)
    digest, seed, num_tokens, checksum, end = match.groups()
    if digest != _digest(request):
        raise BadRequestError(
            f"{LAST_EVENT_ID} is of another request: send the same body again", param=LAST_EVENT_ID
        )
    if not 0 < int(num_tokens) <= sampling.max_tokens:
        raise BadRequestError(
            f"{LAST_EVENT_ID} stands for {int(num_tokens)} tokens, but this stream has 1 to "
            f"{sampling.max_tokens}; send {FROM_START} to start again",
            param=LAST_EVENT_ID,
        )
    position = StreamPosition(
        int(seed, 16) - 2**63, int(num_tokens), int(checksum, 16), end is not None
    )
    sampling = msgspec.structs.replace(sampling, seed=position.seed)
    return msgspec.structs.replace(request, sampling=sampling), position


def _digest(request: EngineRequest) -> str:
    """Return a digest of everything but the seed that determines a request's tokens."""
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    encoded = msgspec.msgpack.encode(
        (request.prompt_token_ids, sampling, request.cache_salt, request.adapter), order="sorted"
    )
    return blake2b(encoded, digest_size=8).hexdigest()


def _checksum(token_ids: Iterable[int], before: int) -> int:
    """Continue the CRC-32 of the tokens so far, independent of how they are grouped."""
    return zlib.crc32(b"".join(i.to_bytes(4, "little") for i in token_ids), before)


class ReplayCheck:
    """Check that a rerun gives the tokens that the client already has.

    Args:
        position: The client's position.
    """

    def __init__(self, position: StreamPosition) -> None:
        self._position = position
        self._num_tokens = self._checksum = 0

    def check_next(self, output: TokenOutput) -> None:
        """Check the next output, which has at most one token.

        Raises:
            TokensDifferError: The tokens differ, so the stream cannot be continued.
        """
        position = self._position
        if self._num_tokens < position.num_tokens:
            self._num_tokens += len(output.token_ids)
            self._checksum = _checksum(output.token_ids, self._checksum)
            is_there = self._num_tokens == position.num_tokens
            is_over = is_there or output.finish_reason is not None
            if is_over and not (is_there and self._checksum == position.checksum):
                raise TokensDifferError(
                    f"the rerun's first {position.num_tokens} tokens differ from those that the "
                    f"client has; start again without {LAST_EVENT_ID}",
                    param=LAST_EVENT_ID,
                )


class ResumableChunks:
    """A `StreamWriter` that adds ids to its events, and skips those that the client has.

    Args:
        chunks: Writer of the events.
        request: The request of the stream.
        position: The client's position.
    """

    def __init__(
        self, chunks: StreamWriter, request: EngineRequest, position: StreamPosition
    ) -> None:
        self._chunks = chunks
        self._position = position
        # Seeds are int64.
        self._head = f"{_digest(request)}-{position.seed + 2**63:x}-"
        self._num_tokens, self._checksum = position.num_tokens, position.checksum
        self._num_skipped = 0
        # That of the client's last event.
        self._last_id = FROM_START
        if position.num_tokens:
            self._id("")

    def add(self, delta: OutputDelta) -> bytes:
        """Add a delta like `StreamWriter.add`; tokens that the client has give no event."""
        if self._num_skipped < self._position.num_tokens and delta.finish_reason is None:
            self._num_skipped += len(delta.token_ids)
            self._chunks.skip(delta)
            return b""
        self._num_tokens += len(delta.token_ids)
        self._checksum = _checksum(delta.token_ids, self._checksum)
        chunk = self._chunks.add(delta)
        return self._id("") + chunk if chunk else b""

    def finish(self, usage: Usage) -> bytes:
        """Return the end of the stream, like `StreamWriter.finish`."""
        end = self._chunks.finish(usage)
        if self._position.has_end:
            return end.partition(b"\n\n")[2]
        return self._id(".end") + end

    def skip(self, delta: OutputDelta) -> None:
        """Count a delta without an event, like `StreamWriter.skip`."""
        self._chunks.skip(delta)

    def fail(self, error: ServingError) -> bytes:
        """Return the end of a failed stream, like `StreamWriter.fail`."""
        if isinstance(error, IngressLeavingError):
            error = IngressLeavingError(
                f"{error.message} with the header Last-Event-ID: {self._last_id}"
            )
        return self._chunks.fail(error)

    def _id(self, end: str) -> bytes:
        self._last_id = f"{self._head}{self._num_tokens}-{self._checksum:08x}{end}"
        return f"id: {self._last_id}\n".encode()

"""How clients read the tokens of many requests that an engine sends as columns.

What an engine says of a request in most steps is one token more: a row of a handle and a token.
Whoever reads frames makes a `TokenOutput` of each, once, and nobody else knows of rows.
`replicas.engine.events` writes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.messages import Accepted, TokenColumns, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.messages import EngineEvent, WireEvent


class ColumnReader:
    """Makes `TokenOutput`s of the rows that one engine sends to one client.

    Owner: whoever reads that engine's frames. A row of a handle that it does not know, for one of a
    request that was given up, gives nothing.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._handles: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, events: Sequence[WireEvent]) -> list[EngineEvent]:
        """The same events, with a `TokenOutput` for each row, or for several of one request."""
        read: list[EngineEvent] = []
        # By handle, what later rows can be added to: nothing else has been said since.
        growing: dict[int, TokenOutput] | None = {} if len(events) > 1 else None
        for event in events:
            if isinstance(event, TokenColumns):
                self._expand(event, read, growing)
                continue
            if growing:
                growing.clear()
            if isinstance(event, TokenOutput):
                self._note(event)
            elif isinstance(event, Accepted):
                self.forget(event.request_id)
                self._rows[event.handle] = _Row(event.request_id)
                self._handles[event.request_id] = event.handle
            read.append(event)
        return read

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request. Idempotent."""
        handle = self._handles.pop(request_id, None)
        if handle is not None:
            self._rows.pop(handle, None)

    def forget_handle(self, handle: int) -> None:
        """Drop one of the times that a request was accepted; a later one stays. Idempotent."""
        row = self._rows.pop(handle, None)
        if row is not None and self._handles.get(row.request_id) == handle:
            del self._handles[row.request_id]

    def _expand(
        self, columns: TokenColumns, read: list[EngineEvent], growing: dict[int, TokenOutput] | None
    ) -> None:
        """Add outputs, or their tokens to those that grow."""
        rows, token_ids = self._rows, columns.token_ids
        end = 0
        counts = columns.counts or [1] * len(columns.handles)
        for handle, count in zip(columns.handles, counts, strict=True):
            start, end = end, end + count
            row = rows.get(handle)
            if row is None:
                continue
            index, row.index = row.index, row.index + count
            if growing is not None and handle in growing:
                growing[handle].token_ids.extend(token_ids[start:end])
                continue
            output = TokenOutput(
                row.request_id, index, token_ids[start:end], None, None, row.num_cached
            )
            read.append(output)
            if growing is not None:
                growing[handle] = output

    def _note(self, output: TokenOutput) -> None:
        """Where the rows after this output begin."""
        if output.finish_reason is not None:
            self.forget(output.request_id)
        elif not output.choice and (handle := self._handles.get(output.request_id)) is not None:
            row = self._rows[handle]
            row.index = output.index + len(output.token_ids)
            row.num_cached = output.num_cached_tokens


class _Row:
    """What the rows of one handle leave out: their request, and the index of the next token."""

    __slots__ = ("index", "num_cached", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.index = 0
        self.num_cached = 0

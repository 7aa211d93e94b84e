"""Expansion of `TokenColumns` into `TokenOutput`s on the client's side.

In most steps each request gains one token, which engines send as a row (handle, token) of a
column-wise message. `ColumnReader` turns rows into `TokenOutput`s right after a frame is decoded;
no other code sees rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.messages import Accepted, TokenColumns, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.messages import EngineEvent, WireEvent


class ColumnReader:
    """Converter of the rows that one engine sends to one client into `TokenOutput`s.

    Owner: the reader of that engine's frames. Rows with unknown handles, such as those of an
    aborted request, are dropped.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _HandleState] = {}
        self._handles: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, events: Sequence[WireEvent]) -> list[EngineEvent]:
        """Return the events with rows replaced by `TokenOutput`s, rows of one request merged."""
        read: list[EngineEvent] = []
        # handle -> output that later rows may extend. Cleared by any other event, as order matters.
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
                self.drop_request(event.request_id)
                self._rows[event.handle] = _HandleState(event.request_id)
                self._handles[event.request_id] = event.handle
            read.append(event)
        return read

    def drop_request(self, request_id: str) -> None:
        """Drop the state of a request. Idempotent."""
        handle = self._handles.pop(request_id, None)
        if handle is not None:
            self._rows.pop(handle, None)

    def drop_handle(self, handle: int) -> None:
        """Drop one acceptance of a request; a later one of the same id stays. Idempotent."""
        row = self._rows.pop(handle, None)
        if row is not None and self._handles.get(row.request_id) == handle:
            del self._handles[row.request_id]

    def _expand(
        self, columns: TokenColumns, read: list[EngineEvent], growing: dict[int, TokenOutput] | None
    ) -> None:
        """Append outputs to `read`, or tokens to the outputs in `growing`."""
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
        """Record the index at which the next row of this output's request begins."""
        if output.finish_reason is not None:
            self.drop_request(output.request_id)
        elif not output.choice and (handle := self._handles.get(output.request_id)) is not None:
            row = self._rows[handle]
            row.index = output.index + len(output.token_ids)
            row.num_cached = output.num_cached_tokens


class _HandleState:
    """State of one handle that its rows leave out: the request and the next token's index."""

    __slots__ = ("index", "num_cached", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.index = 0
        self.num_cached = 0

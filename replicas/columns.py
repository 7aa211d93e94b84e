"""Expansion of `TokenColumns` into `TokenOutput`s on the client's side.

In most steps each choice of a request gains one token, which engines send as a row (handle, token)
of a column-wise message. `ColumnReader` turns rows into `TokenOutput`s right after a frame is
decoded; no other code sees rows.
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
        # request id -> choice -> handle, of the choices that have not ended
        self._handles: dict[str, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, events: Sequence[WireEvent]) -> list[EngineEvent]:
        """Return the events with rows replaced by `TokenOutput`s, rows of one choice merged."""
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
                handles = {i: event.handle + i for i in range(event.num_choices)}
                for choice, handle in handles.items():
                    self._rows[handle] = _HandleState(event.request_id, choice)
                self._handles[event.request_id] = handles
            read.append(event)
        return read

    def drop_request(self, request_id: str) -> None:
        """Drop the state of a request. Idempotent."""
        for handle in self._handles.pop(request_id, {}).values():
            self._rows.pop(handle, None)

    def drop_choice(self, request_id: str, choice: int) -> None:
        """Drop the state of one choice; the request's others stay. Idempotent."""
        handles = self._handles.get(request_id, {})
        handle = handles.pop(choice, None)
        if handle is not None:
            self._rows.pop(handle, None)
            if not handles:
                del self._handles[request_id]

    def drop_acceptance(self, accepted: Accepted) -> None:
        """Drop one acceptance of a request; a later one of the same id stays. Idempotent."""
        handles = self._handles.get(accepted.request_id, {})
        first, end = accepted.handle, accepted.handle + accepted.num_choices
        if any(first <= handle < end for handle in handles.values()):
            self.drop_request(accepted.request_id)

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
                row.request_id, index, token_ids[start:end],
                None, None, row.num_cached, None, row.choice,
            )  # fmt: skip
            read.append(output)
            if growing is not None:
                growing[handle] = output

    def _note(self, output: TokenOutput) -> None:
        """Record the index at which the next row of this output's choice begins."""
        if output.finish_reason == "error":
            self.drop_request(output.request_id)
        elif output.finish_reason is not None:
            self.drop_choice(output.request_id, output.choice)
        else:
            handle = self._handles.get(output.request_id, {}).get(output.choice, -1)
            row = self._rows.get(handle)
            if row is not None:
                row.index = output.index + len(output.token_ids)
                row.num_cached = output.num_cached_tokens


class _HandleState:
    """State of one handle that its rows leave out: the choice and its next token's index."""

    __slots__ = ("choice", "index", "num_cached", "request_id")

    def __init__(self, request_id: str, choice: int) -> None:
        self.request_id = request_id
        self.choice = choice
        self.index = 0
        self.num_cached = 0

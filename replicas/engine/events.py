"""What an engine core has to tell its clients, until it is sent: events, and columns of tokens.

A token of a request is a row of two numbers where its client knows the request by its handle and
there is no more to say; `replicas.columns` reads them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from replicas.messages import TokenColumns, TokenOutput

if TYPE_CHECKING:
    from replicas.engine.sequence import Sequence
    from replicas.messages import WireEvent


class ClientEvents(defaultdict[bytes, "list[WireEvent]"]):
    """Events for each client since they were last taken, in order. Owner: the engine core."""

    def __init__(self) -> None:
        super().__init__(list)

    def add_output(self, seq: Sequence, output: TokenOutput) -> None:
        """Add tokens of a sequence, as a row if they can be one."""
        if seq.is_told and _is_plain(output):
            self.add_tokens(seq.client, seq.handle, output.token_ids)
        else:
            seq.is_told |= not output.choice
            self[seq.client].append(output)

    def add_tokens(self, client: bytes, handle: int, token_ids: list[int]) -> None:
        """Add a row: the next tokens, at least one, of a request whose first tokens are told."""
        events = self[client]
        if not events or type(events[-1]) is not TokenColumns:
            events.append(TokenColumns([], [], []))
        columns = events[-1]
        assert isinstance(columns, TokenColumns)
        columns.handles.append(handle)
        columns.token_ids.extend(token_ids)
        columns.counts.append(len(token_ids))

    def take(self) -> dict[bytes, list[WireEvent]]:
        """All of them; from now on there are none."""
        taken = dict(self)
        self.clear()
        for events in taken.values():
            for event in events:
                if type(event) is TokenColumns and len(event.token_ids) == len(event.handles):
                    event.counts.clear()
        return taken


def _is_plain(output: TokenOutput) -> bool:
    return (
        output.finish_reason is None
        and output.logprobs is None
        and not output.choice
        and bool(output.token_ids)
    )

"""Outputs of steps: where a sequence ends, and the unsent events of each client. Pure.

A token of a request is a row of two numbers if the client knows the request's handle and there is
nothing to add; `replicas.columns` reads the rows.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from replicas.messages import KV_TRANSFER_FAILED, TokenColumns, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from replicas.engine.sequence import Sequence
    from replicas.messages import FinishReason, TokenLogprob, WireEvent


class End(NamedTuple):
    """The end of a sequence.

    Attributes:
        reason: Why it ended.
        stop_reason: The stop token id that ended it, if one did.
    """

    reason: FinishReason
    stop_reason: int | None


class EndRules(NamedTuple):
    """Conditions that end a model's sequences.

    Attributes:
        max_model_len: Longest sequence in tokens.
        eos_token_ids: The model's end tokens.
        tokens_per_pass: The most tokens that a pass gives a sequence; all of them must fit.
    """

    max_model_len: int
    eos_token_ids: frozenset[int]
    tokens_per_pass: int = 1

    def longest(self, seq: Sequence) -> int:
        """Return the number of tokens at which a sequence ends by its length."""
        num_prompt = seq.num_prompt_tokens
        # At least one token ends a prompt of `max_model_len`, which only embeddings may have.
        return max(min(num_prompt + seq.sampling.max_tokens, self.max_model_len), num_prompt + 1)

    def stop_ids(self, seq: Sequence) -> frozenset[int]:
        """Return every token id that ends a sequence."""
        sampling = seq.sampling
        if sampling.ignore_eos:
            return sampling.stop_token_ids
        return sampling.stop_token_ids | self.eos_token_ids

    def reason(self, seq: Sequence, token_id: int, num_tokens: int) -> End | None:
        """Return why a sequence ends with a token; None if it continues.

        Args:
            seq: The sequence.
            token_id: The token.
            num_tokens: Length of the sequence with it.
        """
        sampling = seq.sampling
        if token_id in self.eos_token_ids and not sampling.ignore_eos:
            return End("stop", None)
        if token_id in sampling.stop_token_ids:
            return End("stop", token_id)
        return End("length", None) if num_tokens >= self.longest(seq) else None

    def cut(self, seq: Sequence, run: list[int]) -> tuple[list[int], End | None]:
        """Return the next tokens of a sequence up to the first that ends it, and that end."""
        for count, token_id in enumerate(run, 1):
            end = self.reason(seq, token_id, seq.num_tokens + count)
            if end is not None:
                return run[:count], end
        if seq.num_tokens + len(run) + self.tokens_per_pass > self.max_model_len:
            return run, End("length", None)
        return run, None


class StepOutputs(NamedTuple):
    """Outputs of a step in columns: one row for each sequence that got tokens.

    Attributes:
        sequences: The sequences. Steps of the same rows share this list, so it must not be changed.
        token_ids: Their runs of tokens, one row's after the other's.
        ends: By row, in the order of rows: how it ended. A sequence of mode prefill leaves after
            its first token without an end.
        counts: Length of each run; empty: every row has one token.
        failed: Sequences that have ended without a token, and why.
        logprobs: Log probabilities of runs, by sequence; of a run that was cut those of all tokens.
        prompt_logprobs: Those of whole prompts, by sequence that got its first token.
        embeddings: Those of whole prompts, by sequence, as in `TokenOutput`.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    ends: dict[int, End]
    counts: list[int]
    failed: tuple[tuple[Sequence, str], ...] = ()
    logprobs: Mapping[Sequence, list[list[TokenLogprob]]] = MappingProxyType({})
    prompt_logprobs: Mapping[Sequence, list[list[TokenLogprob]]] = MappingProxyType({})
    embeddings: Mapping[Sequence, bytes] = MappingProxyType({})

    def runs(self) -> Iterator[list[int]]:
        """Yield each row's tokens."""
        token_ids = iter(self.token_ids)
        for count in self.counts or (1 for _ in self.sequences):
            yield list(itertools.islice(token_ids, count))


class ClientEvents(defaultdict[bytes, "list[WireEvent]"]):
    """Events for each client since they were last taken, in order. Owner: the engine core."""

    def __init__(self) -> None:
        super().__init__(list)
        # Rows of the last added step by client, with their handles; mostly reused by the next step.
        self._sequences: list[Sequence] = []
        self._rows: dict[bytes, tuple[list[int], list[int]]] = {}

    def add_step(self, outputs: StepOutputs) -> None:
        """Add a step's outputs: an event for the first and last of a request, else column rows."""
        sequences, token_ids = outputs.sequences, outputs.token_ids
        # Rows with an event of their own: choices without one so far, then those that end.
        apart: dict[int, None] = {}
        if sequences is not self._sequences:
            self._sequences, self._rows = sequences, {}
            for row, seq in enumerate(sequences):
                rows, handles = self._rows.setdefault(seq.client, ([], []))
                rows.append(row)
                handles.append(seq.handle)
                if not seq.has_sent_tokens:
                    apart[row] = None
        apart.update(dict.fromkeys(outputs.ends))
        if outputs.logprobs:
            with_logprobs = (r for r, seq in enumerate(sequences) if seq in outputs.logprobs)
            apart.update(dict.fromkeys(with_logprobs))
        runs = list(outputs.runs()) if outputs.counts else []
        for row in apart:
            seq, run = sequences[row], runs[row] if runs else [token_ids[row]]
            seq.has_sent_tokens = True
            self[seq.client].append(_event(seq, run, outputs.ends.get(row), outputs))
        if runs:
            for row, seq in enumerate(sequences):
                if row not in apart:
                    self.add_tokens(seq.client, seq.handle, runs[row])
        else:
            self._add_columns(token_ids, apart)
        for seq, error in outputs.failed:
            self.fail(seq, error)

    def fail(self, seq: Sequence, error: str) -> None:
        """Add the end of a failed sequence, with the reason."""
        output = TokenOutput(
            seq.request_id, seq.num_output_tokens, [], "error", error=error, choice=seq.choice
        )
        self[seq.client].append(output)

    def abort(self, seq: Sequence) -> None:
        """Add the end of a sequence that the engine has dropped."""
        output = TokenOutput(seq.request_id, seq.num_output_tokens, [], "abort", choice=seq.choice)
        self[seq.client].append(output)

    def fail_transfer(self, seq: Sequence) -> None:
        """Add the end of a sequence whose KV transfer failed."""
        assert seq.load is not None
        self.fail(seq, f"{KV_TRANSFER_FAILED}: {seq.load.failure}")

    def _add_columns(self, token_ids: list[int], but: Collection[int]) -> None:
        """Add one token for each row of the step, except those in `but`."""
        for client, (rows, handles) in self._rows.items():
            if but:
                plain = [(r, h) for r, h in zip(rows, handles, strict=True) if r not in but]
                self._add_rows(client, [h for _, h in plain], [token_ids[r] for r, _ in plain])
            elif len(rows) == len(token_ids):
                self._add_rows(client, handles, token_ids)
            else:
                self._add_rows(client, handles, [token_ids[row] for row in rows])

    def add_tokens(self, client: bytes, handle: int, token_ids: list[int]) -> None:
        """Add a column row: the next tokens, at least one, after a request's first event."""
        columns = self._columns(client)
        columns.handles.append(handle)
        columns.token_ids.extend(token_ids)
        columns.counts.append(len(token_ids))

    def _add_rows(self, client: bytes, handles: list[int], token_ids: list[int]) -> None:
        if handles:
            columns = self._columns(client)
            columns.handles.extend(handles)
            columns.token_ids.extend(token_ids)
            columns.counts.extend([1] * len(handles))

    def _columns(self, client: bytes) -> TokenColumns:
        """Return the columns that a client's next row is appended to."""
        events = self[client]
        if not events or type(events[-1]) is not TokenColumns:
            events.append(TokenColumns([], [], []))
        columns = events[-1]
        assert isinstance(columns, TokenColumns)
        return columns

    def take(self) -> dict[bytes, list[WireEvent]]:
        """Remove and return all events."""
        taken = dict(self)
        self.clear()
        for events in taken.values():
            for event in events:
                if type(event) is TokenColumns and len(event.token_ids) == len(event.handles):
                    event.counts.clear()
        return taken


def _event(seq: Sequence, run: list[int], end: End | None, outputs: StepOutputs) -> TokenOutput:
    """Return the event of a sequence's last tokens and its end; call it before the next step."""
    reason, stop_reason = end or (None, None)
    index, num_cached = seq.num_output_tokens - len(run), max(seq.place.num_cached_tokens, 0)
    logprobs = outputs.logprobs.get(seq)
    if logprobs is not None:
        # The run may have been cut at its end.
        logprobs = logprobs[: len(run)]
    return TokenOutput(
        seq.request_id,
        index,
        run,
        reason,
        stop_reason,
        num_cached,
        choice=seq.choice,
        logprobs=logprobs,
        prompt_logprobs=outputs.prompt_logprobs.get(seq),
        embedding=outputs.embeddings.get(seq),
    )

"""All sequences of an engine, by request and by phase.

Owner of the phase of every sequence, on the engine's core thread. A sequence is in exactly one
place: queued, waiting for KV, running, or leaving. Running sequences are divided into those that
compute their prompt and those that *decode*: from its first token here on all but the last token of
a sequence is computed, and the worker knows it. Decoding rows repeat the same step, so a step only
examines rows that have reached `Sequence.examine_at` or got a token that may end them.

A sequence that has ended is *leaving* while another engine reads or writes its blocks (it is held),
or while a step under way still writes to them. Its slot is free once that step is over, its blocks
once neither applies.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING

from replicas.engine.sequence import Phase, transition
from replicas.engine.step import ScheduledBatch
from replicas.messages import num_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from replicas.config import SchedulingPolicy
    from replicas.engine.sequence import Sequence
    from replicas.engine.step import StepKind

_rank = attrgetter("rank")


class DecodeRows:
    """All decoding rows of one moment; immutable, so that steps of the same rows share it.

    Args:
        kind: Kind of their steps.
        sequences: The rows, in the order in which they run.
        num_groups: DP groups of the engine.

    Attributes:
        sequences: As given.
        plain: The step of these rows alone in which none gets a block.
        num_in: Rows of each DP group.
        on_host: Those of the rows whose tokens are drawn on the host, see `Sequence`.
        stop_ids: Every token that may end one of them.
    """

    __slots__ = ("num_in", "on_host", "plain", "sequences", "stop_ids")

    def __init__(self, kind: StepKind, sequences: list[Sequence], num_groups: int) -> None:
        self.sequences = sequences
        self.plain = ScheduledBatch(
            kind, [s.place.slot for s in sequences], [1] * len(sequences), [], []
        )
        self.num_in = [len(sequences)]
        if num_groups > 1:
            groups = [s.place.dp_group for s in sequences]
            self.num_in = [groups.count(g) for g in range(num_groups)]
        self.on_host = [s for s in sequences if s.is_drawn_on_host]
        # Most rows share one set.
        self.stop_ids = frozenset().union(*{s.stop_ids for s in sequences})

    def __len__(self) -> int:
        return len(self.sequences)


class WaitingQueue:
    """Queued sequences, without slot or blocks, in the order of admission.

    Args:
        num_groups: DP groups of the engine.
        policy: "fcfs" keeps the order of arrival; "priority" sorts by rank, see `Sequence.rank`.
        block_multiple: See `Sequence.num_shared_tokens`; None if choices share no KV.

    Attributes:
        sequences: The queue; only this class changes it.
        num_tokens: Tokens that the queued sequences have to compute. Choices other than 0 count
            those that they cannot share with it, as if it kept its blocks until they run.
        num_asking_for: Sequences that ask for each DP group; index -1 counts those without one.
    """

    def __init__(
        self, num_groups: int, policy: SchedulingPolicy, block_multiple: int | None
    ) -> None:
        self._policy = policy
        self._block_multiple = block_multiple
        self.sequences: deque[Sequence] = deque()
        # What the totals below contain of each sequence: group, tokens, pairs of tokens.
        self._counted: dict[Sequence, tuple[int, int, int]] = {}
        self.num_tokens = 0
        self.num_asking_for = [0] * (num_groups + 1)
        self._num_tokens_for = [0] * (num_groups + 1)
        self._num_pairs_for = [0] * (num_groups + 1)

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self.sequences[index]

    def push(self, seq: Sequence) -> None:
        """Queue a sequence behind all others, or where its rank belongs."""
        if self._policy == "fcfs":
            self.sequences.append(seq)
        else:
            insort(self.sequences, seq, key=_rank)
        self._count(seq)

    def push_preempted(self, seq: Sequence) -> None:
        """Queue a preempted sequence before all others, or where its rank belongs."""
        if self._policy == "fcfs":
            self.sequences.appendleft(seq)
        else:
            insort(self.sequences, seq, key=_rank)
        self._count(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence from any place in the queue."""
        self.sequences.remove(seq)
        group, num_tokens, num_pairs = self._counted.pop(seq)
        self.num_tokens -= num_tokens
        self.num_asking_for[group] -= 1
        self._num_tokens_for[group] -= num_tokens
        self._num_pairs_for[group] -= num_pairs

    def num_tokens_of(self, seq: Sequence) -> int:
        """Return the tokens that a queued sequence has to compute."""
        return self._counted[seq][1]

    def load_of(self, group: int) -> tuple[int, int, int]:
        """Return the sequences that will run in a group, their tokens and pairs of tokens.

        Sequences that ask for no group count with an equal share, rounded up.
        """
        num_groups = len(self.num_asking_for) - 1
        own, tokens, pairs = (
            counts[group] - (-counts[-1] // num_groups)
            for counts in (self.num_asking_for, self._num_tokens_for, self._num_pairs_for)
        )
        return own, tokens, pairs

    def check_invariants(self) -> None:
        """Assert that all counts match the queue."""
        assert self._counted.keys() == set(self.sequences)
        assert self._policy == "fcfs" or list(self.sequences) == sorted(self.sequences, key=_rank)
        assert all(s.phase is Phase.WAITING for s in self.sequences)
        counted = [self._work_of(s) for s in self.sequences]
        assert counted == [self._counted[s] for s in self.sequences]
        assert self.num_tokens == sum(num_tokens for _, num_tokens, _ in counted)
        for group in range(-1, len(self.num_asking_for) - 1):
            waiting = [work for work in counted if work[0] == group]
            assert self.num_asking_for[group] == len(waiting)
            assert self._num_tokens_for[group] == sum(num_tokens for _, num_tokens, _ in waiting)
            assert self._num_pairs_for[group] == sum(num_pairs for _, _, num_pairs in waiting)

    def _work_of(self, seq: Sequence) -> tuple[int, int, int]:
        """Return the group that a sequence asks for, its tokens to compute, and their pairs."""
        start, end = seq.num_computed_tokens, seq.num_tokens
        if seq.parent is not None and self._block_multiple is not None:
            start = seq.num_shared_tokens(self._block_multiple)
        return seq.place.dp_group, end - start, num_pairs(start, end)

    def _count(self, seq: Sequence) -> None:
        group, num_tokens, num_pairs = self._counted[seq] = self._work_of(seq)
        self.num_tokens += num_tokens
        self.num_asking_for[group] += 1
        self._num_tokens_for[group] += num_tokens
        self._num_pairs_for[group] += num_pairs


class RequestTable:
    """All sequences of an engine, and their phases.

    Args:
        num_groups: DP groups of the engine.
        decode_kind: Kind of the decoding rows' steps.
        policy: Order of the queue, and choice of the row to preempt.
        block_multiple: See `WaitingQueue`.

    Attributes:
        queue: The queued sequences.
        rows: The running sequences, in order of admission.
        prefill_rows: Those of them that do not decode yet, in the same order.
        short: Decoding sequences without a block for their next token, as keys in their order.
        held: By request id: the ended sequence whose blocks another engine uses.
        outlived: Ended sequences that a step under way computes.
        num_running: Running sequences of each DP group.
        num_reserved: Sequences of each DP group that hold slot and blocks and wait for KV.
        num_live: Sequences that have not ended, or still have a slot or blocks.
    """

    def __init__(
        self,
        num_groups: int,
        decode_kind: StepKind,
        policy: SchedulingPolicy,
        block_multiple: int | None,
    ) -> None:
        self._decode_kind = decode_kind
        self._policy = policy
        self._num_added = 0
        # By request id, then by choice.
        self._live: dict[str, dict[int, Sequence]] = {}
        self._decode_rows: DecodeRows | None = None
        self.queue = WaitingQueue(num_groups, policy, block_multiple)
        self.rows: list[Sequence] = []
        self.prefill_rows: list[Sequence] = []
        self.short: dict[Sequence, None] = {}
        self.held: dict[str, Sequence] = {}
        self.outlived: list[Sequence] = []
        self.num_running = [0] * num_groups
        self.num_reserved = [0] * num_groups
        self.num_live = 0

    def __repr__(self) -> str:
        return (
            f"RequestTable(queued={len(self.queue)}, running={len(self.rows)}, "
            f"reserved={sum(self.num_reserved)}, held={len(self.held)}, "
            f"outlived={len(self.outlived)})"
        )

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the sequences that have not ended."""
        for choices in self._live.values():
            yield from choices.values()

    # --- changes -------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Add a new sequence, to the queue or to those that have reserved a place."""
        seq.order = self._num_added
        self._num_added += 1
        self._live.setdefault(seq.request_id, {})[seq.choice] = seq
        self.num_live += 1
        if seq.phase is Phase.WAITING:
            self.queue.push(seq)
        else:
            assert seq.phase is Phase.RESERVED, f"a new sequence is {seq.phase}"
            self.num_reserved[seq.place.dp_group] += 1

    def move(self, seq: Sequence, phase: Phase) -> None:
        """Let a sequence with slot and blocks load KV, run, or decode."""
        if phase is Phase.DECODE:
            transition(seq, phase)
            self.prefill_rows.remove(seq)
            self._decode_rows = None
            return
        self._take_out(seq)
        transition(seq, phase)
        if phase is Phase.LOADING:
            self.num_reserved[seq.place.dp_group] += 1
        else:
            assert phase is Phase.PREFILL, f"nothing moves to {phase}"
            self.rows.append(seq)
            self.prefill_rows.append(seq)
            self.num_running[seq.place.dp_group] += 1

    def requeue(self, seq: Sequence) -> None:
        """Queue a preempted sequence again; its slot and blocks are free already."""
        self._take_out(seq)
        transition(seq, Phase.WAITING)
        seq.num_preemptions += 1
        self.queue.push_preempted(seq)

    def give_up(self, request_id: str, choice: int | None = None) -> list[Sequence]:
        """Note that a client has given up a request; return the sequences that are to end now.

        Args:
            request_id: The request.
            choice: The only choice that is given up; None is all of them, and held blocks.
        """
        live = [s for s in self.choices(request_id) if choice in (None, s.choice)]
        for seq in live:
            seq.is_aborted = True
        if choice is None and request_id in self.held:
            self.held[request_id].is_aborted = True
        return live

    def retire(self, seq: Sequence, *, is_held: bool, is_under_way: bool) -> None:
        """End a sequence, which leaves while its slot or blocks are in use.

        Args:
            seq: The sequence.
            is_held: Whether another engine uses its blocks.
            is_under_way: Whether a step under way computes it.
        """
        self._take_out(seq)
        choices = self._live[seq.request_id]
        del choices[seq.choice]
        if not choices:
            del self._live[seq.request_id]
        if is_held:
            self.held[seq.request_id] = seq
        if is_under_way:
            self.outlived.append(seq)
        if is_held or is_under_way:
            transition(seq, Phase.LEAVING)
        else:
            self._end(seq)

    def steps_are_over(self, is_under_way: Callable[[Sequence], bool]) -> list[Sequence]:
        """Return the leaving sequences that no step under way computes any more; end them.

        Those that are held end only with `release_held`.
        """
        over = [s for s in self.outlived if not is_under_way(s)]
        self.outlived = [s for s in self.outlived if s not in over]
        for seq in over:
            if self.held.get(seq.request_id) is not seq:
                self._end(seq)
        return over

    def release_held(self, request_id: str) -> Sequence | None:
        """Note that another engine has fetched the held blocks, or will not. Idempotent.

        Returns:
            The sequence if it ends with this: nothing uses its blocks any more.
        """
        seq = self.held.pop(request_id, None)
        if seq is None or seq in self.outlived:
            return None
        self._end(seq)
        return seq

    def _take_out(self, seq: Sequence) -> None:
        """Take a sequence out of the place of its phase."""
        phase = seq.phase
        if phase is Phase.WAITING:
            self.queue.remove(seq)
        elif seq.is_running:
            self.rows.remove(seq)
            self.num_running[seq.place.dp_group] -= 1
            if phase is Phase.PREFILL:
                self.prefill_rows.remove(seq)
            else:
                self.short.pop(seq, None)
                self._decode_rows = None
        else:
            self.num_reserved[seq.place.dp_group] -= 1

    def _end(self, seq: Sequence) -> None:
        transition(seq, Phase.ENDED)
        self.num_live -= 1

    # --- views ---------------------------------------------------------------------------------

    @property
    def decode_rows(self) -> DecodeRows:
        """Return the sequences that decode."""
        if self._decode_rows is None:
            decoding = [s for s in self.rows if s.phase is Phase.DECODE]
            self._decode_rows = DecodeRows(self._decode_kind, decoding, len(self.num_running))
        return self._decode_rows

    def get(self, request_id: str, choice: int = 0) -> Sequence | None:
        """Return a request's sequence that has not ended, if there is one."""
        return self._live.get(request_id, {}).get(choice)

    def choices(self, request_id: str) -> list[Sequence]:
        """Return a request's sequences that have not ended, in order."""
        return [*self._live.get(request_id, {}).values()]

    def is_known(self, request_id: str) -> bool:
        """Return whether a request is live or has held blocks."""
        return request_id in self._live or request_id in self.held

    def is_of(self, client: bytes, request_id: str) -> bool:
        """Return whether a request, live or with held blocks, belongs to this client."""
        live = self._live.get(request_id)
        seq = next(iter(live.values())) if live else self.held.get(request_id)
        return seq is not None and seq.client == client

    def is_ending(self, request_id: str) -> bool:
        """Return whether only the held blocks of an aborted request are left of it."""
        seq = self.held.get(request_id)
        return request_id not in self._live and seq is not None and seq.is_aborted

    @property
    def clients(self) -> set[bytes]:
        """Return the clients with unfinished sequences."""
        return {seq.client for seq in self}

    def victim(self, dp_group: int) -> Sequence:
        """Return the running sequence to preempt in a DP group, which must have one.

        It is the last one, or by priority the one of the highest rank. Source: vLLM
        v1/core/sched/scheduler.py.
        """
        rows = (s for s in reversed(self.rows) if s.place.dp_group == dp_group)
        return next(rows) if self._policy == "fcfs" else max(rows, key=_rank)

    def prompt_tokens(self) -> list[int]:
        """Return for each DP group the tokens to compute before all its sequences can decode."""
        num_tokens = [0] * len(self.num_running)
        for seq in self.prefill_rows:
            num_tokens[seq.place.dp_group] += seq.num_new_tokens
        return num_tokens

    def leaving(self) -> list[Sequence]:
        """Return the ended sequences that still have a slot or blocks."""
        held = list(self.held.values())
        return held + [s for s in self.outlived if s not in held]

    def check_invariants(self) -> None:
        """Assert that every sequence is in the place of its phase, and that all counts match."""
        self.queue.check_invariants()
        live, leaving = list(self), self.leaving()
        assert self.num_live == len(live) + len(leaving)
        assert all(s.phase is Phase.LEAVING for s in leaving)
        assert all(s.place.slot < 0 or s in self.outlived for s in self.held.values())
        awaiting = [s for s in live if s.phase in (Phase.LOADING, Phase.RESERVED)]
        assert len(live) == len(self.queue) + len(awaiting) + len(self.rows)
        assert {s for s in live if s.is_running} == set(self.rows)
        for group, num_running in enumerate(self.num_running):
            assert num_running == sum(s.place.dp_group == group for s in self.rows)
            assert self.num_reserved[group] == sum(s.place.dp_group == group for s in awaiting)
        for seq in live:
            assert (seq.place.slot < 0) == (not seq.place.block_ids) == (seq.phase is Phase.WAITING)
        self._check_rows()

    def _check_rows(self) -> None:
        decoding = [s for s in self.rows if s.phase is Phase.DECODE]
        assert self.prefill_rows == [s for s in self.rows if s.phase is Phase.PREFILL]
        if self._decode_rows is not None:
            assert self._decode_rows.sequences == decoding
            assert self._decode_rows.plain.slots == [s.place.slot for s in decoding]
        for seq in decoding:
            assert seq.is_known_to_runner
            assert seq.num_new_tokens <= 1
            assert seq.num_output_tokens > 0
        assert self.short.keys() <= set(decoding)

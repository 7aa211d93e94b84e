"""Running sequences, and the common state of their decode steps.

Owner: the scheduler, on the engine's core thread. A sequence *decodes* from its first token here
on: all but its last token is computed, and the worker knows it. Such rows repeat the same step, so
a step only examines rows that have reached `Sequence.look_at` or got a token that may end them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.engine.sequence import Phase, transition
from replicas.engine.step import ScheduledBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replicas.engine.sequence import Sequence
    from replicas.engine.step import StepKind


class Decodes:
    """All decoding rows; immutable, so that steps of the same rows share it.

    Args:
        kind: Kind of their steps.
        sequences: The rows, in the order in which they run.
        num_groups: DP groups of the engine.

    Attributes:
        sequences: As given.
        batch: A step of these rows alone in which none gets a block.
        num_in: Rows of each DP group.
        stop_ids: Every token that may end one of them.
    """

    __slots__ = ("batch", "num_in", "sequences", "stop_ids")

    def __init__(self, kind: StepKind, sequences: list[Sequence], num_groups: int) -> None:
        self.sequences = sequences
        self.batch = ScheduledBatch(kind, [s.slot for s in sequences], [1] * len(sequences), [], [])
        self.num_in = [len(sequences)]
        if num_groups > 1:
            groups = [s.dp_group for s in sequences]
            self.num_in = [groups.count(g) for g in range(num_groups)]
        # Most rows share one set.
        self.stop_ids = frozenset().union(*{s.stop_ids for s in sequences})

    def __len__(self) -> int:
        return len(self.sequences)


class RunningRows:
    """The running sequences, divided into those that decode and the others.

    Args:
        decode_kind: Kind of the decoding rows' steps.
        num_groups: DP groups of the engine.

    Attributes:
        num_in: Running sequences of each DP group.
        num_decoding: Number of them that decode.
        short: By slot: decoding sequences without a block for their next token.
    """

    def __init__(self, decode_kind: StepKind, num_groups: int) -> None:
        self._decode_kind = decode_kind
        self._sequences: list[Sequence] = []
        self._parts: tuple[Decodes, list[Sequence]] | None = None
        self.num_in = [0] * num_groups
        self.num_decoding = 0
        self.short: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, seq: Sequence) -> None:
        """Add a sequence behind all others."""
        self._sequences.append(seq)
        self.num_in[seq.dp_group] += 1
        self._parts = None

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence, which still has its slot."""
        self._sequences.remove(seq)
        self.num_in[seq.dp_group] -= 1
        self.short.pop(seq.slot, None)
        self.num_decoding -= seq.phase is Phase.DECODE
        self._parts = None

    def decode(self, seq: Sequence) -> None:
        """Move a running sequence to those that decode."""
        transition(seq, Phase.DECODE)
        self.num_decoding += 1
        self._parts = None

    def last_in(self, group: int) -> Sequence:
        """Return the last running sequence of a DP group, which must have one."""
        return next(s for s in reversed(self._sequences) if s.dp_group == group)

    @property
    def decodes(self) -> Decodes:
        """Return the sequences that decode."""
        return self._both[0]

    @property
    def others(self) -> list[Sequence]:
        """Return the sequences that do not decode yet."""
        return self._both[1]

    def prompt_tokens(self) -> list[int]:
        """Return for each DP group the tokens to compute before all its sequences can decode."""
        num_tokens = [0] * len(self.num_in)
        for seq in self.others:
            num_tokens[seq.dp_group] += seq.num_new_tokens
        return num_tokens

    def check_invariants(self) -> None:
        """Assert that all counts and cached divisions match the sequences."""
        for group, num_running in enumerate(self.num_in):
            assert num_running == sum(s.dp_group == group for s in self._sequences)
        assert all(seq.is_running for seq in self._sequences)
        decoding = [s for s in self._sequences if s.phase is Phase.DECODE]
        assert self.num_decoding == len(decoding)
        if self._parts is not None:
            assert self.decodes.sequences == decoding
            assert self.decodes.batch.slots == [s.slot for s in decoding]
            assert len(decoding) + len(self.others) == len(self._sequences)
        for seq in decoding:
            assert seq.is_known_to_runner
            assert seq.num_new_tokens <= 1
            assert seq.num_output_tokens > 0
            assert seq.num_computed_tokens <= seq.look_at
        assert all(self._of_slot(slot) is seq for slot, seq in self.short.items())

    @property
    def _both(self) -> tuple[Decodes, list[Sequence]]:
        if self._parts is None:
            decoding = [s for s in self._sequences if s.phase is Phase.DECODE]
            others = [s for s in self._sequences if s.phase is Phase.PREFILL]
            self._parts = Decodes(self._decode_kind, decoding, len(self.num_in)), others
        return self._parts

    def _of_slot(self, slot: int) -> Sequence | None:
        return next(
            (s for s in self._sequences if s.phase is Phase.DECODE and s.slot == slot), None
        )

"""Grammars that sequences wait for before they may run. Pure: the core moves the messages.

A sequence is queued or reserved while its grammar is compiled on the worker, and holds up no other.
Sequences of one grammar share it. A grammar stays wanted, which keeps it in the worker's cache, as
long as a sequence with it lives: after a preemption the sequence may run again at once.

No more grammars are ordered than the worker has threads, so that each one's time counts from the
beginning of its compilation. A compilation that takes too long fails the sequences that wait for
it and keeps its thread. While all threads are kept so, sequences with other grammars fail at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from replicas.messages import BAD_GRAMMAR, GRAMMARS_BUSY
from replicas.sampling.preparation import NUM_GRAMMAR_THREADS, Preparation

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from replicas.engine.sequence import Sequence
    from replicas.sampling.preparation import Prepared
    from replicas.sampling_params import StructuredOutputs

GRAMMAR_TIMEOUT_S = 1.0
"""Seconds that a grammar may take to compile."""
FIRST_GRAMMAR_TIMEOUT_S = 30.0
"""The same for the first ones: the worker also reads the model's vocabulary then."""
LATE = f"{BAD_GRAMMAR}: it takes too long to compile"


class Ended(NamedTuple):
    """Sequences that need not wait any more.

    Attributes:
        ready: Those that may run.
        failed: Those that must end, with the reason.
    """

    ready: list[Sequence]
    failed: list[tuple[Sequence, str]]


@dataclass(slots=True, eq=False)
class _Grammar:
    """One grammar. `deadline_s` is set while it is compiled; `is_ready` once it can be used."""

    users: dict[Sequence, None] = field(default_factory=dict)
    deadline_s: float | None = None
    is_late: bool = False
    is_ready: bool = False


class Preparations:
    """The grammars of all live sequences.

    Attributes:
        is_active: Whether there are orders to send or results to fetch.
        waiting: Sequences that must not run yet.
    """

    def __init__(self) -> None:
        self.is_active = False
        self.waiting: set[Sequence] = set()
        self._grammars: dict[StructuredOutputs, _Grammar] = {}
        self._unwanted: list[StructuredOutputs] = []
        self._timeout_s = FIRST_GRAMMAR_TIMEOUT_S

    def add(self, seq: Sequence) -> None:
        """Note a new sequence, which waits for its grammar if it has one that is not ready."""
        spec = seq.request.sampling.structured_outputs
        if spec is None:
            return
        grammar = self._grammars.setdefault(spec, _Grammar())
        grammar.users[seq] = None
        if not grammar.is_ready:
            self.waiting.add(seq)
            self.is_active = True

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        spec = seq.request.sampling.structured_outputs
        if spec is None:
            return
        self.waiting.discard(seq)
        grammar = self._grammars.get(spec)
        if grammar is None or seq not in grammar.users:
            return
        del grammar.users[seq]
        if not grammar.users and grammar.deadline_s is None:
            del self._grammars[spec]
            if grammar.is_ready:
                self._drop(spec)

    def take_orders(self, now_s: float) -> list[Preparation]:
        """Return orders for the worker; `end` must follow with its results."""
        orders = [Preparation(spec, is_wanted=False) for spec in self._unwanted]
        self._unwanted = []
        num_free = NUM_GRAMMAR_THREADS - sum(
            g.deadline_s is not None for g in self._grammars.values()
        )
        for spec, grammar in self._grammars.items():
            if num_free > 0 and grammar.deadline_s is None and not grammar.is_ready:
                grammar.deadline_s = now_s + self._timeout_s
                orders.append(Preparation(spec))
                num_free -= 1
        return orders

    def end(self, results: SequenceOf[Prepared], now_s: float) -> Ended:
        """Take results of the worker, and return the sequences that need not wait any more."""
        ended = Ended([], [])
        for result in results:
            self._take(result, ended)
        for grammar in self._grammars.values():
            if grammar.deadline_s is not None and now_s >= grammar.deadline_s:
                grammar.is_late = True
                self._fail(grammar, LATE, ended)
        if sum(grammar.is_late for grammar in self._grammars.values()) >= NUM_GRAMMAR_THREADS:
            for grammar in self._grammars.values():
                if not grammar.is_ready:
                    self._fail(grammar, GRAMMARS_BUSY, ended)
        for spec in [s for s, g in self._grammars.items() if not g.users and g.deadline_s is None]:
            del self._grammars[spec]
        is_compiling = any(g.deadline_s is not None for g in self._grammars.values())
        self.is_active = bool(self.waiting or self._unwanted or is_compiling)
        return ended

    def next_deadline_s(self) -> float | None:
        """Return when the next compilation is late; None if none can be."""
        deadlines = [
            g.deadline_s
            for g in self._grammars.values()
            if g.deadline_s is not None and not g.is_late
        ]
        return min(deadlines, default=None)

    def check_invariants(self) -> None:
        """Assert that exactly the users of grammars that are not ready wait."""
        waiting = {s for g in self._grammars.values() if not g.is_ready for s in g.users}
        assert waiting == self.waiting
        assert self.is_active or not waiting

    def _take(self, result: Prepared, ended: Ended) -> None:
        grammar = self._grammars[result.grammar]
        grammar.deadline_s, grammar.is_late = None, False
        self._timeout_s = GRAMMAR_TIMEOUT_S
        if result.error is not None:
            self._fail(grammar, f"{BAD_GRAMMAR}: {result.error}", ended)
        elif grammar.users:
            grammar.is_ready = True
            self.waiting.difference_update(grammar.users)
            ended.ready.extend(grammar.users)
        if not grammar.is_ready:
            del self._grammars[result.grammar]
            self._drop(result.grammar)

    def _fail(self, grammar: _Grammar, error: str, ended: Ended) -> None:
        """Fail the sequences that wait for a grammar."""
        ended.failed.extend((seq, error) for seq in grammar.users)
        self.waiting.difference_update(grammar.users)
        grammar.users.clear()

    def _drop(self, spec: StructuredOutputs) -> None:
        self._unwanted.append(spec)
        self.is_active = True

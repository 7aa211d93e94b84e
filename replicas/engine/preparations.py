"""Grammars that sequences wait for before they may run. Pure: the core moves the messages.

A sequence is queued or reserved while its grammar is compiled on the worker, and holds up no other.
Sequences of one grammar share it. A grammar stays wanted, which keeps it in the worker's cache, as
long as a sequence with it lives: after a preemption the sequence may run again at once.

No more grammars are ordered than the worker has threads, so that each one's time counts from the
beginning of its compilation. A compilation that takes too long fails the sequences that wait for
it and keeps its thread. While all threads are kept so, sequences with other grammars fail at once.
What counts is CPU time, because the threads stand back where the host is busy, and a good grammar
must not fail for that. Time on the clock is only bounded for the client's sake.
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

GRAMMAR_CPU_S = 1.0
"""Seconds of CPU time that a grammar may take to compile."""
GRAMMAR_TIMEOUT_S = 10.0
"""Seconds on the clock that it may take, however busy the host is."""
FIRST_GRAMMAR_TIMEOUT_S = 30.0
"""Both for the first ones: the worker also reads the model's vocabulary then."""
_LEAST_PAUSE_S = 0.05
"""Seconds between two looks at a compilation whose thread is starved."""
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
    """One grammar.

    Attributes:
        users: The sequences that have it.
        deadline_s: While it is compiled: when it is late, whatever CPU time it has taken.
        check_s: When it may have taken its CPU time.
        max_cpu_s: The most CPU time that it may take.
        is_late: Whether it takes too long; it may still be compiled.
        is_ready: Whether it can be used.
    """

    users: dict[Sequence, None] = field(default_factory=dict)
    deadline_s: float | None = None
    check_s: float = 0.0
    max_cpu_s: float = GRAMMAR_CPU_S
    is_late: bool = False
    is_ready: bool = False

    def note_progress(self, cpu_s: float, now_s: float) -> None:
        """Note the CPU time that its compilation has taken."""
        self.is_late |= cpu_s >= self.max_cpu_s
        self.check_s = now_s + max(self.max_cpu_s - cpu_s, _LEAST_PAUSE_S)

    def finds_late(self, now_s: float) -> bool:
        """Return whether it is compiled and late, after a look at the clock."""
        if self.deadline_s is None:
            return False
        self.is_late |= now_s >= self.deadline_s
        if now_s >= self.check_s:
            # Its thread has not begun, or the worker does not say.
            self.check_s = now_s + self.max_cpu_s
        return self.is_late


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
        self._has_vocabulary = False

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
                first = (FIRST_GRAMMAR_TIMEOUT_S, FIRST_GRAMMAR_TIMEOUT_S)
                later = (GRAMMAR_TIMEOUT_S, GRAMMAR_CPU_S)
                timeout_s, grammar.max_cpu_s = later if self._has_vocabulary else first
                grammar.deadline_s = now_s + timeout_s
                grammar.check_s = now_s + grammar.max_cpu_s
                orders.append(Preparation(spec))
                num_free -= 1
        return orders

    def end(self, results: SequenceOf[Prepared], now_s: float) -> Ended:
        """Take results of the worker, and return the sequences that need not wait any more."""
        ended = Ended([], [])
        for result in results:
            if result.cpu_s is None:
                self._take(result, ended)
            else:
                self._grammars[result.grammar].note_progress(result.cpu_s, now_s)
        for grammar in self._grammars.values():
            if grammar.finds_late(now_s):
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
        """Return when the next compilation may be late; None if none can be."""
        deadlines = [
            min(g.deadline_s, g.check_s)
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
        self._has_vocabulary = True
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

"""Grammars on the worker: compiled on threads of their own, cached, and applied to logits as masks.

The core orders a grammar before a row with it may run (`replicas.engine.preparations`), so that no
step waits for a compilation. A row's matcher is a copy of the compiled one that has read the row's
output, which makes its state a function of the row's tokens.

Masks are computed while the device may still compute the logits, and applied to the touched rows
alone. Dimensions as in `replicas.sampling.processor`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from replicas.errors import InvalidRequestError
from replicas.sampling.preparation import NUM_GRAMMAR_THREADS, Prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import numpy.typing as npt
    import torch
    from llguidance import LLMatcher

    from replicas.grammars import GrammarCompiler
    from replicas.sampling.preparation import Preparation
    from replicas.sampling.processor import DeviceAbilities, LogitRows
    from replicas.sampling.row import SampledRow
    from replicas.sampling_params import SamplingParams, StructuredOutputs

    Float32Array = npt.NDArray[np.float32]
    Int32Array = npt.NDArray[np.int32]
    Int64Array = npt.NDArray[np.int64]

MAX_CACHE_BYTES = 256 * 2**20
"""Estimated memory of all compiled grammars."""
_BASE_BYTES, _BYTES_PER_CHAR = 128 * 2**10, 256
"""Estimated memory of a compiled grammar. Measured: 0.1 MB for any JSON object, and 20 to 240 bytes
for each character of larger schemas, enumerations and choices."""
_NICENESS = 10

_ADDENDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") > 0,
    np.float32(0.0),
    np.float32(-np.inf),
)
"""float32 (256, 8): what a byte of a mask adds to eight logits."""
_NUM_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1)
_FEW = 16
"""If fewer than one in so many tokens is allowed, copying their logits takes less time than adding
to all."""


@dataclass(slots=True, eq=False)
class _Entry:
    matcher: LLMatcher
    num_bytes: int


class GrammarCache:
    """Compiled grammars, the least recently used of which are dropped.

    Owner: the worker's thread; compilations run on niced threads, one each.

    Args:
        make_compiler: Makes the compiler of the model's vocabulary; called on one of the threads.
        notify: Called from a thread when a compilation has ended.
        max_bytes: Most memory of all grammars, by estimate.
    """

    def __init__(
        self,
        make_compiler: Callable[[], GrammarCompiler],
        notify: Callable[[], None] = lambda: None,
        max_bytes: int = MAX_CACHE_BYTES,
    ) -> None:
        self._make_compiler = make_compiler
        self._notify = notify
        self._max_bytes = max_bytes
        self._compiler: GrammarCompiler | None = None
        self._making = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_GRAMMAR_THREADS, "grammar", initializer=_stand_back)
        self._compiling: dict[StructuredOutputs, Future[LLMatcher]] = {}
        # Of each compilation: the CPU clock of its thread, and its time at the beginning.
        self._clocks: dict[StructuredOutputs, tuple[int, float]] = {}
        # Least recently used first; those in use are not dropped.
        self._entries: OrderedDict[StructuredOutputs, _Entry] = OrderedDict()
        self._in_use: set[StructuredOutputs] = set()
        self.num_bytes = 0

    def prepare(self, orders: Sequence[Preparation]) -> list[Prepared]:
        """Begin what is ordered, and return what has ended since the last call."""
        ended = []
        for order in orders:
            spec = order.grammar
            if not order.is_wanted:
                self._in_use.discard(spec)
                continue
            self._in_use.add(spec)
            if spec in self._entries:
                self._entries.move_to_end(spec)
                ended.append(Prepared(spec))
            elif spec not in self._compiling:
                future = self._compiling[spec] = self._threads.submit(self._compile, spec)
                future.add_done_callback(lambda _: self._notify())
        done = [spec for spec, future in self._compiling.items() if future.done()]
        return ended + [self._end(spec, self._compiling.pop(spec)) for spec in done]

    def progress(self) -> list[Prepared]:
        """Return the CPU time of the compilations that have begun and not ended."""
        return [
            Prepared(spec, cpu_s=time.clock_gettime(clock) - begun_s)
            for spec, (clock, begun_s) in list(self._clocks.items())
        ]

    def matcher(self, spec: StructuredOutputs, token_ids: Sequence[int]) -> LLMatcher | None:
        """Return a matcher that has read an output; None if the grammar does not allow it.

        Args:
            spec: A grammar that is prepared and wanted.
            token_ids: The output so far.
        """
        matcher = self._entries[spec].matcher.deep_copy()
        return matcher if consume(matcher, token_ids) else None

    @property
    def width(self) -> int:
        """Return the tokens of the vocabulary, at least as many as a row has logits."""
        assert self._compiler is not None, "a grammar has been compiled"
        return self._compiler.tokenizer.vocab_size

    def close(self) -> None:
        """Start no further compilations."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, spec: StructuredOutputs) -> LLMatcher:
        clock = time.pthread_getcpuclockid(threading.get_ident())
        self._clocks[spec] = clock, time.clock_gettime(clock)
        with self._making:
            if self._compiler is None:
                self._compiler = self._make_compiler()
        return self._compiler.compile(spec)

    def _end(self, spec: StructuredOutputs, future: Future[LLMatcher]) -> Prepared:
        """Keep a compiled grammar, or say why there is none."""
        self._clocks.pop(spec, None)
        error = future.exception()
        if isinstance(error, InvalidRequestError):
            return Prepared(spec, str(error))
        if error is not None:
            return Prepared(spec, f"the grammar cannot be compiled: {error!r:.300}")
        num_bytes = estimated_bytes(spec)
        for other in list(self._entries):
            if self.num_bytes + num_bytes <= self._max_bytes:
                break
            if other not in self._in_use:
                self.num_bytes -= self._entries.pop(other).num_bytes
        if self.num_bytes + num_bytes > self._max_bytes:
            return Prepared(spec, "running requests use all the memory for grammars; try again")
        self.num_bytes += num_bytes
        self._entries[spec] = _Entry(future.result(), num_bytes)
        return Prepared(spec)


class GrammarProcessor:
    """Row processor that lets a row draw only tokens with which its output follows its grammar.

    Rows that cannot continue, because a limit of the grammar was exceeded or the row came with
    tokens that the grammar does not allow, may draw no token.

    Args:
        cache: The compiled grammars.
    """

    def __init__(self, cache: GrammarCache) -> None:
        self._cache = cache
        self._matchers: dict[int, LLMatcher | None] = {}
        # Of the step to come, by row of logits: its mask (ceil(V / 32),), or None if it fails.
        self._masks: dict[int, Int32Array | None] = {}

    def add(self, row: SampledRow) -> bool:
        """Take over a row, whose output so far its matcher reads."""
        self._matchers.pop(row.slot, None)
        spec = row.sampling.structured_outputs
        if spec is None:
            return False
        output = row.token_ids[row.num_prompt_tokens :]
        self._matchers[row.slot] = self._cache.matcher(spec, output)
        return True

    def remove(self, slot: int) -> None:
        """Drop the matcher of a slot."""
        self._matchers.pop(slot, None)

    def needs_host(self, sampling: SamplingParams, can: DeviceAbilities) -> bool:
        """Return True: no device masks by grammars."""
        return True

    def prepare(self, rows: LogitRows) -> None:
        """Compute the masks of the step's rows."""
        self._masks = {}
        slots = rows.slots.tolist()
        masks = np.empty((len(slots), -(-self._cache.width // 32)), dtype=np.int32)
        matcher: LLMatcher | None = None
        for row, slot in enumerate(slots):
            if slot not in self._matchers:
                continue
            drafts = rows.drafts[row] if rows.drafts else ()
            if not drafts:
                matcher = self._matchers[slot]
            elif matcher is not None:
                # The row of logits before this one was of the same slot, and one draft shorter.
                if len(drafts) == 1:
                    matcher = matcher.deep_copy()
                if not consume(matcher, drafts[-1:]):
                    # No token of this row is used: the draft before it cannot be drawn.
                    matcher = None
            if matcher is None:
                if not drafts:
                    self._masks[row] = None
                continue
            fill_next_token_bitmask(matcher, masks, row)
            self._masks[row] = None if matcher.is_error() else masks[row]

    def apply(self, logits: torch.Tensor, rows: LogitRows, indices: Int64Array) -> None:
        """Set the logits of tokens that are not allowed to minus infinity, in float32 (n, V)."""
        for row, values in zip(indices.tolist(), logits.numpy(), strict=True):
            if row not in self._masks:
                continue
            mask = self._masks[row]
            if mask is None:
                values.fill(-np.inf)
            else:
                apply_mask(values, mask)

    def note_drawn(self, token_ids: Sequence[int]) -> None:
        """Do nothing: a matcher reads accepted tokens."""

    def accept(self, slot: int, token_ids: Sequence[int]) -> None:
        """Let the matcher of a row read its new tokens."""
        matcher = self._matchers[slot]
        if matcher is not None and not consume(matcher, token_ids):
            self._matchers[slot] = None


def consume(matcher: LLMatcher, token_ids: Sequence[int]) -> bool:
    """Let a matcher read tokens; return whether its grammar allows them.

    After the end of the output any tokens are allowed: end tokens that are ignored.
    """
    num_read = matcher.try_consume_tokens(list(token_ids))
    return num_read == len(token_ids) or (matcher.is_stopped() and not matcher.is_error())


def apply_mask(logits: Float32Array, mask: Int32Array) -> None:
    """Set the logits of a row whose bits are not set to minus infinity.

    Args:
        logits: (V,), changed in place.
        mask: int32 (n,), with token t as bit t % 32 of number t // 32; further logits are masked.
    """
    octets = mask.view(np.uint8)
    if int(_NUM_BITS[octets].sum()) * _FEW < len(logits):
        allowed = np.flatnonzero(np.unpackbits(octets, bitorder="little")[: len(logits)])
        kept = logits[allowed]
        logits.fill(-np.inf)
        logits[allowed] = kept
        return
    width = min(len(logits), 8 * len(octets))
    logits[:width] += _ADDENDS[octets].reshape(-1)[:width]
    logits[width:] = -np.inf


def estimated_bytes(spec: StructuredOutputs) -> int:
    """Return the estimated memory of a compiled grammar."""
    value = getattr(spec, spec.kind)
    num_chars = sum(map(len, value)) if isinstance(value, tuple) else len(str(value))
    return _BASE_BYTES + _BYTES_PER_CHAR * num_chars


def _stand_back() -> None:
    """Lower this thread's priority; Linux keeps one for each thread."""
    os.nice(_NICENESS)

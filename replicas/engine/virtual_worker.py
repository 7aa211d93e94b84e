"""A worker whose device is a model of time: what a simulated engine runs under a virtual clock.

Owner of the clock of its engine's step and of the rows that stand for its KV. It takes the calls of
`replicas.engine.worker.Worker` and gives the same step times, and where it models KV the same token
ids, as that worker gives on a simulated mesh; it leaves out tensors, and on request the KV too, for
thousands of replicas at once. A decode step may be run many times in one call, see
`EngineCore.begin_run`.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kv_transfer.p2p_worker import P2PConnectorWorker
from replicas.engine.step import ModelFacts, StepResult
from replicas.generators.simulated.device import step_factor
from replicas.generators.simulated.kv_io import SimulatedKVIO, simulated_kv_layout
from replicas.generators.simulated.tokens import NextToken, PagedKVCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_transfer.connector import (
        ConnectorMeta,
        ConnectorSettings,
        TransferInfo,
        TransferResults,
        TransferStats,
        TransportFactory,
    )
    from kv_transfer.layout import KVLayout
    from replicas.config import EngineConfig
    from replicas.engine.step import NewSequence, ScheduledBatch
    from replicas.generators.simulated.timing import StepTiming

_FIRST_TOKEN = 16
"""Token ids below are left to end tokens and the like."""


class StepClock:
    """Virtual time inside one step; a `DeviceClock`.

    Attributes:
        spent_s: What the step has taken so far.
    """

    def __init__(self) -> None:
        self._started_s = 0.0
        self.spent_s = 0.0

    def start(self, now_s: float) -> None:
        """A step begins."""
        self._started_s = now_s
        self.spent_s = 0.0

    def now_s(self) -> float:
        """The present, some way into the step."""
        return self._started_s + self.spent_s

    def spend(self, seconds: float) -> None:
        """Let the step take so much longer."""
        self.spent_s += seconds


class Slowdown(Protocol):
    """What is wrong with a device; see `replicas.faults.ReplicaFaults`."""

    def slow_factor(self, now_s: float) -> float:
        """How many times as long a step takes that starts now."""
        ...

    def hang_left_s(self, now_s: float) -> float:
        """How long a step takes at least that starts now."""
        ...


class _Row:
    """What the worker knows of one sequence."""

    __slots__ = ("block_ids", "lane", "num_computed", "num_prompt", "num_tokens", "seed", "tokens")

    def __init__(self, seq: NewSequence, *, keeps_tokens: bool) -> None:
        self.lane = seq.dp_group
        self.num_tokens = len(seq.token_ids)
        self.num_prompt = seq.num_prompt_tokens
        self.num_computed = seq.num_computed_tokens
        self.seed = seq.seed
        self.block_ids = list(seq.block_ids) if keeps_tokens else []
        self.tokens = list(seq.token_ids) if keeps_tokens else []


class VirtualWorker:
    """One simulated device; see the module docstring.

    Args:
        config: The engine's configuration.
        timing: What steps cost.
        facts: What the modelled device and the served model are.
        clock: Clock of this engine's steps.
        faults: What is wrong with the device, and when.
        models_kv: Whether KV rows are kept, written, moved and read, so that a token depends on
            every row of its context. Without, tokens depend on the request alone.
        seed: Of the jitter.
        settings: What the KV connector is told.
        make_transport: Makes the KV transport.
        notify: Wakes the engine.

    Attributes:
        num_rows: Sequences of the last step.
    """

    def __init__(  # noqa: PLR0913 - keyword-only: the parts of one device
        self,
        *,
        config: EngineConfig,
        timing: StepTiming,
        facts: ModelFacts,
        clock: StepClock,
        faults: Slowdown,
        models_kv: bool,
        seed: int = 0,
        settings: ConnectorSettings,
        make_transport: TransportFactory,
        notify: Callable[[], None],
    ) -> None:
        self._config = config
        self._timing = timing
        self._facts = facts
        self._clock = clock
        self._faults = faults
        self._models_kv = models_kv
        self._settings = settings
        self._make_transport = make_transport
        self._notify = notify
        self._rows: list[_Row | None] = [None] * config.max_batch_size
        mesh = config.simulated_mesh
        self._jitter = mesh.jitter if mesh is not None else 0.0
        # A string is hashed alike in every process.
        self._random = random.Random(f"{seed}/{settings.incarnation}")
        self.num_rows = 0
        # Of the steps that were submitted and not collected.
        self._results: deque[StepResult] = deque()
        # Device seconds of the steps that `run_seconds` told of last.
        self._run_s: list[float] = []
        self._connector: P2PConnectorWorker | None = None
        self._cache: PagedKVCache | None = None
        self._next_token: NextToken | None = None

    # --- life cycle ----------------------------------------------------------------------------

    def init_device(self) -> None:
        """There is none."""

    def load_model(self) -> ModelFacts:
        """What was given."""
        return self._facts

    def initialize_kv_cache(
        self, num_blocks: int, max_model_len: int
    ) -> tuple[tuple[str, ...], KVLayout] | None:
        """See `Worker.initialize_kv_cache`."""
        config = self._config
        if self._models_kv:
            self._cache = PagedKVCache(config.tt_data_parallel, num_blocks, config.block_size)
            self._next_token = NextToken(self._facts.vocab_size, self._facts.eos_token_ids)
        if config.kv_connector is None:
            return None
        layout = simulated_kv_layout(config.block_size, "virtual")
        self._connector = P2PConnectorWorker(self._settings, self._notify, self._make_transport)
        # Without rows a cache of one block answers for all of them.
        cache = self._cache or PagedKVCache(1, 2, config.block_size)
        self._connector.register_kv_caches(
            SimulatedKVIO(cache, layout, self._timing, self._clock, keeps_rows=self._models_kv)
        )
        return self._connector.endpoints, layout

    def warm_up(self) -> None:
        """Takes time before the engine is there; see `StepTiming.warm_up_s`."""

    def transfer_stats(self, now_s: float) -> TransferStats | None:
        """See `Worker.transfer_stats`."""
        return self._connector.stats(now_s) if self._connector is not None else None

    def transfers(self, now_s: float) -> list[TransferInfo]:
        """See `Worker.transfers`."""
        return self._connector.transfers(now_s) if self._connector is not None else []

    def shutdown(self) -> None:
        """Close the connector."""
        if self._connector is not None:
            self._connector.close(deadline_s=0.0)

    # --- steps ---------------------------------------------------------------------------------

    def submit_step(
        self, batch: ScheduledBatch | None, meta: ConnectorMeta | None, now_s: float
    ) -> None:
        """See `Worker.submit_step`."""
        self.num_rows = 0
        if self._connector is not None and meta is not None:
            self._connector.start_load_kv(meta, now_s)
        if batch is not None:
            self._apply(batch)
            seconds = self._seconds(batch)
            self._results.append(StepResult(self._advance(batch), seconds))

    def collect_step(self) -> StepResult:
        """See `Worker.collect_step`; the clock tells how long it took."""
        result = self._results.popleft()
        self._clock.spend(result.device_s)
        return result

    def end_step(self, meta: ConnectorMeta, now_s: float) -> TransferResults:
        """See `Worker.end_step`; the clock tells how long it took."""
        assert self._connector is not None
        self._connector.mark_ready(meta, now_s)
        self._connector.wait_for_save()
        return self._connector.get_transfer_results(now_s)

    def run_seconds(self, batch: ScheduledBatch, num_steps: int) -> list[float]:
        """Device seconds of each of `num_steps` repeats of a step that `begin_run` gave."""
        self._apply(batch)
        if num_steps == 1:
            self._run_s = [self._seconds(batch)]
        else:
            factor = self._factor()
            rows = [self._row(slot) for slot in batch.slots]
            contexts = [(row.lane, row.num_computed + 1) for row in rows]
            self._run_s = [factor * s for s in self._timing.decode_run_s(contexts, num_steps)]
        return self._run_s

    def execute_run(self, batch: ScheduledBatch, num_steps: int) -> tuple[list[list[int]], float]:
        """Run a step of which `run_seconds` told: token ids by slot and step, device seconds."""
        device_s = sum(self._run_s[:num_steps])
        if num_steps == 1 or self._cache is not None:
            per_step = [self._advance(batch) for _ in range(num_steps)]
            return [list(tokens) for tokens in zip(*per_step, strict=True)], device_s
        token_ids = []
        for slot in batch.slots:
            row = self._row(slot)
            token_ids.append(self._tokens_of_request(row, num_steps))
            row.num_computed += num_steps
            row.num_tokens += num_steps
        return token_ids, device_s

    # --- inside --------------------------------------------------------------------------------

    def _seconds(self, batch: ScheduledBatch) -> float:
        """How long a step takes; one on a device that hangs as long as it does that."""
        return max(
            self._factor() * self._step_s(batch), self._faults.hang_left_s(self._clock.now_s())
        )

    def _factor(self) -> float:
        slow = self._faults.slow_factor(self._clock.now_s())
        return step_factor(slow, self._jitter, self._random)

    def _apply(self, batch: ScheduledBatch) -> None:
        self.num_rows = len(batch.slots)
        for seq in batch.new:
            self._rows[seq.slot] = _Row(seq, keeps_tokens=self._models_kv)
        if self._models_kv:
            for slot, block_ids in batch.appended_blocks:
                self._row(slot).block_ids.extend(block_ids)

    def _step_s(self, batch: ScheduledBatch) -> float:
        chunks: list[tuple[int, int, int]] = []
        decodes: list[tuple[int, int]] = []
        for slot, count in zip(batch.slots, batch.num_scheduled_tokens, strict=True):
            row = self._row(slot)
            end = row.num_computed + count
            # A row decodes when its last token is all that is left of it, as in the two calls of a
            # generator; in a mixed pass one last token of a prompt costs the same as that.
            if batch.kind != "prefill" and count == 1:
                decodes.append((row.lane, end))
            else:
                chunks.append((row.lane, row.num_computed, end))
        if batch.kind == "mixed":
            return self._timing.mixed_s(chunks, decodes)
        return self._timing.prefill_s(chunks) if chunks else self._timing.decode_s(decodes)

    def _advance(self, batch: ScheduledBatch) -> list[int]:
        """Compute one step; a token for each slot, -1 where the prompt is not complete."""
        sampling: list[_Row] = []
        token_ids: list[int] = []
        for slot, count in zip(batch.slots, batch.num_scheduled_tokens, strict=True):
            row = self._row(slot)
            if self._cache is not None:
                start = row.num_computed
                self._cache.write_tokens(
                    row.lane, row.block_ids, row.tokens[start : start + count], start
                )
            row.num_computed += count
            samples = row.num_computed == row.num_tokens
            if samples:
                sampling.append(row)
            token_ids.append(0 if samples else -1)
        if not sampling:
            return token_ids
        tokens = iter(self._sample(sampling))
        return [token_id if token_id < 0 else next(tokens) for token_id in token_ids]

    def _sample(self, rows: Sequence[_Row]) -> list[int]:
        tokens = (
            [self._tokens_of_request(row, 1)[0] for row in rows]
            if self._cache is None
            else self._tokens_of_context(self._cache, rows)
        )
        for row, token_id in zip(rows, tokens, strict=True):
            row.num_tokens += 1
            if self._cache is not None:
                row.tokens.append(token_id)
        return tokens

    def _tokens_of_request(self, row: _Row, count: int) -> list[int]:
        """The next tokens of a row, which (seed, output index) alone decide."""
        span = self._facts.vocab_size - _FIRST_TOKEN
        first = row.seed + (row.num_tokens - row.num_prompt)
        return [_FIRST_TOKEN + (i * 0x9E3779B1 >> 7) % span for i in range(first, first + count)]

    def _tokens_of_context(self, cache: PagedKVCache, rows: Sequence[_Row]) -> list[int]:
        width = max(len(row.block_ids) for row in rows)
        tables = np.zeros((len(rows), width), dtype=np.int64)
        for i, row in enumerate(rows):
            tables[i, : len(row.block_ids)] = row.block_ids
        sums = cache.context_sums(
            np.array([row.lane for row in rows]),
            tables,
            np.array([row.num_tokens for row in rows]),
        )
        assert self._next_token is not None
        tokens: list[int] = self._next_token(sums).tolist()
        return tokens

    def _row(self, slot: int) -> _Row:
        row = self._rows[slot]
        assert row is not None, f"slot {slot} is empty"
        return row

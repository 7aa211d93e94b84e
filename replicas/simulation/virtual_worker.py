"""Worker with a modelled device, for simulated engines under a virtual clock.

Owner of its device's timeline and of the rows that stand for its KV. It accepts the calls of
`replicas.engine.worker.Worker` and gives the same step times as that worker on a simulated mesh,
and the same token ids for greedy rows if it models KV. It needs no tensors, and optionally no KV,
so that thousands of replicas fit one simulation. A decode step may have many passes, of which the
first one is made when the step is submitted, and the others when it is known how many there are
(`stop_after`). With `num_scheduler_steps` all are made at once.

There is no drafter, no compiler of grammars and no sampler: which drafts are right, how long a
grammar takes, and which rows get no token, is drawn at random from a seed, with the probabilities
of `Chances`.
"""

from __future__ import annotations

import itertools
import os
import random
import resource
from collections import deque
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from kv_transfer.p2p_worker import P2PConnectorWorker
from replicas.engine.step import ModelFacts, RowFailure, ScheduledBatch, StepResult
from replicas.generators.simulated.device import DeviceTimeline
from replicas.generators.simulated.kv_io import SimulatedKVIO, simulated_kv_layout
from replicas.generators.simulated.tokens import (
    GREEDY,
    NextToken,
    PagedKVCache,
    draw_salt,
    expected_tokens,
)
from replicas.messages import ExpertCounters, WorkerDescription
from replicas.sampling.preparation import Prepared
from replicas.sampling_params import GREEDY_EPS
from replicas.speculation.drafts import accepted_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

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
    from replicas.engine.step import NewRow
    from replicas.generators.simulated.device import Slowdown
    from replicas.generators.simulated.timing import StepTiming
    from replicas.kv_groups import KVGroup
    from replicas.sampling.preparation import Preparation
    from replicas.sampling_params import StructuredOutputs

MIN_TURN_S = 1e-6
"""Least seconds of a turn that did something, so that virtual time always advances."""
_FIRST_TOKEN = 16
"""Smaller token ids are never drawn, as end tokens and other special tokens are among them."""
_FAILURES: tuple[Literal["no_distribution", "no_allowed_token"], ...] = (
    "no_distribution",
    "no_allowed_token",
)
_SLOW_COMPILE_S = (0.02, 0.3, 0.3, 3.0, 40.0)
"""Within, and beyond, the timeouts of `replicas.engine.preparations`."""


class Chances(NamedTuple):
    """Probabilities of what the simulated worker does not compute.

    Attributes:
        right_draft: That a draft is the token that the model gives.
        slow_grammar: That a grammar is not compiled at once.
        bad_grammar: That a grammar cannot be compiled.
        failed_row: That a row gets no token in a step that draws one for it.
    """

    right_draft: float = 0.5
    slow_grammar: float = 0.0
    bad_grammar: float = 0.0
    failed_row: float = 0.0


DEFAULT_CHANCES = Chances()


class StepClock:
    """Virtual time inside one step; a `DeviceClock`.

    Attributes:
        spent_s: Seconds of the step so far.
    """

    def __init__(self) -> None:
        self._started_s = 0.0
        self.spent_s = 0.0

    def start(self, now_s: float) -> None:
        """Begin a step."""
        self._started_s = now_s
        self.spent_s = 0.0

    def now_s(self) -> float:
        """Return the virtual time within the step."""
        return self._started_s + self.spent_s

    def spend(self, seconds: float) -> None:
        """Add to the duration of the step."""
        self.spent_s += seconds


class _Begun(NamedTuple):
    """A submitted step: its rows' runs of tokens, when it is over, and waits for earlier passes.

    `num_drafts` and `failed` are as in `StepResult`; `num_passes` are the passes for which the host
    waits once.
    """

    batch: ScheduledBatch
    runs: list[list[int]]
    end_s: float
    earlier_s: Sequence[float] = ()
    num_drafts: Sequence[int] = ()
    num_passes: int = 1
    failed: Sequence[RowFailure] = ()


class _Planned(NamedTuple):
    """A planned pass: its end, the wait for it, and the timeline's state after its submission."""

    end_s: float
    wait_s: float
    free_s: float
    busy_s: float


class _Row:
    """The worker's record of one sequence."""

    __slots__ = (
        "block_ids", "drafts", "lane", "num_computed", "num_prompt", "num_tokens", "salt", "seed",
        "tokens",
    )  # fmt: skip

    def __init__(self, row: NewRow, *, keeps_tokens: bool) -> None:
        self.lane = row.dp_group
        self.num_tokens = len(row.token_ids)
        self.num_prompt = row.num_prompt_tokens
        self.num_computed = row.num_computed_tokens
        self.seed = row.sampling.seed or 0
        # A greedy row draws without its seed.
        self.salt = GREEDY if row.sampling.temperature < GREEDY_EPS else draw_salt(self.seed)
        self.drafts: list[int] = []
        self.block_ids = [list(block_ids) for block_ids in row.block_ids] if keeps_tokens else []
        self.tokens = list(row.token_ids) if keeps_tokens else []


class VirtualWorker:
    """A worker whose device is a timeline under a virtual clock.

    Args:
        config: The engine's configuration.
        timing: Durations of steps.
        facts: Facts of the modelled device and the served model.
        clock: Clock of this engine's steps.
        faults: Slow and hung periods of the device.
        models_kv: Whether KV rows are kept, written, moved and read, so that a token depends on
            every row of its context. Otherwise tokens depend on the request alone.
        seed: Seed of the jitter, and of what has `chances`.
        chances: See there.
        settings: Settings of the KV connector.
        make_transport: Makes the KV transport.
        notify: Wakes the engine.
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
        chances: Chances = DEFAULT_CHANCES,
        settings: ConnectorSettings,
        make_transport: TransportFactory,
        notify: Callable[[], None],
    ) -> None:
        self._config = config
        self._timing = timing
        self._facts = facts
        self._clock = clock
        self._models_kv = models_kv
        self._settings = settings
        self._make_transport = make_transport
        self._notify = notify
        self._rows: list[_Row | None] = [None] * config.max_batch_size
        mesh = config.simulated_mesh
        jitter = mesh.jitter if mesh is not None else 0.0
        # A string seed gives the same numbers in every process.
        self._timeline = DeviceTimeline(
            faults, jitter=jitter, seed=f"{seed}/{settings.incarnation}"
        )
        # Submitted and not collected, oldest first.
        self._begun: deque[_Begun] = deque()
        # The passes that `plan_turns` has planned last.
        self._planned: list[_Planned] = []
        self._connector: P2PConnectorWorker | None = None
        # Of each KV group, if KV is modelled: first that of all tokens, then those of windows.
        self._caches: list[PagedKVCache] = []
        self._windows: list[int] = []
        self._next_token: NextToken | None = None
        self._max_model_len = 0
        self._chances = chances
        self._dice = random.Random(f"{seed}/{settings.incarnation}/chances")
        # Grammars that are compiled, and when each will be; those that rows may use.
        self._compiling: list[tuple[float, Prepared]] = []
        self._grammars: set[StructuredOutputs] = set()

    # --- life cycle ----------------------------------------------------------------------------

    def init_device(self) -> None:
        """Do nothing: there is no device."""

    def load_model(self) -> ModelFacts:
        """Return the given facts."""
        return self._facts

    def initialize_kv_cache(
        self, kv_groups: Sequence[KVGroup], max_model_len: int
    ) -> tuple[tuple[str, ...], tuple[KVLayout, ...]] | None:
        """Make the KV rows, if modelled, and the connector; return as `Worker` does."""
        config, (group, *others) = self._config, kv_groups
        self._max_model_len = max_model_len
        windows = [other.spec.window for other in others]
        self._windows = [window for window in windows if window is not None]
        assert len(self._windows) == len(others), "a second group without a window"
        assert config.kv_connector is None or not others, "a transfer of several groups"
        if self._models_kv:
            self._caches = [
                PagedKVCache(config.tt_data_parallel, each.num_blocks, each.block_size)
                for each in kv_groups
            ]
            self._next_token = NextToken(self._facts.vocab_size, self._facts.eos_token_ids)
        if config.kv_connector is None:
            return None
        layout = simulated_kv_layout(group.block_size, "virtual")
        self._connector = P2PConnectorWorker(self._settings, self._notify, self._make_transport)
        # Without KV rows one block stands for all blocks.
        cache = self._caches[0] if self._caches else PagedKVCache(1, 2, group.block_size)
        io = SimulatedKVIO(cache, layout, self._timing, self._clock, keeps_rows=self._models_kv)
        self._connector.register_kv_caches((io,))
        return self._connector.endpoints, (layout,)

    def warm_up(self) -> None:
        """Do nothing: the simulator adds `StepTiming.warm_up_s` before the engine is ready."""

    def transfer_stats(self, now_s: float) -> TransferStats | None:
        """Return totals of the KV connector; None without one."""
        return self._connector.stats(now_s) if self._connector is not None else None

    def transfers(self, now_s: float) -> list[TransferInfo]:
        """Return the KV transfers under way."""
        return self._connector.transfers(now_s) if self._connector is not None else []

    def expert_counters(self) -> ExpertCounters:
        """Return zeros: virtual models have no experts."""
        return ExpertCounters()

    def describe(self) -> WorkerDescription:
        """Return what runs here; see `WORKER_METHODS`."""
        return WorkerDescription(
            pid=os.getpid(),
            generator=f"{type(self).__module__}:{type(self).__qualname__}",
            dtype=self._config.dtype,
            num_threads=1,
            peak_resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    def shutdown(self) -> None:
        """Close the connector."""
        if self._connector is not None:
            self._connector.close(deadline_s=0.0)

    # --- steps ---------------------------------------------------------------------------------

    def prepare(self, orders: Sequence[Preparation]) -> list[Prepared]:
        """Begin to compile grammars; return those that are done. Virtual tokens follow none."""
        now_s = self._clock.now_s()
        for order in orders:
            if order.is_wanted:
                self._compiling.append(self._compile(order.grammar, now_s))
            else:
                self._grammars.discard(order.grammar)
        done = [prepared for ready_s, prepared in self._compiling if ready_s <= now_s]
        self._compiling = [each for each in self._compiling if each[0] > now_s]
        self._grammars.update(prepared.grammar for prepared in done if prepared.error is None)
        return done

    def _compile(self, grammar: StructuredOutputs, now_s: float) -> tuple[float, Prepared]:
        """Return when a grammar is compiled, and with what result."""
        chances, error = self._chances, None
        if chances.slow_grammar and self._dice.random() < chances.slow_grammar:
            now_s += self._dice.choice(_SLOW_COMPILE_S)
        if chances.bad_grammar and self._dice.random() < chances.bad_grammar:
            error = "it matches nothing"
        return now_s, Prepared(grammar, error)

    @property
    def next_prepared_s(self) -> float | None:
        """When the next grammar will be compiled; None if none is under way."""
        return min((ready_s for ready_s, _ in self._compiling), default=None)

    def submit_step(
        self, batch: ScheduledBatch | None, meta: ConnectorMeta | None, now_s: float
    ) -> None:
        """Begin a step: start transfers, and add the batch to the device's timeline."""
        if self._connector is not None and meta is not None:
            self._connector.start_load_kv(meta, now_s)
        if batch is not None:
            self._apply(batch)
            if batch.num_passes > 1 and self._config.num_scheduler_steps > 1:
                self._begun.append(self._make_passes(batch))
                return
            end_s = self._timeline.submit(self._clock.now_s(), self._step_s(batch))
            runs = self._advance(batch)
            failed = self._fail_rows(runs) if self._chances.failed_row else ()
            num_drafts = self._propose(batch, runs) if batch.max_drafts else ()
            self._begun.append(_Begun(batch, runs, end_s, num_drafts=num_drafts, failed=failed))

    def _make_passes(self, batch: ScheduledBatch) -> _Begun:
        """Make all passes of a step.

        A row without a block for its last token has ended. As on a device it is computed further,
        and what it gets means nothing.
        """
        now_s, end_s = self._clock.now_s(), 0.0
        runs: dict[int, list[int]] = {slot: [] for slot in batch.slots}
        for _ in range(batch.num_passes):
            slots = [slot for slot in batch.slots if self._has_block(self._row(slot))]
            one = ScheduledBatch(batch.kind, slots, [1] * len(slots), [], [])
            end_s = self._timeline.submit(now_s, self._step_s(one))
            tokens = dict(zip(slots, self._advance(one), strict=True))
            for slot, run in runs.items():
                run.extend(tokens.get(slot, [_FIRST_TOKEN]))
        failed = self._fail_passes(runs) if self._chances.failed_row else ()
        return _Begun(batch, [*runs.values()], end_s, num_passes=batch.num_passes, failed=failed)

    def _fail_rows(self, runs: list[list[int]]) -> list[RowFailure]:
        """Take their new tokens from some of a step's rows; return these rows.

        The engine ends such a row. A step ahead may compute it once more, from the token that it
        would have got: as on a device, what that gives means nothing.
        """
        failed = []
        for row, run in enumerate(runs):
            if run and self._dice.random() < self._chances.failed_row:
                run.clear()
                failed.append(RowFailure(row, self._dice.choice(_FAILURES)))
        return failed

    def _fail_passes(self, runs: dict[int, list[int]]) -> list[RowFailure]:
        """Let some rows fail in one of a step's passes; return those that fail in the first.

        A row that fails later keeps its earlier tokens, and is decoded further by the next step.
        """
        failed = []
        for index, (slot, run) in enumerate(runs.items()):
            if self._dice.random() >= self._chances.failed_row:
                continue
            num_lost = len(run) - self._dice.randrange(len(run))
            del run[len(run) - num_lost :]
            row = self._row(slot)
            row.num_tokens -= num_lost
            row.num_computed -= num_lost
            if self._models_kv:
                del row.tokens[len(row.tokens) - num_lost :]
            if not run:
                failed.append(RowFailure(index, self._dice.choice(_FAILURES)))
        return failed

    def _has_block(self, row: _Row) -> bool:
        """Return whether a decoding row has a block for its last token."""
        if not self._caches:
            return row.num_tokens < self._max_model_len
        tables = zip(self._caches, row.block_ids, strict=True)
        return all(row.num_computed < len(ids) * cache.block_size for cache, ids in tables)

    def collect_step(self) -> StepResult:
        """Return the result of the oldest step, and add the wait for it to the clock."""
        wait_s = self.wait_s()
        begun = self._begun.popleft()
        self._clock.spend(wait_s)
        counts = [len(run) for run in begun.runs]
        if counts.count(1) == len(counts):
            counts = []
        return StepResult(
            list(itertools.chain.from_iterable(begun.runs)),
            [*begun.earlier_s, *[wait_s / begun.num_passes] * begun.num_passes],
            counts,
            num_drafts=[*begun.num_drafts],
            failed=[*begun.failed],
        )

    def end_step(self, meta: ConnectorMeta, now_s: float) -> TransferResults:
        """End a step with transfers: extract new KV, then collect ended transfers."""
        assert self._connector is not None
        self._connector.mark_ready(meta, now_s)
        self._connector.wait_for_save()
        return self._connector.get_transfer_results(now_s)

    def wait_s(self) -> float:
        """Return how long the host would wait now for the step that is collected next."""
        return max(self._begun[0].end_s - self._clock.now_s(), 0.0)

    def plan_turns(self, host_s: float, *, is_ahead: bool) -> list[float]:
        """Return when each turn ends if every pass of the only step under way has one of its own.

        Args:
            host_s: Seconds of a turn besides the wait for the device.
            is_ahead: Whether each turn submits the pass of the next one before its wait.
        """
        timeline, now_s = self._timeline, self._clock.now_s()
        [begun] = self._begun
        num_passes = begun.batch.num_passes
        was = timeline.free_s, timeline.busy_s
        marks = [(begun.end_s, *was)]
        rows = [self._row(slot) for slot in begun.batch.slots]
        contexts = [(row.lane, row.num_computed + 1) for row in rows]
        seconds = iter(self._timing.decode_run_s(contexts, num_passes - 1))
        ends_s, self._planned = [], []
        for turn in range(num_passes):
            while len(marks) < min(turn + 1 + is_ahead, num_passes):
                end_s = timeline.submit(now_s, next(seconds))
                marks.append((end_s, timeline.free_s, timeline.busy_s))
            end_s, *mark = marks[turn]
            wait_s = max(end_s - now_s, 0.0)
            self._planned.append(_Planned(end_s, wait_s, *mark))
            now_s += max(wait_s + host_s, MIN_TURN_S)
            ends_s.append(now_s)
        timeline.rewind(*was)
        return ends_s

    def stop_after(self, num_passes: int) -> None:
        """Let the only step under way make this many passes, of those that are planned if many."""
        if num_passes == 1:
            return
        planned = self._planned[:num_passes]
        last = planned[-1]
        self._timeline.rewind(last.free_s, last.busy_s)
        begun = self._begun.popleft()
        batch, runs = begun.batch, begun.runs
        if self._caches:
            for _ in planned[1:]:
                for run, more in zip(runs, self._advance(batch), strict=True):
                    run.extend(more)
        else:
            num_more = num_passes - 1
            for run, slot in zip(runs, batch.slots, strict=True):
                row = self._row(slot)
                run.extend(self._tokens_of_request(row, num_more))
                row.num_computed += num_more
                row.num_tokens += num_more
        earlier_s = [each.wait_s for each in planned[:-1]]
        self._begun.append(_Begun(batch, runs, last.end_s, earlier_s))

    # --- inside --------------------------------------------------------------------------------

    def _apply(self, batch: ScheduledBatch) -> None:
        for row in batch.new:
            grammar = row.sampling.structured_outputs
            assert grammar is None or grammar in self._grammars, f"{grammar} is not compiled"
            self._rows[row.slot] = _Row(row, keeps_tokens=self._models_kv)
        if self._models_kv:
            for slot, appended in batch.appended_blocks:
                for block_ids, new in zip(self._row(slot).block_ids, appended, strict=True):
                    block_ids.extend(new)

    def _step_s(self, batch: ScheduledBatch) -> float:
        chunks: list[tuple[int, int, int]] = []
        decodes: list[tuple[int, int]] = []
        for slot, count in zip(batch.slots, batch.num_scheduled_tokens, strict=True):
            row = self._row(slot)
            end = row.num_computed + count
            # A row with one token left decodes, as in the two calls of a generator. In a mixed pass
            # the last token of a prompt costs the same as a decode. Drafts cost as prompt tokens.
            if batch.kind != "prefill" and count == 1:
                decodes.append((row.lane, end))
            else:
                chunks.append((row.lane, row.num_computed, end))
        if batch.kind == "mixed":
            return self._timing.mixed_s(chunks, decodes)
        return self._timing.prefill_s(chunks) if chunks else self._timing.decode_s(decodes)

    def _advance(self, batch: ScheduledBatch) -> list[list[int]]:
        """Compute one pass; return each row's tokens, none where the prompt is not complete."""
        sampling: list[_Row] = []
        runs: list[list[int]] = []
        drawn: list[list[int]] = []
        for slot, count in zip(batch.slots, batch.num_scheduled_tokens, strict=True):
            row = self._row(slot)
            if row.num_computed + count > row.num_tokens:
                runs.append(self._verify(row, row.num_computed + count - row.num_tokens))
                continue
            start = row.num_computed
            self._write(row, row.tokens[start : start + count], start)
            row.num_computed += count
            runs.append([])
            if row.num_computed == row.num_tokens:
                sampling.append(row)
                drawn.append(runs[-1])
        if sampling:
            for run, token_id in zip(drawn, self._sample(sampling), strict=True):
                run.append(token_id)
        return runs

    def _verify(self, row: _Row, num_drafts: int) -> list[int]:
        """Compute a decoding row's last token and its first drafts; return its new tokens."""
        drafts = row.drafts[:num_drafts]
        assert len(drafts) == num_drafts, f"{num_drafts} drafts to verify, of {len(row.drafts)}"
        if not self._caches:
            drawn = self._tokens_of_request(row, 1 + num_drafts)
        else:
            start = row.num_computed
            self._write(row, [*row.tokens[start:], *drafts], start)
            ends = [row.num_tokens + i for i in range(1 + num_drafts)]
            drawn = self._tokens_of_context([row] * len(ends), ends)
        positions = np.array([len(drawn)])
        [count] = accepted_runs(np.array(drawn), np.array([*drafts, -1]), positions)
        run = drawn[:count]
        row.num_tokens += len(run)
        row.num_computed = row.num_tokens - 1
        if self._caches:
            row.tokens += run
        return run

    def _propose(self, batch: ScheduledBatch, runs: list[list[int]]) -> list[int]:
        """Give each row that has a new token drafts, some of them wrong; return their numbers."""
        for slot, run in zip(batch.slots, runs, strict=True):
            row = self._row(slot)
            most = min(batch.max_drafts, self._max_model_len - 1 - row.num_tokens)
            row.drafts = self._drafts(row, self._dice.randint(0, max(most, 0))) if run else []
        return [len(self._row(slot).drafts) for slot in batch.slots]

    def _drafts(self, row: _Row, count: int) -> list[int]:
        facts = self._facts
        if not self._caches:
            right = self._tokens_of_request(row, count)
        else:
            right = expected_tokens(
                row.tokens, count, facts.vocab_size, facts.eos_token_ids, row.salt
            )
        share = self._chances.right_draft
        return [t if self._dice.random() < share else (t + 1) % facts.vocab_size for t in right]

    def _sample(self, rows: Sequence[_Row]) -> list[int]:
        tokens = (
            [self._tokens_of_request(row, 1)[0] for row in rows]
            if not self._caches
            else self._tokens_of_context(rows, [row.num_tokens for row in rows])
        )
        for row, token_id in zip(rows, tokens, strict=True):
            row.num_tokens += 1
            if self._caches:
                row.tokens.append(token_id)
        return tokens

    def _tokens_of_request(self, row: _Row, count: int) -> list[int]:
        """Return the next tokens of a row, which depend on (seed, output index) alone."""
        span = self._facts.vocab_size - _FIRST_TOKEN
        first = row.seed + (row.num_tokens - row.num_prompt)
        return [_FIRST_TOKEN + (i * 0x9E3779B1 >> 7) % span for i in range(first, first + count)]

    def _write(self, row: _Row, token_ids: Sequence[int], start: int) -> None:
        """Write the KV of a row's tokens from a position on, in every KV group."""
        for cache, block_ids in zip(self._caches, row.block_ids, strict=False):
            cache.write_tokens(row.lane, block_ids, token_ids, start)

    def _tokens_of_context(self, rows: Sequence[_Row], num_tokens: Sequence[int]) -> list[int]:
        """Return the token after so many tokens of each row.

        It is that of a model with one KV group as long as windows hold the same rows as the first
        group, so that `expected_tokens` needs not know of them.
        """
        lanes, ends = np.array([row.lane for row in rows]), np.array(num_tokens)
        first = self._caches[0]
        tables = [_tables([row.block_ids[i] for row in rows]) for i in range(len(self._caches))]
        sums = first.context_sums(lanes, tables[0], ends)
        for window, cache, table in zip(self._windows, self._caches[1:], tables[1:], strict=True):
            sums += cache.window_sums(lanes, table, ends, window)
            sums -= first.window_sums(lanes, tables[0], ends, window)
        sums += np.array([row.salt for row in rows])
        assert self._next_token is not None
        tokens: list[int] = self._next_token(sums).tolist()
        return tokens

    def _row(self, slot: int) -> _Row:
        row = self._rows[slot]
        assert row is not None, f"slot {slot} is empty"
        return row


def _tables(block_ids: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Return block tables as an array, padded with the null block."""
    tables = np.zeros((len(block_ids), max(map(len, block_ids))), dtype=np.int64)
    for row, ids in zip(tables, block_ids, strict=True):
        row[: len(ids)] = ids
    return tables

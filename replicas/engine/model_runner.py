"""Model runner: one step from the persistent batch through the generator and the sampler.

Owner of the persistent batch, of the KV cache handle and of `DeviceInputs`; runs on the worker's
thread only. A step is submitted, which counts its progress, and then collected, which waits for the
device. A step of several passes is collected pass by pass, as each computes the tokens of the one
before; a device that continues from its own tokens has two of them in flight.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from replicas.engine.device_batch import DeviceDraws, DeviceInputs, table_arguments
from replicas.engine.input_batch import PersistentBatch, last_indices
from replicas.engine.step import RowFailure, RowHidden, RowLogprobs, ScheduledBatch, StepResult
from replicas.errors import DeviceError
from replicas.philox import uniform
from replicas.sampling.logprobs import of_device
from replicas.sampling.processor import LogitRows, RowProcessors
from replicas.sampling.sampler import (
    NO_ALLOWED_TOKEN,
    NO_DISTRIBUTION,
    SamplingColumns,
    sample,
)
from replicas.sampling_params import GREEDY_EPS
from replicas.speculation.drafts import accepted_runs
from replicas.warm_up import timed_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from replicas.config import EngineConfig
    from replicas.engine.device_batch import CallRows
    from replicas.engine.step import NewRow, StepKind
    from replicas.generators.protocol import (
        ForwardOutput,
        Generator,
        KVCache,
        SupportsHiddenStates,
        SupportsMixedBatch,
    )
    from replicas.kv_groups import KVGroup
    from replicas.messages import TokenLogprob
    from replicas.sampling.logprobs import Logprobs
    from replicas.sampling.processor import RowChanges, RowProcessor
    from replicas.sampling_params import Pooling
    from replicas.speculation.drafts import Drafter

    IntArray = npt.NDArray[np.integer[Any]]
    Int32Array = npt.NDArray[np.int32]
    Int64Array = npt.NDArray[np.int64]

NOT_DRAWN = -1
"""Stands for a token of a row whose prompt is not complete."""
_NO_NUMBERS = np.zeros(0)
"""Random numbers of rows that all take the most likely token."""


class _StepRows(NamedTuple):
    """Rows of a step: slots (R,), tokens to compute and logit rows of each; the calls."""

    slots: Int32Array
    counts: Int32Array
    num_logits: Int32Array
    calls: list[CallRows]


class _Positions(NamedTuple):
    """Rows of logits of a step with drafts: row of the step (S,), and drafts of it before (S,)."""

    rows: IntArray
    offsets: IntArray


class _Drawn(NamedTuple):
    """Tokens of a step, lengths of its rows' runs, failed rows; as in `StepResult`."""

    token_ids: list[int]
    counts: Sequence[int] = ()
    failed: Sequence[RowFailure] = ()


class _PromptPart(NamedTuple):
    """A part of a prompt that a step computes, and whose log probabilities are asked for.

    Attributes:
        row: Its row of the step.
        num_likeliest: As the parameter `prompt_logprobs`.
        is_first: Whether it begins the prompt.
        token_ids: (n,) the prompt's tokens behind each of its positions.
        hidden: (n, N) their hidden states.
    """

    row: int
    num_likeliest: int
    is_first: bool
    token_ids: list[int]
    hidden: torch.Tensor


@dataclass(slots=True, eq=False)
class _Call:
    """A call of the generator that has been made.

    Attributes:
        rows: Its rows of the step.
        places: (n,) index of each of its rows in the output.
        output: The output as in `Generator`; with `events` still unprocessed.
        events: Device events to wait for before the output can be processed; None if the output is
            complete.
    """

    rows: CallRows
    places: IntArray
    output: ForwardOutput
    events: Sequence[object] | None = None


@dataclass(slots=True, eq=False)
class SubmittedStep:
    """A step that has been submitted.

    Attributes:
        slots: (R,) its rows.
        num_logits: (R,) logit rows of each of them.
        token_places: (R,) index in its sequence of each row's first sampled token.
        calls: Its calls of the generator, in order.
        device_s: Seconds inside the generator so far.
        max_drafts: The most drafts to propose for each row once the tokens are known.
        kind: Of its calls.
        num_passes: Passes to make; `calls` are those of the first.
        positions: Its rows of logits if it verifies drafts; otherwise each row has at most one.
        changes: Changes of its rows of logits that row processors touch, if there are any.
        prompts: Parts of prompts whose log probabilities are asked for.
        hidden: Sums of the hidden states of prompts whose embeddings are asked for.
        result: The result, once the tokens are known.
        prepare_s: Seconds of the submission outside the generator.
        on_host: As in `StepResult`.
    """

    slots: Int32Array
    num_logits: Int32Array
    token_places: Int32Array
    calls: list[_Call]
    device_s: float
    max_drafts: int
    kind: StepKind
    num_passes: int
    positions: _Positions | None = None
    changes: RowChanges | None = None
    prompts: Sequence[_PromptPart] = ()
    hidden: list[RowHidden] = field(default_factory=list)
    result: StepResult | None = None
    prepare_s: float = 0.0
    on_host: list[int] = field(default_factory=list)


class ModelRunner:
    """Computation of scheduled batches: inputs, forward pass, sampling.

    Args:
        generator: The loaded model.
        kv_cache: KV cache that the generator has allocated.
        config: The engine's configuration.
        kv_groups: The model's KV groups.
        max_model_len: Longest sequence in tokens.
        wait_for_event: Waits for an event of `read_decode_output`; not needed by generators without
            asynchronous decode.
        processors: Processors of rows, in the order in which they are applied.
        logprobs: The one of them that reads log probabilities; also reads those of prompts.
        drafter: Proposes drafts after steps that ask for them; a mixed pass can verify them.
    """

    def __init__(  # noqa: PLR0913 - the parts of one device
        self,
        generator: Generator,
        kv_cache: KVCache,
        config: EngineConfig,
        kv_groups: Sequence[KVGroup],
        max_model_len: int,
        wait_for_event: Callable[[object], None] | None = None,
        *,
        processors: Sequence[RowProcessor] = (),
        logprobs: Logprobs | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._generator = generator
        self._kv_cache = kv_cache
        num_slots = config.max_batch_size
        block_sizes = [group.block_size for group in kv_groups]
        self._batch = PersistentBatch(num_slots, max_model_len, block_sizes)
        by_layer = {layer: i for i, group in enumerate(kv_groups) for layer in group.layers}
        self._layer_groups = [by_layer[layer] for layer in sorted(by_layer)]
        self._columns = SamplingColumns(num_slots)
        self._processors = RowProcessors(processors, num_slots)
        self._logprobs = logprobs
        # By slot: log probabilities wanted for the tokens of a prompt that is not computed yet, or
        # how its hidden states become an embedding.
        self._prompt_reads: dict[int, int | Pooling] = {}
        self._drafter = drafter
        self._wait_for_event = wait_for_event
        mesh = config.mesh
        capabilities = generator.model_capabilities
        self._traces_prefill = mesh is None or mesh.trace == "all"
        self._traces_decode = mesh is None or mesh.trace != "none"
        self._draws = DeviceDraws(num_slots)
        if mesh is not None or config.simulated_mesh is not None:
            asked = None if mesh is None else mesh.sample_on_device
            self._draws = DeviceDraws.as_asked(asked, capabilities, num_slots)
        self._tokens_per_pass = capabilities.get("output_tokens_per_step", 1)
        runs_ahead = capabilities.get("supports_async_decode", False)
        self._reads_later = runs_ahead or capabilities.get("reads_decode_later", False)
        self._may_overlap = config.steps_in_flight > 1
        self._device = DeviceInputs(
            self._batch,
            self._columns,
            self._draws,
            runs_ahead=runs_ahead and self._traces_decode,
            layer_groups=self._layer_groups,
        )
        self._release: Callable[[int], None] = getattr(generator, "release_request", _keeps_nothing)
        # Slots and rows of the last step if it was a single decode call: a next decode step of the
        # same sequences reuses them.
        self._steady: tuple[list[int], _StepRows] | None = None
        # The last step and its rows if each row computes one token: the same step may follow.
        self._repeated: tuple[ScheduledBatch, _StepRows] | None = None
        # Submitted and not collected, oldest first.
        self._submitted: deque[SubmittedStep] = deque()

    def run(self, scheduled: ScheduledBatch) -> StepResult:
        """Submit and collect one step."""
        return self.collect(self.submit(scheduled))

    def submit(self, scheduled: ScheduledBatch) -> SubmittedStep:
        """Call the generator for a step; `collect` waits for its tokens.

        First waits for earlier steps, unless the device continues from their tokens by itself.
        """
        batch = self._batch
        if self._submitted and not self._goes_on(scheduled):
            self._finish_all()
        started = time.perf_counter()
        batch.apply(scheduled)
        if scheduled.gone:
            self._processors.remove(scheduled.gone)
            for slot in scheduled.gone:
                self._prompt_reads.pop(slot, None)
        for row in scheduled.new:
            self._take_over(row)
        rows = self._divide(scheduled)
        token_places = batch.num_tokens[rows.slots]
        step = SubmittedStep(
            rows.slots,
            rows.num_logits,
            token_places,
            [],
            0.0,
            scheduled.max_drafts,
            scheduled.kind,
            scheduled.num_passes,
        )
        if scheduled.new and self._device.commands.runs_ahead:
            step.on_host = self._hosts_among(scheduled)
        if self._drafter is not None and rows.num_logits.max() > 1:
            step.positions = _positions(rows.num_logits)
        for call_rows in rows.calls:
            self._submit_call(step, scheduled, call_rows, rows.counts)
        if self._processors.num_touched:
            step.changes = self._changes_of(step)
        if self._steady is not None:
            batch.advance_decodes()
        else:
            batch.advance(rows.slots, rows.counts, rows.num_logits)
        self._submitted.append(step)
        step.prepare_s = time.perf_counter() - started - step.device_s
        return step

    def collect(self, step: SubmittedStep) -> StepResult:
        """Return the result of the oldest step that is not collected."""
        if step.result is None:
            assert self._submitted[0] is step, "an earlier step comes first"
            if step.num_passes > 1:
                return self._make_passes(step)
            self._finish(self._submitted.popleft())
        assert step.result is not None
        return step.result

    def _make_passes(self, step: SubmittedStep) -> StepResult:
        """Collect a step's first pass, and make its further ones, each of which is a step here."""
        num_left, step.num_passes = step.num_passes - 1, 1
        passes, slots = [step], step.slots.tolist()
        again = ScheduledBatch(step.kind, slots, [1] * len(slots), [], [])
        while num_left and again.slots:
            if self._may_overlap and self._goes_on(again):
                latest = self.submit(again)
                self.collect(passes[-1])
            else:
                self.collect(passes[-1])
                again = self._without_ended(again, passes[-1])
                if not again.slots:
                    break
                latest = self.submit(again)
            passes.append(latest)
            num_left -= 1
        self.collect(passes[-1])
        step.result = _joined(passes)
        return step.result

    def _without_ended(self, again: ScheduledBatch, step: SubmittedStep) -> ScheduledBatch:
        """Return the next pass of a collected one: without rows that failed, or have no room.

        A row that fails after its first pass keeps the tokens before. Its next step then fails, as
        it would had it been the only one.
        """
        assert step.result is not None
        batch, counts = self._batch, step.result.counts
        if counts and not all(counts):
            failed = step.slots[np.equal(counts, 0)]
            batch.give_back(failed, np.ones(len(failed), dtype=np.int32))
        else:
            failed = step.slots[:0]
        has_room = batch.num_tokens[step.slots] < batch.max_model_len
        if not len(failed) and has_room.all():
            return again
        slots = step.slots[has_room & ~np.isin(step.slots, failed)].tolist()
        return ScheduledBatch(step.kind, slots, [1] * len(slots), [], [])

    def _goes_on(self, scheduled: ScheduledBatch) -> bool:
        """Return whether the device can run a step from its own tokens of the last one.

        The step may leave out rows of the last one, unless that restarts the device's random
        streams.
        """
        if scheduled.kind != "decode" or scheduled.new:
            return False
        if self._steady is not None and scheduled.slots == self._steady[0]:
            slots = self._steady[1].slots
        else:
            slots = np.asarray(scheduled.slots, dtype=np.int32)
        return self._device.commands.continues(slots, may_drop=not self._draws.keeps_state)

    def _take_over(self, row: NewRow) -> None:
        """Replace the parameters of a new row's slot; the batch has taken over the rest."""
        self._release(row.slot)
        if self._drafter is not None:
            self._drafter.take_slot(row.slot)
        self._columns.add(row)
        self._draws.add(row, self._processors.add(row))
        self._prompt_reads.pop(row.slot, None)
        if row.sampling.prompt_logprobs is not None:
            self._prompt_reads[row.slot] = row.sampling.prompt_logprobs
        elif row.sampling.pooling is not None:
            self._prompt_reads[row.slot] = row.sampling.pooling

    def _hosts_among(self, scheduled: ScheduledBatch) -> list[int]:
        """Return the rows among a step's new ones that the host draws for in decode steps."""
        slots = {row.slot for row in scheduled.new if self._draws.decodes_on_host(row.slot)}
        return [row for row, slot in enumerate(scheduled.slots) if slot in slots]

    def _changes_of(self, step: SubmittedStep) -> RowChanges | None:
        """Return changes of the rows of logits that processors touch, once these are prepared."""
        batch = self._batch
        if step.positions is None:
            entries = np.flatnonzero(step.num_logits)
            slots = step.slots[entries]
            places: IntArray = step.token_places[entries]
        else:
            slots, places = self._drawn_places(step, step.positions)
        is_touched = self._processors.touched[slots] & self._draws.on_host(step.kind, slots)
        if not is_touched.any():
            return None
        slots, places = slots[is_touched], places[is_touched]
        drafts: list[list[int]] = []
        if step.positions is not None:
            offsets = step.positions.offsets[is_touched]
            drafts = [
                batch.token_ids[slot, place - offset : place].tolist()
                for slot, place, offset in zip(slots, places, offsets, strict=True)
            ]
        rows = LogitRows(slots, places - batch.num_prompt_tokens[slots], drafts)
        return self._processors.prepare(rows)

    def _finish_all(self) -> None:
        while self._submitted:
            self.collect(self._submitted[0])

    def _finish(self, step: SubmittedStep) -> None:
        """Read a step's outputs, and draw the host's part of the tokens."""
        started = time.perf_counter()
        outputs = [self._read(call) for call in step.calls]
        sampling = time.perf_counter()
        step.device_s += sampling - started
        slots, places = step.slots, step.token_places
        if step.positions is not None:
            drawn = self._verified(step, step.positions, outputs[0])
        elif self._tokens_per_pass > 1 and len(step.calls[0].rows.drawn) == len(slots):
            drawn = self._drawn_runs(step, outputs[0])
        elif len(step.calls[0].rows.drawn) == len(slots):
            token_ids = _tokens(outputs[0])[step.calls[0].places]
            self._batch.record(slots, places, token_ids)
            drawn = _Drawn(token_ids.tolist())
        else:
            token_ids = self._drawn_and_sampled(step, outputs)
            found = step.num_logits > 0
            self._batch.record(slots[found], places[found], token_ids[found])
            drawn = _runs_of_one(token_ids)
        logprobs: list[RowLogprobs] = []
        if isinstance(outputs[-1], tuple):
            logprobs += self._logprobs_of_device(step, outputs)
        if step.changes is not None:
            self._accept(step, drawn)
            logprobs += self._logprobs_of(slots)
        num_drafts = self._propose(step) if step.max_drafts else []
        step.result = StepResult(
            drawn.token_ids,
            [step.device_s],
            list(drawn.counts),
            list(drawn.failed),
            time.perf_counter() - sampling,
            num_drafts,
            logprobs,
            step.prepare_s,
            self._logprobs_of_prompts(step.prompts) if step.prompts else [],
            step.hidden,
            step.on_host,
        )

    def _drawn_and_sampled(self, step: SubmittedStep, outputs: list[ForwardOutput]) -> IntArray:
        """Return (R,) tokens, `NOT_DRAWN` where none is, of a step in which the host draws."""
        token_ids = np.full(len(step.slots), NOT_DRAWN, dtype=np.int64)
        for call, output in zip(step.calls, outputs, strict=True):
            rows, logits = call.rows, output
            if len(rows.drawn):
                drawn = _tokens(output)[call.places[rows.drawn]]
                token_ids[rows.entries[rows.drawn]] = drawn
            if len(rows.sampled):
                entries, places = rows.entries[rows.sampled], call.places[rows.sampled]
                if len(rows.drawn):
                    logits, places = output[1], np.arange(len(entries))
                slots, token_places = step.slots[entries], step.token_places[entries]
                token_ids[entries] = self._sample(step, slots, token_places, logits, places)
        return token_ids

    def _drawn_runs(self, step: SubmittedStep, output: ForwardOutput) -> _Drawn:
        """Take the tokens of a step in which the device has given each row one or several.

        Raises:
            DeviceError: It has given a row none.
        """
        tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
        tokens: IntArray = tensor.numpy()[step.calls[0].places]
        # A run is padded with -1 behind its last token.
        is_token = np.logical_and.accumulate(tokens >= 0, axis=1)
        counts: IntArray = is_token.sum(axis=1)
        if not counts.all():
            raise DeviceError("a decode on the device has given a row no token")
        rows, offsets = np.nonzero(is_token)
        self._batch.give_back(step.slots, 1 - counts)
        self._batch.record(step.slots[rows], step.token_places[rows] + offsets, tokens[is_token])
        return _Drawn(tokens[is_token].tolist(), counts.tolist())

    # --- drafts ----------------------------------------------------------------------------------

    def _drawn_places(
        self, step: SubmittedStep, positions: _Positions
    ) -> tuple[Int32Array, IntArray]:
        """Return (S,) the slot of each drawn token, and its index in its sequence."""
        rows, offsets = positions
        return step.slots[rows], step.token_places[rows] + offsets

    def _verified(self, step: SubmittedStep, positions: _Positions, logits: torch.Tensor) -> _Drawn:
        """Draw a token at every position of a step, and keep those that follow right drafts.

        A row whose right drafts are followed by logits of no distribution keeps these drafts. Its
        next step then fails, as it would without drafts.
        """
        batch, num_logits = self._batch, step.num_logits
        slots, places = self._drawn_places(step, positions)
        token_ids = self._sample(step, slots, places, logits, np.arange(len(slots)))
        # The token after a row's last draft may lie past the end of the table.
        drafts = batch.token_ids[slots, np.minimum(places, batch.max_model_len - 1)]
        counts = accepted_runs(token_ids, drafts, num_logits)
        starts = num_logits.cumsum() - num_logits
        has_run = np.flatnonzero(counts)
        counts[has_run] -= token_ids[starts[has_run] + counts[has_run] - 1] <= NO_DISTRIBUTION
        failed = np.flatnonzero((counts == 0) & (num_logits > 0))
        failures = [_failure(row, token_ids[starts[row]]) for row in failed.tolist()]
        wrong = np.flatnonzero(counts < num_logits)
        batch.give_back(step.slots[wrong], (num_logits - counts)[wrong])
        # The other tokens of a run are in the table already, as drafts.
        has_run = np.flatnonzero(counts)
        last = counts[has_run] - 1
        batch.record(
            step.slots[has_run],
            step.token_places[has_run] + last,
            token_ids[starts[has_run] + last],
        )
        is_right = positions.offsets < counts[positions.rows]
        return _Drawn(token_ids[is_right].tolist(), counts.tolist(), failures)

    def _propose(self, step: SubmittedStep) -> list[int]:
        """Write drafts behind the tokens of rows that have sampled; return the number of each row.

        The list is empty if there are none.
        """
        assert self._drafter is not None, "a step asks for drafts, but there is no drafter"
        batch = self._batch
        sampled = np.flatnonzero(step.num_logits)
        slots = step.slots[sampled]
        num_tokens = batch.num_tokens[slots]
        # A token after a draft must still fit.
        limits = np.clip(batch.max_model_len - 1 - num_tokens, 0, step.max_drafts)
        proposed = self._drafter.propose(batch.token_ids, slots, num_tokens, limits)
        if not any(proposed):
            return []
        num_drafts = [0] * len(step.slots)
        for row, slot, start, drafts in zip(
            sampled.tolist(), slots.tolist(), num_tokens.tolist(), proposed, strict=True
        ):
            num_drafts[row] = len(drafts)
            batch.put_drafts(slot, start, drafts)
        return num_drafts

    def compile(self) -> None:
        """Run every shape once, so that it is compiled before the first request."""
        self._warm_up_prefill(enable_trace=False)
        self._warm_up_decode(enable_trace=False)

    def capture(self) -> None:
        """Capture the traces; everything must be compiled before, as compiling corrupts traces."""
        if self._traces_prefill:
            self._warm_up_prefill(enable_trace=True)
        if self._traces_decode:
            self._warm_up_decode(enable_trace=True)

    def _warm_up_prefill(self, *, enable_trace: bool) -> None:
        with timed_pass("capture prefill" if enable_trace else "compile prefill"):
            self._generator.warmup_model_prefill(
                kv_cache=self._kv_cache,
                enable_trace=enable_trace,
                can_sample_on_device="prefill" in self._draws.kinds,
            )

    def _warm_up_decode(self, *, enable_trace: bool) -> None:
        with timed_pass("capture decode" if enable_trace else "compile decode"):
            self._generator.warmup_model_decode(
                kv_cache=self._kv_cache,
                enable_trace=enable_trace,
                max_batch_size=len(self._batch.num_tokens),
                num_blocks=self._batch.table_width,
                can_sample_on_device="decode" in self._draws.kinds,
            )

    # --- a step's calls ------------------------------------------------------------------------

    def _divide(self, scheduled: ScheduledBatch) -> _StepRows:
        """Return the rows of a step and their division into calls."""
        if self._steady is not None and scheduled.kind == "decode" and not scheduled.new:
            slots_before, rows = self._steady
            if scheduled.slots == slots_before:
                return rows
        if self._repeated is not None and self._repeated[0] is scheduled:
            return self._repeated[1]
        slots = np.asarray(scheduled.slots, dtype=np.int32)
        counts = np.asarray(scheduled.num_scheduled_tokens, dtype=np.int32)
        num_logits = self._batch.num_logits(slots, counts)
        samples = num_logits > 0
        calls = self._draws.divide(scheduled.kind, slots, samples)
        rows = _StepRows(slots, counts, num_logits, calls)
        is_steady = scheduled.kind == "decode" and len(calls) == 1 and bool(samples.all())
        self._steady = (list(scheduled.slots), rows) if is_steady else None
        # Steps of the same decoding rows are one object.
        is_plain = not scheduled.new and bool((num_logits == 1).all() and (counts == 1).all())
        self._repeated = (scheduled, rows) if is_plain else None
        return rows

    def _submit_call(
        self, step: SubmittedStep, scheduled: ScheduledBatch, rows: CallRows, counts: Int32Array
    ) -> None:
        slots = step.slots
        if len(rows.entries) < len(slots):
            slots, counts = slots[rows.entries], counts[rows.entries]
        if scheduled.kind == "mixed":
            call = self._call_mixed(step, rows, slots, counts)
        elif scheduled.kind == "prefill":
            call = self._call_prefill(step, rows, slots, counts)
        else:
            call = self._call_decode(step, rows, slots, scheduled)
        step.calls.append(call)

    def _call_mixed(
        self, step: SubmittedStep, rows: CallRows, slots: Int32Array, counts: Int32Array
    ) -> _Call:
        if self._prompt_reads:
            is_asked = np.isin(slots, list(self._prompt_reads))
            if is_asked.any():
                return self._call_hidden(step, rows, counts, is_asked)
        inputs = self._batch.flat_inputs(slots, counts, step.num_logits)
        mixed = cast("SupportsMixedBatch", self._generator)
        started = time.perf_counter()
        logits = mixed.forward_mixed(inputs, self._kv_cache)
        step.device_s += time.perf_counter() - started
        # The last logits of each row that samples.
        return _Call(rows, np.cumsum(step.num_logits) - 1, logits)

    def _call_hidden(
        self,
        step: SubmittedStep,
        rows: CallRows,
        counts: Int32Array,
        is_asked: npt.NDArray[np.bool_],
    ) -> _Call:
        """Make a mixed pass that also keeps or sums the hidden states of prompts' parts.

        Args:
            step: The step, with one call.
            rows: Its rows.
            counts: (R,) tokens to compute of each.
            is_asked: (R,) whether log probabilities or an embedding of the row's prompt are wanted.
        """
        batch, slots, reads = self._batch, step.slots, self._prompt_reads
        # The last token's state is that of its logits.
        is_whole = np.isin(slots, [slot for slot, read in reads.items() if read != "last"])
        wanted = np.where(is_whole, counts, step.num_logits)
        ends = wanted.cumsum()
        inputs = batch.flat_inputs(slots, counts, wanted)
        model = cast("SupportsHiddenStates", self._generator)
        started = time.perf_counter()
        hidden = model.forward_hidden(inputs, self._kv_cache)
        sampled = torch.from_numpy(last_indices(ends, step.num_logits))
        logits = model.compute_logits(hidden[sampled])
        step.device_s += time.perf_counter() - started
        parts = []
        for row in np.flatnonzero(is_asked).tolist():
            slot, count = int(slots[row]), int(counts[row])
            start, num_prompt = int(batch.num_computed_tokens[slot]), batch.num_prompt_tokens[slot]
            read, first = reads[slot], int(ends[row] - wanted[row])
            if isinstance(read, int):
                token_ids = batch.token_ids[slot, start + 1 : num_prompt][:count].tolist()
                part = hidden[first : first + len(token_ids)]
                parts.append(_PromptPart(row, read, start == 0, token_ids, part))
            elif wanted[row]:
                total = hidden[first : int(ends[row])].sum(dim=0, dtype=torch.float32)
                step.hidden.append(RowHidden(row, total.numpy().astype("<f4").tobytes()))
            if start + count >= num_prompt:
                del reads[slot]
        step.prompts = parts
        return _Call(rows, np.cumsum(step.num_logits) - 1, logits)

    def _call_prefill(
        self, step: SubmittedStep, rows: CallRows, slots: Int32Array, counts: Int32Array
    ) -> _Call:
        self._device.commands.invalidate()
        places = np.arange(len(slots))
        inputs = self._batch.prefill_inputs(slots, counts)
        params = None
        if len(rows.drawn):
            params = self._device.params(rows, slots, places, len(slots))
        started = time.perf_counter()
        output = self._generator.prefill_forward(
            tokens=torch.from_numpy(inputs.tokens),
            kv_cache=self._kv_cache,
            enable_trace=self._traces_prefill,
            prompt_lens=torch.from_numpy(inputs.prompt_lens),
            start_pos=torch.from_numpy(inputs.start_pos),
            empty_slots=inputs.empty_slots,
            sampling_params=params,
            **table_arguments(inputs.page_tables, self._layer_groups),
        )
        step.device_s += time.perf_counter() - started
        return _Call(rows, places, output)

    def _call_decode(
        self, step: SubmittedStep, rows: CallRows, slots: Int32Array, scheduled: ScheduledBatch
    ) -> _Call:
        inputs = self._device.decode_inputs(rows, slots, scheduled, is_ahead=bool(self._submitted))
        started = time.perf_counter()
        output: Any = self._generator.decode_forward(
            kv_cache=self._kv_cache,
            enable_trace=self._traces_decode,
            read_from_device=not self._reads_later,
            **inputs,
        )
        events: Sequence[object] | None = None
        if self._reads_later:
            output, events = self._generator.read_decode_output(output, async_read=True)
        step.device_s += time.perf_counter() - started
        return _Call(rows, slots, output, events)

    # --- outputs ---------------------------------------------------------------------------------

    def _read(self, call: _Call) -> ForwardOutput:
        """Wait for the output of a call and return it."""
        if call.events is None:
            return call.output
        for event in call.events:
            assert self._wait_for_event is not None, "a generator gave an event to wait for"
            self._wait_for_event(event)
        return self._generator.process_decode_output_host(
            call.output, is_tokens=bool(len(call.rows.drawn))
        )

    def _sample(
        self,
        step: SubmittedStep,
        slots: Int32Array,
        token_places: IntArray,
        logits: torch.Tensor,
        places: IntArray,
    ) -> Int64Array:
        """Draw a token from each of some of a step's rows of logits.

        Args:
            step: The step.
            slots: (n,) slot of each.
            token_places: (n,) index in its sequence of the token that each gives.
            logits: (N, V) or (N, 1, V).
            places: (n,) index of each in `logits`.
        """
        columns, uniforms = self._columns, _NO_NUMBERS
        if (columns.temperature[slots] >= GREEDY_EPS).any():
            indices = token_places - self._batch.num_prompt_tokens[slots]
            uniforms = uniform(columns.seed[slots], indices.astype(np.int64))
        logits = logits if logits.ndim == 2 else logits[:, -1]
        if step.changes is None:
            return sample(logits, columns, slots, uniforms, places)
        # A generator returns the logits of all touched rows in one call, as the host draws them.
        is_touched = self._processors.touched[slots]
        token_ids = np.empty(len(slots), dtype=np.int64)
        for rows, changes in (
            (np.flatnonzero(~is_touched), None),
            (np.flatnonzero(is_touched), step.changes),
        ):
            numbers = uniforms[rows] if len(uniforms) else uniforms
            token_ids[rows] = sample(logits, columns, slots[rows], numbers, places[rows], changes)
        if self._logprobs is not None:
            self._logprobs.read_model(logits, places, slots, token_ids)
        return token_ids

    def _logprobs_of(self, slots: Int32Array) -> list[RowLogprobs]:
        """Return the log probabilities of the step's tokens, of the rows that ask for them."""
        found = {} if self._logprobs is None else self._logprobs.take()
        return [
            RowLogprobs(row, found[slot])
            for row, slot in enumerate(slots.tolist())
            if slot in found
        ]

    def _logprobs_of_device(
        self, step: SubmittedStep, outputs: list[ForwardOutput]
    ) -> list[RowLogprobs]:
        """Return the log probabilities that the device has returned beside its tokens."""
        found = []
        for (rows, places), output in zip(
            ((call.rows, call.places) for call in step.calls), outputs, strict=True
        ):
            # Beside logits, a device returns none.
            if not isinstance(output, tuple) or len(rows.sampled):
                continue
            tokens, entries = _tokens(output), rows.entries[rows.drawn]
            counts = self._draws.num_logprobs[step.slots[entries]]
            for row, place, count in zip(
                entries.tolist(), places[rows.drawn].tolist(), counts.tolist(), strict=True
            ):
                if count >= 0:
                    entry = of_device(output[1], place, int(tokens[place]), count)
                    found.append(RowLogprobs(row, [entry]))
        return found

    def _logprobs_of_prompts(self, parts: Sequence[_PromptPart]) -> list[RowLogprobs]:
        """Return the log probabilities of parts of prompts."""
        assert self._logprobs is not None, "nothing here reads log probabilities"
        compute_logits = cast("SupportsHiddenStates", self._generator).compute_logits
        found = []
        for part in parts:
            positions: list[list[TokenLogprob]] = [[]] if part.is_first else []
            positions += self._logprobs.of_prompt(
                part.hidden, part.token_ids, part.num_likeliest, compute_logits
            )
            found.append(RowLogprobs(part.row, positions))
        return found

    def _accept(self, step: SubmittedStep, drawn: _Drawn) -> None:
        """Give processors the tokens that the host has drawn for the rows that they touch.

        Their state of the device's rows is not used again: a row returns to the host only with a
        new prefill, and as a new row.
        """
        slots, token_ids = step.slots, iter(drawn.token_ids)
        counts = drawn.counts or [1] * len(slots)
        on_host = self._draws.on_host(step.kind, slots)
        touched = (self._processors.touched[slots] & on_host).tolist()
        for slot, count, is_touched in zip(slots.tolist(), counts, touched, strict=True):
            run = list(islice(token_ids, count))
            if run and is_touched:
                self._processors.accept(slot, run)


def _joined(passes: list[SubmittedStep]) -> StepResult:
    """Return the result of a step whose rows get a token in each pass that they take part in."""
    runs: dict[int, list[int]] = {slot: [] for slot in passes[0].slots.tolist()}
    results = [step.result for step in passes if step.result is not None]
    for step, result in zip(passes, results, strict=True):
        token_ids = iter(result.token_ids)
        for slot, count in zip(step.slots.tolist(), result.counts or repeat(1), strict=False):
            runs[slot] += islice(token_ids, count)
    return StepResult(
        [token_id for run in runs.values() for token_id in run],
        [result.device_s for result in results],
        [len(run) for run in runs.values()],
        results[0].failed,
        sum(result.sample_s for result in results),
        prepare_s=sum(result.prepare_s for result in results),
    )


def _positions(num_logits: Int32Array) -> _Positions:
    """Return the positions of (R,) numbers of logit rows."""
    rows = np.repeat(np.arange(len(num_logits)), num_logits)
    starts = num_logits.cumsum() - num_logits
    return _Positions(rows, np.arange(len(rows)) - starts[rows])


def _runs_of_one(token_ids: IntArray) -> _Drawn:
    """Return the tokens among (R,) numbers, some of which stand for none."""
    has_token = token_ids >= 0
    if has_token.all():
        return _Drawn(token_ids.tolist())
    failed = np.flatnonzero(token_ids <= NO_DISTRIBUTION)
    failures = [_failure(row, token_ids[row]) for row in failed.tolist()]
    counts = has_token.astype(np.int64)
    return _Drawn(token_ids[has_token].tolist(), counts.tolist(), failures)


def _failure(row: int, token_id: int) -> RowFailure:
    is_allowed = token_id != NO_ALLOWED_TOKEN
    return RowFailure(row, "no_distribution" if is_allowed else "no_allowed_token")


def _keeps_nothing(slot: int) -> None:
    """Do nothing: the generator keeps no state for a slot after its sequence has left."""


def _tokens(output: ForwardOutput) -> IntArray:
    """Return (rows,) token ids of a call that sampled: its output, or the first of a pair."""
    tokens: torch.Tensor = output[0] if isinstance(output, tuple) else output
    token_ids: IntArray = tokens.numpy().reshape(-1)
    return token_ids

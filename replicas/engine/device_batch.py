"""What a device draws and has: division of sampling with the host, and inputs of decode calls.

Owner: the model runner. Rows are slots of the persistent batch, `replicas.engine.input_batch`.

Device and host draw different tokens for the same seed, so the request alone decides which of them
draws, never the other requests of a step. The device draws where it supports the parameters (for
example, few enough candidates); otherwise the host draws from the row's logits. Penalties and log
probabilities are the device's in decode calls only, as prefill calls take no tokens to penalise: a
row with either gets the token after its prompt from the host. A generator call
returns either tokens or logits. So a step with rows of both kinds takes two calls, each row in one
of them, unless the generator returns the logits of some rows beside the tokens of the others.

A device that continues from its own tokens is called with the inputs of the last step that it
reloaded, and reloads none of them. It lacks the tokens that the host draws. So it continues only
without the host's rows: the scheduler leaves these out of the step after each of theirs, and the
host draws while the device computes that one. The step with them reloads all inputs, because
there is no command to reload those of some rows.

Source of the commands: vllm-tt-plugin docs/DECODE_RELOAD_CONTRACT.md (decode contract 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replicas.generators.protocol import NO_LOG_PROBS, DeviceSamplingParams
from replicas.philox import uniform
from replicas.sampling.processor import DeviceAbilities, drawn_on_host
from replicas.sampling_params import GREEDY_EPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from replicas.engine.input_batch import PersistentBatch
    from replicas.engine.step import NewRow, ScheduledBatch, StepKind
    from replicas.generators.protocol import ModelCapabilities
    from replicas.sampling.processor import RowProcessor
    from replicas.sampling.sampler import SamplingColumns

    IntArray = npt.NDArray[np.integer]
    Int32Array = npt.NDArray[np.int32]
    BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class CallRows:
    """The rows of one call.

    Attributes:
        entries: (n,) indices of these rows in the step.
        drawn: Indices into `entries` of the rows that the device draws a token for.
        sampled: Indices into `entries` of the rows that the host draws a token for.
    """

    entries: IntArray
    drawn: IntArray
    sampled: IntArray


_ANY = DeviceAbilities()
_NO_PENALTIES = (0.0, 0.0, 1.0)


class DeviceDraws:
    """Division of steps by what a generator can draw on the device.

    Args:
        max_batch_size: Slots of the persistent batch.
        kinds: Kinds of calls that may draw.
        can: Parameters that the device supports.
        keeps_state: Whether each draw advances a row's random stream on the device. Then the device
            must not draw for a row that needs no token.
        gives_both: Whether a decode call can return logits of some rows beside tokens of others.

    Attributes:
        kinds: As given.
        keeps_state: As given.
        penalties: (B, 3) presence, frequency and repetition penalty of each slot.
        is_penalised: (B,) whether any of them changes logits.
        num_logprobs: (B,) as `DeviceSamplingParams.num_logprobs`.
    """

    def __init__(
        self,
        max_batch_size: int,
        kinds: frozenset[StepKind] = frozenset(),
        *,
        can: DeviceAbilities = _ANY,
        keeps_state: bool = False,
        gives_both: bool = False,
    ) -> None:
        self.kinds = kinds
        self.keeps_state = keeps_state
        self._can = can
        self._gives_both = gives_both
        self._on_host: dict[StepKind, BoolArray] = {
            kind: np.zeros(max_batch_size, dtype=np.bool_) for kind in kinds
        }
        self.penalties = np.tile(_NO_PENALTIES, (max_batch_size, 1))
        self.is_penalised = np.zeros(max_batch_size, dtype=np.bool_)
        self.num_logprobs = np.full(max_batch_size, NO_LOG_PROBS)

    @classmethod
    def as_asked(
        cls, asked: str | None, can: ModelCapabilities, max_batch_size: int
    ) -> DeviceDraws:
        """Create the division that the configuration asks for, by default all that is supported.

        Args:
            asked: See `MeshConfig.sample_on_device`.
            can: The generator's capabilities.
            max_batch_size: Slots of the persistent batch.
        """
        kinds: frozenset[StepKind] = frozenset()
        if asked is None and can.get("supports_sample_on_device"):
            asked = "all" if can.get("supports_sample_in_prefill") else "decode_only"
        if asked is not None and asked != "none":
            kinds = frozenset({"decode", "prefill"} if asked == "all" else {"decode"})
        return cls(
            max_batch_size,
            kinds,
            can=DeviceAbilities(
                can.get("max_device_top_k"),
                can.get("supports_device_penalties", True),
                can.get("max_device_logprobs"),
            ),
            keeps_state=not can.get("device_draws_keep_no_state", False),
            gives_both=can.get("gives_logits_beside_tokens", False),
        )

    def add(self, row: NewRow, processors: Sequence[RowProcessor]) -> None:
        """Take over a row, which these processors touch."""
        slot, sampling = row.slot, row.sampling
        is_hosts = bool(self.kinds) and drawn_on_host(sampling, self._can, processors)
        for kind, on_host in self._on_host.items():
            on_host[slot] = is_hosts or (kind != "decode" and len(processors) > 0)
        self.penalties[slot] = (
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
        )
        self.is_penalised[slot] = sampling.has_penalties
        self.num_logprobs[slot] = NO_LOG_PROBS if sampling.logprobs is None else sampling.logprobs

    def on_host(self, kind: StepKind, slots: IntArray) -> BoolArray:
        """Return (R,) whether the host draws for each of these rows in a step of this kind."""
        found = self._on_host.get(kind)
        return np.ones(len(slots), dtype=np.bool_) if found is None else found[slots]

    def decodes_on_host(self, slot: int) -> bool:
        """Return whether the host draws for a row in decode steps in which the device may draw."""
        return "decode" in self.kinds and bool(self._on_host["decode"][slot])

    def divide(self, kind: StepKind, slots: IntArray, samples: BoolArray) -> list[CallRows]:
        """Return the calls of a step, in order.

        Args:
            kind: Of the step.
            slots: (R,) rows that run.
            samples: (R,) whether each of them samples.
        """
        no_rows = np.empty(0, dtype=np.intp)
        entries, wanted = np.arange(len(slots)), np.flatnonzero(samples)
        if kind not in self.kinds:
            return [CallRows(entries, no_rows, wanted)]
        is_hosts = samples & self._on_host[kind][slots]
        is_drawn = samples & ~is_hosts
        # Rows that need a call of their own, which does not draw.
        is_apart = is_hosts | ~samples if self.keeps_state else is_hosts
        if not is_apart.any():
            return [CallRows(entries, wanted, no_rows)]
        if not is_drawn.any():
            return [CallRows(entries, no_rows, wanted)]
        if kind == "decode" and self._gives_both:
            return [CallRows(entries, np.flatnonzero(is_drawn), np.flatnonzero(is_hosts))]
        apart, others = np.flatnonzero(is_apart), np.flatnonzero(~is_apart)
        return [
            CallRows(apart, no_rows, np.flatnonzero(samples[apart])),
            CallRows(others, np.flatnonzero(samples[others]), no_rows),
        ]


@dataclass(frozen=True, slots=True)
class DecodeReload:
    """The four commands of one decode call; see `TextDecoder.decode_forward`.

    Attributes:
        inputs: Reload tokens, positions and page table.
        page_table: Reload the page table alone.
        sampling_params: Reload the sampling parameters.
        sampling_state: Restart the rows' random streams from their seeds.
    """

    inputs: bool
    page_table: bool = False
    sampling_params: bool = False
    sampling_state: bool = False


HOST_SAMPLED = DecodeReload(inputs=True)
"""Command of every decode call that returns logits: only the host knows the next tokens."""

_AFRESH = DecodeReload(inputs=True, sampling_params=True, sampling_state=True)
_STEADY = DecodeReload(inputs=False)
_NEW_BLOCKS = DecodeReload(inputs=False, page_table=True)


class DecodeCommands:
    """State of the device after the last decode call, and the commands of the next one.

    While the device continues from its own tokens, it still computes rows that have left the
    batch. Their page tables then point to the null block. The next full reload drops them.

    Args:
        runs_ahead: Whether the generator can continue from its own tokens: it supports this and its
            decode calls are traced.

    Attributes:
        runs_ahead: As given.
        num_steps_left: How often the device may continue after the last reload before any of its
            rows, also one that has left, passes the end of its page table. Set at each reload.
    """

    def __init__(self, *, runs_ahead: bool) -> None:
        self.runs_ahead = runs_ahead
        # Rows of the last call, and those of them for which the device has drawn.
        self._rows: Int32Array | None = None
        self._drawn: Int32Array | None = None
        self.num_steps_left = 0

    def continues(self, slots: Int32Array, *, may_drop: bool) -> bool:
        """Return whether a call for these rows, all drawn on the device, needs no host tokens.

        Args:
            slots: (R,) rows of the call.
            may_drop: Whether it may lack rows for which the device has drawn.
        """
        drawn = self._drawn
        if drawn is None or not self.runs_ahead or self.num_steps_left <= 0:
            return False
        if slots is drawn or np.array_equal(slots, drawn):
            return True
        return may_drop and bool(np.isin(slots, drawn).all())

    def invalidate(self) -> None:
        """Note that a call other than a decode with device sampling is made."""
        self._rows = self._drawn = None

    def next_call(
        self,
        slots: Int32Array,
        drawn: Int32Array,
        *,
        has_new: bool,
        has_new_blocks: bool,
        is_ahead: bool = False,
    ) -> DecodeReload:
        """Return the commands of a decode call that samples on the device.

        Args:
            slots: (R,) rows that run.
            drawn: Those of them for which the device draws; the device lacks the others' tokens.
            has_new: Whether one of them holds a new or restarted sequence.
            has_new_blocks: Whether the block table of one of them has grown.
            is_ahead: Whether the host does not know their tokens yet; requires `continues`.
        """
        before, self._rows, self._drawn = self._rows, slots, drawn
        has_hosts = len(drawn) < len(slots)
        is_same = before is slots or (before is not None and np.array_equal(before, slots))
        if is_ahead or (is_same and not has_new and self.runs_ahead and not has_hosts):
            if self.num_steps_left > 0:
                self.num_steps_left -= 1
                return _STEADY if is_same and not has_new_blocks else _NEW_BLOCKS
            return _AFRESH
        return HOST_SAMPLED if is_same and not has_new else _AFRESH


def device_params(
    batch: PersistentBatch,
    columns: SamplingColumns,
    draws: DeviceDraws,
    slots: IntArray,
    entries: IntArray,
    num_entries: int,
) -> DeviceSamplingParams:
    """Return the sampling parameters of `slots` at `entries`, with padding everywhere else.

    If it keeps state, the device draws each row's numbers from a stream that starts at its seed. It
    restarts the stream on command: after every prefill, and when rows come or go. The same seed
    would then repeat its numbers. So the row's seed is derived from the request's seed and the
    index of its next token, which differ between restarts. Consequence: a request repeats its
    tokens only if its streams restart at the same tokens, for example when it runs alone.

    The plug-in sends no seed for requests without one, and the device then draws from a state of
    its own. An engine cannot do that: it does not know which seeds a front end has made up.

    Args:
        batch: The persistent batch.
        columns: Its rows' parameters.
        draws: The others of these, and whether the device keeps state.
        slots: (n,) rows that the device draws for.
        entries: (n,) their indices in the call.
        num_entries: Rows of the call.
    """
    temperature, top_k = np.zeros(num_entries), np.ones(num_entries, dtype=np.int64)
    top_p = np.ones(num_entries)
    seed: list[int | None] = [None] * num_entries
    is_random = columns.temperature[slots] >= GREEDY_EPS
    drawn, at = slots[is_random], entries[is_random]
    temperature[at], top_k[at] = columns.temperature[drawn], columns.top_k[drawn]
    top_p[at] = columns.top_p[drawn]
    seeds = columns.seed[drawn]
    if draws.keeps_state:
        indices = (batch.num_tokens[drawn] - batch.num_prompt_tokens[drawn]).astype(np.int64)
        seeds = (uniform(seeds, indices) * 2.0**53).astype(np.int64)
    for entry, value in zip(at.tolist(), seeds.tolist(), strict=True):
        seed[entry] = value
    penalties = np.tile(_NO_PENALTIES, (num_entries, 1))
    penalties[entries] = draws.penalties[slots]
    presence, frequency, repetition = penalties.T.tolist()
    num_logprobs = np.full(num_entries, NO_LOG_PROBS)
    num_logprobs[entries] = draws.num_logprobs[slots]
    return DeviceSamplingParams(
        temperature=temperature.tolist(),
        top_k=top_k.tolist(),
        top_p=top_p.tolist(),
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        seed=seed,
        num_logprobs=num_logprobs.tolist(),
        enable_log_probs=(num_logprobs != NO_LOG_PROBS).tolist(),
    )


def table_arguments(
    page_tables: npt.NDArray[np.int32], layer_groups: Sequence[int]
) -> dict[str, Any]:
    """Return page tables as arguments of a padded call.

    Args:
        page_tables: (G, N, K), of each KV group.
        layer_groups: KV group of each layer; not needed if there is only one.
    """
    tables = [torch.from_numpy(table) for table in page_tables]
    found: dict[str, Any] = {"page_table": tables[0]}
    if len(tables) > 1:
        found["page_tables_per_layer"] = [tables[group] for group in layer_groups]
    return found


class DeviceInputs:
    """Maker of the arguments of decode calls, with the inputs that the device already has.

    Args:
        batch: The persistent batch.
        columns: Its rows' sampling parameters.
        draws: Division of rows between device and host.
        runs_ahead: Whether the device can continue from its own tokens, without the host.
        layer_groups: See `table_arguments`.

    Attributes:
        commands: Which inputs a decode call must reload.
    """

    def __init__(
        self,
        batch: PersistentBatch,
        columns: SamplingColumns,
        draws: DeviceDraws,
        *,
        runs_ahead: bool,
        layer_groups: Sequence[int] = (),
    ) -> None:
        self._batch = batch
        self._layer_groups = layer_groups
        self._columns = columns
        self._draws = draws
        self.commands = DecodeCommands(runs_ahead=runs_ahead)
        self._params: DeviceSamplingParams | None = None
        # Tokens, page tables and positions of the last decode that reloaded them.
        self._inputs: tuple[torch.Tensor, dict[str, Any], torch.Tensor] | None = None

    def decode_inputs(
        self, rows: CallRows, slots: Int32Array, scheduled: ScheduledBatch, *, is_ahead: bool
    ) -> dict[str, Any]:
        """Return the arguments of `decode_forward`.

        Args:
            rows: The rows of the call.
            slots: (R,) their slots.
            scheduled: The step.
            is_ahead: Whether the step before it is not collected yet.
        """
        reload = self._reload(rows, slots, scheduled, is_ahead=is_ahead)
        if reload.page_table:
            self._batch.keep_decoding(slots)
        if reload.inputs or self._inputs is None:
            inputs = self._batch.decode_inputs(slots)
            last = int(inputs.start_pos.max())
            self.commands.num_steps_left = self._batch.max_model_len - 1 - last
            self._inputs = (
                torch.from_numpy(inputs.tokens),
                table_arguments(inputs.page_tables, self._layer_groups),
                torch.from_numpy(inputs.start_pos),
            )
        # While the device continues from its own tokens, `tokens` and `start_pos` are stale.
        tokens, tables, start_pos = self._inputs
        found: dict[str, Any] = {
            "tokens": tokens,
            **tables,
            "start_pos": start_pos,
            "sampling_params": self._params if len(rows.drawn) else None,
            "reload_inputs": reload.inputs,
            "reload_page_table": reload.page_table,
            "reload_sampling_params": reload.sampling_params,
            "reset_sampling_state": reload.sampling_state,
        }
        if len(rows.drawn) and len(rows.sampled):
            found["logits_rows"] = slots[rows.sampled].tolist()
        if reload.sampling_state:
            found |= self._histories(slots[rows.drawn])
        return found

    def params(
        self, rows: CallRows, slots: Int32Array, places: IntArray, num_places: int
    ) -> DeviceSamplingParams:
        """Return the device's sampling parameters for a call of `num_places` rows.

        Args:
            rows: The rows of the call.
            slots: (R,) their slots.
            places: (R,) their indices in the call.
            num_places: Rows of the call, padding included.
        """
        return device_params(
            self._batch,
            self._columns,
            self._draws,
            slots[rows.drawn],
            places[rows.drawn],
            num_places,
        )

    def _histories(self, slots: Int32Array) -> dict[str, torch.Tensor]:
        """Return the tokens that penalties of some of these (R,) rows concern, if there are any.

        The device counts its own draws, so it needs them only when it drops its state.
        """
        slots = slots[self._draws.is_penalised[slots]]
        if not len(slots):
            return {}
        batch = self._batch
        starts, ends = batch.num_prompt_tokens[slots], batch.num_tokens[slots]
        return {
            "prompt_tokens": self._padded(slots, np.zeros_like(starts), starts),
            "output_tokens": self._padded(slots, starts, ends),
        }

    def _padded(self, slots: Int32Array, starts: Int32Array, ends: Int32Array) -> torch.Tensor:
        """Return int32 (B, longest): a part of the tokens of some rows, with -1 everywhere else."""
        token_ids = self._batch.token_ids
        width = int((ends - starts).max(initial=0))
        found = np.full((len(token_ids), width), -1, dtype=np.int32)
        for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
            found[slot, : end - start] = token_ids[slot, start:end]
        return torch.from_numpy(found)

    def _reload(
        self, rows: CallRows, slots: Int32Array, scheduled: ScheduledBatch, *, is_ahead: bool
    ) -> DecodeReload:
        """Return the reload commands of a decode call, and renew the sampling parameters if due."""
        if not len(rows.drawn):
            self.commands.invalidate()
            return HOST_SAMPLED
        reload = self.commands.next_call(
            slots,
            slots[rows.drawn] if len(rows.sampled) else slots,
            has_new=bool(scheduled.new),
            has_new_blocks=bool(scheduled.appended_blocks),
            is_ahead=is_ahead,
        )
        if reload.sampling_params or self._params is None:
            self._params = self.params(rows, slots, slots, len(self._batch.num_tokens))
        return reload

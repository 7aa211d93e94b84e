"""What a device draws and has: division of sampling with the host, and inputs of decode calls.

Owner: the model runner. Rows are slots of the persistent batch, `replicas.engine.input_batch`.

Device and host draw different tokens for the same seed, so the request alone decides which of them
draws, never the other requests of a step. The device draws where it supports the parameters (for
example, few enough candidates); otherwise the host draws from the row's logits. A generator call
returns either tokens or logits. So a step with rows of both kinds takes two calls, each row in one
of them, unless the generator returns the logits of some rows beside the tokens of the others.

A device that continues from its own tokens is called with the inputs of the last step that it
reloaded, and reloads none of them.

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
    import numpy.typing as npt

    from replicas.engine.input_batch import PersistentBatch
    from replicas.engine.step import NewRow, ScheduledBatch, StepKind
    from replicas.generators.protocol import ModelCapabilities
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
        self._on_host = np.zeros(max_batch_size, dtype=np.bool_)

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
            can=DeviceAbilities(can.get("max_device_top_k")),
            keeps_state=not can.get("device_draws_keep_no_state", False),
            gives_both=can.get("gives_logits_beside_tokens", False),
        )

    def add(self, row: NewRow, *, is_touched: bool) -> None:
        """Take over a row; `is_touched` as in `drawn_on_host`."""
        self._on_host[row.slot] = drawn_on_host(row.sampling, self._can, is_touched=is_touched)

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
        is_hosts = samples & self._on_host[slots]
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
        num_steps_left: How often the device may continue after the last reload before any of its
            rows, also one that has left, passes the end of its page table. Set at each reload.
    """

    def __init__(self, *, runs_ahead: bool) -> None:
        self._runs_ahead = runs_ahead
        self._rows: npt.NDArray[np.int32] | None = None
        self.num_steps_left = 0

    def continues(self, slots: IntArray) -> bool:
        """Return whether a call for these rows, all drawn on the device, needs no host tokens."""
        has_rows = self._rows is not None and _are_among(slots, self._rows)
        return self._runs_ahead and self.num_steps_left > 0 and has_rows

    def invalidate(self) -> None:
        """Note that a call other than a decode with device sampling is made."""
        self._rows = None

    def next_call(
        self,
        slots: npt.NDArray[np.int32],
        *,
        has_new: bool,
        has_new_blocks: bool,
        has_hosts: bool = False,
        is_ahead: bool = False,
    ) -> DecodeReload:
        """Return the commands of a decode call that samples on the device.

        Args:
            slots: (R,) rows that run.
            has_new: Whether one of them holds a new or restarted sequence.
            has_new_blocks: Whether the block table of one of them has grown.
            has_hosts: Whether the host draws for one of them, whose token the device lacks.
            is_ahead: Whether the host does not know their tokens yet; requires `continues`.
        """
        before, self._rows = self._rows, slots
        is_same = before is slots or (before is not None and np.array_equal(before, slots))
        if is_ahead or (is_same and not has_new and self._runs_ahead and not has_hosts):
            if self.num_steps_left > 0:
                self.num_steps_left -= 1
                return _STEADY if is_same and not has_new_blocks else _NEW_BLOCKS
            return _AFRESH
        return HOST_SAMPLED if is_same and not has_new else _AFRESH


def _are_among(slots: IntArray, rows: IntArray) -> bool:
    return slots is rows or np.array_equal(slots, rows) or bool(np.isin(slots, rows).all())


def device_params(
    batch: PersistentBatch,
    columns: SamplingColumns,
    slots: IntArray,
    entries: IntArray,
    num_entries: int,
    *,
    keeps_state: bool,
) -> DeviceSamplingParams:
    """Return the sampling parameters of `slots` at `entries`, with padding everywhere else.

    With `keeps_state` the device draws each row's numbers from a stream that starts at its seed. It
    restarts the stream on command: after every prefill, and when rows come or go. The same seed
    would then repeat its numbers. So the row's seed is derived from the request's seed and the
    index of its next token, which differ between restarts. Consequence: a request repeats its
    tokens only if its streams restart at the same tokens, for example when it runs alone.

    The plug-in sends no seed for requests without one, and the device then draws from a state of
    its own. An engine cannot do that: it does not know which seeds a front end has made up.

    Args:
        batch: The persistent batch.
        columns: Its rows' parameters.
        slots: (n,) rows that the device draws for.
        entries: (n,) their indices in the call.
        num_entries: Rows of the call.
        keeps_state: See above.
    """
    temperature, top_k = np.zeros(num_entries), np.ones(num_entries, dtype=np.int64)
    top_p = np.ones(num_entries)
    seed: list[int | None] = [None] * num_entries
    is_random = columns.temperature[slots] >= GREEDY_EPS
    drawn, at = slots[is_random], entries[is_random]
    temperature[at], top_k[at] = columns.temperature[drawn], columns.top_k[drawn]
    top_p[at] = columns.top_p[drawn]
    seeds = columns.seed[drawn]
    if keeps_state:
        indices = (batch.num_tokens[drawn] - batch.num_prompt_tokens[drawn]).astype(np.int64)
        seeds = (uniform(seeds, indices) * 2.0**53).astype(np.int64)
    for entry, value in zip(at.tolist(), seeds.tolist(), strict=True):
        seed[entry] = value
    return DeviceSamplingParams(
        temperature=temperature.tolist(),
        top_k=top_k.tolist(),
        top_p=top_p.tolist(),
        presence_penalty=[0.0] * num_entries,
        frequency_penalty=[0.0] * num_entries,
        repetition_penalty=[1.0] * num_entries,
        seed=seed,
        num_logprobs=[NO_LOG_PROBS] * num_entries,
        enable_log_probs=[False] * num_entries,
    )


class DeviceInputs:
    """Maker of the arguments of decode calls, with the inputs that the device already has.

    Args:
        batch: The persistent batch.
        columns: Its rows' sampling parameters.
        draws: Division of rows between device and host.
        runs_ahead: Whether the device can continue from its own tokens, without the host.

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
    ) -> None:
        self._batch = batch
        self._columns = columns
        self._draws = draws
        self.commands = DecodeCommands(runs_ahead=runs_ahead)
        self._params: DeviceSamplingParams | None = None
        # Tokens, page table and positions of the last decode that reloaded them.
        self._inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

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
                torch.from_numpy(inputs.page_tables[0]),
                torch.from_numpy(inputs.start_pos),
            )
        # While the device continues from its own tokens, `tokens` and `start_pos` are stale.
        tokens, page_table, start_pos = self._inputs
        found: dict[str, Any] = {
            "tokens": tokens,
            "page_table": page_table,
            "start_pos": start_pos,
            "sampling_params": self._params if len(rows.drawn) else None,
            "reload_inputs": reload.inputs,
            "reload_page_table": reload.page_table,
            "reload_sampling_params": reload.sampling_params,
            "reset_sampling_state": reload.sampling_state,
        }
        if len(rows.drawn) and len(rows.sampled):
            found["logits_rows"] = slots[rows.sampled].tolist()
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
            slots[rows.drawn],
            places[rows.drawn],
            num_places,
            keeps_state=self._draws.keeps_state,
        )

    def _reload(
        self, rows: CallRows, slots: Int32Array, scheduled: ScheduledBatch, *, is_ahead: bool
    ) -> DecodeReload:
        """Return the reload commands of a decode call, and renew the sampling parameters if due."""
        if not len(rows.drawn):
            self.commands.invalidate()
            return HOST_SAMPLED
        reload = self.commands.next_call(
            slots,
            has_new=bool(scheduled.new),
            has_new_blocks=bool(scheduled.appended_blocks),
            has_hosts=bool(len(rows.sampled)),
            is_ahead=is_ahead,
        )
        if reload.sampling_params or self._params is None:
            self._params = self.params(rows, slots, slots, len(self._batch.num_tokens))
        return reload

"""All lanes of a mesh as one batch of slots.

Lanes run side by side: commands are queued on all of them before any output is read. Rows of one
lane prefill one after another, and decode together. Arguments have been checked (`calls.py`).

State on the device is that of the last decode: tokens, positions, page table and sampling settings
of every slot. The first three are rewritten with every change of slots. The host keeps the settings
and writes them again in their new order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import ttnn

from replicas.generators.ttnn.lanes import LaneSizes, TTLane
from replicas.generators.ttnn.model import TTTransformer
from replicas.generators.ttnn.sampling import parse_sampling
from replicas.generators.ttnn.trace import NoTrace, TtnnTracer

if TYPE_CHECKING:
    import numpy.typing as npt

    from replicas.generators.protocol import DeviceSamplingParams, ForwardOutput
    from replicas.generators.ttnn.calls import CallLimits, DecodeCall, PrefillCall
    from replicas.generators.ttnn.kv_cache import TTKVCache
    from replicas.generators.ttnn.loaded import LoadedModel
    from replicas.generators.ttnn.sampling import SamplingRows
    from replicas.generators.ttnn.trace import Tracer

    Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeOutput:
    """Output of a decode, on the device or, once read, on the host.

    Attributes:
        tokens: Tokens of each lane; None without live rows, or if only logits are requested.
        logits: Logits of each lane; None if none are requested.
        is_live: bool (B,).
        is_tokens: Tokens were sampled on the device.
        logits_rows: (H,) rows whose logits are requested in addition.
    """

    tokens: tuple[ttnn.Tensor | None, ...]
    logits: tuple[ttnn.Tensor | None, ...]
    is_live: npt.NDArray[np.bool_]
    is_tokens: bool
    logits_rows: Int64Array | None


class LaneBatch:
    """Lanes over one KV cache, for as long as it is in use.

    Owns the lanes with their inputs, the traces, and the device's sampling settings.

    Attributes:
        cache: The KV cache, owned by the caller.
        limits: Limits for arguments of calls.
        lanes: Lane ``i`` has the slots from ``i`` times its number of rows.
    """

    def __init__(self, model: LoadedModel, cache: TTKVCache, limits: CallLimits) -> None:
        """Create a transformer and its inputs on every lane."""
        self.cache = cache
        self.limits = limits
        self._rows_per_lane = model.rows_per_lane
        traces = model.settings.trace
        self._prefill_tracer: Tracer = TtnnTracer() if traces == "all" else NoTrace()
        self._decode_tracer: Tracer = NoTrace() if traces == "none" else TtnnTracer()
        # "prefill" / "decode" -> whether its compiled form draws on the device; absent until
        # compiled.
        self._compiled: dict[str, bool] = {}
        self._sampling: SamplingRows | None = None
        self.lanes = [self._lane(model, lane) for lane in range(len(model.lanes))]

    def _lane(self, model: LoadedModel, index: int) -> TTLane:
        device, weights = model.lanes[index]
        block_size = self.limits.block_size
        transformer = TTTransformer(
            model.config,
            device,
            weights,
            model.precision,
            max_seq_len=model.max_seq_len,
            max_rows=self._rows_per_lane,
            block_size=block_size,
        )
        sizes = LaneSizes(
            num_rows=self._rows_per_lane,
            max_seq_len=model.max_seq_len,
            block_size=block_size,
            local_vocab=weights.num_vocab_padded // device.get_num_devices(),
            hidden_size=model.config.hidden_size,
        )
        planes = self.cache[index]
        return TTLane(device, transformer, planes, sizes, self._prefill_tracer, self._decode_tracer)

    def close(self) -> None:
        """Release the traces and the lanes; no call may follow."""
        for tracer in (self._prefill_tracer, self._decode_tracer):
            tracer.release()
        for lane in self.lanes:
            lane.close()

    # --- warm-up -------------------------------------------------------------------------------

    def warm_up_prefill(self, *, capture: bool, samples: bool) -> None:
        """Compile every bucket in the null block, or capture the compiled calls.

        Raises:
            ValueError: A capture before both warm-ups have compiled.
        """
        self._check_compiled("prefill", capture=capture, samples=samples)
        for lane in self.lanes:
            if capture:
                lane.capture_prefill()
            else:
                lane.compile_prefill(sample=samples)
        self._compiled["prefill"] = samples

    def warm_up_decode(self, *, capture: bool, samples: bool) -> None:
        """Compile decode in the null block, or capture it; see ``warm_up_prefill``."""
        self._check_compiled("decode", capture=capture, samples=samples)
        for lane in self.lanes:
            if capture:
                lane.capture_decode(sample=samples)
            else:
                lane.compile_decode(sample=samples)
        self._compiled["decode"] = samples

    def _check_compiled(self, kind: str, *, capture: bool, samples: bool) -> None:
        """Refuse a capture before everything is compiled: later compiling may corrupt traces."""
        is_whole = len(self._compiled) == len(("prefill", "decode"))
        if capture and not (is_whole and samples <= self._compiled[kind]):
            raise ValueError(
                "first warm up prefill and decode with enable_trace False, and with the same "
                "can_sample_on_device"
            )

    # --- forward -------------------------------------------------------------------------------

    def prefill(
        self, call: PrefillCall, sampling: SamplingRows | None, *, traced: bool
    ) -> torch.Tensor:
        """Compute the ends of N prompts.

        Args:
            call: The rows.
            sampling: Sampling settings of the rows; None for logits.
            traced: Replay a trace if there is one.

        Returns:
            (N, 1, V) bfloat16, or with ``sampling`` int32 (N, 1).
        """
        num_rows = len(call.slots)
        hosts = {
            row: self._lane_of(call.slots[row]).prefill(
                call.tokens[row, : call.ends[row]],
                int(call.starts[row]),
                call.page_table[row],
                None if sampling is None else sampling.select(np.array([row])),
                traced=traced,
            )
            for row in self._interleaved(call.slots)
        }
        for lane in {slot // self._rows_per_lane for slot in call.slots.tolist()}:
            ttnn.event_synchronize(self.lanes[lane].event())
        if sampling is not None:
            sampled = torch.empty(num_rows, 1, dtype=torch.int32)
            for row, host in hosts.items():
                sampled[row, 0] = int(self._lane_of(call.slots[row]).token_ids(host)[0])
            return sampled
        rows = {n: self._lane_of(call.slots[n]).logits(host)[0] for n, host in hosts.items()}
        logits = torch.stack([rows[n] for n in range(num_rows)])
        return logits[:, None, : self.limits.vocab_size]

    def check_continues(self) -> None:
        """Check that every lane can continue from its own draws; raise ValueError if not."""
        for lane in self.lanes:
            lane.check_continues()

    def next_sampling(
        self, params: DeviceSamplingParams | None, remap: Int64Array | None, *, reload: bool
    ) -> SamplingRows | None:
        """Return the settings of all slots to load; None if the device has them."""
        if params is not None and reload:
            return parse_sampling(params, self.limits.max_batch_size, self.limits.vocab_size)
        if params is not None and self._sampling is None:
            raise ValueError("the device has no sampling settings yet: set reload_sampling_params")
        if remap is None or self._sampling is None:
            return None
        return self._sampling.select(remap)

    def decode(
        self,
        call: DecodeCall,
        settings: SamplingRows | None,
        *,
        samples: bool,
        logits_rows: Int64Array | None,
        traced: bool,
    ) -> DecodeOutput:
        """Compute a token of every live row.

        Args:
            call: The inputs to load.
            settings: Sampling settings of all slots to load; None if the device has them.
            samples: Whether to draw on the device.
            logits_rows: (H,) rows whose logits are returned with the tokens.
            traced: Replay a trace if there is one.
        """
        self._load(call)
        if settings is not None:
            self._load_sampling(settings)
        wants = np.full(len(self.lanes), not samples)
        if logits_rows is not None:
            wants[logits_rows // self._rows_per_lane] = True
        is_live = np.concatenate([lane.is_live for lane in self.lanes])
        outputs = [
            lane.decode(sample=samples, logits=wanted, traced=traced)
            if lane.is_live.any()
            else (None, None)
            for lane, wanted in zip(self.lanes, wants.tolist(), strict=True)
        ]
        tokens, logits = zip(*outputs, strict=True)
        return DecodeOutput(tokens, logits, is_live, samples, logits_rows)

    def _load(self, call: DecodeCall) -> None:
        if call.page_table is None:
            return
        for index, lane in enumerate(self.lanes):
            rows = self._rows_of(index)
            if call.tokens is None or call.positions is None:
                lane.load_page_table(call.page_table[rows])
            else:
                lane.load(call.tokens[rows], call.positions[rows], call.page_table[rows])

    def _load_sampling(self, settings: SamplingRows) -> None:
        self._sampling = settings
        for index, lane in enumerate(self.lanes):
            lane.load_sampling(settings.select(self._rows_of(index)))

    # --- reading -------------------------------------------------------------------------------

    def read(
        self, output: DecodeOutput, *, wait: bool
    ) -> tuple[DecodeOutput, list[ttnn.MeshEvent]]:
        """Copy an output to the host, started on all lanes before waiting for any.

        Returns:
            The output, valid after the events, and the events; without events after a wait.
        """
        tokens, logits = (
            tuple(
                None if tensor is None else lane.read(tensor, wait=False)
                for lane, tensor in zip(self.lanes, tensors, strict=True)
            )
            for tensors in (output.tokens, output.logits)
        )
        events = [
            lane.event()
            for lane, *read in zip(self.lanes, tokens, logits, strict=True)
            if any(tensor is not None for tensor in read)
        ]
        while wait and events:
            ttnn.event_synchronize(events.pop())
        return replace(output, tokens=tokens, logits=logits), events

    def gathered(self, output: DecodeOutput) -> ForwardOutput:
        """Combine the lanes' outputs; see ``TTGenerator.decode_forward``."""
        if not output.is_tokens:
            return self._whole_logits(output)[:, None]
        tokens = np.zeros((self.limits.max_batch_size, 1), dtype=np.int32)
        for index, (lane, host) in enumerate(zip(self.lanes, output.tokens, strict=True)):
            if host is not None:
                tokens[self._rows_of(index), 0] = lane.token_ids(host)
        tokens[~output.is_live] = 0
        if output.logits_rows is None:
            return torch.from_numpy(tokens)
        return torch.from_numpy(tokens), self._some_logits(output, output.logits_rows)

    def _whole_logits(self, output: DecodeOutput) -> torch.Tensor:
        """Return all logits (B, V); a single lane's without another copy."""
        vocab_size = self.limits.vocab_size
        empty = torch.zeros(self._rows_per_lane, vocab_size, dtype=torch.bfloat16)
        parts = [
            empty if host is None else lane.logits(host)[:, :vocab_size]
            for lane, host in zip(self.lanes, output.logits, strict=True)
        ]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        padding = np.flatnonzero(~output.is_live)
        if len(padding):
            logits[torch.from_numpy(padding)] = 0.0
        return logits

    def _some_logits(self, output: DecodeOutput, rows: Int64Array) -> torch.Tensor:
        """Return the logits of some rows, (H, V)."""
        of_lanes = {
            index: lane.logits(host)
            for index, (lane, host) in enumerate(zip(self.lanes, output.logits, strict=True))
            if host is not None
        }
        found = [of_lanes[row // self._rows_per_lane] for row in rows.tolist()]
        places = (rows % self._rows_per_lane).tolist()
        picked = [logits[place] for logits, place in zip(found, places, strict=True)]
        return torch.stack(picked)[:, : self.limits.vocab_size]

    def _lane_of(self, slot: int) -> TTLane:
        return self.lanes[int(slot) // self._rows_per_lane]

    def _rows_of(self, lane: int) -> slice:
        return slice(lane * self._rows_per_lane, (lane + 1) * self._rows_per_lane)

    def _interleaved(self, slots: Int64Array) -> list[int]:
        """Return the order of prefill rows: each lane's first row first, so all start early."""
        lanes = slots // self._rows_per_lane
        turns = [int((lanes[:row] == lane).sum()) for row, lane in enumerate(lanes)]
        return sorted(range(len(slots)), key=lambda row: turns[row])

"""Model runner: one step from the persistent batch through the generator and the sampler.

Owner of the persistent batch, of the KV cache handle and of what is known of the device's own
inputs; runs on the worker's thread only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from replicas.engine.batch import PersistentBatch
from replicas.engine.device_sampling import (
    HOST_SAMPLED,
    DecodeCommands,
    can_draw,
    decode_params,
    prefill_params,
)
from replicas.engine.sampler import sample
from replicas.engine.step import StepResult
from replicas.philox import uniform

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from replicas.config import EngineConfig
    from replicas.engine.device_sampling import DecodeReload
    from replicas.engine.step import ScheduledBatch, StepKind
    from replicas.generators.protocol import (
        DeviceSamplingParams,
        ForwardOutput,
        Generator,
        KVCache,
        SupportsMixedBatch,
    )


class ModelRunner:
    """Turns a scheduled batch into sampled tokens.

    Args:
        generator: The model, loaded.
        kv_cache: What the generator allocated.
        config: The engine's configuration.
        max_model_len: Longest sequence in tokens.
        wait_for_event: Waits for one of the events that `read_decode_output` returns; a generator
            that does not run ahead returns none.
    """

    def __init__(
        self,
        generator: Generator,
        kv_cache: KVCache,
        config: EngineConfig,
        max_model_len: int,
        wait_for_event: Callable[[object], None] | None = None,
    ) -> None:
        self._generator = generator
        self._kv_cache = kv_cache
        self._batch = PersistentBatch(config.max_batch_size, max_model_len, config.block_size)
        self._wait_for_event = wait_for_event
        mesh = config.mesh
        capabilities = generator.model_capabilities
        self._traces_prefill = mesh is None or mesh.trace == "all"
        self._traces_decode = mesh is None or mesh.trace != "none"
        # Calls whose tokens are drawn on the device, where that can be.
        self._device_draws: frozenset[StepKind] = frozenset()
        if mesh is not None and mesh.sample_on_device != "none":
            both = mesh.sample_on_device == "all"
            self._device_draws = frozenset({"decode", "prefill"} if both else {"decode"})
        self._max_top_k = capabilities.get("max_device_top_k")
        # A row of which no token is wanted must not draw then: it would count as a draw.
        self._keeps_state = not capabilities.get("device_draws_keep_no_state", False)
        self._reads_later = mesh is not None and capabilities.get("supports_async_decode", False)
        self._commands = DecodeCommands(runs_ahead=self._reads_later and self._traces_decode)
        self._decode_params: DeviceSamplingParams | None = None
        self._release: Callable[[int], None] = getattr(generator, "release_request", _keeps_nothing)

    def run(self, scheduled: ScheduledBatch) -> StepResult:
        """Run one step: inputs, forward, sample, remember."""
        batch = self._batch
        batch.apply(scheduled)
        for seq in scheduled.new:
            self._release(seq.slot)
        slots = np.asarray(scheduled.slots, dtype=np.int32)
        counts = np.asarray(scheduled.num_scheduled_tokens, dtype=np.int32)
        samples = batch.samples(slots, counts)
        started = time.perf_counter()
        if (
            scheduled.kind in self._device_draws
            and (not self._keeps_state or samples.all())
            and can_draw(batch, slots[samples], self._max_top_k)
        ):
            drawn = self._draw_on_device(scheduled, slots, counts, samples)
            device_s = time.perf_counter() - started
            token_ids = np.where(samples, drawn, -1)
        else:
            self._commands.forget()
            logits = self._forward(scheduled, slots, counts, samples)
            device_s = time.perf_counter() - started
            token_ids = self._sample(logits, slots, samples)
        batch.advance(slots, counts, token_ids)
        return StepResult(token_ids.tolist(), device_s)

    def compile(self) -> None:
        """Run every shape once, so that its programs are there before the first request."""
        self._warm_up_prefill(enable_trace=False)
        self._warm_up_decode(enable_trace=False)

    def capture(self) -> None:
        """Record what is traced; all that is ever compiled must have been: it spoils traces."""
        if self._traces_prefill:
            self._warm_up_prefill(enable_trace=True)
        if self._traces_decode:
            self._warm_up_decode(enable_trace=True)

    def _warm_up_prefill(self, *, enable_trace: bool) -> None:
        self._generator.warmup_model_prefill(
            kv_cache=self._kv_cache,
            enable_trace=enable_trace,
            can_sample_on_device="prefill" in self._device_draws,
        )

    def _warm_up_decode(self, *, enable_trace: bool) -> None:
        self._generator.warmup_model_decode(
            kv_cache=self._kv_cache,
            enable_trace=enable_trace,
            max_batch_size=len(self._batch.num_tokens),
            num_blocks=self._batch.table_width,
            can_sample_on_device="decode" in self._device_draws,
        )

    # --- logits for the host -------------------------------------------------------------------

    def _forward(
        self,
        scheduled: ScheduledBatch,
        slots: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        samples: npt.NDArray[np.bool_],
    ) -> torch.Tensor:
        """Logits (S, V) of the rows that sample, in scheduling order."""
        if scheduled.kind == "mixed":
            mixed = cast("SupportsMixedBatch", self._generator)
            return mixed.forward_mixed(self._batch.flat_inputs(slots, counts), self._kv_cache)
        if scheduled.kind == "prefill":
            return self._prefill(slots, counts)[torch.from_numpy(samples)]
        return self._decode(slots)[torch.from_numpy(slots[samples].astype(np.int64))]

    def _prefill(self, slots: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]) -> torch.Tensor:
        return cast("torch.Tensor", self._call_prefill(slots, counts, None)[:, -1, :])

    def _decode(self, slots: npt.NDArray[np.int32]) -> torch.Tensor:
        return cast("torch.Tensor", self._call_decode(slots, None, HOST_SAMPLED)[:, -1, :])

    def _sample(
        self,
        logits: torch.Tensor,
        slots: npt.NDArray[np.int32],
        samples: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.int64]:
        """A token for every row that samples, -1 for the others."""
        batch = self._batch
        rows = slots[samples]
        token_ids = np.full(len(slots), -1, dtype=np.int64)
        if len(rows):
            indices = (batch.num_tokens[rows] - batch.num_prompt_tokens[rows]).astype(np.int64)
            token_ids[samples] = sample(
                logits,
                batch.temperature[rows],
                batch.top_k[rows],
                batch.top_p[rows],
                uniform(batch.seed[rows], indices),
            )
        return token_ids

    # --- tokens from the device ----------------------------------------------------------------

    def _draw_on_device(
        self,
        scheduled: ScheduledBatch,
        slots: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        samples: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.int64]:
        """(R,) tokens in scheduling order; of rows that do not sample whatever came back."""
        if scheduled.kind == "prefill":
            self._commands.forget()
            params = prefill_params(self._batch, slots, samples, keeps_state=self._keeps_state)
            return _tokens(self._call_prefill(slots, counts, params))
        reload = self._commands.next_call(
            slots, has_new=bool(scheduled.new), has_new_blocks=bool(scheduled.appended_blocks)
        )
        if reload.sampling_params or self._decode_params is None:
            self._decode_params = decode_params(self._batch, slots, keeps_state=self._keeps_state)
        return _tokens(self._call_decode(slots, self._decode_params, reload))[slots]

    # --- the two calls -------------------------------------------------------------------------

    def _call_prefill(
        self,
        slots: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        sampling_params: DeviceSamplingParams | None,
    ) -> ForwardOutput:
        inputs = self._batch.prefill_inputs(slots, counts)
        return self._generator.prefill_forward(
            tokens=torch.from_numpy(inputs.tokens),
            page_table=torch.from_numpy(inputs.page_table),
            kv_cache=self._kv_cache,
            enable_trace=self._traces_prefill,
            prompt_lens=torch.from_numpy(inputs.prompt_lens),
            start_pos=torch.from_numpy(inputs.start_pos),
            empty_slots=inputs.empty_slots,
            sampling_params=sampling_params,
        )

    def _call_decode(
        self,
        slots: npt.NDArray[np.int32],
        sampling_params: DeviceSamplingParams | None,
        reload: DecodeReload,
    ) -> ForwardOutput:
        inputs = self._batch.decode_inputs(slots)
        output: Any = self._generator.decode_forward(
            tokens=torch.from_numpy(inputs.tokens),
            page_table=torch.from_numpy(inputs.page_table),
            kv_cache=self._kv_cache,
            start_pos=torch.from_numpy(inputs.start_pos),
            enable_trace=self._traces_decode,
            read_from_device=not self._reads_later,
            sampling_params=sampling_params,
            reload_inputs=reload.inputs,
            reload_page_table=reload.page_table,
            reload_sampling_params=reload.sampling_params,
            reset_sampling_state=reload.sampling_state,
        )
        if not self._reads_later:
            return output
        on_host, events = self._generator.read_decode_output(output, async_read=True)
        for event in events:
            assert self._wait_for_event is not None, "a generator gave an event to wait for"
            self._wait_for_event(event)
        return self._generator.process_decode_output_host(
            on_host, is_tokens=sampling_params is not None
        )


def _keeps_nothing(slot: int) -> None:
    """A generator keeps nothing for a slot whose sequence has left it."""


def _tokens(output: ForwardOutput) -> npt.NDArray[np.int64]:
    """Token ids of a call that sampled: (rows,) of (rows,), (rows, 1), or either in a pair."""
    tokens = output[0] if isinstance(output, tuple) else output
    return np.asarray(tokens, dtype=np.int64).reshape(-1)

"""Model runner: one step from the persistent batch through the generator and the sampler.

Owner of the persistent batch and of the KV cache handle; runs on the worker's thread only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from replicas.engine.batch import PersistentBatch
from replicas.engine.sampler import sample
from replicas.engine.step import StepResult
from replicas.philox import uniform

if TYPE_CHECKING:
    import numpy.typing as npt

    from replicas.config import EngineConfig
    from replicas.engine.step import ScheduledBatch
    from replicas.generators.protocol import Generator, KVCache, SupportsMixedBatch


class ModelRunner:
    """Turns a scheduled batch into sampled tokens.

    Args:
        generator: The model, loaded.
        kv_cache: What the generator allocated.
        config: The engine's configuration.
        max_model_len: Longest sequence in tokens.
    """

    def __init__(
        self, generator: Generator, kv_cache: KVCache, config: EngineConfig, max_model_len: int
    ) -> None:
        self._generator = generator
        self._kv_cache = kv_cache
        self._batch = PersistentBatch(config.max_batch_size, max_model_len, config.block_size)

    def run(self, scheduled: ScheduledBatch) -> StepResult:
        """Run one step: inputs, forward, sample, remember."""
        batch = self._batch
        batch.apply(scheduled)
        slots = np.asarray(scheduled.slots, dtype=np.int32)
        counts = np.asarray(scheduled.num_scheduled_tokens, dtype=np.int32)
        started = time.perf_counter()
        logits = self._forward(scheduled, slots, counts)
        device_s = time.perf_counter() - started
        token_ids = self._sample(logits, slots, batch.samples(slots, counts))
        batch.advance(scheduled, token_ids)
        return StepResult(token_ids, device_s)

    def warm_up(self) -> None:
        """Compile, then capture: compiling after a capture may spoil its memory."""
        for enable_trace in (False, True):
            self._generator.warmup_model_prefill(
                kv_cache=self._kv_cache, enable_trace=enable_trace, can_sample_on_device=False
            )
            self._generator.warmup_model_decode(
                kv_cache=self._kv_cache,
                enable_trace=enable_trace,
                max_batch_size=len(self._batch.num_tokens),
                num_blocks=self._batch.table_width,
                can_sample_on_device=False,
            )

    def _forward(
        self,
        scheduled: ScheduledBatch,
        slots: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
    ) -> torch.Tensor:
        """Logits (S, V) of the rows that sample, in scheduling order."""
        if scheduled.kind == "mixed":
            mixed = cast("SupportsMixedBatch", self._generator)
            return mixed.forward_mixed(self._batch.flat_inputs(slots, counts), self._kv_cache)
        samples = torch.from_numpy(self._batch.samples(slots, counts))
        if scheduled.kind == "prefill":
            return self._prefill(slots, counts)[samples]
        return self._decode(slots)[torch.from_numpy(slots.astype(np.int64))][samples]

    def _prefill(self, slots: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]) -> torch.Tensor:
        inputs = self._batch.prefill_inputs(slots, counts)
        output: Any = self._generator.prefill_forward(
            tokens=torch.from_numpy(inputs.tokens),
            page_table=torch.from_numpy(inputs.page_table),
            kv_cache=self._kv_cache,
            enable_trace=True,
            prompt_lens=torch.from_numpy(inputs.prompt_lens),
            start_pos=torch.from_numpy(inputs.start_pos),
            empty_slots=inputs.empty_slots,
        )
        return cast("torch.Tensor", output[:, -1, :])

    def _decode(self, slots: npt.NDArray[np.int32]) -> torch.Tensor:
        inputs = self._batch.decode_inputs(slots)
        output: Any = self._generator.decode_forward(
            tokens=torch.from_numpy(inputs.tokens),
            page_table=torch.from_numpy(inputs.page_table),
            kv_cache=self._kv_cache,
            start_pos=torch.from_numpy(inputs.start_pos),
            enable_trace=True,
            read_from_device=True,
        )
        return cast("torch.Tensor", output[:, -1, :])

    def _sample(
        self,
        logits: torch.Tensor,
        slots: npt.NDArray[np.int32],
        samples: npt.NDArray[np.bool_],
    ) -> list[int]:
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
        result: list[int] = token_ids.tolist()
        return result

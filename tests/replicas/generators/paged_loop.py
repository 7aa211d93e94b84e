"""A naive engine for tests: steps a generator over paged sequences, greedily.

It shares no code with the real engine, and it is as awkward as an engine may be: blocks are handed
out in shuffled order, sequences arrive one after another, and slots are scattered.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replicas.generators.protocol import FlatBatch
from replicas.kv_groups import KVGroup, layers_by_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.generators.model_config import ModelConfig


@dataclass(eq=False)
class PagedSequence:
    """One request: its tokens so far, where its KV lives, and the logits it was given."""

    token_ids: list[int]
    num_prompt_tokens: int
    slot: int
    lane: int
    block_ids: list[int]
    num_computed_tokens: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """Tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def accept(self, num_tokens: int, logits: torch.Tensor) -> None:
        """Take the result of ``num_tokens`` computed tokens; sample if the prompt is through."""
        self.num_computed_tokens += num_tokens
        if self.num_computed_tokens == len(self.token_ids):
            self.logits.append(logits.clone())
            self.token_ids.append(int(logits.argmax()))


class PagedLoop:
    """Drives one generator; see ``generate``."""

    def __init__(
        self,
        generator: Any,
        config: ModelConfig,
        *,
        num_lanes: int = 1,
        slots_per_lane: int = 4,
        block_size: int = 16,
        max_seq_len: int = 128,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.generator = generator
        self.block_size = block_size
        self.num_lanes = num_lanes
        self.slots_per_lane = slots_per_lane
        self.table_width = max_seq_len // block_size
        self.num_blocks = 1 + slots_per_lane * self.table_width
        by_spec = layers_by_spec(config.kv_specs(str(dtype).removeprefix("torch.")))
        # All KV groups have the same table; each block of states is a checkpoint.
        groups = [
            KVGroup(layers=layers, spec=spec, block_size=block_size, num_blocks=self.num_blocks)
            for spec, layers in by_spec
        ]
        self._num_groups, self._num_layers = len(groups), config.num_hidden_layers
        spec = groups[0].spec
        shape = (self.num_blocks, spec.heads, block_size, spec.width)
        self.cache = (
            generator.allocate_kv_cache(shape, dtype, config.num_hidden_layers)
            if len(groups) == 1
            else generator.allocate_kv_groups(groups, dtype)
        )
        shuffle = random.Random(seed)
        self._free_blocks = [list(range(1, self.num_blocks)) for _ in range(num_lanes)]
        for free in self._free_blocks:
            shuffle.shuffle(free)
        self._free_slots = list(range(num_lanes * slots_per_lane))
        shuffle.shuffle(self._free_slots)

    def fill(self, value: float) -> None:
        """Put ``value`` everywhere in a torch cache, the null block included."""
        for lane in self.cache:
            for layer in lane:
                for plane in layer:
                    plane.fill_(value)

    def add(self, prompt: Sequence[int], num_new: int) -> PagedSequence:
        """Give a prompt a slot and all the blocks that it will need."""
        slot = self._free_slots.pop()
        lane = slot // self.slots_per_lane
        num_blocks = -(-(len(prompt) + num_new) // self.block_size)
        block_ids = [self._free_blocks[lane].pop() for _ in range(num_blocks)]
        return PagedSequence(list(prompt), len(prompt), slot, lane, block_ids)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_new: int,
        *,
        chunk: int | None = None,
        mixed: bool = False,
    ) -> list[PagedSequence]:
        """Generate ``num_new`` tokens for every prompt; prompt i arrives in step i.

        Args:
            prompts: Token ids.
            num_new: Output tokens per prompt.
            chunk: Most prompt tokens per step and sequence; None for whole prompts.
            mixed: One ``forward_mixed`` per step instead of a prefill and a decode call.
        """
        sequences = [self.add(prompt, num_new) for prompt in prompts]
        step = 0
        while any(len(sequence.output) < num_new for sequence in sequences):
            step += 1
            live = [s for s in sequences[:step] if len(s.output) < num_new]
            if mixed:
                self.step_mixed(live, chunk)
                continue
            prefilling = [s for s in live if s.num_computed_tokens < s.num_prompt_tokens]
            decoding = [s for s in live if s.num_computed_tokens >= s.num_prompt_tokens]
            if prefilling:
                self.step_prefill(prefilling, chunk)
            if decoding:
                self.step_decode(decoding)
        return sequences

    def step_prefill(self, sequences: Sequence[PagedSequence], chunk: int | None = None) -> None:
        """One padded prefill call."""
        starts = [s.num_computed_tokens for s in sequences]
        ends = [
            start + _num_scheduled(s, chunk) for s, start in zip(sequences, starts, strict=True)
        ]
        tokens = torch.zeros(len(sequences), max(ends), dtype=torch.int32)
        for row, (sequence, end) in enumerate(zip(sequences, ends, strict=True)):
            tokens[row, :end] = torch.tensor(sequence.token_ids[:end])
        logits = self.generator.prefill_forward(
            tokens=tokens,
            **self._tables(self._page_table(sequences)),
            kv_cache=self.cache,
            enable_trace=False,
            prompt_lens=torch.tensor(ends),
            start_pos=torch.tensor(starts, dtype=torch.int32),
            empty_slots=[s.slot for s in sequences],
        )
        assert logits.shape[:2] == (len(sequences), 1)
        for sequence, start, end, row in zip(sequences, starts, ends, logits, strict=True):
            sequence.accept(end - start, row[0])

    def step_decode(self, sequences: Sequence[PagedSequence]) -> torch.Tensor:
        """One decode call over the whole padded batch; returns its logits."""
        num_slots = self.num_lanes * self.slots_per_lane
        tokens = torch.zeros(num_slots, 1, dtype=torch.int32)
        start_pos = torch.full((num_slots,), -1, dtype=torch.int32)
        page_table = torch.zeros(num_slots, self.table_width, dtype=torch.int32)
        for sequence, row in zip(sequences, self._page_table(sequences), strict=True):
            tokens[sequence.slot, 0] = sequence.token_ids[sequence.num_computed_tokens]
            start_pos[sequence.slot] = sequence.num_computed_tokens
            page_table[sequence.slot] = row
        logits = self.generator.decode_forward(
            tokens=tokens,
            **self._tables(page_table),
            kv_cache=self.cache,
            start_pos=start_pos,
            enable_trace=False,
            read_from_device=True,
            reload_inputs=True,
        )
        assert logits.shape[:2] == (num_slots, 1)
        for sequence in sequences:
            sequence.accept(1, logits[sequence.slot, 0])
        return logits

    def step_mixed(self, sequences: Sequence[PagedSequence], chunk: int | None = None) -> None:
        """One flat pass over prefill chunks and decodes."""
        scheduled = [_num_scheduled(s, chunk) for s in sequences]
        logits = self.generator.forward_mixed(self.flat_batch(sequences, scheduled), self.cache)
        assert len(logits) == len(sequences)
        for sequence, num_tokens, row in zip(sequences, scheduled, logits, strict=True):
            sequence.accept(num_tokens, row)

    def flat_batch(
        self, sequences: Sequence[PagedSequence], scheduled: Sequence[int], every: bool = False
    ) -> FlatBatch:
        """Build the flat form token by token; with ``every``, all logits are wanted."""
        rows: list[tuple[int, int, int, int]] = []
        query_start_loc = [0]
        for request, (sequence, num_tokens) in enumerate(zip(sequences, scheduled, strict=True)):
            start = sequence.num_computed_tokens
            for position in range(start, start + num_tokens):
                block = sequence.block_ids[position // self.block_size]
                slot = block * self.block_size + position % self.block_size
                rows.append((request, sequence.token_ids[position], position, slot))
            query_start_loc.append(len(rows))
        requests, tokens, positions, kv_slots = np.array(rows, dtype=np.int64).T
        starts = np.array([s.num_computed_tokens for s in sequences], dtype=np.int32)
        return FlatBatch(
            request_indices=requests.astype(np.int32),
            input_ids=tokens.astype(np.int32),
            positions=positions,
            slot_mapping=np.tile(kv_slots, (self._num_groups, 1)),
            query_start_loc=np.array(query_start_loc, dtype=np.int32),
            seq_lens=starts + np.array(scheduled, dtype=np.int32),
            block_table=np.tile(self._page_table(sequences).numpy(), (self._num_groups, 1, 1)),
            dp_groups=np.array([s.lane for s in sequences], dtype=np.int32),
            logits_indices=(
                np.arange(len(rows)) if every else np.array(query_start_loc[1:], dtype=np.int64) - 1
            ),
        )

    def _tables(self, table: torch.Tensor) -> dict[str, Any]:
        if self._num_groups == 1:
            return {"page_table": table}
        return {"page_table": table, "page_tables_per_layer": [table] * self._num_layers}

    def _page_table(self, sequences: Sequence[PagedSequence]) -> torch.Tensor:
        table = torch.zeros(len(sequences), self.table_width, dtype=torch.int32)
        for row, sequence in enumerate(sequences):
            table[row, : len(sequence.block_ids)] = torch.tensor(sequence.block_ids)
        return table


def _num_scheduled(sequence: PagedSequence, chunk: int | None) -> int:
    remaining = len(sequence.token_ids) - sequence.num_computed_tokens
    return remaining if chunk is None else min(chunk, remaining)

"""A model runner over a table of logits, for tests of sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from replicas.config import EngineConfig
from replicas.engine.model_runner import ModelRunner
from replicas.engine.step import NewRow, ScheduledBatch, StepResult
from replicas.sampling_params import SamplingParams
from tests.kv_groups import one_kv_group

if TYPE_CHECKING:
    from replicas.sampling.logprobs import Logprobs

VOCAB = 24
NUM_SLOTS = 4
MAX_LEN = 64


class TableGenerator:
    """A model whose logits depend on the last token and its position alone.

    Args:
        seed: Seed of the table.
        vocab: Width of the logits.
    """

    model_capabilities: ClassVar[dict[str, object]] = {}

    def __init__(self, seed: int, vocab: int = VOCAB) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = 3 * torch.randn(vocab * 7, vocab, generator=generator)

    def forward_mixed(self, batch, kv_cache):
        at = torch.from_numpy(batch.input_ids[batch.logits_indices].astype("int64"))
        positions = torch.from_numpy(batch.positions[batch.logits_indices])
        return self.table[at * 7 + positions % 7]

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """The logits after these tokens."""
        return self.table[token_ids[-1] * 7 + (len(token_ids) - 1) % 7]


class Rows:
    """A runner and its rows' tokens; all rows decode in each step.

    Args:
        processors: See `ModelRunner`.
        seed: See `TableGenerator`.
        vocab: See `TableGenerator`.
        logprobs: See `ModelRunner`.

    Attributes:
        token_ids: By slot: the tokens of its row.
        failed: By slot: why its row got no token in the last step, and left.
    """

    def __init__(
        self, processors=(), seed: int = 0, vocab: int = VOCAB, logprobs: Logprobs | None = None
    ) -> None:
        config = EngineConfig(model="/none", max_batch_size=NUM_SLOTS, block_size=4)
        self.generator = TableGenerator(seed, vocab)
        self.runner = ModelRunner(
            self.generator,
            "cache",
            config,
            one_kv_group(9, 4),
            MAX_LEN,
            processors=processors,
            logprobs=logprobs,
        )
        self.token_ids: dict[int, list[int]] = {}
        self.failed: dict[int, str] = {}
        self._new: dict[int, NewRow] = {}
        self._gone: list[int] = []

    def add(
        self,
        slot: int,
        prompt: list[int],
        output: list[int] | tuple = (),
        params: SamplingParams | None = None,
        **sampling,
    ) -> None:
        """Put a row into a slot; with `output` it has been decoded elsewhere."""
        token_ids = [*prompt, *output]
        self.token_ids[slot] = token_ids
        blocks = [slot * MAX_LEN // 4 + i + 1 for i in range(MAX_LEN // 4)]
        params = params or SamplingParams(**{"seed": 7, **sampling})
        self._new[slot] = NewRow(slot, 0, [*token_ids], len(prompt), 0, [blocks], params)

    def remove(self, slot: int) -> None:
        """Take a row out of its slot."""
        del self.token_ids[slot]
        self._new.pop(slot, None)
        self._gone.append(slot)

    def step(self) -> StepResult:
        """Give each row its next token."""
        slots = list(self.token_ids)
        counts = [len(self.token_ids[s]) if s in self._new else 1 for s in slots]
        new, gone = list(self._new.values()), self._gone
        self._new, self._gone = {}, []
        result = self.runner.run(ScheduledBatch("mixed", slots, counts, new, [], gone=gone))
        tokens = iter(result.token_ids)
        for row, slot in enumerate(slots):
            count = result.counts[row] if result.counts else 1
            self.token_ids[slot] += [next(tokens) for _ in range(count)]
        self.failed = {slots[failure.row]: failure.reason for failure in result.failed}
        for slot in self.failed:
            self.remove(slot)
        return result

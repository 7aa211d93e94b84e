"""Processor that ends the reasoning of an output after so many tokens.

Source: vLLM 0.32 `thinking_token_budget`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from replicas.reasoning import ReasoningReader
from replicas.sampling.processor import SlotProcessor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from replicas.sampling.processor import LogitRows
    from replicas.sampling.row import SampledRow

    Int64Array = npt.NDArray[np.int64]

_FORBIDDEN = np.float32(-np.inf)


class _Reasoning(NamedTuple):
    """The most tokens of a row's reasoning, and its reader."""

    max_tokens: int
    reader: ReasoningReader


class ReasoningBudgets(SlotProcessor[_Reasoning]):
    """Processor of `reasoning_budget`: where it is used up, only the end of the reasoning may come.

    A grammar or another parameter that forbids the next token of the end goes first.
    """

    def state_of(self, row: SampledRow) -> _Reasoning | None:
        """Return the reasoning so far of a row with a budget; None if it has none."""
        budget = row.sampling.reasoning_budget
        if budget is None:
            return None
        reader = ReasoningReader(budget.marks)
        reader.read(row.token_ids[row.num_prompt_tokens :])
        return _Reasoning(budget.max_tokens, reader)

    def apply(self, logits: torch.Tensor, rows: LogitRows, indices: Int64Array) -> None:
        """Forbid all tokens but the next one of the end where a budget is used up, in (n, V)."""
        for place, index, (max_tokens, reader) in self._touched(rows, indices):
            drafts = rows.drafts[index] if rows.drafts else ()
            if drafts:
                reader = reader.copy()  # noqa: PLW2901 - of this row of logits alone
                reader.read(drafts)
            if reader.is_open and reader.num_tokens >= max_tokens:
                values, token_id = logits[place].numpy(), reader.next_of_end()
                if values[token_id] > _FORBIDDEN:
                    kept = values[token_id]
                    values.fill(_FORBIDDEN)
                    values[token_id] = kept

    def accept(self, slot: int, token_ids: Sequence[int]) -> None:
        """Read the tokens that a row has got."""
        self._states[slot].reader.read(token_ids)

"""Penalties for tokens that a row has already: repetition, frequency, presence.

Source: vLLM v1/sample/ops/penalties.py and model_executor/layers/utils.py `apply_penalties`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replicas.engine.rows.processor import SlotProcessor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt
    import torch

    from replicas.engine.rows.processor import LogitRows
    from replicas.engine.step import NewRow

    Int64Array = npt.NDArray[np.int64]
    Float32Array = npt.NDArray[np.float32]


class Penalties(SlotProcessor["_Penalised"]):
    """Processor of `repetition_penalty`, `frequency_penalty` and `presence_penalty`, in this order.

    Repetition concerns the tokens of prompt and output, the others those of the output. Only the
    logits of these tokens are read and written.
    """

    def state_of(self, row: NewRow) -> _Penalised | None:
        """Return the state of a row; None if it has no penalty."""
        sampling = row.sampling
        factors = (
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        if factors == (1.0, 0.0, 0.0):
            return None
        prompt = (
            row.token_ids[: row.num_prompt_tokens] if sampling.repetition_penalty != 1.0 else []
        )
        state = _Penalised(factors, prompt)
        state.count(row.token_ids[row.num_prompt_tokens :])
        return state

    def apply(self, logits: torch.Tensor, rows: LogitRows) -> None:
        """Penalise the tokens that each row has already, in float32 (S, V)."""
        found = [
            (at, *state.tokens(rows.drafts[at] if rows.drafts else ()), state.factors)
            for at, state in self._touched(rows)
        ]
        if not found:
            return
        vocab = logits.shape[-1]
        lengths = [len(token_ids) for _, token_ids, _, _ in found]
        # All rows at once: (n,) of all their tokens.
        places = np.concatenate([at * vocab + token_ids for at, token_ids, _, _ in found])
        counts = np.concatenate([counts for _, _, counts, _ in found])
        factors = np.array([factors for *_, factors in found], dtype=np.float32)
        repetition, frequency, presence = np.repeat(factors, lengths, axis=0).T
        values = logits.numpy().reshape(-1)
        old = values[places]
        new = np.where(old > 0, old / repetition, old * repetition)
        values[places] = new - frequency * counts - presence * (counts > 0)

    def accept(self, slot: int, token_ids: Sequence[int]) -> None:
        """Count the tokens that a row has got."""
        self._states[slot].count(token_ids)


class _Penalised:
    """The tokens of a row that penalties concern, and how often each is in its output.

    Args:
        factors: Repetition, frequency and presence penalty.
        prompt: Tokens that are penalised without being output.

    Attributes:
        factors: As given.
    """

    def __init__(self, factors: tuple[float, float, float], prompt: Sequence[int]) -> None:
        self.factors = factors
        seen = np.unique(np.array(prompt, dtype=np.int64))
        # Both arrays have room behind the tokens, so that most tokens cost no allocation.
        self._token_ids = np.concatenate([seen, np.zeros(64, dtype=np.int64)])
        self._counts = np.zeros(len(self._token_ids), dtype=np.float32)
        # By token id: its index in both arrays.
        self._places = {token_id: place for place, token_id in enumerate(seen.tolist())}

    def count(self, token_ids: Iterable[int]) -> None:
        """Count tokens of the output."""
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, self._token_ids])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._token_ids[place] = token_id
            self._counts[place] += 1.0

    def tokens(self, drafts: Sequence[int]) -> tuple[Int64Array, Float32Array]:
        """Return (n,) tokens, each once, and how often each is in the output and the drafts."""
        num_tokens = len(self._places)
        token_ids, counts = self._token_ids[:num_tokens], self._counts[:num_tokens]
        if not drafts:
            return token_ids, counts
        new = list(dict.fromkeys(t for t in drafts if t not in self._places))
        token_ids = np.concatenate([token_ids, np.array(new, dtype=np.int64)])
        counts = np.concatenate([counts, np.zeros(len(new), dtype=np.float32)])
        for token_id in drafts:
            place = self._places.get(token_id)
            counts[num_tokens + new.index(token_id) if place is None else place] += 1.0
        return token_ids, counts

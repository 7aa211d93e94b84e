"""Penalties for tokens that a row has already: repetition, frequency, presence.

Source: vLLM v1/sample/ops/penalties.py and model_executor/layers/utils.py `apply_penalties`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from replicas.sampling.processor import SlotProcessor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt
    import torch

    from replicas.sampling.processor import DeviceAbilities, LogitRows
    from replicas.sampling.row import SampledRow
    from replicas.sampling_params import SamplingParams

    Int64Array = npt.NDArray[np.int64]
    Float32Array = npt.NDArray[np.float32]


class Penalties(SlotProcessor["_Penalised"]):
    """Processor of `repetition_penalty`, `frequency_penalty` and `presence_penalty`, in this order.

    Repetition concerns the tokens of prompt and output, the others those of the output. Only the
    logits of these tokens are read and written.
    """

    def state_of(self, row: SampledRow) -> _Penalised | None:
        """Return the state of a row; None if it has no penalty."""
        sampling = row.sampling
        if not sampling.has_penalties:
            return None
        is_repeating = sampling.repetition_penalty != 1.0
        prompt = row.token_ids[: row.num_prompt_tokens] if is_repeating else []
        state = _Penalised(sampling, prompt)
        state.count(row.token_ids[row.num_prompt_tokens :])
        return state

    def needs_host(self, sampling: SamplingParams, can: DeviceAbilities) -> bool:
        """Return whether the device applies no penalties."""
        return not can.penalties

    def apply(self, logits: torch.Tensor, rows: LogitRows, indices: Int64Array) -> None:
        """Penalise the tokens that each row has already, in float32 (n, V)."""
        values = logits.numpy()
        for place, index, state in self._touched(rows, indices):
            token_ids, penalties = state.tokens(rows.drafts[index] if rows.drafts else ())
            row = values[place]
            found, factor = row.take(token_ids), state.repetition
            if factor != 1.0:
                # A factor below 1 rewards: the greater of the two for a positive logit.
                least_or_greatest = np.minimum if factor > 1.0 else np.maximum
                found = least_or_greatest(found / factor, found * factor)
            found -= penalties
            row[token_ids] = found

    def accept(self, slot: int, token_ids: Sequence[int]) -> None:
        """Count the tokens that a row has got."""
        self._states[slot].count(token_ids)


class _Penalised:
    """The tokens of a row that penalties concern, and what their number in its output costs each.

    Args:
        sampling: The row's parameters.
        prompt: Tokens that are penalised without being output.

    Attributes:
        repetition: The repetition penalty.
    """

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int]) -> None:
        self.repetition = np.float32(sampling.repetition_penalty)
        self._frequency = np.float32(sampling.frequency_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        seen = np.unique(np.array(prompt, dtype=np.int64))
        # The arrays have room behind the tokens, so that most tokens cost no allocation.
        self._token_ids = np.concatenate([seen, np.zeros(64, dtype=np.int64)])
        self._penalties = np.zeros(len(self._token_ids), dtype=np.float32)
        # By token id: its index in both arrays, and how often it is in the output.
        self._places = {token_id: place for place, token_id in enumerate(seen.tolist())}
        self._counts: Counter[int] = Counter()

    def count(self, token_ids: Iterable[int]) -> None:
        """Count tokens of the output."""
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, self._token_ids])
                self._penalties = np.concatenate([self._penalties, self._penalties])
            count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
            self._token_ids[place] = token_id
            self._penalties[place] = self._penalty(count)

    def tokens(self, drafts: Sequence[int]) -> tuple[Int64Array, Float32Array]:
        """Return (n,) tokens, each once, and the penalties for their number, drafts included."""
        num_tokens = len(self._places)
        token_ids, penalties = self._token_ids[:num_tokens], self._penalties[:num_tokens]
        if not drafts:
            return token_ids, penalties
        penalties = penalties.copy()
        new: list[int] = []
        of_new: list[np.float32] = []
        for token_id, count in Counter(drafts).items():
            penalty = self._penalty(self._counts[token_id] + count)
            place = self._places.get(token_id)
            if place is None:
                new.append(token_id)
                of_new.append(penalty)
            else:
                penalties[place] = penalty
        return (
            np.concatenate([token_ids, np.array(new, dtype=np.int64)]),
            np.concatenate([penalties, np.array(of_new, dtype=np.float32)]),
        )

    def _penalty(self, count: int) -> np.float32:
        return self._frequency * np.float32(count) + self._presence

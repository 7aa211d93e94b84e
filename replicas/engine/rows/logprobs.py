"""Log probabilities of drawn tokens, and of the likeliest or given tokens beside them; of prompts.

Logits are kept before or after the other processors, as the engine's `logprobs_mode` says, and read
once the tokens are drawn. Source: vLLM v1/sample/sampler.py `gather_logprobs`.

Those of a prompt are read from its hidden states, in portions, because all its logits at once could
take gigabytes. Source: vLLM v1/worker/gpu_model_runner.py `_get_prompt_logprobs_dict`.

Dimensions: n kept rows of logits; V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from replicas.engine.rows.processor import SlotProcessor
from replicas.engine.sampler import Limits, best_tokens, block_maxima, within_limits
from replicas.messages import TokenLogprob
from replicas.sampling_params import GREEDY_EPS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from replicas.config import LogprobsMode
    from replicas.engine.rows.processor import LogitRows
    from replicas.engine.step import NewRow
    from replicas.sampling_params import SamplingParams

    Float32Array = npt.NDArray[np.float32]


PORTION = 64
"""Positions of a prompt whose logits exist at once."""


class _Asked(NamedTuple):
    """A request's parameters, the number of likeliest tokens (-1: all), and given tokens."""

    sampling: SamplingParams
    num_likeliest: int
    token_ids: tuple[int, ...]


class Logprobs(SlotProcessor[_Asked]):
    """Processor of `logprobs` and `logprob_token_ids`; changes no logits.

    Args:
        mode: Which values are reported; see `EngineConfig.logprobs_mode`.

    Attributes:
        mode: As given.
    """

    def __init__(self, mode: LogprobsMode) -> None:
        super().__init__()
        self.mode = mode
        # Of the step to come: by slot the first of its rows in `_kept`; its tokens, once drawn.
        self._first: dict[int, int] = {}
        self._tokens: dict[int, list[int]] = {}
        # float32 (rows, V) and (V,), reused by every step: new memory costs as much as the copies.
        self._kept = torch.empty(0, 0)
        self._scratch = torch.empty(0)
        # Of each kept row: the greatest value of each block, and the logarithm of its sum.
        self._maxima: list[Float32Array] = []
        self._log_sums: list[float] = []

    def state_of(self, row: NewRow) -> _Asked | None:
        """Return what a row asks for; None if nothing."""
        sampling = row.sampling
        if sampling.logprobs is None and not sampling.logprob_token_ids:
            return None
        return _Asked(sampling, sampling.logprobs or 0, sampling.logprob_token_ids)

    def prepare(self, rows: LogitRows) -> None:
        """Begin a step."""
        self._first, self._tokens = {}, {}
        self._maxima, self._log_sums = [], []
        num_rows = sum(slot in self._states for slot in rows.slots.tolist())
        if len(self._kept) < num_rows:
            self._kept = torch.empty(num_rows, self._kept.shape[1])

    def apply(self, logits: torch.Tensor, rows: LogitRows) -> None:
        """Keep the logits of the rows that ask for log probabilities."""
        vocab = logits.shape[-1]
        if self._kept.shape[1] != vocab:
            self._kept, self._scratch = torch.empty(len(self._kept), vocab), torch.empty(vocab)
        for index, asked in self._touched(rows):
            row = len(self._maxima)
            kept = self._kept[row]
            kept.copy_(logits[index])
            if self.mode.startswith("processed"):
                _restrict(kept, asked.sampling)
            self._first.setdefault(int(rows.slots[index]), row)
            # Now, because the row is in the core's cache.
            maxima = block_maxima(kept[None]).numpy()[0]
            self._maxima.append(maxima)
            self._log_sums.append(self._log_sum(kept, float(maxima.max())))

    def accept(self, slot: int, token_ids: Sequence[int]) -> None:
        """Note the tokens that a row has got."""
        self._tokens[slot] = list(token_ids)

    def take(self) -> dict[int, list[list[TokenLogprob]]]:
        """Return the log probabilities of the step's tokens, by slot: a list for each token."""
        if not self._tokens:
            return {}
        found = {}
        for slot, token_ids in self._tokens.items():
            first, asked = self._first[slot], self._states[slot]
            found[slot] = [
                _position(
                    asked.num_likeliest,
                    token_id,
                    self._kept[row].numpy(),
                    self._maxima[row],
                    self._log_sums[row],
                    asked.token_ids,
                )
                for row, token_id in enumerate(token_ids, start=first)
            ]
        self._tokens = {}
        return found

    def of_prompt(
        self,
        hidden: torch.Tensor,
        token_ids: Sequence[int],
        num_likeliest: int,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[list[TokenLogprob]]:
        """Return for positions of a prompt its next token, then the likeliest ones.

        Of the logits as they are, because nothing is drawn there.

        Args:
            hidden: (n, N) hidden states of the positions.
            token_ids: (n,) the token behind each.
            num_likeliest: Number of likeliest tokens; -1 is the whole vocabulary.
            compute_logits: See `SupportsHiddenStates`.
        """
        found = []
        for start in range(0, len(token_ids), PORTION):
            part = slice(start, start + PORTION)
            # In a call of its own, which drops the logits before the next ones are computed.
            found += self._portion(
                compute_logits(hidden[part]).float(), token_ids[part], num_likeliest
            )
        return found

    def _portion(
        self, logits: torch.Tensor, token_ids: Sequence[int], num_likeliest: int
    ) -> list[list[TokenLogprob]]:
        """Return `of_prompt` of float32 logits (n, V)."""
        if self._scratch.shape != logits.shape[1:]:
            self._scratch = torch.empty(logits.shape[1])
        found = []
        for row, token_id in zip(logits, token_ids, strict=True):
            maxima = block_maxima(row[None]).numpy()[0]
            log_sum = self._log_sum(row, float(maxima.max()))
            values = row.numpy()
            found.append(_position(num_likeliest, token_id, values, maxima, log_sum))
        return found

    def _log_sum(self, kept: torch.Tensor, greatest: float) -> float:
        """Return what to subtract from a row (V,) for log probabilities; 0 for logits."""
        if self.mode.endswith("logits"):
            return 0.0
        weights = torch.sub(kept, greatest, out=self._scratch).exp_()
        return greatest + float(weights.sum().log())


def _position(
    num_likeliest: int,
    token_id: int,
    values: Float32Array,
    maxima: Float32Array,
    log_sum: float,
    given: Sequence[int] = (),
) -> list[TokenLogprob]:
    """Return a token of a row (V,), then the likeliest, or instead the given ones."""
    others = [(other, _rank(values, other)) for other in given]
    if not given and num_likeliest:
        count = len(values) if num_likeliest == -1 else num_likeliest
        likeliest = best_tokens(values, maxima, count)[:count].tolist()
        others = [(other, rank) for rank, other in enumerate(likeliest, 1)]
    return [
        TokenLogprob(found, float(values[found]) - log_sum, rank)
        for found, rank in [(token_id, _rank(values, token_id)), *others]
    ]


def _rank(values: Float32Array, token_id: int) -> int:
    """Return how many tokens are at least as likely as one, itself included."""
    return int(np.count_nonzero(values >= values[token_id]))


def _restrict(logits: torch.Tensor, sampling: SamplingParams) -> None:
    """Divide float32 (V,) by the temperature, and forbid the tokens that cannot be drawn."""
    if sampling.temperature < GREEDY_EPS:
        return
    logits /= sampling.temperature
    vocab = len(logits)
    top_k = sampling.top_k if 0 < sampling.top_k < vocab else vocab
    limits = Limits(top_k, sampling.top_p, sampling.min_p)
    if limits == (vocab, 1.0, 0.0):
        return
    token_ids = torch.from_numpy(within_limits(logits, limits))
    kept = logits[token_ids]
    logits.fill_(-torch.inf)
    logits[token_ids] = kept

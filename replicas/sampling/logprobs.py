"""Log probabilities of drawn tokens, and of the likeliest or given tokens beside them; of prompts.

The engine's `logprobs_mode` says whether logits are read before or after the other processors. The
model's own are read once tokens are drawn. Others are kept while their row is changed, and read as
soon as its token is drawn, while they are in the core's cache. Source: vLLM v1/sample/sampler.py
`gather_logprobs`.

Those of a prompt are read from its hidden states, in portions, because all its logits at once could
take gigabytes. Source: vLLM v1/worker/gpu_model_runner.py `_get_prompt_logprobs_dict`.

Dimensions: n rows of logits that are changed together; V vocabulary.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from replicas.errors import DeviceError
from replicas.messages import UNKNOWN_RANK, TokenLogprob
from replicas.sampling.compiled import Entries, find_kernels, read_entries
from replicas.sampling.processor import SlotProcessor
from replicas.sampling.sampler import Limits, best_tokens, block_maxima, within_limits
from replicas.sampling_params import GREEDY_EPS, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from replicas.config import LogprobsMode
    from replicas.sampling.processor import DeviceAbilities, LogitRows
    from replicas.sampling.row import SampledRow

    Float32Array = npt.NDArray[np.float32]
    Float64Array = npt.NDArray[np.float64]
    Int64Array = npt.NDArray[np.int64]
    IntArray = npt.NDArray[np.integer[Any]]


PORTION = 64
"""Positions of a prompt whose logits exist at once."""
_SMALL = 60.0
"""Powers of e of smaller numbers do not overflow in float32, and their sum does not vanish: nothing
needs to be subtracted from such logits first."""
_DEFAULTS = SamplingParams()
_NO_TOKENS = np.empty(0, dtype=np.int64)


class _Asked(NamedTuple):
    """What a request asks for.

    Attributes:
        sampling: Its parameters.
        num_likeliest: Number of likeliest tokens; -1 is all.
        token_ids: Given tokens.
        of_model: Whether of the model's logits as they are, so that none need to be kept.
    """

    sampling: SamplingParams
    num_likeliest: int
    token_ids: tuple[int, ...]
    of_model: bool = True


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
        self._kernels = find_kernels()
        # float32 (n, V), reused: new memory costs as much as the copies.
        self._kept = torch.empty(0, 0)
        # Of the rows of the last `apply` that ask: place among them, slot, and what it asks for.
        self._rows: list[tuple[int, int, _Asked]] = []
        # Of the step by slot: the log probabilities of each drawn token, and of the output.
        self._drawn: dict[int, list[list[TokenLogprob]]] = {}
        self._accepted: dict[int, list[list[TokenLogprob]]] = {}

    def state_of(self, row: SampledRow) -> _Asked | None:
        """Return what a row asks for; None if nothing."""
        sampling = row.sampling
        if sampling.logprobs is None and not sampling.logprob_token_ids:
            return None
        of_model = self.mode.startswith("raw") and sampling.structured_outputs is None
        return _Asked(sampling, sampling.logprobs or 0, sampling.logprob_token_ids, of_model)

    def needs_host(self, sampling: SamplingParams, can: DeviceAbilities) -> bool:
        """Return whether the device cannot report all that is asked.

        Devices report values of the model's logits. With penalties they might be others.
        """
        most, count = can.max_logprobs, sampling.logprobs
        if most is None or count is None or not 0 <= count <= most:
            return True
        is_other = bool(sampling.logprob_token_ids) or sampling.has_penalties
        return is_other or self.mode != "raw_logprobs"

    def prepare(self, rows: LogitRows) -> None:
        """Begin a step."""
        self._drawn, self._accepted = {}, {}

    def apply(self, logits: torch.Tensor, rows: LogitRows, indices: Int64Array) -> None:
        """Keep logits that differ from the model's until tokens are drawn."""
        self._rows = []
        for place, index, asked in self._touched(rows, indices):
            if not asked.of_model:
                self._rows.append((place, int(rows.slots[index]), asked))
        if not self._rows:
            return
        if len(self._kept) < len(self._rows) or self._kept.shape[1:] != logits.shape[1:]:
            self._kept = torch.empty_like(logits)
        for kept, (place, _, asked) in zip(self._kept, self._rows, strict=False):
            kept.copy_(logits[place])
            if self.mode.startswith("processed"):
                _restrict(kept, asked.sampling)

    def note_drawn(self, token_ids: Sequence[int]) -> None:
        """Read the log probabilities of the tokens (n,) of the rows of the last `apply`."""
        if not self._rows:
            return
        places, slots, asked = zip(*self._rows, strict=True)
        tokens = [token_ids[place] for place in places]
        self._note(slots, self._read(self._kept, np.arange(len(tokens)), tokens, asked))

    def read_model(
        self, logits: torch.Tensor, places: IntArray, slots: IntArray, token_ids: Int64Array
    ) -> None:
        """Read the log probabilities that are those of the model's logits, once tokens are drawn.

        Args:
            logits: (N, V), as the model has given them.
            places: (n,) row of each token.
            slots: (n,) slot of each.
            token_ids: (n,) the tokens; negative: there is none.
        """
        rows = [
            (place, slot, token_id, asked)
            for place, slot, token_id in zip(
                places.tolist(), slots.tolist(), token_ids.tolist(), strict=True
            )
            if (asked := self._states.get(slot)) is not None and asked.of_model
        ]
        if rows:
            of_rows, of_slots, tokens, wanted = zip(*rows, strict=True)
            at = np.array(of_rows, dtype=np.int64)
            self._note(of_slots, self._read(logits.contiguous(), at, tokens, wanted))

    def _note(self, slots: Sequence[int], found: list[list[TokenLogprob]]) -> None:
        for slot, position in zip(slots, found, strict=True):
            self._drawn.setdefault(slot, []).append(position)

    def accept(self, slot: int, token_ids: Sequence[int]) -> None:
        """Note the tokens that a row has got."""
        self._accepted[slot] = self._drawn[slot][: len(token_ids)]

    def take(self) -> dict[int, list[list[TokenLogprob]]]:
        """Return the log probabilities of the step's tokens, by slot: a list for each token."""
        found, self._drawn, self._accepted = self._accepted, {}, {}
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
        asked = _Asked(_DEFAULTS, num_likeliest, ())
        found = []
        for start in range(0, len(token_ids), PORTION):
            part = slice(start, start + PORTION)
            logits = compute_logits(hidden[part]).float().contiguous()
            places = np.arange(len(logits))
            found += self._read(logits, places, token_ids[part], [asked] * len(logits))
            # Dropped before the next ones are computed.
            del logits
        return found

    def _read(
        self,
        logits: torch.Tensor,
        places: Int64Array,
        token_ids: Sequence[int],
        asked: Sequence[_Asked],
    ) -> list[list[TokenLogprob]]:
        """Return for each row its token, then the likeliest, or instead the given ones.

        Args:
            logits: (N, V), contiguous.
            places: (n,) which of the N rows.
            token_ids: (n,) its token; negative: there is none, and nothing is returned for it.
            asked: (n,) what is asked of each row.
        """
        vocab = logits.shape[-1]
        given: list[list[int]] = []
        num_likeliest = []
        for token_id, wanted in zip(token_ids, asked, strict=True):
            is_drawn = token_id >= 0
            count = 0 if wanted.token_ids or not is_drawn else wanted.num_likeliest
            given.append([token_id, *wanted.token_ids] if is_drawn else [])
            num_likeliest.append(vocab if count == -1 else min(count, vocab))
        if self._kernels is None or logits.dtype not in (torch.float32, torch.bfloat16):
            copied = logits[torch.from_numpy(places)].float()
            found = _plain_entries(copied, given, num_likeliest)
        else:
            found = read_entries(self._kernels, logits, places, given, num_likeliest)
        counts = np.add([len(tokens) for tokens in given], num_likeliest)
        values = found.values.astype(np.float64)
        if not self.mode.endswith("logits"):
            values -= np.repeat(found.log_sums, counts)
        columns = found.token_ids.tolist(), values.tolist(), found.ranks.tolist()
        entries = map(TokenLogprob, *columns)
        return [list(itertools.islice(entries, count)) for count in counts.tolist()]


def of_device(
    found: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    place: int,
    token_id: int,
    num_likeliest: int,
) -> list[TokenLogprob]:
    """Return the log probability of a token that a device has drawn, then the likeliest ones.

    Args:
        found: As `DeviceLogProbs` of the generators' protocol.
        place: Row of the call.
        token_id: The drawn token.
        num_likeliest: How many of the likeliest are asked for.

    Raises:
        DeviceError: The device has returned fewer, or none for the drawn token.
    """
    if isinstance(found, torch.Tensor):
        values, token_ids = found[place : place + 1].tolist(), [token_id]
        drawn = TokenLogprob(token_id, values[0], UNKNOWN_RANK)
    else:
        values, token_ids = (part[place].tolist() for part in found)
        if token_id not in token_ids:
            raise DeviceError(f"the device gave no log probability of token {token_id}, its draw")
        rank = token_ids.index(token_id) + 1
        drawn = TokenLogprob(token_id, values[rank - 1], rank)
    if len(token_ids) < num_likeliest:
        raise DeviceError(
            f"the device gave log probabilities of {len(token_ids)} tokens, not {num_likeliest}"
        )
    likeliest = zip(token_ids[:num_likeliest], values, itertools.count(1), strict=False)
    return [drawn, *(TokenLogprob(*each) for each in likeliest)]


def _plain_entries(
    logits: torch.Tensor, given: Sequence[list[int]], num_likeliest: Sequence[int]
) -> Entries:
    """Return the same as `read_entries`, without kernels; overwrites the logits."""
    maxima = block_maxima(logits).numpy()
    token_ids: list[Int64Array] = []
    ranks: list[Int64Array] = []
    values: list[Float32Array] = []
    for row, of_blocks, tokens, count in zip(
        logits.numpy(), maxima, given, num_likeliest, strict=True
    ):
        likeliest = best_tokens(row, of_blocks, count)[:count] if count else _NO_TOKENS
        token_ids += [np.array(tokens, dtype=np.int64), likeliest]
        ranks += [np.array([_rank(row, token_id) for token_id in tokens], dtype=np.int64)]
        ranks += [np.arange(1, count + 1)]
        values += [row[part] for part in token_ids[-2:]]
    log_sums = _log_sums(logits, maxima.max(axis=1))
    return Entries(
        np.concatenate(token_ids), np.concatenate(values), np.concatenate(ranks), log_sums
    )


def _log_sums(logits: torch.Tensor, greatest: Float32Array) -> Float64Array:
    """Return the logarithms of the sums of the powers of e, of rows (n, V)."""
    subtracted = np.where(np.abs(greatest) < _SMALL, np.float32(0.0), greatest)
    if subtracted.any():
        logits.sub_(torch.from_numpy(subtracted)[:, None])
    sums = logits.exp_().sum(dim=-1).numpy()
    log_sums: Float64Array = np.log(sums, dtype=np.float64) + subtracted
    return log_sums


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

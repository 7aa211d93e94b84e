"""Host sampling: logits to token ids, by counter-based random numbers.

The random number of a token depends on (seed, output index) alone, so that a request draws the same
numbers if it is chunked, preempted, moved to another engine, or batched with others. The draw
inverts the cumulative distribution in vocabulary order: a change of the last bits of the logits
moves no boundary by more than that, while sorted order could swap whole intervals. Order of
operations: temperature, min-p, top-k, top-p, as in vLLM v1/sample/sampler.py.

The cost of a row depends on its parameters. The vocabulary is divided into blocks: the greatest
value of each bounds the k best from below, so that few blocks are searched for candidates; the sum
of each finds the block that a random number falls into. Only candidates are sorted, and no row's
arithmetic depends on another's.

Dimensions: B slots; R rows; V vocabulary; n rows that are processed together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch

from replicas.sampling_params import GREEDY_EPS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from replicas.sampling.row import SampledRow

    IntArray = npt.NDArray[np.integer[Any]]
    Float32Array = npt.NDArray[np.float32]
    Float64Array = npt.NDArray[np.float64]
    Int64Array = npt.NDArray[np.int64]

NO_DISTRIBUTION = -2
"""Stands for the token of a row whose logits are no distribution: NaN, or infinite."""

NO_ALLOWED_TOKEN = -3
"""Stands for the token of a row whose parameters forbid every token."""

_LOG2_E = 1.4426950408889634

_BLOCK = 256
"""Tokens of a block; the vocabularies in use have at most a few hundred blocks."""

_ELEMENTS_AT_ONCE = 1 << 18
"""Logits that are processed together: 1 MiB as float32, which a core's cache holds with room."""

_FIRST_CANDIDATES = 64
"""Candidates among which the nucleus is searched first; it is seldom larger."""


class SamplingColumns:
    """Parameters of the draws of all B slots, in columns.

    Args:
        max_batch_size: B.

    Attributes:
        temperature: (B,); below 1e-5 takes the most likely token.
        top_k: (B,); 0 or less, or V and more, is off.
        top_p: (B,); 1 is off.
        min_p: (B,); 0 is off.
        seed: (B,) int64, key of each slot's random numbers.
    """

    def __init__(self, max_batch_size: int) -> None:
        self.temperature = np.zeros(max_batch_size, dtype=np.float32)
        self.top_k = np.zeros(max_batch_size, dtype=np.int32)
        self.top_p = np.ones(max_batch_size, dtype=np.float32)
        self.min_p = np.zeros(max_batch_size, dtype=np.float32)
        self.seed = np.zeros(max_batch_size, dtype=np.int64)

    def add(self, row: SampledRow) -> None:
        """Take over the parameters of a row."""
        slot, sampling = row.slot, row.sampling
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = min(sampling.top_k, np.iinfo(np.int32).max)
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = sampling.seed or 0


class LogitChanges(Protocol):
    """What changes rows of logits before tokens are drawn from them, and is given these tokens."""

    def apply(self, logits: torch.Tensor, indices: Int64Array) -> None:
        """Change float32 logits (n, V) in place; `indices` (n,) says which of the rows they are."""

    def note(self, token_ids: Int64Array) -> None:
        """Take the tokens (n,) drawn from the rows of the last `apply`; negative: there is none."""


def sample(
    logits: torch.Tensor,
    columns: SamplingColumns,
    slots: IntArray,
    uniforms: Float64Array,
    places: IntArray | None = None,
    changes: LogitChanges | None = None,
) -> Int64Array:
    """Draw one token per row.

    Args:
        logits: float (N, V); not modified.
        columns: Parameters of every slot.
        slots: (R,) slot of each row.
        uniforms: (R,) in [0, 1), one per row; may be empty where every row is greedy.
        places: (R,) indices of these rows in `logits`; None for all rows. Other rows are not read.
        changes: Changes a copy of each row before its draw, a few rows at a time.

    Returns:
        (R,) token ids; `NO_DISTRIBUTION` for a row with NaN, or whose greatest logit is infinite;
        `NO_ALLOWED_TOKEN` for one in which the changes have left minus infinity alone.
    """
    vocab = logits.shape[-1]
    temperature = columns.temperature[slots]
    places = np.arange(len(logits)) if places is None else places
    is_greedy = temperature < GREEDY_EPS
    token_ids = np.empty(len(places), dtype=np.int64)
    for rows in _portions(np.flatnonzero(is_greedy), vocab):
        values = _rows_of(logits, places[rows])
        if changes is None:
            token_ids[rows] = _most_likely(values.float())
        else:
            values = values.to(torch.float32, copy=True)
            changes.apply(values, rows)
            token_ids[rows] = _most_likely(values)
            changes.note(token_ids[rows])
    if not is_greedy.all():
        top_k, top_p, min_p = columns.top_k[slots], columns.top_p[slots], columns.min_p[slots]
        is_whole = ((top_k <= 0) | (top_k >= vocab)) & (top_p >= 1.0) & (min_p <= 0.0)
        whole = np.flatnonzero(~is_greedy & is_whole)
        if len(whole):
            found = _draw_from_whole(logits, places, whole, temperature, uniforms, changes)
            token_ids[whole] = found
        for rows in np.flatnonzero(~is_greedy & ~is_whole)[:, None]:
            row = int(rows[0])
            limits = Limits(
                int(top_k[row]) if 0 < top_k[row] < vocab else vocab,
                float(top_p[row]),
                float(min_p[row]),
            )
            values = logits[int(places[row])][None].to(torch.float32, copy=True)
            if changes is not None:
                changes.apply(values, rows)
            scaled = values[0].div_(float(temperature[row]))
            token_ids[row] = _draw_restricted(scaled, limits, uniforms[row])
            if changes is not None:
                changes.note(token_ids[rows])
    # Without changes it is the model that gives no token a chance.
    return np.maximum(token_ids, NO_DISTRIBUTION) if changes is None else token_ids


def _portions(rows: Int64Array, vocab: int) -> Iterator[Int64Array]:
    """Yield the rows in portions whose logits fit a core's cache."""
    size = max(1, _ELEMENTS_AT_ONCE // vocab)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _rows_of(logits: torch.Tensor, rows: npt.NDArray[np.integer[Any]]) -> torch.Tensor:
    """Return (n, V); a view if the rows are neighbours, as they mostly are."""
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first + 1 == count and (count <= 2 or bool((np.diff(rows) == 1).all())):
        return logits[first : first + count]
    return logits[torch.from_numpy(rows.astype(np.int64))]


def _by_block(values: torch.Tensor, reduce: Literal["amax", "sum"]) -> torch.Tensor:
    """Reduce (n, V) to (n, ceil(V / block)): one value per block; the last block may be shorter."""
    num_whole = values.shape[-1] // _BLOCK
    whole = values[:, : num_whole * _BLOCK].reshape(len(values), num_whole, _BLOCK)
    parts = [getattr(whole, reduce)(-1)]
    if num_whole * _BLOCK < values.shape[-1]:
        parts.append(getattr(values[:, num_whole * _BLOCK :], reduce)(-1, keepdim=True))
    return torch.cat(parts, dim=-1)


def block_maxima(values: torch.Tensor) -> torch.Tensor:
    """Return the greatest value of each block of (n, V), for `best_tokens`."""
    return _by_block(values, "amax")


def _most_likely(logits: torch.Tensor) -> Int64Array:
    """Return the first greatest token of each row of float32 (n, V).

    NumPy's argmax is ten times as fast as PyTorch's.
    """
    values = logits.numpy()
    found: Int64Array = values.argmax(axis=1)
    return _or_none(found, values[np.arange(len(found)), found])


def _or_none(token_ids: Int64Array, greatest: Float32Array) -> Int64Array:
    """Return the tokens, or what stands for none where a row's maximum is NaN or infinite.

    A row with any NaN has NaN as its maximum, in NumPy and PyTorch.
    """
    is_finite = np.isfinite(greatest)
    if is_finite.all():
        return token_ids
    none = np.where(greatest == -np.inf, NO_ALLOWED_TOKEN, NO_DISTRIBUTION)
    return np.where(is_finite, token_ids, none)


def _draw_from_whole(
    logits: torch.Tensor,
    places: IntArray,
    rows: Int64Array,
    temperature: Float32Array,
    uniforms: Float64Array,
    changes: LogitChanges | None,
) -> Int64Array:
    """Draw a token for each of n rows: first the block by the blocks' sums, then the token in it.

    The weights of the whole vocabulary are computed in one reused buffer. Without changes only the
    blocks' sums are kept, and the weights of all n drawn blocks are computed a second time, by the
    same arithmetic. Changed rows are drawn one by one while the buffer holds them. Weights are
    powers of two, which take a third of the time of powers of e.

    Args:
        logits: As `sample`; so are the other arguments.
        places: (R,).
        rows: (n,) which of the R rows.
        temperature: (R,).
        uniforms: (R,).
        changes: As `sample`.
    """
    count, vocab = len(rows), logits.shape[-1]
    places, uniforms = places[rows], uniforms[rows]
    scale = torch.from_numpy(np.float32(_LOG2_E) / temperature[rows])[:, None]
    greatest = torch.empty(count, 1)
    sums = torch.empty(count, -(-vocab // _BLOCK))
    token_ids = np.empty(count, dtype=np.int64)
    scratch = torch.empty(min(count, max(1, _ELEMENTS_AT_ONCE // vocab)), vocab)
    for at in _portions(np.arange(count), vocab):
        portion = slice(int(at[0]), int(at[-1]) + 1)
        weights = scratch[: len(at)]
        weights.copy_(_rows_of(logits, places[at]))
        if changes is not None:
            changes.apply(weights, rows[portion])
        weights.mul_(scale[portion])
        torch.amax(weights, dim=-1, keepdim=True, out=greatest[portion])
        weights.sub_(greatest[portion]).exp2_()
        sums[portion] = _by_block(weights, "sum")
        if changes is not None:
            drawn = [
                _draw_from_weights(*each)
                for each in zip(
                    weights.numpy(), sums[portion].numpy(), uniforms[portion], strict=True
                )
            ]
            token_ids[portion] = _or_none(np.array(drawn), greatest[portion, 0].numpy())
            changes.note(token_ids[portion])
    if changes is not None:
        return token_ids
    cumulative = sums.numpy().cumsum(axis=-1, dtype=np.float64)
    targets = uniforms * cumulative[:, -1]
    blocks = _indices_of(cumulative, targets)
    before = np.where(blocks > 0, cumulative[np.arange(count), blocks - 1], 0.0)
    columns = blocks[:, None] * _BLOCK + np.arange(min(_BLOCK, vocab))
    inside = columns < vocab
    chosen = logits[torch.from_numpy(places.astype(np.int64))[:, None],
                    torch.from_numpy(np.where(inside, columns, 0))]  # fmt: skip
    weights = chosen.float().mul(scale).sub_(greatest).exp2_()
    within = np.where(inside, weights.numpy(), 0.0).cumsum(axis=-1, dtype=np.float64)
    token_ids = blocks * _BLOCK + _indices_of(within, targets - before)
    return _or_none(token_ids, greatest[:, 0].numpy())


def _draw_from_weights(weights: Float32Array, sums: Float32Array, number: float) -> int:
    """Draw a token from (V,) weights with the sums of their blocks."""
    cumulative = sums.cumsum(dtype=np.float64)
    target = number * cumulative[-1]
    block = _index_of(cumulative, target)
    if block:
        target -= cumulative[block - 1]
    within = weights[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
    return block * _BLOCK + _index_of(within, target)


def _indices_of(cumulative: Float64Array, targets: Float64Array) -> Int64Array:
    """Apply `_index_of` to each of n rows."""
    found = (cumulative <= targets[:, None]).sum(axis=-1)
    last = (cumulative < cumulative[:, -1:]).sum(axis=-1)
    indices: Int64Array = np.minimum(found, last)
    return indices


def _index_of(cumulative: Float64Array, target: float) -> int:
    """Return the index at which a cumulative sum passes the target; never one of weight 0.

    If rounding leaves the sum short of the target, it is the last index of nonzero weight.
    """
    found = int(cumulative.searchsorted(target, side="right"))
    return found if found < len(cumulative) else int(cumulative.searchsorted(cumulative[-1]))


class Limits(NamedTuple):
    """Restrictions of one draw; V, 1 and 0 are off."""

    top_k: int
    top_p: float
    min_p: float


def _draw_restricted(logits: torch.Tensor, limits: Limits, number: float) -> int:
    """Draw a token from float32 (V,), scaled by temperature, among those within all limits."""
    maxima = block_maxima(logits[None]).numpy()[0]
    greatest = maxima.max()
    if not np.isfinite(greatest):
        return NO_ALLOWED_TOKEN if greatest == -np.inf else NO_DISTRIBUTION
    token_ids, weights = _within_limits(logits.numpy(), maxima, limits)
    in_order = token_ids.argsort()
    cumulative = weights[in_order].cumsum()
    return int(token_ids[in_order][_index_of(cumulative, number * cumulative[-1])])


def within_limits(logits: torch.Tensor, limits: Limits) -> Int64Array:
    """Return the tokens of finite float32 (V,), scaled by temperature, that may be drawn."""
    maxima = block_maxima(logits[None]).numpy()[0]
    token_ids, _ = _within_limits(logits.numpy(), maxima, limits)
    return token_ids


def _within_limits(
    values: Float32Array, maxima: Float32Array, limits: Limits
) -> tuple[Int64Array, Float64Array]:
    """Return (n,) the tokens of (V,) within all limits, best first, and their weights."""
    top_k, top_p, min_p = limits
    if top_k < len(values) or min_p > 0.0:
        if top_k < len(values):
            token_ids = best_tokens(values, maxima, top_k)[:top_k]
        else:
            token_ids = _nearbest_tokens(values, maxima, min_p)
        weights = np.exp(values[token_ids].astype(np.float64) - maxima.max())
        # The greatest weight is 1.
        size = int((weights >= min_p).sum())
        token_ids, weights = token_ids[:size], weights[:size]
        total = weights.sum()
    else:
        token_ids, weights, total = _cover(values, maxima, top_p)
    if top_p < 1.0:
        # A token is outside if the mass before it reaches top_p. The first is always inside.
        before = weights.cumsum() - weights
        size = max(1, int(before.searchsorted(np.float64(np.float32(top_p)) * total)))
        token_ids, weights = token_ids[:size], weights[:size]
    return token_ids, weights


def _cover(
    logits: Float32Array, maxima: Float32Array, top_p: float
) -> tuple[Int64Array, Float64Array, float]:
    """Return enough best tokens for the nucleus, their weights, and the weight of all tokens."""
    greatest = maxima.max()
    total = float(np.exp(logits - greatest).sum(dtype=np.float64))
    count = _FIRST_CANDIDATES
    while True:
        token_ids = best_tokens(logits, maxima, count)
        weights = np.exp(logits[token_ids].astype(np.float64) - greatest)
        if weights.sum() >= top_p * total or len(token_ids) == len(logits):
            return token_ids, weights, total
        count *= 8


def _nearbest_tokens(logits: Float32Array, maxima: Float32Array, min_p: float) -> Int64Array:
    """Return at least the tokens of (V,) with `min_p` times the greatest weight, best first."""
    # Rounding of float32 must not drop a token that float64 would keep.
    bound = maxima.max() + np.float32(np.log(min_p)) * np.float32(1.0001) - np.float32(1e-4)
    blocks = np.flatnonzero(maxima >= bound)
    places = (blocks[:, None] * _BLOCK + np.arange(_BLOCK)).reshape(-1)
    places = places[places < len(logits)]
    candidates: Int64Array = places[logits[places] >= bound]
    return candidates[np.argsort(-logits[candidates], kind="stable")]


def best_tokens(logits: Float32Array, maxima: Float32Array, count: int) -> Int64Array:
    """Return at least the `count` best tokens of (V,), best first, the lower id first if equal.

    The `count`-th greatest block maximum is a lower bound: `count` blocks have a token that reaches
    it, so no token below it is among the `count` best.
    """
    if count >= len(maxima):
        candidates = np.arange(len(logits))
        if count < len(logits):
            bound = np.partition(logits, len(logits) - count)[len(logits) - count]
            candidates = np.flatnonzero(logits >= bound)
    else:
        bound = np.partition(maxima, len(maxima) - count)[len(maxima) - count]
        blocks = np.flatnonzero(maxima >= bound)
        if len(blocks) > count:
            # Of equal blocks the first ones: where a grammar allows few tokens, most are equal.
            equal = np.flatnonzero(maxima == bound)[count - np.count_nonzero(maxima > bound) :]
            blocks = np.setdiff1d(blocks, equal, assume_unique=True)
        places = (blocks[:, None] * _BLOCK + np.arange(_BLOCK)).reshape(-1)
        places = places[: len(places) - max(0, int(places[-1]) + 1 - len(logits))]
        candidates = places[logits[places] >= bound]
    return candidates[np.argsort(-logits[candidates], kind="stable")]

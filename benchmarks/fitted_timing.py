"""Cost of a recorded engine's steps: a `StepTiming` fitted on its own turns.

Pure. A turn is one round of the engine's core thread, from the look into the inbox to the last
frame handed out, so that what the process itself costs (Python, sockets' threads, other processes
on the same cores) is inside. Two models, of turns that only decode and of turns with chunks of
prompts; each is a sum of terms with coefficients that are not negative, times a factor. The terms
follow the torch generator: decode rows cost their tokens in the cache, chunks run one by one.

The terms are fitted on what a turn computes, in seconds of the core thread's processor time. On a
machine that others use too, seconds of the clock would mislead: slow minutes are those with long
queues, so that rows would be held to be dear. How much longer a turn takes by the clock, waiting
for a processor or for the interpreter's lock, is kept as a factor, with the tail that it has: every
step takes the factor of some turn, chosen by a hash of the step itself. So a request of many steps
meets the mean, the median step the median, and equal questions still get equal answers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from replicas.engine.step import ModelFacts
from replicas.generators.simulated.timing import LinkTiming

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.generators.simulated.timing import StepTiming

Chunk = tuple[int, int, int]
Row = tuple[int, int]
Floats = NDArray[np.float64]

TERMS = (
    "turn", "row", "context token",
    "chunk", "chunk token", "token pair", "resumed chunk", "masked token pair",
)  # fmt: skip
"""Names of a turn's terms, see `terms`."""
NUM_DECODE_TERMS = 3
"""The first terms; a turn without chunks has no others."""

_NUM_FACTORS = 200
_WORST_FACTOR = 20.0
_U64 = (1 << 64) - 1


class Turn(msgspec.Struct, array_like=True):
    """One turn of a recorded engine.

    Attributes:
        start_s: When the core had read its inbox; monotonic, like all times.
        end_s: When it had handed out its frames.
        chunks: (lane, start, end) of the prompts that it computed.
        rows: (lane, context tokens) of the rows that it decoded.
        device_s: The part inside the generator.
        copy_s: The part that copies KV blocks.
        cpu_s: CPU time of the core thread without copying; at most the turn's seconds.
        moved_kv: Whether the KV connector had anything to do.
    """

    start_s: float = 0.0
    end_s: float = 0.0
    chunks: list[Chunk] = []
    rows: list[Row] = []
    device_s: float = 0.0
    copy_s: float = 0.0
    cpu_s: float = 0.0
    moved_kv: bool = False


class Copy(msgspec.Struct, array_like=True, frozen=True):
    """KV blocks that the core thread read or wrote in one call."""

    direction: Literal["read", "write"]
    start_s: float
    end_s: float
    num_bytes: int


class EngineRecord(msgspec.Struct):
    """An engine process's record of its own run.

    Attributes:
        facts: Of the loaded model.
        turns: Those that did something, in order.
        copies: KV copies, in order.
        wakes_s: When the KV transport woke the core.
        received: When each request was in the inbox, or in the hands of a core that waited.
        sent: (request id, index, when) of tokens, as they are handed to the sending thread.
    """

    facts: ModelFacts | None = None
    turns: list[Turn] = []
    copies: list[Copy] = []
    wakes_s: list[float] = []
    received: dict[str, float] = {}
    sent: list[tuple[str, int, float]] = []


# --- terms ---------------------------------------------------------------------------------------


def terms(chunks: Sequence[Chunk], rows: Sequence[Row]) -> list[float]:
    """Return a turn's amount of each of `TERMS`."""
    num_context = sum(length for _, length in rows)
    values = [1.0, float(len(rows)), float(num_context), float(len(chunks))]
    num_tokens = num_pairs = num_masked = 0.0
    num_resumed = 0
    for _, start, end in chunks:
        length = end - start
        num_tokens += length
        if start:
            num_resumed += 1
            num_masked += length * end
        else:
            num_pairs += length * length / 2
    return [*values, num_tokens, num_pairs, float(num_resumed), num_masked]


# --- fitting -------------------------------------------------------------------------------------


def nnls(a: Floats, b: Floats) -> Floats:
    """The x >= 0 with the least |ax - b|.

    Source: Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23.

    Args:
        a: (n, k).
        b: (n,).

    Returns:
        (k,).
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    x = np.zeros(a.shape[1])
    is_free = np.zeros(a.shape[1], dtype=bool)
    for _ in range(10 * a.shape[1]):
        slope = a.T @ (b - a @ x)
        slope[is_free] = -np.inf
        best = int(np.argmax(slope))
        if slope[best] <= 1e-10 * np.linalg.norm(b):
            break
        is_free[best] = True
        x = _descend(a, b, x, is_free)
    solution: Floats = x / scale
    return solution


def _descend(a: Floats, b: Floats, x: Floats, is_free: NDArray[np.bool_]) -> Floats:
    """Go to the optimum of the free coefficients, fixing those at 0 that would pass below it."""
    while True:
        target = np.zeros_like(x)
        target[is_free] = np.linalg.lstsq(a[:, is_free], b, rcond=None)[0]
        below = is_free & (target <= 0)
        if not below.any():
            return target
        share = float(np.min(x[below] / (x[below] - target[below])))
        x = x + share * (target - x)
        is_free &= x > 1e-12
        x[~is_free] = 0.0


def fit_medians(a: Floats, b: Floats, num_rounds: int = 40) -> Floats:
    """The x >= 0 with the least sum of |b - ax| / ax: as much of `b` is above `ax` as below.

    Found by least squares, with new weights in every round.

    Args:
        a: (n, k).
        b: (n,), positive.
        num_rounds: How often the weights are renewed.

    Returns:
        (k,).
    """
    weights = 1.0 / b
    x = np.zeros(a.shape[1])
    for _ in range(num_rounds):
        x = nnls(a * weights[:, None], b * weights)
        fitted = np.maximum(a @ x, 1e-3 * np.median(b))
        # The weight divides a squared deviation by its size, which leaves its absolute value.
        weights = 1.0 / np.sqrt(fitted * np.maximum(np.abs(b - fitted), 1e-3 * fitted))
    return x


class StepModel(NamedTuple):
    """Seconds of one kind of turn.

    Attributes:
        coefficients: Processor seconds per unit of each term.
        factors: Turns by the clock over their fit, ascending; equally likely.
    """

    coefficients: tuple[float, ...]
    factors: tuple[float, ...]

    def seconds(self, values: Sequence[float], key: int | None) -> float:
        """Seconds of a turn with so much of each term.

        `key` decides which factor it takes; None takes none: processor seconds.
        """
        fitted_s = sum(c * v for c, v in zip(self.coefficients, values, strict=False))
        if key is None:
            return fitted_s
        return fitted_s * self.factors[_mix64(key) * len(self.factors) >> 64]


def fit_steps(turns: Sequence[Turn], host_s: float, *, chunks: bool) -> StepModel:
    """Fit the turns with chunks, or those without.

    Args:
        turns: Of an engine, of any kind.
        host_s: Time of a turn without a step; left out of the model.
        chunks: Which of the two models.
    """
    turns = [t for t in turns if (t.chunks or t.rows) and bool(t.chunks) == chunks]
    num_terms = len(TERMS) if chunks else NUM_DECODE_TERMS
    if not turns:
        return StepModel((0.0,) * num_terms, (1.0,))
    values = np.array([terms(t.chunks, t.rows)[:num_terms] for t in turns])
    cpu_s = np.array([max(t.cpu_s - host_s, 1e-6) for t in turns])
    took_s = np.array([max(t.end_s - t.start_s - t.copy_s - host_s, 1e-6) for t in turns])
    coefficients = fit_medians(values, cpu_s)
    return StepModel(tuple(coefficients.tolist()), _factors(took_s, values @ coefficients))


def _factors(took_s: Floats, fitted_s: Floats) -> tuple[float, ...]:
    ratios = took_s / np.maximum(fitted_s, 1e-9)
    shares = (np.arange(_NUM_FACTORS) + 0.5) / _NUM_FACTORS
    factors: list[float] = np.minimum(np.quantile(ratios, shares), _WORST_FACTOR).tolist()
    return tuple(factors)


def fit_link(copies: Sequence[Copy]) -> LinkTiming:
    """Setup and bandwidth of KV copies, both directions together."""
    if not copies:
        return LinkTiming(0.0, 1e12)
    sizes = np.array([[1.0, c.num_bytes] for c in copies])
    took_s = np.array([max(c.end_s - c.start_s, 1e-6) for c in copies])
    setup_s, byte_s = fit_medians(sizes, took_s)
    return LinkTiming(float(setup_s), 1.0 / max(float(byte_s), 1e-12))


# --- the timing ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTiming:
    """`StepTiming` of a recorded engine; see the module docstring.

    Attributes:
        decode: Turns without chunks.
        mixed: Turns with chunks, and perhaps with rows.
        host_s: See `StepTiming`: a turn without a step, which serves KV transfers only.
        bytes_per_token: See `StepTiming`.
        link: See `StepTiming`.
        host_row_s: See `StepTiming`; 0, the models have it.
        salt: Another one lets every step take another factor.
    """

    decode: StepModel
    mixed: StepModel
    host_s: float
    bytes_per_token: int
    link: LinkTiming
    host_row_s: float = 0.0
    salt: int = 0

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        """See `StepTiming.prefill_s`."""
        return self.mixed_s(chunks, ())

    def decode_s(self, rows: Sequence[Row]) -> float:
        """See `StepTiming.decode_s`."""
        return self.mixed_s((), rows)

    def decode_run_s(self, rows: Sequence[Row], num_steps: int) -> list[float]:
        """See `StepTiming.decode_run_s`."""
        return [self.decode_s([(lane, n + i) for lane, n in rows]) for i in range(num_steps)]

    def mixed_s(self, chunks: Sequence[Chunk], rows: Sequence[Row]) -> float:
        """See `StepTiming.mixed_s`; 0.0 for nothing."""
        if not chunks and not rows:
            return 0.0
        values = terms(chunks, rows)
        key = sum(n for _, n in rows) * 0x1000003 + len(rows) + _mix64(self.salt)
        key = key * 0x1000003 + sum(end * 31 + start for _, start, end in chunks)
        return (self.mixed if chunks else self.decode).seconds(values, key)

    def warm_up_s(self) -> float:
        """See `StepTiming.warm_up_s`."""
        return 0.0


def fit_timing(record: EngineRecord, block_size: int) -> FittedTiming:
    """Fit an engine's timing on its record."""
    assert record.facts is not None
    [kv_group] = record.facts.kv_groups
    idle_s = [t.end_s - t.start_s - t.copy_s for t in record.turns if not t.chunks and not t.rows]
    host_s = float(np.median(idle_s)) if idle_s else 0.0
    return FittedTiming(
        decode=fit_steps(record.turns, host_s, chunks=False),
        mixed=fit_steps(record.turns, host_s, chunks=True),
        host_s=host_s,
        bytes_per_token=kv_group.bytes_per_block // block_size,
        link=fit_link(record.copies),
    )


def with_factors_of(timing: FittedTiming, record: EngineRecord) -> FittedTiming:
    """The same costs on the machine as it was during another record; for a diagnosis."""

    def with_factors(model: StepModel, *, chunks: bool) -> StepModel:
        turns = [t for t in record.turns if (t.chunks or t.rows) and bool(t.chunks) == chunks]
        if not turns:
            return model
        took_s = [max(t.end_s - t.start_s - t.copy_s - timing.host_s, 1e-6) for t in turns]
        values = [terms(t.chunks, t.rows) for t in turns]
        fitted_s = [model.seconds(v, None) for v in values]
        return model._replace(factors=_factors(np.array(took_s), np.array(fitted_s)))

    return dataclasses.replace(
        timing,
        decode=with_factors(timing.decode, chunks=False),
        mixed=with_factors(timing.mixed, chunks=True),
    )


def _mix64(word: int) -> int:
    """Scatter 64-bit words; the finaliser of SplitMix64, Steele et al., OOPSLA 2014."""
    word = (word + 0x9E3779B97F4A7C15) & _U64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _U64
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _U64
    return word ^ word >> 31


if TYPE_CHECKING:  # fails type checking when the class and the protocol part ways

    def _conforms(timing: FittedTiming) -> StepTiming:
        return timing

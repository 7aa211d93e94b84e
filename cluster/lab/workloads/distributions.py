"""Synthetic workloads: arrivals, lengths and shared prefixes drawn from distributions.

A specification is a YAML or JSON file; docs/workloads.md shows one. Prompts that begin alike are
cut from one stream of blocks: the turns of a conversation are ever longer pieces of its stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
import numpy as np
import yaml

from cluster.lab.workloads.errors import WorkloadError
from cluster.lab.workloads.request import TraceRequest, Workload
from cluster.lab.workloads.rows import (
    TokenCount,
    convert_row,
    in_arrival_order,
    random_generator,
    read_text,
    row_error,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    Counts = npt.NDArray[np.int64]
    Seconds = npt.NDArray[np.float64]

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10**8)]

MAX_REQUESTS = 10**8
"""More than this does not fit into memory."""

_MAX_TOKENS = 2**31 - 1
_NUM_GAPS_AT_A_TIME = 4096
# Each purpose has its own stream of random numbers under the seed.
_ARRIVALS, _PROMPTS, _OUTPUTS, _GROUPS, _TURNS, _PAUSES, _QUESTIONS = range(7)


class _Distribution(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag=str.lower,
):
    """A distribution; the key `kind` names its class."""


class Poisson(_Distribution, frozen=True):
    """Independent arrivals, `rate_rps` requests per second."""

    rate_rps: Positive
    cv: ClassVar[float] = 1.0


class Gamma(_Distribution, frozen=True):
    """Gaps of a Gamma distribution.

    Attributes:
        cv: Standard deviation of the gaps over their mean; 1 is Poisson, more is burstier. What
            vLLM's benchmark calls burstiness is the shape of the distribution, 1 / cv².
    """

    rate_rps: Positive
    cv: Annotated[float, msgspec.Meta(gt=0, le=20)]


class ConstantRate(_Distribution, frozen=True, tag="constant"):
    """Equal gaps: `rate_rps` requests per second."""

    rate_rps: Positive
    cv: ClassVar[float] = 0.0


class Ramp(_Distribution, frozen=True):
    """A rate that changes linearly, then stays.

    Attributes:
        end_rps: Rate from `ramp_s` on.
        ramp_s: Seconds that the change takes.
        cv: Coefficient of variation of the gaps, as for `gamma`.
    """

    start_rps: NotNegative
    end_rps: Positive
    ramp_s: Positive
    cv: Annotated[float, msgspec.Meta(ge=0, le=20)] = 1.0


class ConstantLength(_Distribution, frozen=True, tag="constant"):
    """Always `tokens`."""

    tokens: TokenCount


class Uniform(_Distribution, frozen=True):
    """Every length from `min` to `max` is equally likely."""

    min: TokenCount
    max: TokenCount

    def __post_init__(self) -> None:
        _check_bounds(self.min, self.max)


class Lognormal(_Distribution, frozen=True):
    """Many short and a few long ones.

    Attributes:
        mean: In tokens, before lengths are cut at the bounds.
        std: Standard deviation, likewise.
        min: Shorter ones get this length.
        max: Longer ones get this length.
    """

    mean: Positive
    std: NotNegative
    min: TokenCount = 1
    max: TokenCount = _MAX_TOKENS

    def __post_init__(self) -> None:
        _check_bounds(self.min, self.max)


class Empirical(_Distribution, frozen=True):
    """Observed lengths.

    Attributes:
        weights: Frequency of each; equal if left out.
    """

    values: Annotated[tuple[TokenCount, ...], msgspec.Meta(min_length=1)]
    weights: tuple[NotNegative, ...] | None = None

    def __post_init__(self) -> None:
        if self.weights is None:
            return
        if len(self.weights) != len(self.values):
            raise ValueError(f"{len(self.weights)} weights for {len(self.values)} values")
        if not sum(self.weights):
            raise ValueError("weights are all 0")


Arrivals = Poisson | Gamma | ConstantRate | Ramp
Lengths = ConstantLength | Uniform | Lognormal | Empirical


class SharedPrefixes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Groups of requests with a common prefix, such as the same system prompt.

    Attributes:
        prefix_tokens: Length of each prefix; a multiple of the specification's `block_tokens`.
        questions_per_group: Number of questions after each prefix, asked repeatedly in a shuffled
            order. None makes every question a new one, of a group drawn at random.
    """

    groups: Count
    prefix_tokens: TokenCount
    questions_per_group: Count | None = None


class Conversations(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conversations of several turns; `arrivals` then gives the first turns.

    Attributes:
        pause_s: Mean time from one turn's arrival to the next one's, even if the answer takes
            longer.
        pause_cv: Standard deviation of that time over its mean.
    """

    turns: Lengths
    pause_s: Positive
    pause_cv: Annotated[float, msgspec.Meta(ge=0, le=20)] = 1.0


class WorkloadSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A complete specification of a workload.

    Attributes:
        arrivals: Arrivals of requests, or starts of conversations.
        prompt_tokens: Length of a prompt; with prefixes or turns, of its new part.
        num_requests: Number of requests. Set this, `duration_s`, or both; the first limit ends it.
        duration_s: Seconds in which requests arrive.
        prefixes: Groups of requests with a common prefix.
        conversations: Turns of conversations.
        block_tokens: Tokens of a block, the unit in which prompts are equal or not.
        name: Name for reports; None for the file's name.
    """

    arrivals: Arrivals
    prompt_tokens: Lengths
    output_tokens: Lengths
    num_requests: Count | None = None
    duration_s: Positive | None = None
    prefixes: SharedPrefixes | None = None
    conversations: Conversations | None = None
    block_tokens: TokenCount = 16
    name: str | None = None

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration_s is None:
            raise ValueError("set num_requests or duration_s, or the workload never ends")
        if self.prefixes and self.prefixes.prefix_tokens % self.block_tokens:
            raise ValueError(
                f"prefix_tokens {self.prefixes.prefix_tokens} is not a multiple of block_tokens "
                f"{self.block_tokens}"
            )


@dataclass(frozen=True, slots=True)
class _Sessions:
    """Conversations, or single requests, in order of their first arrival.

    Attributes:
        starts_s: First arrival of each, (S,).
        groups: Index of each one's shared prefix, (S,).
        streams: Index of the stream of tokens that follows the prefix, (S,).
    """

    starts_s: Seconds
    groups: Counts
    streams: Counts
    num_turns: Counts


def read_distributions(path: Path, seed: int = 0) -> Workload:
    """Draw the workload of a specification.

    Raises:
        WorkloadError: The file is malformed, or nothing arrives.
    """
    spec = convert_row(_read_values(path), WorkloadSpec, path)
    if spec.duration_s and _expected(spec.arrivals, spec.duration_s) > MAX_REQUESTS:
        raise WorkloadError(f"asks for more than {MAX_REQUESTS} requests; lower it", path=str(path))
    requests = in_arrival_order(_draw_requests(spec, seed), path)
    return Workload(spec.name or path.stem, requests[: spec.num_requests], spec.block_tokens)


def _read_values(path: Path) -> object:
    """Parse a YAML or JSON file, without checks."""
    text = read_text(path)
    try:
        # YAML is not quite a superset of JSON: it takes 1e-3 for text.
        return msgspec.json.decode(text) if path.suffix == ".json" else yaml.safe_load(text)
    except msgspec.DecodeError as error:
        raise row_error(error, path, None) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise WorkloadError(
            f"is not YAML: {getattr(error, 'problem', None) or error}; correct it",
            path=str(path),
            line=mark.line + 1 if mark else None,
        ) from None


def _draw_requests(spec: WorkloadSpec, seed: int) -> Iterator[TraceRequest]:
    """Yield all turns of all conversations, one conversation after the other."""
    sessions = _draw_sessions(spec, seed)
    num_requests = int(sessions.num_turns.sum())
    ends = np.cumsum(sessions.num_turns)
    firsts = ends - sessions.num_turns
    asked = _draw_lengths(spec.prompt_tokens, num_requests, random_generator(seed, _PROMPTS))
    answered = _draw_lengths(spec.output_tokens, num_requests, random_generator(seed, _OUTPUTS))
    waited_s = np.zeros(num_requests)
    if spec.conversations:
        random = random_generator(seed, _PAUSES)
        gaps = _draw_gaps(spec.conversations.pause_cv, num_requests, random)
        waited_s = np.cumsum(gaps * spec.conversations.pause_s)
    if spec.prefixes and spec.prefixes.questions_per_group:
        # The same question has the same length whenever it is asked.
        num_questions = spec.prefixes.groups * spec.prefixes.questions_per_group
        random = random_generator(seed, _QUESTIONS)
        lengths = _draw_lengths(spec.prompt_tokens, num_questions, random)
        asked[firsts] = lengths[sessions.streams]
    session_of = np.repeat(np.arange(len(firsts)), sessions.num_turns)
    history = np.cumsum(asked + answered) - answered
    history -= (history - asked)[firsts][session_of]
    arrivals_s = sessions.starts_s[session_of] + waited_s - waited_s[firsts][session_of]
    blocks = _PromptBlocks(spec, int(history.max(initial=0)))
    for session, arrival_s, num_new, num_output in zip(
        session_of.tolist(), arrivals_s.tolist(), history.tolist(), answered.tolist(), strict=True
    ):
        if spec.duration_s is None or arrival_s < spec.duration_s:
            ids = blocks.of(int(sessions.groups[session]), int(sessions.streams[session]), num_new)
            yield TraceRequest(arrival_s, blocks.prefix_tokens + num_new, num_output, ids)


class _PromptBlocks:
    """The numbering of prompts' blocks: first those of all prefixes, then those of all streams."""

    def __init__(self, spec: WorkloadSpec, max_new_tokens: int) -> None:
        prefixes = spec.prefixes
        self.prefix_tokens = prefixes.prefix_tokens if prefixes else 0
        self._block_tokens = spec.block_tokens
        self._num_prefix_blocks = self.prefix_tokens // spec.block_tokens
        self._first_of_streams = self._num_prefix_blocks * (prefixes.groups if prefixes else 0)
        self._stride = -(-max_new_tokens // spec.block_tokens)
        # A new question that no later request shares needs no block ids.
        self._has_streams = spec.conversations is not None or (
            prefixes is not None and prefixes.questions_per_group is not None
        )

    def of(self, group: int, stream: int, num_new_tokens: int) -> tuple[int, ...]:
        """Return the block ids of a prompt: the group's prefix, then the stream's first blocks."""
        start = group * self._num_prefix_blocks
        prefix = range(start, start + self._num_prefix_blocks)
        if not self._has_streams:
            return tuple(prefix)
        start = self._first_of_streams + stream * self._stride
        return (*prefix, *range(start, start - (-num_new_tokens // self._block_tokens)))


def _draw_sessions(spec: WorkloadSpec, seed: int) -> _Sessions:
    starts_s = _draw_arrivals(spec, random_generator(seed, _ARRIVALS))
    num_sessions = len(starts_s)
    streams = np.arange(num_sessions)
    groups = np.zeros(num_sessions, dtype=np.int64)
    random = random_generator(seed, _GROUPS)
    if spec.prefixes and spec.prefixes.questions_per_group:
        num_questions = spec.prefixes.groups * spec.prefixes.questions_per_group
        streams = random.permutation(num_questions)[streams % num_questions]
        groups = streams // spec.prefixes.questions_per_group
    elif spec.prefixes:
        groups = random.integers(spec.prefixes.groups, size=num_sessions)
    num_turns = np.ones(num_sessions, dtype=np.int64)
    if spec.conversations:
        turns = spec.conversations.turns
        num_turns = _draw_lengths(turns, num_sessions, random_generator(seed, _TURNS))
    return _Sessions(starts_s, groups, streams, num_turns)


def _draw_arrivals(spec: WorkloadSpec, random: np.random.Generator) -> Seconds:
    """Draw sorted arrivals: `num_requests`, or enough to fill `duration_s`.

    Gaps have mean 1 and are then stretched by the rate at their time, so burstiness does not depend
    on the rate.
    """
    arrivals = spec.arrivals
    num_wanted = math.inf if spec.num_requests is None else spec.num_requests
    end = math.inf if spec.duration_s is None else _expected(arrivals, spec.duration_s)
    parts: list[Seconds] = []
    last, num_drawn = 0.0, 0
    while last < end and num_drawn < num_wanted:
        parts.append(last + np.cumsum(_draw_gaps(arrivals.cv, _NUM_GAPS_AT_A_TIME, random)))
        last, num_drawn = float(parts[-1][-1]), num_drawn + _NUM_GAPS_AT_A_TIME
    ordinals = np.concatenate(parts)[: spec.num_requests]
    return _times_of(arrivals, ordinals)


def _draw_gaps(cv: float, num_gaps: int, random: np.random.Generator) -> Seconds:
    """Draw gaps of mean 1 with the given coefficient of variation."""
    if not cv:
        return np.ones(num_gaps)
    shape = 1 / cv**2
    return random.standard_gamma(shape, num_gaps) / shape


def _expected(arrivals: Arrivals, time_s: float) -> float:
    """Return the mean number of arrivals until `time_s`."""
    if not isinstance(arrivals, Ramp):
        return arrivals.rate_rps * time_s
    ramped_s = min(time_s, arrivals.ramp_s)
    slope = (arrivals.end_rps - arrivals.start_rps) / arrivals.ramp_s
    in_ramp = (arrivals.start_rps + slope * ramped_s / 2) * ramped_s
    return in_ramp + arrivals.end_rps * (time_s - ramped_s)


def _times_of(arrivals: Arrivals, ordinals: Seconds) -> Seconds:
    """Return when the mean number of arrivals reaches each ordinal: the inverse of `_expected`."""
    if not isinstance(arrivals, Ramp):
        return ordinals / arrivals.rate_rps
    at_end = _expected(arrivals, arrivals.ramp_s)
    slope = (arrivals.end_rps - arrivals.start_rps) / arrivals.ramp_s
    inside = np.minimum(ordinals, at_end)
    # The root of the quadratic in a form that also holds for a slope of 0.
    rates_rps = np.sqrt(np.maximum(arrivals.start_rps**2 + 2 * slope * inside, 0.0))
    in_ramp_s = 2 * inside / (arrivals.start_rps + rates_rps)
    return in_ramp_s + (ordinals - inside) / arrivals.end_rps


def _draw_lengths(lengths: Lengths, num: int, random: np.random.Generator) -> Counts:
    """Draw `num` lengths of at least 1; shape (num,)."""
    if isinstance(lengths, ConstantLength):
        return np.full(num, lengths.tokens, dtype=np.int64)
    if isinstance(lengths, Uniform):
        return random.integers(lengths.min, lengths.max, size=num, endpoint=True)
    if isinstance(lengths, Lognormal):
        variance = math.log1p((lengths.std / lengths.mean) ** 2)
        mu = math.log(lengths.mean) - variance / 2
        drawn = np.rint(random.lognormal(mu, math.sqrt(variance), num))
        return np.clip(drawn, lengths.min, lengths.max).astype(np.int64)
    weights = np.array(lengths.weights or (1.0,) * len(lengths.values))
    return random.choice(np.array(lengths.values), num, p=weights / weights.sum())


def _check_bounds(least: int, most: int) -> None:
    if least > most:
        raise ValueError(f"min {least} is above max {most}")

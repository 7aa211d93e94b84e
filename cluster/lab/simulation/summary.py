"""Computes a run's figures from its records: latencies, goodput, reuse, utilisation. Pure.

Equal records give equal summaries and equal bytes of JSON, so a summary has no wall time.
docs/simulator-results.md explains each figure, too.

Latencies are measured from the scheduled arrival, so they include delays of a busy router. They
cover successful requests only: a failed request counts against attainment instead. The definitions
of TTFT, TPOT, ITL and goodput are those of inference-perf and of vLLM's `bench serve`; TBT is
Mooncake's.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from cluster.lab.simulation.records import OK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from cluster.lab.simulation.records import ReplicaRecord, RequestRecord, SimulationResult

    Floats = NDArray[np.float64]

PERCENTS: Final = (50, 90, 95, 99)

MIN_SAMPLES_ABOVE: Final = 10
"""A percentile with fewer samples above it is uncertain: P99 needs 1,000 samples, P50 needs 20."""

SLO_SCALES: Final = (
    *(0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0),
    *(1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0),
)
"""The scales at which a summary gives attainment; 1 stands for the given objectives."""


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The objectives of a good request; None for no objective.

    Attributes:
        ttft_s: Longest time to the first token.
        tpot_s: Longest mean time per further token.
        e2e_s: Longest time to the last token.

    Raises:
        ValueError: An objective is not positive.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            bound = getattr(self, name)
            if bound is not None and not bound > 0:
                raise ValueError(f"{name} must be more than 0, not {bound}")


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a set of samples, in seconds; all None without samples.

    Percentiles are by nearest rank: the smallest sample that at least that share of the samples
    does not exceed. So each is a sample, never interpolated.

    Attributes:
        p50: The median, by nearest rank; `p90`, `p95` and `p99` likewise.
        uncertain: Names of the percentiles with fewer than `MIN_SAMPLES_ABOVE` samples above them.
    """

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None
    uncertain: tuple[str, ...] = ()


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes and rates of the requests.

    Attributes:
        num_ok: Requests that got every token.
        success_rate: ok / sent; None when none was sent.
        failures: Number of other requests, by outcome.
        num_retries: Restarts of all requests.
        offered_per_s: Arrivals per second between the first and the last; None for fewer than two.
        completed_per_s: ok / duration.
        output_tokens_per_s: Output tokens of the ok requests / duration.
    """

    num_sent: int
    num_ok: int
    success_rate: float | None
    failures: dict[str, int]
    num_retries: int
    offered_per_s: float | None
    completed_per_s: float | None
    output_tokens_per_s: float | None


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the ok requests.

    Attributes:
        ttft_s: First token - arrival.
        tpot_s: (E2E - TTFT) / (tokens - 1) of each request; 0 for one token.
        itl_s: Every gap between two tokens of a request, all requests together.
        tbt_s: Mean of the longest tenth of a request's gaps (rounded up); one for each request.
        e2e_s: Last token - arrival.
        queued_s: Time in a router's queue.
    """

    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    tbt_s: Distribution
    e2e_s: Distribution
    queued_s: Distribution


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that kept every objective. A request that failed kept none.

    Attributes:
        num_good: Number of these requests.
        attainment: good / sent; None when none was sent.
        good_per_s: good / duration.
        scales: Factors on all objectives at once, ascending.
        attainments: Attainment at each of these; empty when none was sent.
        scale_at_90: The smallest factor with which 9 in 10 of the sent requests are good; None when
            more than 1 in 10 failed.
    """

    slo: Slo
    num_good: int
    attainment: float | None
    good_per_s: float | None
    scales: tuple[float, ...]
    attainments: tuple[float, ...]
    scale_at_90: float | None


class PrefixReuse(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens of the ok requests, and how many of them were cached.

    Attributes:
        num_cached_tokens: Tokens from the prefix cache.
        hit_share: cached / prompt tokens; None when there are no prompts.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    hit_share: float | None


class TransferSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The time that KV transfers added to the ok requests that had one.

    Measured from the first token until all KV is at the decode engine. The part that overlaps with
    prefill does not count, and TTFT does not include it.

    Attributes:
        seconds: One sample for each request with a transfer.
        total_s: Their sum.
        share_of_e2e: total / sum of these requests' E2E; None when that is 0.
    """

    seconds: Distribution
    total_s: float
    share_of_e2e: float | None


class ReplicaSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a replica, until its end.

    Attributes:
        lived_s: Seconds from then to its stop, or to the end of the run.
        utilisation: Seconds in steps / lived; None when it lived for no time.
        slot_occupancy: Slot-seconds in use / (slots * lived); None without slots or time.
        num_preemptions: Requests that lost their blocks and were computed again.
    """

    name: str
    role: str
    started_s: float
    lived_s: float
    utilisation: float | None
    slot_occupancy: float | None
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int


class PoolSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All replicas of one role.

    Attributes:
        num_replicas: Number of distinct names; restarts do not count.
        utilisation: Sum of seconds in steps / sum of seconds lived.
        slot_occupancy: Sum of slot-seconds in use / sum of slots * seconds lived.
        imbalance: Largest / mean of the tokens (computed prompt and output) of its replicas: 1 is
            balanced; the number of replicas means that one did everything. None without tokens. A
            replica that started late counts as if it had been idle before.
    """

    role: str
    num_replicas: int
    utilisation: float | None
    slot_occupancy: float | None
    imbalance: float | None
    num_preemptions: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of one run's report, except its real duration.

    Attributes:
        schema_version: Increases when a figure changes its name or meaning, not for new figures.
        workload: As in `SimulationResult`, like `policy`, `num_replicas`, `seed`, `speed_up`,
            `config`, `duration_s` and `num_events`.
        goodput: None without objectives.
        replicas: One for each start of a replica, in the order of the records.
    """

    workload: str
    policy: str
    num_replicas: int
    seed: int
    speed_up: float
    config: dict[str, str | int | float | bool]
    duration_s: float
    num_events: int
    requests: RequestSummary
    latencies: Latencies
    goodput: Goodput | None
    prefix: PrefixReuse
    transfers: TransferSummary
    pools: tuple[PoolSummary, ...]
    replicas: tuple[ReplicaSummary, ...]
    schema_version: int = 1


class Samples(NamedTuple):
    """The samples of `Latencies`: ok requests with a token, float64, in the records' order.

    `itl_s` has the shape [gaps], all requests one after another; `tbt_s` has the shape [requests
    with two tokens or more], all others [requests].
    """

    ttft_s: Floats
    tpot_s: Floats
    itl_s: Floats
    tbt_s: Floats
    e2e_s: Floats
    queued_s: Floats


def summarise(result: SimulationResult, slo: Slo | None = None) -> Summary:
    """Compute a run's figures; without objectives there is no goodput."""
    records = result.records
    samples = collect_samples(records)._asdict()
    lives = [_life(replica, result.duration_s) for replica in result.replicas]
    return Summary(
        workload=result.workload,
        policy=result.policy,
        num_replicas=result.num_replicas,
        seed=result.seed,
        speed_up=float(result.speed_up),
        config=dict(result.config),
        duration_s=float(result.duration_s),
        num_events=result.num_events,
        requests=_requests(records, result.duration_s),
        latencies=Latencies(**{name: distribution(values) for name, values in samples.items()}),
        goodput=None if slo is None or slo == Slo() else _goodput(result, slo),
        prefix=_prefix(records),
        transfers=_transfers(records),
        pools=_pools(lives),
        replicas=tuple(_replica(life) for life in lives),
    )


def to_json(summary: Summary) -> bytes:
    """Encode a summary as indented UTF-8 JSON with a final newline, without NaN."""
    encoded = msgspec.json.encode(summary, order="deterministic")
    return msgspec.json.format(encoded, indent=2) + b"\n"


def collect_samples(records: Iterable[RequestRecord]) -> Samples:
    """Collect the latencies of the successful requests."""
    served = _served(records)
    gaps = [np.diff(r.token_times_s) for r in served if r.token_times_s.size > 1]
    ttft_s, tpot_s, e2e_s = _per_request(served)
    return Samples(
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=e2e_s,
        queued_s=_floats(r.queued_s for r in served),
        itl_s=np.concatenate(gaps) if gaps else _floats(()),
        tbt_s=_floats(_mean_of_longest_tenth(g) for g in gaps),
    )


def distribution(samples: Floats) -> Distribution:
    """Compute the statistics of samples; shape [samples], any order."""
    count = int(samples.size)
    if count == 0:
        return Distribution(count=0)
    ascending = np.sort(samples)
    return Distribution(
        count=count,
        mean=float(ascending.sum()) / count,
        **{f"p{percent}": nearest_rank(ascending, percent) for percent in PERCENTS},
        max=float(ascending[-1]),
        uncertain=tuple(
            f"p{percent}"
            for percent in PERCENTS
            if count * (100 - percent) < 100 * MIN_SAMPLES_ABOVE
        ),
    )


def nearest_rank(ascending: Floats, percent: int) -> float:
    """Return the smallest sample that at least `percent` % of the samples do not exceed.

    Args:
        ascending: Sorted samples, at least one; shape [samples].
        percent: 1 to 100.
    """
    assert ascending.size, "no samples"
    assert 1 <= percent <= 100, f"{percent=}"
    # Integer arithmetic: as a float, 0.95 * 20 may be slightly above 19, giving the next rank.
    rank = -(-percent * int(ascending.size) // 100)
    return float(ascending[rank - 1])


def slo_ratios(records: Sequence[RequestRecord], slo: Slo) -> Floats:
    """Return the largest latency / objective of each sent request, ascending; shape [requests].

    A request is good if all objectives are multiplied by at least its ratio. The ratio of a failed
    request is infinite.
    """
    latencies_s = _per_request(_served(records))
    worst = np.zeros(latencies_s[0].size)
    for latency_s, bound_s in zip(latencies_s, (slo.ttft_s, slo.tpot_s, slo.e2e_s), strict=True):
        if bound_s is not None:
            worst = np.maximum(worst, latency_s / bound_s)
    ratios = np.full(len(records), np.inf)
    ratios[: worst.size] = worst
    return np.sort(ratios)


def attainment_curve(ratios: Floats, scales: Sequence[float] | Floats) -> Floats:
    """Return good / sent at each scale of the objectives; 0 if none was sent.

    Args:
        ratios: From `slo_ratios`.
        scales: Factors on all objectives at once; shape [scales].
    """
    num_good: NDArray[np.int64] = np.searchsorted(ratios, scales, side="right")
    return num_good / max(ratios.size, 1)


def _requests(records: Sequence[RequestRecord], duration_s: float) -> RequestSummary:
    outcomes = Counter(r.outcome for r in records)
    num_ok = outcomes.pop(OK, 0)
    arrivals = sorted(r.arrival_s for r in records)
    between_s = arrivals[-1] - arrivals[0] if arrivals else 0.0
    num_tokens = sum(int(r.token_times_s.size) for r in records if r.outcome == OK)
    return RequestSummary(
        num_sent=len(records),
        num_ok=num_ok,
        success_rate=_ratio(num_ok, len(records)),
        failures=dict(sorted(outcomes.items())),
        num_retries=sum(r.num_retries for r in records),
        offered_per_s=_ratio(len(records) - 1, between_s),
        completed_per_s=_ratio(num_ok, duration_s),
        output_tokens_per_s=_ratio(num_tokens, duration_s),
    )


def _goodput(result: SimulationResult, slo: Slo) -> Goodput:
    ratios = slo_ratios(result.records, slo)
    num_good = int(np.searchsorted(ratios, 1.0, side="right"))
    at_90 = nearest_rank(ratios, 90) if ratios.size else np.inf
    return Goodput(
        slo=slo,
        num_good=num_good,
        attainment=_ratio(num_good, len(result.records)),
        good_per_s=_ratio(num_good, result.duration_s),
        scales=SLO_SCALES,
        attainments=tuple(attainment_curve(ratios, SLO_SCALES).tolist()) if ratios.size else (),
        scale_at_90=at_90 if np.isfinite(at_90) else None,
    )


def _prefix(records: Iterable[RequestRecord]) -> PrefixReuse:
    served = [r for r in records if r.outcome == OK]
    num_prompt_tokens = sum(r.num_prompt_tokens for r in served)
    num_cached_tokens = sum(r.num_cached_tokens for r in served)
    return PrefixReuse(
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        hit_share=_ratio(num_cached_tokens, num_prompt_tokens),
    )


def _transfers(records: Iterable[RequestRecord]) -> TransferSummary:
    moved = [r for r in _served(records) if r.transfer_s is not None]
    _, _, e2e_s = _per_request(moved)
    seconds = _floats(r.transfer_s for r in moved if r.transfer_s is not None)
    # Sum in ascending order, so that the order of the records does not change the last bits.
    total_s, total_e2e_s = (float(np.sort(samples).sum()) for samples in (seconds, e2e_s))
    share = _ratio(total_s, total_e2e_s)
    return TransferSummary(seconds=distribution(seconds), total_s=total_s, share_of_e2e=share)


class _Life(NamedTuple):
    """A replica's record, and how long it ran."""

    record: ReplicaRecord
    lived_s: float


def _life(record: ReplicaRecord, end_s: float) -> _Life:
    stopped_s = end_s if record.stopped_s is None else record.stopped_s
    return _Life(record, max(0.0, float(stopped_s) - float(record.started_s)))


def _replica(life: _Life) -> ReplicaSummary:
    record, lived_s = life
    utilisation, slot_occupancy = _usage([life])
    return ReplicaSummary(
        name=record.name,
        role=record.role,
        started_s=float(record.started_s),
        lived_s=lived_s,
        utilisation=utilisation,
        slot_occupancy=slot_occupancy,
        num_steps=record.num_steps,
        num_prompt_tokens=record.num_prompt_tokens,
        num_output_tokens=record.num_output_tokens,
        num_preemptions=record.num_preemptions,
    )


def _pools(lives: Sequence[_Life]) -> tuple[PoolSummary, ...]:
    roles = sorted({record.role for record, _ in lives})
    return tuple(_pool(role, [x for x in lives if x.record.role == role]) for role in roles)


def _pool(role: str, lives: Sequence[_Life]) -> PoolSummary:
    num_tokens: Counter[str] = Counter()
    for record, _ in lives:
        num_tokens[record.name] += record.num_prompt_tokens + record.num_output_tokens
    utilisation, slot_occupancy = _usage(lives)
    return PoolSummary(
        role=role,
        num_replicas=len(num_tokens),
        utilisation=utilisation,
        slot_occupancy=slot_occupancy,
        imbalance=_ratio(max(num_tokens.values()) * len(num_tokens), num_tokens.total()),
        num_preemptions=sum(record.num_preemptions for record, _ in lives),
    )


def _usage(lives: Sequence[_Life]) -> tuple[float | None, float | None]:
    """Return utilisation and slot occupancy of all starts together."""
    slot_s = sum(record.num_slots * lived_s for record, lived_s in lives)
    return (
        _ratio(sum(record.busy_s for record, _ in lives), sum(lived_s for _, lived_s in lives)),
        _ratio(sum(record.slot_busy_s for record, _ in lives), slot_s),
    )


def _served(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    return [r for r in records if r.outcome == OK and r.token_times_s.size]


def _per_request(served: Sequence[RequestRecord]) -> tuple[Floats, Floats, Floats]:
    """Return TTFT, TPOT and E2E of requests that have a token, each of shape [requests]."""
    arrival_s = _floats(r.arrival_s for r in served)
    ttft_s = _floats(r.token_times_s[0] for r in served) - arrival_s
    e2e_s = _floats(r.token_times_s[-1] for r in served) - arrival_s
    num_gaps = _floats(r.token_times_s.size - 1 for r in served)
    # One token: E2E is TTFT, and any divisor gives 0.
    return ttft_s, (e2e_s - ttft_s) / np.maximum(num_gaps, 1), e2e_s


def _mean_of_longest_tenth(gaps_s: Floats) -> float:
    count = -(-int(gaps_s.size) // 10)
    return float(np.sort(gaps_s)[-count:].sum() / count)


def _floats(values: Iterable[float]) -> Floats:
    return np.fromiter(values, dtype=np.float64)


def _ratio(part: float, whole: float) -> float | None:
    """Return part / whole, or None if the whole is 0."""
    return float(part) / float(whole) if whole > 0 else None

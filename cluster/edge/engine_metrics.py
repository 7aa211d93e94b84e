"""Engines' counters as Prometheus text; vLLM's metric names where they exist, else `ttserve_`.

Engines count, an ingress asks them when it is scraped. So any ingress shows every engine, and each
series is labelled by pool and replica, many by DP group too. The ingress's own metrics are in
`cluster.routing.metrics`.
"""

from __future__ import annotations

import itertools
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import asdict
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kv_transfer.connector import STAGE_BOUNDS_S
from kv_transfer.errors import FailureReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client.core import Metric

    from cluster.routing.pools import Member
    from kv_transfer.connector import TransferStats
    from replicas.messages import EngineMetrics, GroupCounters

    _Kind = type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]
    _Samples = Iterable[tuple[Any, ...]]

ENGINE_LABELS = ("model_name", "pool", "replica")


def render_engine_metrics(
    engines: Sequence[tuple[Member, EngineMetrics]], model_name: str
) -> bytes:
    """Return the metrics of engines in Prometheus' text format."""
    return generate_latest(_EngineCollector(engines, model_name))


class _EngineCollector(Collector):
    """A collector of the counters of some engines."""

    def __init__(self, engines: Sequence[tuple[Member, EngineMetrics]], model_name: str) -> None:
        self._engines = [_EngineSample(member, metrics) for member, metrics in engines]
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        for family in FAMILIES:
            metric = family.kind(family.name, family.text, labels=ENGINE_LABELS + family.labels)
            for engine in self._engines:
                own = (self._model_name, engine.member.pool, engine.member.replica_id)
                for labels, *values in family.samples(engine):
                    metric.add_metric((*own, *labels), *values)
            yield metric


class _EngineSample(NamedTuple):
    """One engine and its counters."""

    member: Member
    metrics: EngineMetrics


class Family(NamedTuple):
    """A family of engine metrics.

    Attributes:
        kind: Class of the family.
        name: Name without the suffix that the kind adds.
        text: Help text.
        samples: Returns the samples of one engine: values of `labels`, then the other arguments of
            `kind.add_metric`.
        labels: Names of the labels beside `ENGINE_LABELS`.
    """

    kind: _Kind
    name: str
    text: str
    samples: Callable[[_EngineSample], _Samples]
    labels: tuple[str, ...] = ()


def _of_groups(kind: _Kind, *rows: tuple[str, str, str]) -> Iterable[Family]:
    """Yield a family for each row of (name, text, field of `GroupCounters`)."""
    for name, text, field in rows:
        yield Family(kind, name, text, partial(_each_group, attrgetter(field)), ("dp_group",))


def _of_engines(kind: _Kind, owner: str, *rows: tuple[str, str, str]) -> Iterable[Family]:
    """Yield a family for each row of (name, text, field).

    `owner` is the path from an `_EngineSample` to the object that has the field.
    """
    for name, text, field in rows:
        yield Family(kind, name, text, partial(_alone, attrgetter(f"{owner}.{field}")))


def _each_group(value: Callable[[GroupCounters], float], engine: _EngineSample) -> _Samples:
    for index, group in enumerate(engine.metrics.groups):
        yield (str(index),), value(group)


def _alone(value: Callable[[_EngineSample], float], engine: _EngineSample) -> _Samples:
    yield (), value(engine)


def _kv_usage(group: GroupCounters) -> float:
    """Return the share of used blocks in the fullest KV group of a DP group."""
    blocks = zip(group.num_free_blocks, group.num_blocks, strict=True)
    return 1.0 - min(num_free / num_blocks for num_free, num_blocks in blocks)


def _each_kv_group(field: str, engine: _EngineSample) -> _Samples:
    for index, group in enumerate(engine.metrics.groups):
        for kv_group, value in enumerate(getattr(group, field)):
            yield (str(index), str(kv_group)), value


def _block_bytes(engine: _EngineSample) -> _Samples:
    for index, kv_group in enumerate(engine.member.description.kv_groups):
        yield (str(index),), kv_group.bytes_per_block


def _finished(engine: _EngineSample) -> _Samples:
    for index, group in enumerate(engine.metrics.groups):
        for reason, count in group.requests_finished.items():
            yield (str(index), reason), count


def _host_parts(engine: _EngineSample) -> _Samples:
    for part, seconds in asdict(engine.metrics.host_seconds).items():
        yield (part,), seconds


def _accepted_drafts(engine: _EngineSample) -> _Samples:
    for position, count in enumerate(engine.metrics.drafts.num_accepted_tokens_per_pos):
        yield (str(position),), count


def _expert_tokens(engine: _EngineSample) -> _Samples:
    for expert, count in enumerate(engine.metrics.experts.num_tokens):
        yield (str(expert),), count


def _transfers(engine: _EngineSample) -> _Samples:
    stats = engine.metrics.transfer
    for path, counts in stats.paths.items():
        yield ("producer", path, "ok"), counts.num_sent
        yield ("consumer", path, "ok"), counts.num_received
    # A transfer that failed may have failed before a path was chosen.
    for role, reasons in _reasons(stats):
        num_cancelled = reasons.get(FailureReason.CANCELLED.value, 0)
        yield (role, "", "cancelled"), num_cancelled
        yield (role, "", "failed"), sum(reasons.values()) - num_cancelled


def _failures(engine: _EngineSample) -> _Samples:
    for role, reasons in _reasons(engine.metrics.transfer):
        for reason, count in reasons.items():
            # A cancelled transfer is no failure: its request had ended.
            if reason != FailureReason.CANCELLED.value:
                yield (role, reason), count


def _reasons(stats: TransferStats) -> tuple[tuple[str, dict[str, int]], ...]:
    """Return for each role the counts of unsuccessful transfers by reason."""
    return ("producer", stats.send_failures), ("consumer", stats.receive_failures)


def _transferred_bytes(engine: _EngineSample) -> _Samples:
    for path, counts in engine.metrics.transfer.paths.items():
        yield ("producer", path), counts.bytes_sent
        yield ("consumer", path), counts.bytes_received


def _leases(engine: _EngineSample) -> _Samples:
    for event, count in engine.metrics.transfer.leases.items():
        yield (event,), count


def _stages(engine: _EngineSample) -> _Samples:
    """Yield for each stage its cumulative counts by bound, as the text format wants, and sum."""
    bounds = [*map(floatToGoString, STAGE_BOUNDS_S), "+Inf"]
    for stage, histogram in engine.metrics.transfer.stages.items():
        counts = itertools.accumulate(histogram.counts)
        yield (stage,), list(zip(bounds, counts, strict=True)), histogram.total_s


def _inflight(engine: _EngineSample) -> _Samples:
    yield ("producer",), engine.metrics.transfer.num_inflight_sends
    yield ("consumer",), engine.metrics.transfer.num_inflight_loads


FAMILIES = (
    *_of_groups(
        GaugeMetricFamily,
        ("vllm:num_requests_running", "Sequences that are being computed", "num_running"),
    ),
    Family(
        GaugeMetricFamily, "vllm:kv_cache_usage_perc",
        "Share of KV blocks in use, 0 to 1, of the fullest KV group",
        partial(_each_group, _kv_usage), ("dp_group",),
    ),
    *_of_groups(
        CounterMetricFamily,
        ("vllm:prompt_tokens", "Prompt tokens of requests that got their first token here",
         "prompt_tokens"),
        ("vllm:generation_tokens", "Tokens sampled", "generation_tokens"),
        ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache",
         "prefix_cache_queries"),
        ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", "prefix_cache_hits"),
        ("vllm:num_preemptions", "Sequences that were preempted and lost their KV blocks",
         "num_preemptions"),
        ("ttserve_kv_window_blocks_freed",
         "KV blocks that running sequences have freed, as a window of attention moved past them",
         "window_blocks_freed"),
    ),
    *_of_groups(
        GaugeMetricFamily,
        ("ttserve_slots", "Decode slots", "num_slots"),
        ("ttserve_empty_slots", "Decode slots that are free", "num_empty_slots"),
        ("ttserve_reserved_slots", "Decode slots reserved for requests whose KV has not arrived",
         "num_reserved"),
    ),
    Family(
        GaugeMetricFamily, "ttserve_kv_blocks", "KV blocks that requests can use",
        partial(_each_kv_group, "num_blocks"), ("dp_group", "kv_group"),
    ),
    Family(
        GaugeMetricFamily, "ttserve_kv_free_blocks",
        "KV blocks that are free, or hold only cached KV that can be evicted",
        partial(_each_kv_group, "num_free_blocks"), ("dp_group", "kv_group"),
    ),
    Family(
        CounterMetricFamily, "vllm:request_success", "Sequences that ended, by reason",
        _finished, ("dp_group", "finished_reason"),
    ),
    *_of_engines(
        GaugeMetricFamily, "metrics",
        ("vllm:num_requests_waiting", "Sequences in the engine's queue", "num_waiting"),
    ),
    *_of_engines(
        CounterMetricFamily, "metrics",
        ("ttserve_steps", "Engine steps that computed tokens", "num_steps"),
        ("ttserve_scheduled_tokens", "Prompt and output tokens that engine steps computed",
         "scheduled_tokens"),
        ("ttserve_step_device_seconds", "Time of engine steps inside the model", "device_seconds"),
        ("ttserve_stalls", "Engine steps that exceeded the stall limit and then ended",
         "num_stalls"),
    ),
    *_of_engines(
        CounterMetricFamily, "metrics.drafts",
        ("vllm:spec_decode_num_drafts", "Verifications of drafts: one for each sequence and step",
         "num_drafts"),
        ("vllm:spec_decode_num_draft_tokens", "Drafts that were verified", "num_draft_tokens"),
        ("vllm:spec_decode_num_accepted_tokens", "Drafts that were right", "num_accepted_tokens"),
    ),
    Family(
        CounterMetricFamily, "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts that were right, by their position behind the last token",
        _accepted_drafts, ("position",),
    ),
    Family(
        CounterMetricFamily, "ttserve_expert_tokens",
        "Tokens that an engine's requests sent to each expert, in all layers",
        _expert_tokens, ("expert",),
    ),
    *_of_engines(
        CounterMetricFamily, "metrics.experts",
        ("ttserve_expert_rows", "Rows that the experts of an engine computed, also for other ranks",
         "num_rows"),
    ),
    *_of_engines(
        GaugeMetricFamily, "metrics.experts",
        ("ttserve_expert_imbalance",
         "Tokens of a layer's busiest expert over the mean of all, since warm-up; mean of layers",
         "imbalance"),
    ),
    Family(
        CounterMetricFamily, "ttserve_step_host_seconds",
        "Host time of engine steps outside the model, by activity", _host_parts, ("part",),
    ),
    Family(
        CounterMetricFamily, "ttserve_kv_transfers", "KV transfers that ended, by outcome",
        _transfers, ("role", "path", "outcome"),
    ),
    Family(
        CounterMetricFamily, "ttserve_kv_transfer_failures", "KV transfers that failed, by reason",
        _failures, ("role", "reason"),
    ),
    Family(
        CounterMetricFamily, "ttserve_kv_transfer_bytes", "KV bytes delivered",
        _transferred_bytes, ("role", "path"),
    ),
    Family(
        CounterMetricFamily, "ttserve_kv_leases",
        "Events of leases, the promises to keep KV blocks for another engine",
        _leases, ("event",),
    ),
    Family(
        HistogramMetricFamily, "ttserve_kv_transfer_stage_seconds",
        "Duration of each stage of a KV transfer", _stages, ("stage",),
    ),
    Family(
        GaugeMetricFamily, "ttserve_kv_inflight_transfers", "KV transfers that have not ended",
        _inflight, ("role",),
    ),
    *_of_engines(
        CounterMetricFamily, "metrics.transfer",
        ("ttserve_kv_retransmits", "KV chunks that were requested again", "num_retransmits"),
        ("ttserve_kv_checksum_failures", "KV chunks that arrived damaged",
         "num_checksum_failures"),
        ("ttserve_kv_dropped_chunks",
         "KV chunks dropped because they were late, duplicate or of another attempt",
         "num_dropped_chunks"),
        ("ttserve_kv_unknown_ids", "Messages about KV transfers that this engine does not know",
         "num_unknown_ids"),
        ("ttserve_kv_malformed_messages", "Messages about KV transfers that could not be decoded",
         "num_malformed"),
        ("ttserve_kv_bad_tickets",
         "Fetches of KV refused because their ticket was forged, expired or for another engine",
         "num_bad_tickets"),
        ("ttserve_kv_credit_stalled_seconds",
         "Time in which computed KV waited until its receiver allowed more data (credit)",
         "credit_stalled_s"),
    ),
    *_of_engines(
        GaugeMetricFamily, "metrics.transfer",
        ("ttserve_kv_leased_blocks", "KV blocks kept until their transfer to another engine ends",
         "num_leased_blocks"),
        ("ttserve_kv_reserved_blocks", "KV blocks reserved for KV that has not arrived",
         "num_reserved_blocks"),
        ("ttserve_kv_quarantined_blocks",
         "KV blocks that must not be reused yet, because a late write may still land there",
         "num_quarantined_blocks"),
        ("ttserve_kv_oldest_lease_seconds",
         "Age of the oldest transfer to another engine that has not ended",
         "oldest_lease_s"),
    ),
    *_of_engines(
        CounterMetricFamily, "metrics.transfer.store",
        ("ttserve_kv_store_hits", "KV units that a load found in the store", "hits"),
        ("ttserve_kv_store_misses", "KV units that a load did not find in the store", "misses"),
        ("ttserve_kv_store_puts", "KV units that were saved in the store", "puts"),
        ("ttserve_kv_store_drops",
         "KV units that were not saved because the store was slow, full or unreachable", "drops"),
        ("ttserve_kv_store_errors", "Calls to the store that failed", "errors"),
    ),
    *_of_engines(
        CounterMetricFamily, "metrics",
        ("ttserve_kv_recompute_tokens",
         "Prompt tokens computed because their KV did not arrive", "kv_recompute_tokens"),
    ),
    Family(
        GaugeMetricFamily, "ttserve_kv_block_bytes", "Bytes of one KV block",
        _block_bytes, ("kv_group",),
    ),
)  # fmt: skip

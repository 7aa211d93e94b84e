"""Every metric once: name, unit, labels, help; vLLM's names where they exist, else `ttserve_`.

An ingress counts its own requests and labels them as its own: what stands before the ingresses
sends a scrape to any of them. Engines count theirs and are asked when somebody scrapes, so any
ingress shows every engine, labelled by pool, replica and DP group.
"""

from __future__ import annotations

import itertools
import secrets
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import asdict
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
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

_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

_RATIO_BUCKETS = (
    0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0,
)  # fmt: skip

_ENGINE_LABELS = ("model_name", "pool", "replica")


class RouterMetrics:
    """What one ingress counts itself.

    Args:
        model_name: The served model's name, a label of every series.

    Attributes:
        ingress: Which one; a label of every series.
        queue_time: Seconds that a request waited for a decode slot.
        time_to_first_token: Seconds from arrival to the first token.
        inter_token_latency: Seconds between the outputs of a request.
        e2e_latency: Seconds from arrival to the end.
        requests: Requests that ended, by reason; "error" counts those that failed, "abort" those
            whose client left.
        refusals: Placements that an engine refused, by reason.
        lapses: Reservations that an engine gave up, as nobody had started them in time.
        turned_away: Requests that were not let in, by the error that they got.
        retries: Parts of requests that were tried again, by reason.
        lost: Engines that died with a part of a request on them, by its leg.
        stalled: Parts of requests that were taken away from an engine that stalled, by leg.
        num_stalled: Replicas that get nothing new because they do not move.
        migrations: Streams that another decode engine went on with, by what became of the one
            before.
        migration_gap: Seconds between the last token of the one and the first of the other, by how
            that came by the KV: "moved" from the one before, "cached", or "recomputed".
        num_shut: Replicas that get nothing new, or a probe, because they failed requests.
        lost_routes: Lines of the route log that were not written.
        prediction: What came true of a placement, divided by what was predicted, of "ttft" (from
            the placement on), "token" (each further one), "computed_tokens" (of the prompt).
    """

    def __init__(self, model_name: str) -> None:
        self.ingress = secrets.token_hex(4)
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.queue_time = self._histogram(
            "vllm:request_queue_time_seconds",
            "Time that a request waited for a decode slot",
            _REQUEST_BUCKETS,
        )
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "Time from arrival to the first token",
            _TTFT_BUCKETS,
        )
        self.inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds", "Time between outputs of a request", _ITL_BUCKETS
        )
        self.e2e_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time from arrival to the end", _REQUEST_BUCKETS
        )
        self.migration_gap = Histogram(
            "ttserve_router_migration_gap_seconds",
            "Time between the last token of one decode replica and the first token of the next, by "
            "how the next one got the KV",
            ["model_name", "kv"],
            buckets=_ITL_BUCKETS,
            registry=self.registry,
        )
        self.num_queued = self._gauge(
            "ttserve_router_queued_requests",
            "Requests at this ingress that wait for admission or for a decode slot",
        )
        self.num_stalled = self._gauge(
            "ttserve_router_stalled_replicas",
            "Replicas that get no new requests because they are stalled, silent or unreachable",
        )
        self.num_shut = self._gauge(
            "ttserve_router_shut_replicas",
            "Replicas that get no new requests, or one at a time, because they failed others",
        )
        self.lapses: Counter = Counter(
            "ttserve_router_lapsed_reservations",
            "Reservations that an engine released because they were not activated in time",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name)
        self.prediction = Histogram(
            "ttserve_router_prediction_ratio",
            "Actual value divided by the value predicted when the request was placed",
            ["of"],
            buckets=_RATIO_BUCKETS,
            registry=self.registry,
        )
        self._add_counters()

    def _add_counters(self) -> None:
        self.requests = self._counter(
            "ttserve_ingress_requests",
            "Requests that ended at this ingress, by reason",
            "finished_reason",
        )
        self.refusals = self._counter(
            "ttserve_router_refusals", "Placements that an engine refused, by reason", "reason"
        )
        self.turned_away = self._counter(
            "ttserve_router_turned_away", "Requests that admission refused, by error code", "code"
        )
        self.retries = self._counter(
            "ttserve_router_retries",
            "Prefills, decode placements and KV transfers that were retried or replaced, by reason",
            "reason",
        )
        self.lost_routes: Counter = Counter(
            "ttserve_router_lost_routes",
            "Lines of the route log that could not be written",
            ["model_name"],
            registry=self.registry,
        ).labels(self._model_name)
        self.lost = self._counter(
            "ttserve_router_lost_legs", "Prefills and decodes whose engine was lost", "leg"
        )
        self.stalled = self._counter(
            "ttserve_router_stalled_legs",
            "Prefills and decodes that were moved away from a stalled replica",
            "leg",
        )
        self.migrations = self._counter(
            "ttserve_router_migrations",
            "Streams that another decode replica continued, by reason",
            "reason",
        )

    def migrated(self, reason: str, kv: str, gap_s: float) -> None:
        """Count a stream that another decode engine goes on with; see `Seam`."""
        self.migrations.labels(reason).inc()
        self.migration_gap.labels(self._model_name, kv).observe(gap_s)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(self._model_name)

    def _gauge(self, name: str, text: str) -> Gauge:
        family = Gauge(name, text, ["model_name"], registry=self.registry)
        return family.labels(self._model_name)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, [label], registry=self.registry)


def render(
    router: RouterMetrics, engines: Sequence[tuple[Member, EngineMetrics]], model_name: str
) -> bytes:
    """All metrics in Prometheus' text format: this ingress's own, then every engine's."""
    return generate_latest(_IngressCollector(router)) + generate_latest(
        _EngineCollector(engines, model_name)
    )


class _IngressCollector(Collector):
    """Says of an ingress's own metrics whose they are."""

    def __init__(self, router: RouterMetrics) -> None:
        self._router = router

    def collect(self) -> Iterable[Metric]:
        for metric in self._router.registry.collect():
            metric.samples = [
                sample._replace(labels={**sample.labels, "ingress": self._router.ingress})
                for sample in metric.samples
            ]
            yield metric


class _EngineCollector(Collector):
    """Turns engines' counters into metric families."""

    def __init__(self, engines: Sequence[tuple[Member, EngineMetrics]], model_name: str) -> None:
        self._engines = [_Engine(member, metrics) for member, metrics in engines]
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        for family in _FAMILIES:
            metric = family.kind(family.name, family.text, labels=_ENGINE_LABELS + family.labels)
            for engine in self._engines:
                own = (self._model_name, engine.member.pool, engine.member.replica_id)
                for labels, *values in family.samples(engine):
                    metric.add_metric((*own, *labels), *values)
            yield metric


class _Engine(NamedTuple):
    """Whom samples are taken of."""

    member: Member
    metrics: EngineMetrics


class _Family(NamedTuple):
    """One family of metrics of engines.

    Attributes:
        kind: Its class.
        name: Without the suffixes of its kind.
        text: Its help.
        samples: Of one engine: values of `labels`, and what else `kind.add_metric` takes.
        labels: Besides those that every family of engines has.
    """

    kind: _Kind
    name: str
    text: str
    samples: Callable[[_Engine], _Samples]
    labels: tuple[str, ...] = ()


def _of_groups(kind: _Kind, *rows: tuple[str, str, str]) -> Iterable[_Family]:
    """A family for each row of (name, text, field of each DP group)."""
    for name, text, field in rows:
        yield _Family(kind, name, text, partial(_each_group, attrgetter(field)), ("dp_group",))


def _of_engines(kind: _Kind, owner: str, *rows: tuple[str, str, str]) -> Iterable[_Family]:
    """A family for each row of (name, text, field); `owner` says whose, from an `_Engine` on."""
    for name, text, field in rows:
        yield _Family(kind, name, text, partial(_alone, attrgetter(f"{owner}.{field}")))


def _each_group(value: Callable[[GroupCounters], float], engine: _Engine) -> _Samples:
    for index, group in enumerate(engine.metrics.groups):
        yield (str(index),), value(group)


def _alone(value: Callable[[_Engine], float], engine: _Engine) -> _Samples:
    yield (), value(engine)


def _kv_usage(group: GroupCounters) -> float:
    """Of the KV group that has fewest left."""
    blocks = zip(group.num_free_blocks, group.num_blocks, strict=True)
    return 1.0 - min(num_free / num_blocks for num_free, num_blocks in blocks)


def _each_kv_group(field: str, engine: _Engine) -> _Samples:
    for index, group in enumerate(engine.metrics.groups):
        for kv_group, value in enumerate(getattr(group, field)):
            yield (str(index), str(kv_group)), value


def _block_bytes(engine: _Engine) -> _Samples:
    for index, kv_group in enumerate(engine.member.description.kv_groups):
        yield (str(index),), kv_group.bytes_per_block


def _finished(engine: _Engine) -> _Samples:
    for index, group in enumerate(engine.metrics.groups):
        for reason, count in group.requests_finished.items():
            yield (str(index), reason), count


def _host_parts(engine: _Engine) -> _Samples:
    for part, seconds in asdict(engine.metrics.host_seconds).items():
        yield (part,), seconds


def _transfers(engine: _Engine) -> _Samples:
    stats = engine.metrics.transfer
    for path, counts in stats.paths.items():
        yield ("producer", path, "ok"), counts.num_sent
        yield ("consumer", path, "ok"), counts.num_received
    # One without success may never have had a path.
    for role, reasons in _reasons(stats):
        num_cancelled = reasons.get(FailureReason.CANCELLED.value, 0)
        yield (role, "", "cancelled"), num_cancelled
        yield (role, "", "failed"), sum(reasons.values()) - num_cancelled


def _failures(engine: _Engine) -> _Samples:
    for role, reasons in _reasons(engine.metrics.transfer):
        for reason, count in reasons.items():
            # Nobody needs the KV any more: the answer was complete, or its client is gone.
            if reason != FailureReason.CANCELLED.value:
                yield (role, reason), count


def _reasons(stats: TransferStats) -> tuple[tuple[str, dict[str, int]], ...]:
    """Of each role: what ended without success, by reason."""
    return ("producer", stats.send_failures), ("consumer", stats.receive_failures)


def _transferred_bytes(engine: _Engine) -> _Samples:
    for path, counts in engine.metrics.transfer.paths.items():
        yield ("producer", path), counts.bytes_sent
        yield ("consumer", path), counts.bytes_received


def _leases(engine: _Engine) -> _Samples:
    for event, count in engine.metrics.transfer.leases.items():
        yield (event,), count


def _stages(engine: _Engine) -> _Samples:
    """Of each stage: bounds with cumulative counts, as the format has them, and the sum."""
    bounds = [*map(floatToGoString, STAGE_BOUNDS_S), "+Inf"]
    for stage, histogram in engine.metrics.transfer.stages.items():
        counts = itertools.accumulate(histogram.counts)
        yield (stage,), list(zip(bounds, counts, strict=True)), histogram.total_s


def _inflight(engine: _Engine) -> _Samples:
    yield ("producer",), engine.metrics.transfer.num_inflight_sends
    yield ("consumer",), engine.metrics.transfer.num_inflight_loads


_FAMILIES = (
    *_of_groups(
        GaugeMetricFamily, ("vllm:num_requests_running", "Running sequences", "num_running")
    ),
    _Family(
        GaugeMetricFamily, "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1",
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
    ),
    *_of_groups(
        GaugeMetricFamily,
        ("ttserve_slots", "Decode slots", "num_slots"),
        ("ttserve_empty_slots", "Decode slots that are free", "num_empty_slots"),
        ("ttserve_reserved_slots", "Decode slots reserved for requests whose KV has not arrived",
         "num_reserved"),
    ),
    _Family(
        GaugeMetricFamily, "ttserve_kv_blocks", "Usable KV blocks",
        partial(_each_kv_group, "num_blocks"), ("dp_group", "kv_group"),
    ),
    _Family(
        GaugeMetricFamily, "ttserve_kv_free_blocks", "KV blocks that are free or evictable",
        partial(_each_kv_group, "num_free_blocks"), ("dp_group", "kv_group"),
    ),
    _Family(
        CounterMetricFamily, "vllm:request_success", "Sequences that ended, by reason",
        _finished, ("dp_group", "finished_reason"),
    ),
    *_of_engines(
        GaugeMetricFamily, "metrics",
        ("vllm:num_requests_waiting", "Sequences in the engine's queue", "num_waiting"),
    ),
    *_of_engines(
        CounterMetricFamily, "metrics",
        ("ttserve_steps", "Engine steps", "num_steps"),
        ("ttserve_scheduled_tokens", "Tokens computed", "scheduled_tokens"),
        ("ttserve_step_device_seconds", "Time of engine steps inside the model", "device_seconds"),
        ("ttserve_stalls", "Engine steps that exceeded the stall limit and then ended",
         "num_stalls"),
    ),
    _Family(
        CounterMetricFamily, "ttserve_step_host_seconds",
        "Host time of engine steps outside the model, by activity", _host_parts, ("part",),
    ),
    _Family(
        CounterMetricFamily, "ttserve_kv_transfers", "KV transfers that ended, by outcome",
        _transfers, ("role", "path", "outcome"),
    ),
    _Family(
        CounterMetricFamily, "ttserve_kv_transfer_failures", "KV transfers that failed, by reason",
        _failures, ("role", "reason"),
    ),
    _Family(
        CounterMetricFamily, "ttserve_kv_transfer_bytes", "KV bytes delivered",
        _transferred_bytes, ("role", "path"),
    ),
    _Family(
        CounterMetricFamily, "ttserve_kv_leases", "Leases on KV blocks, by event",
        _leases, ("event",),
    ),
    _Family(
        HistogramMetricFamily, "ttserve_kv_transfer_stage_seconds",
        "Duration of each stage of a KV transfer", _stages, ("stage",),
    ),
    _Family(
        GaugeMetricFamily, "ttserve_kv_inflight_transfers", "KV transfers that have not ended",
        _inflight, ("role",),
    ),
    *_of_engines(
        CounterMetricFamily, "metrics.transfer",
        ("ttserve_kv_retransmits", "KV chunks that were requested again", "num_retransmits"),
        ("ttserve_kv_checksum_failures", "KV chunks that arrived damaged",
         "num_checksum_failures"),
        ("ttserve_kv_dropped_chunks",
         "KV chunks dropped because they were late, duplicate or for another attempt",
         "num_dropped_chunks"),
        ("ttserve_kv_unknown_ids", "Messages about KV transfers that this engine does not know",
         "num_unknown_ids"),
        ("ttserve_kv_malformed_messages", "Frames that could not be decoded", "num_malformed"),
        ("ttserve_kv_bad_tickets",
         "Fetches refused because their ticket was forged, expired or for another engine",
         "num_bad_tickets"),
        ("ttserve_kv_credit_stalled_seconds",
         "Time in which computed KV waited for credit, summed over transfers", "credit_stalled_s"),
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
    _Family(
        GaugeMetricFamily, "ttserve_kv_block_bytes", "Bytes of one KV block",
        _block_bytes, ("kv_group",),
    ),
)  # fmt: skip

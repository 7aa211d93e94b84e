"""An ingress's own metrics; vLLM's metric names where they exist, else `ttserve_`.

Every series has the label `ingress`, because HAProxy sends a scrape to any ingress. The engines'
metrics are in `cluster.edge.engine_metrics`.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client.core import Metric

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


class RouterMetrics:
    """The metrics that one ingress counts itself.

    Args:
        model_name: Name of the served model, a label of most series.

    Attributes:
        ingress: Random name of this ingress, a label of every series.
        queue_time: Seconds that a request waited for its first decode slot.
        time_to_first_token: Seconds from arrival to the first token.
        inter_token_latency: Seconds between the outputs of a request.
        e2e_latency: Seconds from arrival to the end.
        requests: Requests that ended, by reason; "error" counts failed ones, "abort" those whose
            client left.
        refusals: Placements that an engine refused, by reason.
        lapses: Reservations that an engine released because they were not activated in time.
        turned_away: Requests that admission refused, by error code.
        retries: Prefills, decode placements and KV transfers that were retried or replaced, by
            reason.
        lost: Prefill and decode legs whose engine was lost, by leg.
        num_queued: Requests that wait for admission or for a decode slot.
        stalled: Prefill and decode legs that were moved away from a stalled engine, by leg.
        num_stalled: Replicas that get no new requests because they are stalled, silent or
            unreachable.
        migrations: Streams that another decode engine continued, by the reason for leaving the
            first one.
        migration_gap: Seconds between the last token of the first engine and the first token of
            the next, by how the next got the KV: "moved" from the first, "cached" or "recomputed".
        failed_key_reads: Versions of the file of API keys that could not be used.
        num_shut: Replicas that get no new requests, or only a probe, because they failed requests.
        lost_routes: Lines of the route log that could not be written.
        prediction: Actual divided by predicted value of a placement, of "ttft" (counted from the
            placement), "token" (each further token) and "computed_tokens" (of the prompt).
    """

    def __init__(self, model_name: str) -> None:
        self.ingress = secrets.token_hex(4)
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.queue_time = self._histogram(
            "vllm:request_queue_time_seconds",
            "Time that a request waited for its first decode slot",
            _REQUEST_BUCKETS,
        )
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "Time from a request's arrival to its first token",
            _TTFT_BUCKETS,
        )
        self.inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Time between two outputs of a request",
            _ITL_BUCKETS,
        )
        self.e2e_latency = self._histogram(
            "vllm:e2e_request_latency_seconds",
            "Time from a request's arrival to its end",
            _REQUEST_BUCKETS,
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
            "Replicas that get no new requests, or one at a time, because requests failed there",
        )
        self.failed_key_reads = self._gauge(
            "ttserve_ingress_key_file_failures",
            "Versions of the file of API keys that could not be used; the keys before them stay",
        )
        self.lapses: Counter = Counter(
            "ttserve_router_lapsed_reservations",
            "Reserved slots that an engine released because their request did not start in time",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name)
        self.prediction = Histogram(
            "ttserve_router_prediction_ratio",
            "Actual value divided by the value predicted when the request was sent to its engine",
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
            "ttserve_router_refusals", "Requests that an engine refused, by reason", "reason"
        )
        self.turned_away = self._counter(
            "ttserve_router_turned_away",
            "Requests that admission refused or kept waiting too long, by error code",
            "code",
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
        """Count a stream that another decode engine continues; see `Seam` for the arguments."""
        self.migrations.labels(reason).inc()
        self.migration_gap.labels(self._model_name, kv).observe(gap_s)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(_LabelledCollector(self))

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(self._model_name)

    def _gauge(self, name: str, text: str) -> Gauge:
        family = Gauge(name, text, ["model_name"], registry=self.registry)
        return family.labels(self._model_name)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, [label], registry=self.registry)


class _LabelledCollector(Collector):
    """A collector that adds the label `ingress` to every sample."""

    def __init__(self, router: RouterMetrics) -> None:
        self._router = router

    def collect(self) -> Iterable[Metric]:
        for metric in self._router.registry.collect():
            metric.samples = [
                sample._replace(labels={**sample.labels, "ingress": self._router.ingress})
                for sample in metric.samples
            ]
            yield metric

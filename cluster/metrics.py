"""Every metric once: name, unit, labels, help; vLLM's names where they exist, else `ttserve_`.

An ingress counts its own requests; engines count theirs and are asked when somebody scrapes, so
any ingress shows every engine, labelled by pool, replica and DP group.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kv_transfer.connector import STAGE_BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client.core import Metric

    from cluster.pools import Member
    from kv_transfer.connector import StageHistogram
    from replicas.messages import EngineMetrics, GroupCounters

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

_GROUP_LABELS = ("model_name", "pool", "replica", "dp_group")
_ENGINE_LABELS = ("model_name", "pool", "replica")


class RouterMetrics:
    """What one ingress counts itself.

    Args:
        model_name: The served model's name, a label of every series.

    Attributes:
        queue_time: Seconds that a request waited for a decode slot.
        time_to_first_token: Seconds from arrival to the first token.
        inter_token_latency: Seconds between the outputs of a request.
        e2e_latency: Seconds from arrival to the end.
        requests: Requests that ended, by reason; "error" counts those that failed, "abort" those
            whose client left.
        refusals: Placements that an engine refused, by reason.
        retries: Parts of requests that were tried again, by reason.
        lost: Engines that died with a part of a request on them, by its leg.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.queue_time = self._histogram(
            "vllm:request_queue_time_seconds",
            "Time a request waited for a decode slot",
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
        self.requests = self._counter(
            "ttserve_ingress_requests", "Requests that ended at this ingress", "finished_reason"
        )
        self.refusals = self._counter(
            "ttserve_router_refusals", "Placements that an engine refused", "reason"
        )
        self.retries = self._counter(
            "ttserve_router_retries", "Parts of requests that were tried again", "reason"
        )
        self.lost = self._counter(
            "ttserve_router_lost_legs", "Parts of requests whose engine died", "leg"
        )
        self.num_queued = Gauge(
            "ttserve_router_queued_requests",
            "Requests that wait for a decode slot at this ingress",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(self._model_name)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, [label], registry=self.registry)


def render(
    router: RouterMetrics, engines: Sequence[tuple[Member, EngineMetrics]], model_name: str
) -> bytes:
    """All metrics in Prometheus' text format: this ingress's own, then every engine's."""
    registry = CollectorRegistry()
    registry.register(_EngineCollector(engines, model_name))
    return generate_latest(router.registry) + generate_latest(registry)


class _EngineCollector(Collector):
    """Turns engines' counters into metric families."""

    def __init__(self, engines: Sequence[tuple[Member, EngineMetrics]], model_name: str) -> None:
        self._engines = engines
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        yield from self._group_families()
        yield from self._engine_families()
        yield from self._transfer_families()

    def _group_families(self) -> Iterable[Metric]:
        yield self._groups(
            GaugeMetricFamily, "vllm:num_requests_running", "Sequences that run", "num_running"
        )
        yield self._usage()
        for name, text, field in (
            (
                "vllm:prompt_tokens",
                "Prompt tokens of requests that got their first token here",
                "prompt_tokens",
            ),
            ("vllm:generation_tokens", "Tokens sampled", "generation_tokens"),
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache",
                "prefix_cache_queries",
            ),
            (
                "vllm:prefix_cache_hits",
                "Prompt tokens found in the prefix cache",
                "prefix_cache_hits",
            ),
            ("vllm:num_preemptions", "Sequences that lost their blocks", "num_preemptions"),
        ):
            yield self._groups(CounterMetricFamily, name, text, field)
        for name, text, field in (
            ("ttserve_slots", "Decode slots", "num_slots"),
            ("ttserve_empty_slots", "Decode slots that are free", "num_empty_slots"),
            ("ttserve_reserved_slots", "Decode slots that wait for their KV", "num_reserved"),
            ("ttserve_kv_blocks", "Usable KV blocks", "num_blocks"),
            ("ttserve_kv_free_blocks", "KV blocks that are free or evictable", "num_free_blocks"),
        ):
            yield self._groups(GaugeMetricFamily, name, text, field)
        finished = CounterMetricFamily(
            "vllm:request_success",
            "Sequences that ended",
            labels=(*_GROUP_LABELS, "finished_reason"),
        )
        for labels, group in self._each_group():
            for reason, count in group.requests_finished.items():
                finished.add_metric((*labels, reason), count)
        yield finished

    def _engine_families(self) -> Iterable[Metric]:
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting", "Sequences in the engine's queue", labels=_ENGINE_LABELS
        )
        counters = {
            field: CounterMetricFamily(name, text, labels=_ENGINE_LABELS)
            for name, text, field in (
                ("ttserve_steps", "Engine steps", "num_steps"),
                ("ttserve_scheduled_tokens", "Tokens computed", "scheduled_tokens"),
                ("ttserve_step_device_seconds", "Time of steps inside the model", "device_seconds"),
                ("ttserve_step_host_seconds", "Time of steps outside the model", "host_seconds"),
            )
        }
        for labels, metrics in self._each_engine():
            waiting.add_metric(labels, metrics.num_waiting)
            for field, family in counters.items():
                family.add_metric(labels, getattr(metrics, field))
        yield waiting
        yield from counters.values()

    def _transfer_families(self) -> Iterable[Metric]:
        transfers = _counter(
            "ttserve_kv_transfers", "KV transfers that ended", "role", "path", "outcome"
        )
        failures = _counter(
            "ttserve_kv_transfer_failures", "KV transfers that failed", "role", "reason"
        )
        num_bytes = _counter("ttserve_kv_transfer_bytes", "KV bytes delivered", "role", "path")
        leases = _counter("ttserve_kv_leases", "Leases on KV blocks, by what happened", "event")
        stages = HistogramMetricFamily(
            "ttserve_kv_transfer_stage_seconds",
            "Time of the stages of a KV transfer",
            labels=(*_ENGINE_LABELS, "stage"),
        )
        inflight = GaugeMetricFamily(
            "ttserve_kv_inflight_transfers",
            "KV transfers that have not ended",
            labels=(*_ENGINE_LABELS, "role"),
        )
        for labels, metrics in self._each_engine():
            stats = metrics.transfer
            for path, counts in stats.paths.items():
                transfers.add_metric((*labels, "producer", path, "ok"), counts.num_sent)
                transfers.add_metric((*labels, "consumer", path, "ok"), counts.num_received)
                num_bytes.add_metric((*labels, "producer", path), counts.bytes_sent)
                num_bytes.add_metric((*labels, "consumer", path), counts.bytes_received)
            for role, reasons in (
                ("producer", stats.send_failures), ("consumer", stats.receive_failures),
            ):  # fmt: skip
                # One that failed may never have had a path.
                transfers.add_metric((*labels, role, "", "failed"), sum(reasons.values()))
                for reason, count in reasons.items():
                    failures.add_metric((*labels, role, reason), count)
            for event, count in stats.leases.items():
                leases.add_metric((*labels, event), count)
            for stage, histogram in stats.stages.items():
                stages.add_metric((*labels, stage), _buckets(histogram), histogram.total_s)
            inflight.add_metric((*labels, "producer"), stats.num_inflight_sends)
            inflight.add_metric((*labels, "consumer"), stats.num_inflight_loads)
        yield from (transfers, failures, num_bytes, leases, stages, inflight)
        yield from self._transfer_numbers()

    def _transfer_numbers(self) -> Iterable[Metric]:
        """What is one number for each engine."""
        for name, text, field in (
            ("retransmits", "KV chunks that were asked for again", "num_retransmits"),
            ("checksum_failures", "KV chunks that arrived damaged", "num_checksum_failures"),
            ("dropped_chunks", "KV chunks that came late, twice or for another attempt",
             "num_dropped_chunks"),
            ("unknown_ids", "Messages about KV transfers that nobody here knows",
             "num_unknown_ids"),
            ("malformed_messages", "Frames that are no message", "num_malformed"),
            ("bad_tickets", "Fetches with a forged, foreign or old ticket", "num_bad_tickets"),
            ("credit_stalled_seconds", "Time in which computed KV waited for credit, summed over "
             "transfers", "credit_stalled_s"),
        ):  # fmt: skip
            yield self._numbers(_counter(f"ttserve_kv_{name}", text), lambda m: m.transfer, field)
        for name, text, field in (
            ("leased_blocks", "KV blocks kept for transfers that send", "num_leased_blocks"),
            ("reserved_blocks", "KV blocks that wait for KV to come", "num_reserved_blocks"),
            ("quarantined_blocks", "KV blocks that nobody may have yet, for a write may still land "
             "there", "num_quarantined_blocks"),
            ("oldest_lease_seconds", "Age of the oldest transfer that sends", "oldest_lease_s"),
        ):  # fmt: skip
            yield self._numbers(_gauge(f"ttserve_kv_{name}", text), lambda m: m.transfer, field)
        for name, text in (
            ("hits", "Units of KV that a load got from the store"),
            ("misses", "Units of KV that the store was asked for in vain"),
            ("puts", "Units of KV that were saved in the store"),
            ("drops", "Units of KV that were not saved: the store was slow, full or away"),
            ("errors", "Calls that the store did not answer as it should"),
        ):
            family = _counter(f"ttserve_kv_store_{name}", text)
            yield self._numbers(family, lambda m: m.transfer.store, name)
        yield self._numbers(
            _counter(
                "ttserve_kv_recompute_tokens",
                "Prompt tokens computed because their KV did not come",
            ),
            lambda m: m,
            "kv_recompute_tokens",
        )
        block_bytes = _gauge("ttserve_kv_block_bytes", "Bytes of one KV block")
        for member, _ in self._engines:
            block_bytes.add_metric(self._labels(member), member.description.bytes_per_block)
        yield block_bytes

    def _numbers(
        self,
        family: CounterMetricFamily | GaugeMetricFamily,
        owner: Callable[[EngineMetrics], object],
        field: str,
    ) -> Metric:
        for labels, metrics in self._each_engine():
            family.add_metric(labels, getattr(owner(metrics), field))
        return family

    def _groups(
        self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, field: str
    ) -> Metric:
        family = kind(name, text, labels=_GROUP_LABELS)
        for labels, group in self._each_group():
            family.add_metric(labels, getattr(group, field))
        return family

    def _usage(self) -> Metric:
        family = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", labels=_GROUP_LABELS
        )
        for labels, group in self._each_group():
            family.add_metric(labels, 1.0 - group.num_free_blocks / group.num_blocks)
        return family

    def _each_engine(self) -> Iterable[tuple[tuple[str, ...], EngineMetrics]]:
        for member, metrics in self._engines:
            yield self._labels(member), metrics

    def _each_group(self) -> Iterable[tuple[tuple[str, ...], GroupCounters]]:
        for labels, metrics in self._each_engine():
            for index, group in enumerate(metrics.groups):
                yield (*labels, str(index)), group

    def _labels(self, member: Member) -> tuple[str, ...]:
        return self._model_name, member.pool, member.replica_id


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=(*_ENGINE_LABELS, *labels))


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=_ENGINE_LABELS)


def _buckets(histogram: StageHistogram) -> list[tuple[str, float]]:
    """Bounds and cumulative counts, as the format has them."""
    bounds = [*map(floatToGoString, STAGE_BOUNDS_S), "+Inf"]
    return list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))

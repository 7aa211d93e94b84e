"""The metrics text: what a scraper reads, name by name and label by label."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics import RouterMetrics, render
from replicas.messages import EngineMetrics, GroupCounters, TransferCounters
from tests.cluster.engines import make_member

BLOCK_BYTES = 1024


def group(scale):
    return GroupCounters(
        num_running=scale,
        num_reserved=2 * scale,
        num_slots=16,
        num_empty_slots=16 - 3 * scale,
        num_blocks=40,
        num_free_blocks=30,
        prompt_tokens=100 * scale,
        generation_tokens=200 * scale,
        prefix_cache_queries=300 * scale,
        prefix_cache_hits=50 * scale,
        num_preemptions=7 * scale,
        requests_finished={"stop": scale, "length": 2 * scale},
    )


def engine(groups, transfer):
    return EngineMetrics(
        num_waiting=3,
        num_steps=11,
        scheduled_tokens=99,
        device_seconds=1.5,
        host_seconds=0.25,
        groups=groups,
        transfer=transfer,
    )


@pytest.fixture
def samples():
    """(name, labels) -> value of a page over one prefill and one decode engine."""
    router = RouterMetrics("tiny")
    router.requests.labels("stop").inc(4)
    router.refusals.labels("no_slot").inc(2)
    router.retries.labels("prefill").inc()
    router.queue_time.observe(0.2)
    router.time_to_first_token.observe(0.03)
    router.num_queued.set(5)
    sent = TransferCounters(
        transfers={"send": {"ok": 6, "failed": 1}, "receive": {"ok": 0, "failed": 0}},
        failures={"expired": 1},
        bytes={"send": 13 * BLOCK_BYTES, "receive": 0},
        blocks={"send": 13, "receive": 0},
        num_inflight=2,
        num_leased_blocks=9,
    )
    received = TransferCounters(
        transfers={"send": {"ok": 0, "failed": 0}, "receive": {"ok": 6, "failed": 0}},
        bytes={"send": 0, "receive": 13 * BLOCK_BYTES},
        blocks={"send": 0, "receive": 13},
        seconds={"wait": 0.5, "network": 0.125},
    )
    engines = [
        (make_member("prefill", "p", bytes_per_block=BLOCK_BYTES), engine([group(1)], sent)),
        (
            make_member("decode", "d", bytes_per_block=BLOCK_BYTES),
            engine([group(2), group(4)], received),
        ),
    ]
    page = render(router, engines, "tiny").decode()
    found = {}
    for family in text_string_to_metric_families(page):
        assert family.documentation, family.name
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def of(samples, name, **labels):
    """Values of a name, by the labels that are not asked for."""
    asked = set(labels.items())
    return {
        tuple(value for key, value in keys if key not in labels): value
        for (found, keys), value in samples.items()
        if found == name and asked <= set(keys)
    }


def test_every_group_of_every_engine_has_its_series(samples):
    for name, field in (
        ("vllm:num_requests_running", "num_running"),
        ("vllm:prompt_tokens_total", "prompt_tokens"),
        ("vllm:generation_tokens_total", "generation_tokens"),
        ("vllm:prefix_cache_queries_total", "prefix_cache_queries"),
        ("vllm:prefix_cache_hits_total", "prefix_cache_hits"),
        ("vllm:num_preemptions_total", "num_preemptions"),
        ("ttserve_slots", "num_slots"),
        ("ttserve_empty_slots", "num_empty_slots"),
        ("ttserve_reserved_slots", "num_reserved"),
        ("ttserve_kv_blocks", "num_blocks"),
        ("ttserve_kv_free_blocks", "num_free_blocks"),
    ):
        # Labels in the order of their names: dp_group, pool, replica.
        assert of(samples, name, model_name="tiny") == {
            ("0", "prefill", "prefill-p"): getattr(group(1), field),
            ("0", "decode", "decode-d"): getattr(group(2), field),
            ("1", "decode", "decode-d"): getattr(group(4), field),
        }, name
    usage = of(samples, "vllm:kv_cache_usage_perc", pool="prefill")
    assert usage.popitem()[1] == pytest.approx(0.25)
    assert of(
        samples, "vllm:request_success_total", dp_group="1", model_name="tiny", pool="decode"
    ) == {("length", "decode-d"): 8, ("stop", "decode-d"): 4}


def test_every_engine_has_its_steps_and_its_queue(samples):
    for name, value in (
        ("vllm:num_requests_waiting", 3),
        ("ttserve_steps_total", 11),
        ("ttserve_scheduled_tokens_total", 99),
        ("ttserve_step_device_seconds_total", 1.5),
        ("ttserve_step_host_seconds_total", 0.25),
    ):
        assert of(samples, name, model_name="tiny") == {
            ("prefill", "prefill-p"): value,
            ("decode", "decode-d"): value,
        }, name


def test_transfers_are_counted_at_both_ends_and_bytes_are_blocks(samples):
    transfers = of(samples, "ttserve_kv_transfers_total", model_name="tiny")
    assert transfers["send", "ok", "prefill", "prefill-p"] == 6
    assert transfers["send", "failed", "prefill", "prefill-p"] == 1
    assert transfers["receive", "ok", "decode", "decode-d"] == 6
    blocks = of(samples, "ttserve_kv_transfer_blocks_total", model_name="tiny")
    num_bytes = of(samples, "ttserve_kv_transfer_bytes_total", model_name="tiny")
    block_bytes = of(samples, "ttserve_kv_block_bytes", model_name="tiny")
    assert blocks["send", "prefill", "prefill-p"] == blocks["receive", "decode", "decode-d"] == 13
    assert num_bytes == {
        labels: count * block_bytes[labels[1:]] for labels, count in blocks.items()
    }
    assert of(samples, "ttserve_kv_transfer_failures_total", pool="prefill").popitem()[1] == 1
    assert of(samples, "ttserve_kv_leased_blocks", pool="prefill").popitem()[1] == 9
    assert of(samples, "ttserve_kv_inflight_transfers", pool="decode").popitem()[1] == 0
    stages = of(samples, "ttserve_kv_transfer_stage_seconds_total", pool="decode")
    assert sorted(stages.values()) == [0.125, 0.5]


def test_ingress_counts_its_own_requests(samples):
    assert of(samples, "ttserve_ingress_requests_total") == {("stop",): 4}
    assert of(samples, "ttserve_router_refusals_total") == {("no_slot",): 2}
    assert of(samples, "ttserve_router_retries_total") == {("prefill",): 1}
    assert of(samples, "ttserve_router_queued_requests") == {("tiny",): 5}
    for name in ("vllm:request_queue_time_seconds", "vllm:time_to_first_token_seconds"):
        assert of(samples, f"{name}_count") == {("tiny",): 1}
    assert of(samples, "vllm:time_to_first_token_seconds_bucket", le="0.04") == {("tiny",): 1}
    assert of(samples, "vllm:time_to_first_token_seconds_bucket", le="0.02") == {("tiny",): 0}


def test_page_without_engines_is_still_a_page():
    page = render(RouterMetrics("tiny"), [], "tiny").decode()
    names = {family.name for family in text_string_to_metric_families(page)}
    assert {"vllm:num_requests_running", "ttserve_kv_transfer_bytes"} <= names

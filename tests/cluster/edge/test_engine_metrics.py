"""Engine metrics as text: names, labels and values."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.edge.engine_metrics import render_engine_metrics
from kv_transfer.connector import PathCounters, StageHistogram, TransferStats
from kv_transfer.store import StoreCounters
from replicas.messages import (
    DraftCounters,
    EngineMetrics,
    ExpertCounters,
    GroupCounters,
    HostSeconds,
)
from tests.cluster.engines import make_member
from tests.kv_groups import one_kv_group

BLOCK_BYTES = 1024
KV_GROUPS = (*one_kv_group(41, 32, BLOCK_BYTES // 32), *one_kv_group(21, 64, BLOCK_BYTES // 32))
ROW_BYTES = 512


def group(scale):
    return GroupCounters(
        num_running=scale,
        num_reserved=2 * scale,
        num_slots=16,
        num_empty_slots=16 - 3 * scale,
        num_blocks=[40, 20],
        num_free_blocks=[30, 18],
        prompt_tokens=100 * scale,
        generation_tokens=200 * scale,
        prefix_cache_queries=300 * scale,
        prefix_cache_hits=50 * scale,
        num_preemptions=7 * scale,
        requests_finished={"stop": scale, "length": 2 * scale},
    )


def engine(groups, transfer, num_recomputed=0):
    return EngineMetrics(
        num_waiting=3,
        num_steps=11,
        scheduled_tokens=99,
        device_seconds=1.5,
        host_seconds=HostSeconds(schedule=0.25, encode=0.5),
        groups=groups,
        transfer=transfer,
        kv_recompute_tokens=num_recomputed,
        drafts=DraftCounters(5, 12, 7, [4, 3]),
        experts=ExpertCounters(num_tokens=[6, 2], num_rows=9, imbalance=1.5),
    )


def histogram(*seconds):
    made = StageHistogram()
    for value in seconds:
        made.observe(value)
    return made


@pytest.fixture
def samples():
    """(name, labels) -> value of the metrics of one prefill and one decode engine."""
    sent = TransferStats(
        paths={
            "inline": PathCounters(num_sent=6, bytes_sent=13 * ROW_BYTES),
            "shared": PathCounters(num_sent=2, bytes_sent=5 * ROW_BYTES),
        },
        send_failures={"expired": 1, "peer_dead": 2, "cancelled": 5},
        stages={"handover": histogram(0.03, 0.04, 70.0)},
        leases={"granted": 9, "late_fetch": 1},
        num_inflight_sends=2,
        num_leased_blocks=9,
        oldest_lease_s=1.25,
        credit_stalled_s=0.75,
        num_retransmits=3,
        num_unknown_ids=4,
        num_bad_tickets=5,
    )
    received = TransferStats(
        paths={
            "inline": PathCounters(num_received=6, bytes_received=13 * ROW_BYTES),
            "pool": PathCounters(num_received=1, bytes_received=ROW_BYTES),
        },
        receive_failures={"stalled": 1, "cancelled": 4},
        num_inflight_loads=1,
        num_reserved_blocks=7,
        num_quarantined_blocks=8,
        store=StoreCounters(hits=1, misses=2, puts=3, drops=4, errors=5),
    )
    engines = [
        (
            make_member("prefill", "p", kv_groups=KV_GROUPS),
            engine([group(1)], sent),
        ),
        (
            make_member("decode", "d", kv_groups=KV_GROUPS),
            engine([group(2), group(4)], received, num_recomputed=160),
        ),
    ]
    page = render_engine_metrics(engines, "tiny").decode()
    found = {}
    for family in text_string_to_metric_families(page):
        assert family.documentation, family.name
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def of(samples, name, **labels):
    """Values of a name, by the labels that are not given."""
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
    ):
        # Labels in the order of their names: dp_group, pool, replica.
        assert of(samples, name, model_name="tiny") == {
            ("0", "prefill", "prefill-p"): getattr(group(1), field),
            ("0", "decode", "decode-d"): getattr(group(2), field),
            ("1", "decode", "decode-d"): getattr(group(4), field),
        }, name
    for name, values in (("ttserve_kv_blocks", [40, 20]), ("ttserve_kv_free_blocks", [30, 18])):
        # Labels in the order of their names: dp_group, kv_group, pool, replica.
        assert of(samples, name, model_name="tiny", pool="decode") == {
            (dp_group, str(kv_group), "decode-d"): values[kv_group]
            for dp_group in "01"
            for kv_group in range(2)
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
    ):
        assert of(samples, name, model_name="tiny") == {
            ("prefill", "prefill-p"): value,
            ("decode", "decode-d"): value,
        }, name


def test_host_time_of_steps_by_activity(samples):
    seconds = of(samples, "ttserve_step_host_seconds_total", pool="decode", model_name="tiny")
    parts = ("schedule", "prepare", "sample", "update", "transfer", "frames", "encode")
    wanted = {"schedule": 0.25, "encode": 0.5}
    assert seconds == {(part, "decode-d"): wanted.get(part, 0.0) for part in parts}


PREFILL, DECODE = ("prefill", "prefill-p"), ("decode", "decode-d")


def test_transfers_are_counted_at_both_ends_by_path_and_outcome(samples):
    # Labels in the order of their names: outcome, path, pool, replica, role.
    transfers = of(samples, "ttserve_kv_transfers_total", model_name="tiny")
    assert {labels: count for labels, count in transfers.items() if count} == {
        ("ok", "inline", *PREFILL, "producer"): 6,
        ("ok", "shared", *PREFILL, "producer"): 2,
        ("failed", "", *PREFILL, "producer"): 3,
        ("cancelled", "", *PREFILL, "producer"): 5,
        ("ok", "inline", *DECODE, "consumer"): 6,
        ("ok", "pool", *DECODE, "consumer"): 1,
        ("failed", "", *DECODE, "consumer"): 1,
        ("cancelled", "", *DECODE, "consumer"): 4,
    }
    num_bytes = of(samples, "ttserve_kv_transfer_bytes_total", model_name="tiny", path="inline")
    assert num_bytes[(*PREFILL, "producer")] == num_bytes[(*DECODE, "consumer")] == 13 * ROW_BYTES
    failures = of(samples, "ttserve_kv_transfer_failures_total", model_name="tiny")
    assert failures == {
        ("prefill", "expired", "prefill-p", "producer"): 1,
        ("prefill", "peer_dead", "prefill-p", "producer"): 2,
        ("decode", "stalled", "decode-d", "consumer"): 1,
    }


def test_stages_are_histograms_with_cumulative_buckets(samples):
    name = "ttserve_kv_transfer_stage_seconds"
    buckets = of(samples, f"{name}_bucket", stage="handover", model_name="tiny", pool="prefill")
    assert len(buckets) == 16
    assert buckets["0.02", "prefill-p"] == 0
    assert buckets["0.05", "prefill-p"] == buckets["30.0", "prefill-p"] == 2
    assert buckets["+Inf", "prefill-p"] == 3
    assert of(samples, f"{name}_sum", stage="handover").popitem()[1] == pytest.approx(70.07)
    assert of(samples, f"{name}_count", stage="handover").popitem()[1] == 3


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        ("leased_blocks", 9, 0),
        ("reserved_blocks", 0, 7),
        ("quarantined_blocks", 0, 8),
        ("oldest_lease_seconds", 1.25, 0),
        ("credit_stalled_seconds_total", 0.75, 0),
        ("retransmits_total", 3, 0),
        ("checksum_failures_total", 0, 0),
        ("dropped_chunks_total", 0, 0),
        ("unknown_ids_total", 4, 0),
        ("malformed_messages_total", 0, 0),
        ("bad_tickets_total", 5, 0),
        ("store_hits_total", 0, 1),
        ("store_misses_total", 0, 2),
        ("store_puts_total", 0, 3),
        ("store_drops_total", 0, 4),
        ("store_errors_total", 0, 5),
        ("recompute_tokens_total", 0, 160),
    ],
)
def test_kv_transfer_numbers_of_every_engine(samples, name, prefill, decode):
    values = of(samples, f"ttserve_kv_{name}", model_name="tiny")
    assert values == {PREFILL: prefill, DECODE: decode}


def test_block_bytes_of_every_kv_group(samples):
    # Labels in the order of their names: kv_group, pool, replica.
    found = of(samples, "ttserve_kv_block_bytes", model_name="tiny")
    assert found == {
        (kv_group, *engine): num_bytes
        for engine in (PREFILL, DECODE)
        for kv_group, num_bytes in (("0", BLOCK_BYTES), ("1", 2 * BLOCK_BYTES))
    }


def test_unfinished_transfers_by_role_and_leases_by_event(samples):
    inflight = of(samples, "ttserve_kv_inflight_transfers", model_name="tiny")
    assert inflight[(*PREFILL, "producer")] == 2
    assert inflight[(*DECODE, "consumer")] == 1
    leases = of(samples, "ttserve_kv_leases_total", model_name="tiny")
    assert leases == {("granted", *PREFILL): 9, ("late_fetch", *PREFILL): 1}


def test_no_series_names_a_peer_or_a_request(samples):
    labels = {key for name, keys in samples for key, _ in keys if name.startswith("ttserve_kv")}
    known = {"model_name", "pool", "replica", "dp_group", "kv_group"}
    assert labels == known | {"role", "path", "outcome", "reason", "event", "stage", "le"}


def test_without_engines_every_family_is_still_named():
    page = render_engine_metrics([], "tiny").decode()
    names = {family.name for family in text_string_to_metric_families(page)}
    assert {"vllm:num_requests_running", "ttserve_kv_transfer_bytes"} <= names


def test_the_load_of_experts_has_its_series(samples):
    for expert, tokens in enumerate((6, 2)):
        found = of(samples, "ttserve_expert_tokens_total", expert=str(expert))
        assert set(found.values()) == {tokens}
    assert set(of(samples, "ttserve_expert_rows_total").values()) == {9}
    assert set(of(samples, "ttserve_expert_imbalance").values()) == {1.5}


def test_drafts_have_the_names_of_vllm(samples):
    name = "vllm:spec_decode_num"
    for what, count in (("drafts", 5), ("draft_tokens", 12), ("accepted_tokens", 7)):
        assert of(samples, f"{name}_{what}_total", model_name="tiny", pool="decode") == {
            ("decode-d",): count
        }
    by_position = of(samples, f"{name}_accepted_tokens_per_pos_total", model_name="tiny")
    assert by_position["decode", "0", "decode-d"] == 4
    assert by_position["decode", "1", "decode-d"] == 3

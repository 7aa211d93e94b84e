"""Resources that a cluster without requests must have released, from its metrics. Pure."""

from __future__ import annotations

from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

_HELD = {
    "vllm:num_requests_running": "running sequences",
    "vllm:num_requests_waiting": "waiting sequences",
    "ttserve_router_queued_requests": "queued requests",
    "ttserve_reserved_slots": "reserved slots",
    "ttserve_kv_inflight_transfers": "transfers",
    "ttserve_kv_leased_blocks": "leased blocks",
    "ttserve_kv_reserved_blocks": "reserved blocks",
    "ttserve_kv_quarantined_blocks": "quarantined blocks",
}
_TOTAL = {"ttserve_slots": "slots", "ttserve_kv_blocks": "blocks"}
_FREE = {"ttserve_empty_slots": "slots", "ttserve_kv_free_blocks": "blocks"}


def held(page: str) -> dict[str, int]:
    """Return the number of held resources of each kind, summed over engines, without zeros.

    Args:
        page: The answer of /metrics.

    Raises:
        ValueError: A metric is missing, so nothing can be said.
    """
    found: defaultdict[str, float] = defaultdict(float)
    seen = set()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            seen.add(sample.name)
            found[_HELD.get(sample.name) or _TOTAL.get(sample.name, "")] += sample.value
            found[_FREE.get(sample.name, "")] -= sample.value
    missing = {*_HELD, *_TOTAL, *_FREE} - seen
    if missing:
        raise ValueError(f"/metrics lacks {', '.join(sorted(missing))}")
    return {name: round(value) for name, value in found.items() if name and round(value)}

"""The server of `test_serving*.py`: a tiny model, few slots, and its metrics."""

import urllib.request

import harness
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.engines import model_folder

MODEL = "tiny"
BLOCK_SIZE = 32
LONG = 8000
"""Tokens of an answer that the client never reads to its end: it takes seconds."""
GREEDY = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
PLACES = 32
MAX_ONGOING = 64
"""Open requests of the one ingress: as many as decode slots."""


def serve_file(port):
    """A Serve config file on this port of the loopback interface."""
    engine = {"block_size": BLOCK_SIZE, "dtype": "float32", "num_threads": 1, "num_blocks": 300}
    args = {
        "model": str(model_folder()),
        "model_name": MODEL,
        "engine": engine,
        "router": {"max_queued_requests": PLACES, "min_remote_prefill_tokens": 0},
        "ingress": {"max_body_bytes": 100_000, "max_ongoing_requests": MAX_ONGOING},
        "pools": {
            "prefill": {"engine": {"max_batch_size": 8, "max_num_batched_tokens": 256}},
            "decode": {"replicas": 2, "engine": {"max_batch_size": 32, "tt_data_parallel": 2}},
        },
    }
    application = {"name": "ttserve", "import_path": "cluster.app:build", "args": args}
    return yaml.safe_dump(
        {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
    )


def metrics(server):
    """(name, labels) -> value of every sample that the server shows."""
    with urllib.request.urlopen(f"{server.operations_url}/metrics", timeout=60) as reply:
        page = reply.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def total(samples, name, **labels):
    """Sum of a name's samples that have these labels."""
    return sum(
        value
        for (found, found_labels), value in samples.items()
        if found == name and set(labels.items()) <= found_labels
    )


def labels_of(samples, name, *keys):
    """The values of these labels on every sample of a name."""
    return {
        tuple(dict(labels)[key] for key in keys) for (found, labels) in samples if found == name
    }


def is_idle(samples):
    """Return whether every slot and block is free and no transfer is under way."""
    return (
        total(samples, "ttserve_slots") == total(samples, "ttserve_empty_slots") > 0
        and total(samples, "ttserve_kv_blocks") == total(samples, "ttserve_kv_free_blocks") > 0
        and total(samples, "ttserve_reserved_slots") == 0
        and total(samples, "ttserve_kv_leased_blocks") == 0
        and total(samples, "ttserve_kv_inflight_transfers") == 0
    )


def wait_whole(server):
    """Wait until every replica serves: an ingress is ready with one of each pool."""

    def is_whole():
        return len(labels_of(metrics(server), "ttserve_slots", "replica")) == 3

    harness.wait_for(is_whole, 180, "every replica serves")


def wait_idle(server):
    """Poll until everything is free; returns the metrics."""

    def idle():
        samples = metrics(server)
        return samples if is_idle(samples) else None

    return harness.wait_for(idle, 180, "every slot and block is free")


def added(before, after, name, **labels):
    """Return the growth of a counter."""
    return total(after, name, **labels) - total(before, name, **labels)

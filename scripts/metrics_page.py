"""Writes docs/metrics.md: every Prometheus metric, from its help text and labels in the code.

python scripts/metrics_page.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.metrics import MetricWrapperBase

from cluster.edge.admin.metrics import AdminMetrics
from cluster.edge.engine_metrics import ENGINE_LABELS, FAMILIES
from cluster.routing.metrics import RouterMetrics

if TYPE_CHECKING:
    from collections.abc import Sequence

DOCUMENT = Path(__file__).resolve().parents[1] / "docs/metrics.md"

_INTRODUCTION = """# Metrics

Every Prometheus metric that ttserve exports. Made from the code by
`python scripts/metrics_page.py`; a test keeps it true. Terms such as
slot, lease and DP group are in the [glossary](glossary.md).

## Where to scrape

`/metrics` is served by HAProxy's operations listener, over HTTP. It needs an [API key](keys.md) if
the cluster has a file of keys, of any tenant. The public port does not serve it.

| cluster | address of the operations listener |
|---|---|
| started with `ttserve serve` | `127.0.0.1` at `http_options.port` + 1, so port 8001 by default |
| started by hand | the same, or what `ttserve environment --operations ADDRESS:PORT` sets |
| on [Kubernetes](kubernetes.md) | port 8001 of each worker; Service `<name>-operations` |

- HAProxy sends a scrape to any ingress. The ingress answers with the metrics of all ingresses and
  engines, which it asks at that moment.
- An engine that does not answer within 2 s is missing from that scrape, as is an ingress after 1 s.
- A scrape of several hosts shows the same ingresses and engines more than once. In a query take
  `max by (ingress, …)` or `max by (pool, replica, …)` first, then sum.
- Names that begin with `vllm:` are vLLM's, for dashboards made for vLLM.
- Times are in seconds. A counter counts from the start of its process.
- A histogram NAME is three series: `NAME_bucket`, `NAME_sum` and `NAME_count`. An ingress also
  exports `NAME_created` for counters and histograms, the time at which a series began.
- A series of an ingress with a label such as `reason` appears when its first event happens.
- The [admin server](admin.md) has its own `/metrics`, at its own port, for the key of any tenant of
  its file. It counts from its start.
- Ray has metrics of its own, at other ports.
"""

ROUTER_LABELS = ("ingress",)

LABELS = {
    "ingress": "random name of the ingress process that counted; new at each start",
    "model_name": "the name under which the model is served",
    "pool": "pool of the replica: `prefill`, `decode` or `both`; unchanged when its role changes",
    "replica": "id of the replica, as `/debug/slots` shows it",
    "dp_group": "index of the DP group in its engine, from 0",
    "position": "position of a draft among those of its sequence in one step, from 0",
    "kv_group": "index of the KV group (layers with one block table) in its engine, from 0",
    "role": "side of the engine in a KV transfer",
    "path": "how the KV travels, see [KV transfer](kv-transfer.md)",
    "outcome": "how a KV transfer ended",
    "reason": "why it happened; each metric has its own values",
    "finished_reason": "why a request or sequence ended",
    "code": "the error's `code`, as the client gets it; see [errors](errors.md)",
    "stage": "part of a KV transfer",
    "event": "what happened to a lease",
    "leg": "the part of the request that ran on the engine",
    "kv": "how the next decode replica got the KV of a moved stream",
    "of": "the predicted value",
    "part": "activity of the host in an engine step",
    "route": "name of an admin route, its `operationId` in the server's `/openapi.json`",
    "status": "status of the answer",
    "expert": "number of the expert in its layer",
}
"""Meaning of each label."""


@dataclass(frozen=True, slots=True)
class Values:
    """Values of one label.

    Attributes:
        label: The label.
        metrics: Metrics to which the values apply; empty if to every metric with this label.
        meanings: Meaning of each value.
    """

    label: str
    metrics: tuple[str, ...]
    meanings: dict[str, str]


TRANSFER_FAILURES = {
    "peer_dead": "the connection to the other engine broke, or was never made",
    "stalled": "the other engine is connected, but was silent for longer than its deadline",
    "expired": "the producer's lease ended: no consumer fetched, or it stopped renewing",
    "checksum": "a chunk arrived damaged twice",
    "layout": "the two engines lay out a KV block differently",
    "cancelled": "an engine ended the transfer; counted only as `kv_cancelled`, not as a failure",
    "unknown_transfer": "the producer did not learn of the transfer in time",
    "version": "the two engines speak different versions of the protocol",
    "incarnation": "the producer was restarted since its ticket was made",
    "audience": "the ticket was made for another consumer",
    "auth": "the ticket was not sealed with a secret of this deployment",
    "capacity": "no buffer had room for the data",
    "store": "the KV store did not deliver a value that it had reported as present",
    "epoch": "the message belongs to another attempt of the same transfer",
}

_DEPARTURES = {
    "lost": "the replica ended, or did not answer",
    "stalled": "the replica was in one step for too long",
    "leaving": "the replica was about to stop or to change its role",
    "quiet": "the replica sent no token for some time, and another one sent one first",
}

VALUES = (
    Values(
        "finished_reason",
        (),
        {
            "stop": "an end token or a stop string",
            "length": "the limit of tokens",
            "abort": "the client left, or the rest was not wanted",
            "error": "it failed",
        },
    ),
    Values(
        "reason",
        ("ttserve_router_refusals_total",),
        {
            "no_slot": "no decode slot is free",
            "no_blocks": "too few KV blocks are free",
            "queue_full": "the engine's queue is full",
            "draining": "the replica is about to stop or to change its role",
            "duplicate": "the engine already has a request with this id",
            "invalid": "the engine cannot run this request",
        },
    ),
    Values(
        "reason",
        ("ttserve_router_retries_total",),
        {
            "prefill": "a prefill ended without a token, and may be tried on another replica",
            **{
                f"decode_{reason}": f"before the first token from its decode slot: {why}"
                for reason, why in _DEPARTURES.items()
            },
            "kv_…": "a KV transfer failed; `kv_` is followed by a reason of "
            "`ttserve_kv_transfer_failures_total`",
        },
    ),
    Values("reason", ("ttserve_router_migrations_total",), _DEPARTURES),
    Values(
        "leg",
        (),
        {
            "prefill": "the prompt, on a prefill replica",
            "decode": "the output, or prompt and output on one replica",
        },
    ),
    Values(
        "kv",
        (),
        {
            "moved": "transferred from the replica before",
            "cached": "part or all of it was in the next replica's cache",
            "recomputed": "computed again",
        },
    ),
    Values(
        "of",
        (),
        {
            "ttft": "time from the choice of an engine to the first token",
            "token": "time of each further token",
            "computed_tokens": "prompt tokens that had to be computed, as they were not cached",
        },
    ),
    Values(
        "role",
        (),
        {"producer": "sends KV that it computed", "consumer": "receives KV"},
    ),
    Values(
        "path",
        (),
        {
            "shared": "the consumer reads the producer's memory on the same host",
            "inline": "over the ZMQ connection of the two engines",
            "nixl": "over NIXL, between hosts with RDMA",
            "pool": "through the KV store",
            "(empty)": "the transfer did not succeed; a path may not have been chosen",
        },
    ),
    Values(
        "outcome",
        (),
        {
            "ok": "the KV was delivered",
            "cancelled": "the request ended first; no failure",
            "failed": "not delivered; `ttserve_kv_transfer_failures_total` has the reasons",
        },
    ),
    Values("reason", ("ttserve_kv_transfer_failures_total",), TRANSFER_FAILURES),
    Values(
        "event",
        (),
        {
            "granted": "the producer began to keep the blocks",
            "renewed": "the consumer asked for more time",
            "done": "the consumer has a verified copy",
            "expired": "a deadline passed",
            "cancelled": "one of the two engines ended the transfer",
            "late_fetch": "a consumer asked for KV after the lease had ended",
        },
    ),
    Values(
        "stage",
        (),
        {
            "rendezvous": "producer: from the offer until the consumer fetches",
            "handover": "producer: from the last computed KV to its delivery",
            "first_chunk": "consumer: from the start to the first received KV",
            "stream": "consumer: from the first received KV to the last written",
            "commit": "consumer: from the last written KV to the report that it is complete",
            "total": "consumer: from the start to the report",
        },
    ),
    Values(
        "part",
        (),
        {
            "schedule": "choosing what to compute",
            "prepare": "building the model's inputs, and calling it, without the time inside it",
            "sample": "drawing tokens, or reading those that the device drew",
            "update": "applying the results: ended requests, blocks, events",
            "transfer": "reading KV for other engines, and handling received KV",
            "frames": "assembling messages for ingresses",
            "encode": "encoding messages and passing them to the socket",
        },
    ),
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the page.

    Attributes:
        name: Name in queries; a histogram's without `_bucket`.
        kind: Prometheus' type.
        labels: Names of its labels.
        text: Help text.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


# The first pattern that begins a metric's name decides its section.
GROUPS = (
    (
        "Requests",
        r"ttserve_ingress_|vllm:(request_success|time_to_first|inter_token|e2e_)",
    ),
    (
        "Queue and slots",
        r"vllm:(request_queue_time|num_requests_|num_preemptions)"
        r"|ttserve_((empty_|reserved_)?slots|router_queued|router_lapsed)",
    ),
    ("Admission", r"ttserve_router_turned_away"),
    ("Routing, retries and migrations", r"ttserve_router_"),
    ("Tokens", r"vllm:(prompt|generation)_tokens|ttserve_(scheduled|kv_recompute)_tokens"),
    ("Engines and steps", r"ttserve_(step|stalls)"),
    ("Speculative decoding", r"vllm:spec_decode_"),
    ("Experts", r"ttserve_expert_"),
    (
        "KV cache",
        r"vllm:(kv_cache|prefix_cache)|ttserve_kv_((free_|window_)?blocks|block_bytes)",
    ),
    ("KV store", r"ttserve_kv_store_"),
    ("KV transfer", r"ttserve_kv_"),
    ("Admin server", r"ttserve_admin_"),
)
"""Sections, each with a pattern of the names in it."""


def metrics() -> list[Metric]:
    """Return every metric of an ingress, then those of engines and of the admin server."""
    return [*_router_metrics(), *_engine_metrics(), *_admin_metrics()]


def _router_metrics() -> list[Metric]:
    return _counted(RouterMetrics(""), ROUTER_LABELS)


def _admin_metrics() -> list[Metric]:
    return _counted(AdminMetrics(), ())


def _counted(source: RouterMetrics | AdminMetrics, common: tuple[str, ...]) -> list[Metric]:
    """Return the metrics of a registry, with the labels that all of them have."""
    # The client library shows labels only through samples, which do not exist before an event.
    labels = {
        each._name: tuple(each._labelnames)  # noqa: SLF001
        for each in vars(source).values()
        if isinstance(each, MetricWrapperBase)
    }
    return [
        Metric(
            _full_name(family.name, family.type),
            family.type,
            common + labels[family.name],
            family.documentation,
        )
        for family in source.registry.collect()
    ]


def _engine_metrics() -> list[Metric]:
    found = []
    for family in FAMILIES:
        kind = family.kind(family.name, family.text).type
        name = _full_name(family.name, kind)
        found.append(Metric(name, kind, ENGINE_LABELS + family.labels, family.text))
    return found


def _full_name(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def group(name: str) -> str:
    """Return the section of a metric.

    Raises:
        ValueError: No pattern of `GROUPS` fits.
    """
    for title, pattern in GROUPS:
        if re.match(pattern, name):
            return title
    raise ValueError(f"{name} has no section: add it to GROUPS of scripts/metrics_page.py")


def page() -> str:
    """Return the whole document."""
    rows = metrics()
    parts = [_INTRODUCTION, _labels()]
    for title, _ in GROUPS:
        parts += [f"## {title}", ""]
        parts += _table(
            ("metric", "type", "labels", "meaning"),
            [
                (f"`{row.name}`", row.kind, _own_labels(row), row.text)
                for row in rows
                if group(row.name) == title
            ],
        )
    return "\n".join([*parts, *_values(rows)])


def _labels() -> str:
    engine = ", ".join(f"`{label}`" for label in ENGINE_LABELS)
    intro = (
        "## Labels\n\nIn the tables below, *ingress* stands for the label `ingress`, which every "
        f"metric of an\ningress has, and *engine* for {engine}, which every metric\nof an "
        "engine has. A histogram's buckets also have `le`, their upper bound.\n"
    )
    rows = [(f"`{label}`", text) for label, text in LABELS.items()]
    return "\n".join([intro, *_table(("label", "meaning"), rows)])


def _own_labels(row: Metric) -> str:
    """Return the labels of a metric, with a word for those that all of its kind have."""
    words = {ENGINE_LABELS: ["*engine*"], ROUTER_LABELS: ["*ingress*"], (): []}
    common = next(each for each in words if row.labels[: len(each)] == each)
    own = (f"`{label}`" for label in row.labels[len(common) :])
    return ", ".join([*words[common], *own])


def _values(rows: list[Metric]) -> list[str]:
    lines = ["## Values of labels", ""]
    for values in VALUES:
        names = values.metrics or tuple(row.name for row in rows if values.label in row.labels)
        lines += [f"**`{values.label}`** of {', '.join(f'`{name}`' for name in names)}:", ""]
        meanings = [(_code(value), text) for value, text in values.meanings.items()]
        lines += _table(("value", "meaning"), meanings)
    return lines


def _code(value: str) -> str:
    return value if value.startswith("(") else f"`{value}`"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = [head, *rows]
    texts = [f"| {' | '.join(cells)} |" for cells in lines]
    return [texts[0], "|---" * len(head) + "|", *texts[1:], ""]


def main() -> None:
    """Write the page."""
    DOCUMENT.write_text(page())


if __name__ == "__main__":
    main()

"""The page of metrics agrees with the code, and explains every metric, label and value."""

import re
import typing

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.edge.admin.metrics import AdminMetrics
from cluster.edge.engine_metrics import render_engine_metrics
from cluster.routing.metrics import RouterMetrics
from kv_transfer.connector import STAGES
from kv_transfer.errors import FailureReason
from replicas.messages import FinishReason, HostSeconds, RefusalReason
from scripts import metrics_page


def test_page_is_up_to_date():
    assert metrics_page.DOCUMENT.read_text() == metrics_page.page(), (
        "run `python scripts/metrics_page.py`"
    )


def test_every_exported_metric_has_a_row():
    pages = [
        RouterMetrics("tiny").render(), render_engine_metrics([], "tiny"), AdminMetrics().render(),
    ]  # fmt: skip
    text = b"".join(pages).decode()
    exported = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")
    }
    rows = re.findall(
        r"^\| `([\w:]+)` \| (?:counter|gauge|histogram) \|", metrics_page.page(), re.M
    )
    assert sorted(rows) == sorted(exported)


def test_every_label_has_a_meaning():
    used = {label for metric in metrics_page.metrics() for label in metric.labels}
    assert used == metrics_page.LABELS.keys()


def test_a_metric_without_a_section_is_refused():
    with pytest.raises(ValueError, match="vllm:new has no section"):
        metrics_page.group("vllm:new")


def test_no_cell_is_long():
    cells = [
        c for line in metrics_page.page().splitlines() if line[:1] == "|" for c in line.split("|")
    ]
    assert max(map(len, cells)) <= 200


@pytest.mark.parametrize(
    ("label", "metric", "values"),
    [
        ("finished_reason", None, typing.get_args(FinishReason)),
        ("reason", "ttserve_router_refusals_total", typing.get_args(RefusalReason)),
        ("reason", "ttserve_kv_transfer_failures_total", [x.value for x in FailureReason]),
        ("stage", None, STAGES),
        ("part", None, [x.name for x in msgspec.structs.fields(HostSeconds)]),
    ],
)
def test_every_value_of_a_label_has_a_meaning(label, metric, values):
    (found,) = (
        x
        for x in metrics_page.VALUES
        if x.label == label and (metric is None or metric in x.metrics)
    )
    assert found.meanings.keys() == set(values)

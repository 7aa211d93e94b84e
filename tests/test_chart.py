"""What the chart repeats of the code is what the code says; tests/helm has what needs helm."""

import json
import re
from pathlib import Path

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.config.schema import IngressConfig, PoolConfig, RouterConfig
from cluster.edge.client_guard import ClientLimits
from cluster.edge.engine_metrics import render_engine_metrics
from cluster.routing import metrics
from cluster.routing.metrics import RouterMetrics
from kv_transfer.connector import PathCounters, StageHistogram, TransferStats
from replicas.messages import (
    DraftCounters,
    EngineMetrics,
    ExpertCounters,
    GroupCounters,
    HostSeconds,
)
from replicas.text_pieces import MAX_WHOLE_CHARS
from replicas.tt.meshes import MESHES, mesh_spec
from scripts import values_table
from tests.cluster.engines import make_member

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm/ttserve"
METRIC = re.compile(r"\b(?:ttserve_\w+|vllm:\w+)")


def read(path):
    return yaml.safe_load((CHART / path).read_text())


def of_ones(kind, **given):
    """A struct of ones: what counts appears only once it has counted."""
    return kind(**dict.fromkeys([f.name for f in msgspec.structs.fields(kind)], 1) | given)


def exported():
    """Names of all series of a page."""
    router = RouterMetrics("tiny")
    for counter in (
        router.requests, router.refusals, router.retries, router.lost, router.stalled
    ):  # fmt: skip
        counter.labels("x").inc()
    stage = StageHistogram()
    stage.observe(1.0)
    transfer = TransferStats(
        paths={"inline": PathCounters(num_sent=1)},
        send_failures={"expired": 1},
        receive_failures={"stalled": 1},
        stages={"handover": stage},
        leases={"granted": 1},
    )
    given = {"num_blocks": [1], "num_free_blocks": [1], "requests_finished": {"stop": 1}}
    groups = [of_ones(GroupCounters, **given)]
    host = of_ones(HostSeconds)
    engine = of_ones(
        EngineMetrics,
        groups=groups,
        transfer=transfer,
        host_seconds=host,
        drafts=of_ones(DraftCounters, num_accepted_tokens_per_pos=[1]),
        experts=of_ones(ExpertCounters, num_tokens=[1]),
    )
    engines = render_engine_metrics([(make_member("decode", "d"), engine)], "tiny")
    page = router.render() + engines
    return {
        sample.name
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_the_demo_is_the_one_of_make_serve():
    assert (CHART / "files/demo.yaml").read_text() == (ROOT / "configs/demo.yaml").read_text()


def test_meshes_have_the_boards_that_the_code_says():
    for name, mesh in read("files/meshes.yaml").items():
        spec = mesh_spec(name)
        found = {"board": spec.board, "devices": spec.num_pcie_devices, "hosts": spec.num_hosts}
        assert mesh == found, name


def test_every_mesh_of_a_known_board_is_there():
    known = read("files/meshes.yaml")
    for name, spec in MESHES.items():
        assert spec.board is None or name.lower() in known, name


def test_defaults_are_those_of_the_code():
    pool, ingress, router = PoolConfig(), IngressConfig(), RouterConfig()
    assert pool.num_cpus == ingress.num_cpus
    assert read("files/defaults.yaml") == {
        "pool_replicas": pool.replicas,
        "ingress_replicas": ingress.replicas,
        "num_cpus": pool.num_cpus,
        "drain_timeout_s": pool.drain_timeout_s,
        "request_timeout_s": ingress.request_timeout_s,
        "queue_timeout_s": router.queue_timeout_s,
        "max_body_bytes": ingress.max_body_bytes,
    }


def test_an_ingress_pod_holds_the_most_that_clients_can_make_it_keep():
    """The comment above the value has the sum; these are its parts that the code decides."""
    values = read("values.yaml")
    limits = ClientLimits()
    bodies = limits.max_bodies * limits.free_bytes + limits.shared_bytes
    encoded = 2 * MAX_WHOLE_CHARS * 300
    itself_and_ray, shared_memory = 0.8 * 2**30, 2**30
    assert values["workerDefaults"]["shmSize"] == "1Gi"
    assert values["workers"]["ingress"]["resources"]["limits"] == {"memory": "4Gi"}
    assert 2 * bodies + encoded + itself_and_ray + shared_memory < 4 * 2**30


def test_objectives_are_bounds_of_the_histograms():
    rules = json.loads((CHART / "values.schema.json").read_text())["properties"]["monitoring"]
    rules = rules["properties"]["rules"]["properties"]
    assert tuple(rules["firstTokenSeconds"]["enum"]) == metrics._TTFT_BUCKETS
    assert tuple(rules["tokenSeconds"]["enum"]) == metrics._ITL_BUCKETS


@pytest.mark.parametrize(
    "path", ["templates/prometheusrule.yaml", *sorted((CHART / "files/dashboards").glob("*"))]
)
def test_rules_and_dashboards_name_metrics_that_are_exported(path):
    text = (CHART / path).read_text()
    # The templates put `_bucket` and `_count` behind names of their own.
    text = re.sub(r'"name" "(vllm:\w+)"', r"\1_bucket \1_count", text)
    names = set(METRIC.findall(text))
    assert len(names) >= 8
    assert names - exported() == set()


def test_the_table_of_values_is_current():
    path = ROOT / "docs/kubernetes.md"
    assert values_table.updated(path.read_text()) == path.read_text(), (
        "run `python scripts/values_table.py`"
    )


def test_every_value_is_explained():
    rows = values_table.rows(CHART / "values.yaml", CHART / "values.schema.json")
    assert len(rows) > 80
    sections = {row.path for row in rows if not row.default}
    alone = [row.path for row in rows if not row.text]
    assert [path for path in alone if path.rpartition(".")[0] not in sections] == []


def test_versions_are_those_of_the_package():
    project = (ROOT / "pyproject.toml").read_text()
    chart, values = read("Chart.yaml"), read("values.yaml")
    assert f'version = "{chart["appVersion"]}"' in project
    assert f"ray[serve]=={values['rayVersion']}" in project

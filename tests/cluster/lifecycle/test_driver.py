"""How the driver of a local server ends that cannot serve, without Ray."""

import sys
import threading
import warnings
from types import SimpleNamespace

import msgspec
import pytest
import yaml

from cluster.lifecycle import supervisor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from cluster.lifecycle import driver

POLICY = {"policy_function": "cluster.lifecycle.autoscaling:ApplicationPolicy"}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the driver over an application; returns exit code, output and what it stopped."""
    stopped = []
    monkeypatch.setattr(driver, "_stop_event", threading.Event)
    monkeypatch.setattr(driver, "_start_ray", lambda *_: None)
    monkeypatch.setattr(driver, "_deploy", lambda *_: None)
    monkeypatch.setattr(driver, "_stop_serve", stopped.append)
    monkeypatch.setattr(driver.ray, "shutdown", lambda: None)
    monkeypatch.setattr(driver.ray, "cluster_resources", lambda: {"CPU": 2.0})

    def run(pool=None, **fields):
        application = {
            "name": "ttserve", "import_path": "cluster.app:build",
            "args": {"pools": {"both": pool or {}}}, **fields,
        }  # fmt: skip
        path = tmp_path / "serve.yaml"
        path.write_text(
            yaml.safe_dump({"http_options": {"host": "127.0.0.1"}, "applications": [application]})
        )
        options = supervisor.ServeOptions(config=str(path), folder=str(tmp_path / "private"))
        monkeypatch.setattr(sys, "argv", ["driver", msgspec.json.encode(options).decode()])
        return driver.main(), capsys.readouterr().err, stopped

    return run


@pytest.mark.parametrize(
    ("pool", "fields", "key"),
    [
        ({}, {"deployments": [{"name": "both", "num_replicas": 2}]}, "deployments"),
        ({}, {"route_prefix": "/llm"}, "route_prefix"),
        ({"max_replicas": 2}, {"autoscaling_policy": POLICY}, "autoscaling_policy"),
    ],
)
def test_a_key_without_effect_on_a_local_server_is_refused_by_name(run, pool, fields, key):
    code, said, _ = run(pool, **fields)
    assert code == 2
    assert f"applications[0].{key} has no effect on a local server" in said


def test_a_server_whose_application_fails_says_why_and_ends(run, monkeypatch):
    broken = SimpleNamespace(status="UNHEALTHY", message="no model at /models/tiny")
    application = SimpleNamespace(
        status="DEPLOY_FAILED", message="", deployments={"both": broken, "ingress": broken}
    )
    status = SimpleNamespace(applications={"ttserve": application})
    # Asked once: a second question means that it waits on.
    monkeypatch.setattr(driver.serve, "status", iter([status]).__next__)
    code, said, stopped = run()
    assert (code, stopped) == (1, ["ttserve"])
    assert "deployment both: no model at /models/tiny" in said


def test_a_host_without_the_resources_of_a_pool_fails_at_once(run):
    code, said, _ = run({"resources": {"board": 2}})
    assert code == 1
    assert "The replicas need 2 board and there are 0 on this host" in said

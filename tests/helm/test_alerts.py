"""Every alert fires when it should and is silent when it should, by promtool."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

CASES = Path(__file__).with_name("alerts.yaml")


@pytest.fixture(scope="module")
def rules(render, tmp_path_factory):
    """The rules as Prometheus gets them, in a file."""
    (found,) = (
        found
        for found in render("--set", "monitoring.rules.enabled=true")
        if found["kind"] == "PrometheusRule"
    )
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(yaml.safe_dump(found["spec"]))
    return path


def promtool(*arguments):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not here: apt install prometheus")
    return subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_prometheus_takes_the_rules(rules):
    done = promtool("check", "rules", rules)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_and_is_silent(rules):
    shutil.copy(CASES, rules.parent)
    done = promtool("test", "rules", rules.parent / CASES.name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_alert_is_without_a_case_of_each_kind(rules):
    """Cases are counted by alert and severity, as some alerts have two severities."""
    made = {
        (rule["alert"], rule["labels"]["severity"])
        for group in yaml.safe_load(rules.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    fires, is_silent = set(), set()
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for asked in case["alert_rule_test"]:
            severities = {alert["exp_labels"]["severity"] for alert in asked.get("exp_alerts", [])}
            fires |= {(asked["alertname"], severity) for severity in severities}
            both = {pair for pair in made if pair[0] == asked["alertname"]}
            is_silent |= {pair for pair in both if pair[1] not in severities}
    assert made - fires == set()
    assert made - is_silent == set()


def test_an_alert_says_what_to_do(rules):
    for group in yaml.safe_load(rules.read_text())["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                assert re.search(r"[.:]", rule["annotations"]["description"])
                assert rule["annotations"]["summary"]

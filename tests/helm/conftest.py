"""Fixtures for the rendered chart; only `make test-helm`, which builds helm, collects the tests."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm/ttserve"
BIN = Path(os.environ.get("BIN") or ROOT / ".kit")
PRESETS = sorted((CHART / "ci").glob("*.yaml"))
ANY_DIGEST = "sha256:" + 64 * "0"
OPTIONAL = [
    "--set", "networkPolicy.clients[0].podSelector.matchLabels.app=chat",
    "--set", "monitoring.podMonitor.enabled=true,monitoring.serviceMonitor.enabled=true",
    "--set", "secrets.existingApiKeys=tenants,tests.apiKey.secretName=tester",
    "--set", "monitoring.serviceMonitor.apiKey.secretName=scraper",
    "--set", "monitoring.rules.enabled=true,monitoring.dashboards.enabled=true",
    "--set", "gcsFaultTolerance.enabled=true,autoscaling.enabled=true",
    "--set", "ingress.enabled=true,ingress.host=llm.example.org,ingress.tlsSecretName=tls",
    "--set", "httpRoute.enabled=true,httpRoute.parentRefs[0].name=gateway",
    "--set", "inferencePool.enabled=true,inferencePool.endpointPicker.name=picker",
]  # fmt: skip
"""All options that are off by default."""


def options_of(preset):
    """Return a preset's further options, from the command in its first lines.

    The command has a variable for the digest, which only the registry knows.
    """
    for line in preset.read_text().splitlines():
        words = line.replace("$DIGEST", ANY_DIGEST).split()
        if words[:3] == ["#", "helm", "install"]:
            return words[5:]
    raise ValueError(f"{preset} does not say how it is used: # helm install NAME helm/ttserve ...")


def run_helm(*arguments):
    return subprocess.run(
        [BIN / "helm", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="session", autouse=True)
def _helm():
    if not (BIN / "helm").exists():
        pytest.skip(f"helm is not in {BIN}: make test-helm builds it")


@pytest.fixture(scope="session")
def render():
    """Render the chart: `render("--set", "a=b")` gives the objects."""

    def objects(*options):
        done = run_helm("template", "demo", CHART, "--namespace", "llm", *options)
        assert done.returncode == 0, done.stderr
        return [found for found in yaml.safe_load_all(done.stdout) if found]

    return objects


def rayservice(objects):
    (found,) = (found for found in objects if found["kind"] == "RayService")
    return found


def groups(objects):
    """Worker groups by name."""
    config = rayservice(objects)["spec"]["rayClusterConfig"]
    return {group["groupName"]: group for group in config["workerGroupSpecs"]}

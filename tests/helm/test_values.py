"""A mistake in values is an error at every depth."""

import copy

import pytest
import yaml

from tests.helm.conftest import CHART, run_helm

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
FREE = {"workers", "labels", "matchLabels"}
"""Keys whose children are named by users, not by the chart."""


def paths(values, above=()):
    """Yield every key, at every depth, that the chart names."""
    for key, value in values.items():
        if not {*above[-1:]} & FREE:
            yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def changed(path, change):
    values = copy.deepcopy(VALUES)
    at = values
    for key in path[:-1]:
        at = at[key]
    change(at, path[-1])
    return values


def refusal(values, tmp_path):
    """Return helm's error for these values in place of the chart's, or nothing."""
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    done = run_helm("template", "demo", CHART, "-f", file)
    return done.stderr if done.returncode else ""


def test_there_are_many_keys():
    assert len(list(paths(VALUES))) > 130


def test_the_values_themselves_are_right(tmp_path):
    assert refusal(VALUES, tmp_path) == ""


def test_every_key_that_is_misspelt_is_refused_by_its_name(tmp_path):
    """One run for each section suffices, as helm lists all errors at once."""
    for section in VALUES:
        wrong = list(paths({section: VALUES[section]}))
        values = copy.deepcopy(VALUES)
        for path in sorted(wrong, key=len, reverse=True):
            at = values
            for key in path[:-1]:
                at = at[key]
            at[f"{path[-1]}Typo"] = at[path[-1]]
        said = refusal(values, tmp_path)
        missed = [path for path in wrong if f"{path[-1]}Typo" not in said]
        assert missed == [], said


@pytest.mark.parametrize("wrong", [[], {"a": {"b": 1}}, -1.5], ids=str)
def test_every_value_of_a_wrong_kind_is_refused(wrong, tmp_path):
    """A run for each leaf would take minutes: one run a section, whose error names every leaf."""
    for section in VALUES:
        leaves = [
            path
            for path in paths({section: VALUES[section]})
            if not isinstance(_at(path), (dict, list))
        ]
        if not leaves:
            continue
        values = copy.deepcopy(VALUES)
        for path in leaves:
            at = values
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = wrong
        said = refusal(values, tmp_path)
        missed = [path for path in leaves if "/" + "/".join(path) not in said.replace(".", "/")]
        assert missed == [], said


def _at(path):
    value = VALUES
    for key in path:
        value = value[key]
    return value


@pytest.mark.parametrize(
    "options",
    [
        "extraEnv[0].nam=A",
        "extraVolumes[0].name=a",
        "extraVolumes[0].name=a,extraVolumes[0].emptydir.medium=Memory",
        "extraVolumeMounts[0].name=a",
        "head.tolerations[0].kee=a",
        "head.affinity.nodeafinity.a=b",
        "workers.decode.tolerations[0].effect=NoWay",
        "workers.decode.boards.tipe=n300",
        "workers.decode.boards.type=n301",
        "workers.decode.role=decode",
        "workers.more.replicas=1",
        "workers.head.roles[0]=decode",
        "workers.Decode.roles[0]=decode",
        "workers.decode.roles[0]=dekode",
        "workerDefaults.roles[0]=decode",
        "workerDefaults.resources.requests.cpuu=1",
        "workerDefaults.resources.requests.memory=4GB",
        "workerDefaults.shmSize=1",
        "networkPolicy.clients[0].podselector.matchLabels.a=b",
        "networkPolicy.clients[0].podSelector.matchlabels.a=b",
        "networkPolicy.extraEgress[0].port[0].port=1",
        "httpRoute.parentRefs[0].nam=a",
        "imagePullSecrets[0]=a",
        "image.digest=sha256:1",
        "gcsFaultTolerance.image=redis:7",
        "gcsFaultTolerance.image.digest=7",
        "trustedProxies[0]=proxy.example.org",
        "service.externalTrafficPolicy=Global",
        "head.tmpSize=8G",
        "monitoring.rules.firstTokenSeconds=3",
        "monitoring.rules.objective=1",
        "device.mode=usb",
        "secrets.keysName=../keys",
        "secrets.existingApiKeys=a/b",
        "secrets.apiKeysName=../keys",
        "monitoring.serviceMonitor.apiKey.secret=a",
        "tests.apiKey=a",
        "gcsFaultTolerance.existingRedis=redis",
        "rayVersion=latest",
        "service.port=0",
        "extraObjects[0].kind=Pod",
    ],
)
def test_a_wrong_value_is_refused(options):
    done = run_helm("template", "demo", CHART, "--set", options)
    assert done.returncode
    assert "values don't meet the specifications of the schema" in done.stderr

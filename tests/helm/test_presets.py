"""Every preset with its file renders, and its objects and its served file are valid."""

import json
import subprocess

import pytest
import yaml

from cluster.config.resolve import resolve
from cluster.config.serve_file import read_serve_file
from tests.helm.conftest import (
    BIN,
    CHART,
    OPTIONAL,
    PRESETS,
    groups,
    options_of,
    rayservice,
    run_helm,
)


@pytest.fixture(params=[[], OPTIONAL], ids=["as it is", "with all options"])
def options(request):
    return request.param


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_valid(preset, options, render, tmp_path):
    objects = render(*options_of(preset), *options)
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(yaml.safe_dump_all(objects))
    schemas = str(BIN / "schemas") + "/{{ .ResourceKind }}{{ .KindSuffix }}.json"
    done = subprocess.run(
        [BIN / "kubeconform", "-strict", "-schema-location", schemas, manifest],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    served = tmp_path / "serve.yaml"
    served.write_text(rayservice(objects)["spec"]["serveConfigV2"])
    file = read_serve_file(served)
    config = resolve(file.args)
    assert file.http_options.host == "0.0.0.0"
    assert config.data_host == "node"
    assert config.key_file == "/run/secrets/ttserve/keys"
    _check_resources(config, groups(objects))
    _check_pods(objects)


def _check_resources(config, made):
    """The worker groups declare all Ray resources that the file requests, boards included."""
    wanted = [pool.resources for pool in config.pools.values()] + [config.ingress.resources]
    told = [json.loads(json.loads(g["rayStartParams"]["resources"])) for g in made.values()]
    for resources in wanted:
        assert any(resources.keys() <= have.keys() for have in told), resources
    for role, engine in config.engines.items():
        boards = 0 if engine.mesh is None else engine.mesh.spec.num_pcie_devices
        (have,) = (have for have in told if f"ttserve_{role}" in have)
        assert have.get("TTNPU", 0) == boards * config.pools[role].replicas / len(_pods(made, role))


def _pods(made, role):
    return [
        group["groupName"]
        for group in made.values()
        if f"ttserve_{role}" in group["rayStartParams"]["resources"]
        for _ in range(group["replicas"])
    ]


def _pod_specs(objects):
    """Return the specs of all pods that objects make."""
    specs = [group["template"]["spec"] for group in groups(objects).values()]
    specs.append(
        rayservice(objects)["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    )
    for found in objects:
        if found["kind"] in {"Job", "Deployment"}:
            specs.append(found["spec"]["template"]["spec"])
        if found["kind"] == "Pod":
            specs.append(found["spec"])
    assert len(specs) >= 4
    return specs


def _check_pods(objects):
    """No port is named twice in a container, and Pod Security admits every pod."""
    for spec in _pod_specs(objects):
        assert not spec.get("hostIPC")
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
        for container in spec["containers"]:
            ports = container.get("ports", [])
            for key in ("name", "containerPort"):
                assert len({port[key] for port in ports}) == len(ports)
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_bounds_what_each_pod_writes_to_its_node(preset, render):
    for spec in _pod_specs(render(*options_of(preset), *OPTIONAL)):
        for volume in spec["volumes"]:
            empty = volume.get("emptyDir")
            assert empty is None or "sizeLimit" in empty or empty["medium"].startswith("HugePages")
        sizes = [
            _bytes(volume["emptyDir"]["sizeLimit"])
            for volume in spec["volumes"]
            if "emptyDir" in volume and volume["emptyDir"].get("medium") is None
        ]
        (container,) = spec["containers"]
        resources = container["resources"]
        assert _bytes(resources["limits"]["ephemeral-storage"]) >= sum(sizes)
        assert resources["requests"]["ephemeral-storage"]


def test_production_admits_a_gateway_alone_and_pins_its_image(render):
    """It makes no keys, so that a second rendering without a cluster, as by Argo CD, is equal."""
    (preset,) = (path for path in PRESETS if path.stem == "production")
    options = options_of(preset)
    objects = render(*options)
    assert all("@sha256:" in s["containers"][0]["image"] for s in _pod_specs(objects))
    assert [found for found in objects if found["kind"] == "Secret"] == []
    assert render(*options) == objects
    done = run_helm("template", "demo", CHART, *options, "--set", "image.digest=")
    assert "image.digest is empty and image.requireDigests is true" in done.stderr
    policies = {f["metadata"]["name"]: f for f in objects if f["kind"] == "NetworkPolicy"}
    (rule,) = policies["demo-ttserve-clients"]["spec"]["ingress"]
    assert len(rule["from"]) == 2
    for group in groups(objects).values():
        assert group["replicas"] >= 2


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_gives_memory_to_what_it_mounts(preset, render):
    for group in groups(render(*options_of(preset))).values():
        spec = group["template"]["spec"]
        (shm,) = (v["emptyDir"] for v in spec["volumes"] if v["name"] == "shm")
        assert shm["medium"] == "Memory"
        kept = int(group["rayStartParams"]["object-store-memory"])
        assert 75 * 2**20 <= kept < _bytes(shm["sizeLimit"])
        assert _bytes(shm["sizeLimit"]) < _bytes(
            spec["containers"][0]["resources"]["limits"]["memory"]
        )


def _bytes(quantity):
    return int(quantity[:-2]) * {"Mi": 2**20, "Gi": 2**30}[quantity[-2:]]

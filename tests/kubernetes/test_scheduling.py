"""The real scheduler and API server on simulated hosts with boards.

KWOK's nodes have no kubelet: the tests show that a preset's pods are admitted, and get the boards
that the chart requests.
"""

import json

import pytest

from tests.helm.conftest import OPTIONAL, PRESETS, options_of
from tests.kubernetes.cluster import CHART, ROOT, wait_until

DRIVER = "tenstorrent.com"
TAINT = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}
CAPACITY = {"cpu": "64", "memory": "1Ti", "ephemeral-storage": "1Ti", "pods": "64"}
HOSTS = {
    "plain": ("", 0),
    "card": ("n150", 1),
    "box-a": ("n300", 4),
    "box-b": ("n300", 4),
    "galaxy-a": ("galaxy-wormhole", 32),
    "galaxy-b": ("galaxy-wormhole", 32),
}
PRESETS_OF = {preset.stem: preset for preset in PRESETS}


def node(name):
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": name, "test": "boards"},
        },
        "spec": {"taints": [TAINT]},
        "status": {
            "capacity": CAPACITY,
            "allocatable": CAPACITY,
        },
    }


def resource_slice(name, board, count):
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": DRIVER,
            "nodeName": name,
            "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
            "devices": [
                {"name": f"board-{i}", "attributes": {"boardName": {"string": board}}}
                for i in range(count)
            ],
        },
    }


@pytest.fixture(scope="module")
def hosts(cluster):
    """A plain host, and hosts with one n150, four n300 and a Galaxy's 32 boards."""
    if not cluster.is_kit:
        pytest.skip("hosts that pretend are the kit's own, and KUBECONFIG names another cluster")
    made = [node(name) for name in HOSTS]
    made += [resource_slice(name, *boards) for name, boards in HOSTS.items() if boards[1]]
    made.append(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": DRIVER},
            "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}]},
        }
    )
    cluster.apply(*made)
    yield cluster
    for thing in made:
        cluster.kubectl("delete", thing["kind"], thing["metadata"]["name"], "--ignore-not-found")


@pytest.fixture
def scheduled(hosts):
    """Install a preset on the hosts: `scheduled("t3k-pd", **replicas)` waits for its pods."""
    installed = []

    def install(preset, **replicas):
        namespace = f"boards-{preset}"
        hosts.make_namespace(namespace)
        installed.append(namespace)
        hosts.helm("install", "demo", CHART, "-n", namespace, *values(preset, replicas), cwd=ROOT)
        num_pods = 1 + sum(group["replicas"] for group in groups(hosts, namespace))
        return Pods(hosts, namespace, num_pods)

    yield install
    for namespace in installed:
        hosts.helm("uninstall", "demo", "-n", namespace)
        hosts.kubectl("delete", "namespace", namespace, "--timeout=120s")


def values(preset, replicas):
    """Return a preset's options for the simulated hosts; `replicas` of groups."""
    tolerated = json.dumps([{"key": TAINT["key"], "operator": "Exists"}])
    changed = [f"workers.{group}.replicas={count}" for group, count in replicas.items()]
    return [
        *options_of(PRESETS_OF[preset]),
        *("--set-json", f"head.tolerations={tolerated},workerDefaults.tolerations={tolerated}"),
        *("--set", "head.nodeSelector.test=boards,workerDefaults.nodeSelector.test=boards"),
        *("--set", ",".join(["validate.enabled=false", *changed])),
    ]


def groups(cluster, namespace):
    service = cluster.get("rayservice", "demo-ttserve", namespace)
    return service["spec"]["rayClusterConfig"]["workerGroupSpecs"]


class Pods:
    """The pods of a release and their hosts."""

    def __init__(self, cluster, namespace, count):
        self._cluster = cluster
        self._namespace = namespace
        wait_until(lambda: len(self.all()) == count, f"{count} pods")

    def all(self):
        return self._cluster.get("pods", None, self._namespace, "app.kubernetes.io/instance=demo")

    def of(self, groups):
        """Return the pods of these groups, once the scheduler has placed or rejected each."""
        selector = f"app.kubernetes.io/instance=demo,ttserve.io/group in ({','.join(groups)})"

        def judged():
            found = self._cluster.get("pods", None, self._namespace, selector)
            return found if all(condition(pod) is not None for pod in found) else None

        return wait_until(judged, "the scheduler's word")

    def pending(self, *groups):
        """Return the scheduler's message for each unplaced pod of these groups."""
        return [condition(p)["message"] for p in self.of(groups) if not p["spec"].get("nodeName")]

    def boards(self):
        """(host, group) -> boards of each claim that is allotted."""
        of_claim = {}
        for pod in self.all():
            for claim in pod["status"].get("resourceClaimStatuses", []):
                group = pod["metadata"]["labels"]["ttserve.io/group"]
                of_claim[claim["resourceClaimName"]] = (pod["spec"].get("nodeName", ""), group)
        found = {}
        for claim in self._cluster.get("resourceclaims", None, self._namespace):
            results = claim["status"].get("allocation", {}).get("devices", {}).get("results", [])
            if results:
                (pool,) = {result["pool"] for result in results}
                host, group = of_claim[claim["metadata"]["name"]]
                assert pool == host
                found[host, group] = len({result["device"] for result in results})
        return found


def condition(pod):
    for found in pod.get("status", {}).get("conditions", []):
        if found["type"] == "PodScheduled":
            return found
    return None


@pytest.mark.parametrize("preset", PRESETS_OF)
@pytest.mark.parametrize("options", [[], OPTIONAL], ids=["as it is", "with all options"])
def test_a_preset_is_admitted(preset, options, cluster):
    with cluster.namespace(f"admission-{preset}") as namespace:
        done = cluster.helm(
            "install", "demo", CHART, "-n", namespace, "--dry-run=server",
            *options_of(PRESETS_OF[preset]), *options, cwd=ROOT,
        )  # fmt: skip
        assert "warning" not in (done.stdout + done.stderr).lower()
        rendered = cluster.helm(
            "template", "demo", CHART, "-n", namespace,
            *options_of(PRESETS_OF[preset]), *options, cwd=ROOT,
        )  # fmt: skip
        # helm renders the objects; the API server must accept them.
        taken = cluster.kubectl(
            "-n", namespace, "apply", "--dry-run=server", "--validate=strict", "-f", "-",
            input=rendered.stdout,
        )  # fmt: skip
        assert "rayservice.ray.io/demo-ttserve created (server dry run)" in taken.stdout
        assert "would violate" not in taken.stderr.lower()


@pytest.mark.parametrize(
    ("preset", "boards"),
    [
        ("n150", {("card", "both"): 1}),
        ("galaxy", {("galaxy", "both"): 32}),
        ("t3k-pd", {("box", "decode"): 4, ("box", "prefill"): 4}),
        ("galaxy-pd", {("galaxy", "decode"): 32, ("galaxy", "prefill"): 32}),
    ],
)
def test_every_pod_gets_its_boards(preset, boards, scheduled):
    pods = scheduled(preset)
    assert pods.pending("ingress", *(group for _, group in boards)) == []
    found = pods.boards()
    kinds = {(host.partition("-")[0], group): count for (host, group), count in found.items()}
    assert kinds == boards
    assert len({host for host, _ in found}) == len(boards)


@pytest.mark.parametrize(
    ("preset", "replicas"),
    [
        ("n150", {"both": 2}),
        ("galaxy", {"both": 3}),
        ("t3k-pd", {"decode": 2}),
        ("galaxy-pd", {"prefill": 2}),
    ],
)
def test_one_too_many_waits_for_boards(preset, replicas, scheduled):
    pods = scheduled(preset, **replicas)
    (why,) = pods.pending("prefill", "decode", "both")
    assert "cannot allocate all claims" in why
    assert pods.pending("ingress") == []

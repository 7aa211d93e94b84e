"""Fixtures on a real Kubernetes: the kit's node (helm/kit/), or the cluster that KUBECONFIG names.

`make test-helm` builds the images and runs these tests; no other command collects them.

    def test_something(release, client):
        streams = client.streams(release.url, count=32, tokens=500)  # each has its first token
        release.cluster.kubectl("-n", release.namespace, "delete", "pod", name)
        assert all(result["tokens"] == 500 for result in streams.results())

`cluster` runs kubectl and helm, `release` is the chart, installed once for the session, with the
values of helm/ttserve/ci/laptop.yaml in a namespace that enforces Pod Security `restricted`. A test
that breaks it waits until it is whole again (`release.wait_ready`). `make_release` installs further
ones with other values and removes them. `client` is a pod outside of every release.
"""

from __future__ import annotations

import os
import subprocess

import pytest
import yaml

from tests.kubernetes.cluster import (
    IMAGE,
    NODE,
    ROOT,
    Client,
    Cluster,
    Release,
    environment_cluster,
    kit_folder,
    wait_until,
)

# Everything in one worker pod, for two cores that also run the control plane.
LAPTOP = ["-f", str(ROOT / "helm/ttserve/ci/laptop.yaml")]
SIMULATED = ROOT / "configs/sim-t3k-2p2d.yaml"


def pytest_collection_modifyitems(items):
    """Give tests the time that pods need to start."""
    for item in items:
        if "kubernetes" in item.path.parts and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def cluster():
    """The cluster; the kit's node ends with this process, for any reason."""
    given = environment_cluster()
    if given is not None:
        yield given
        return
    subprocess.run([NODE, "down"], check=True)
    guard = subprocess.Popen([NODE, "guard", str(os.getpid())], start_new_session=True)
    subprocess.run([NODE, "up"], check=True)
    try:
        yield Cluster([str(NODE), "exec"], is_kit=True, bin=kit_folder())
    finally:
        subprocess.run([NODE, "down"], check=True)
        guard.kill()
        guard.wait()


@pytest.fixture
def kit(cluster):
    """The cluster, for tests of what the kit's node alone can show."""
    if not cluster.is_kit:
        pytest.skip("only the kit's own node can show this, and KUBECONFIG names another cluster")
    return cluster


@pytest.fixture(scope="session")
def image(cluster):
    """The image's name; on the kit's node it is the one that images.sh built."""
    if not cluster.is_kit:
        if "TTSERVE_IMAGE" not in os.environ:
            pytest.skip("with KUBECONFIG, TTSERVE_IMAGE=repository:tag names an image it can pull")
        return os.environ["TTSERVE_IMAGE"]
    push = ["buildah", "--storage-driver", "overlay", "push", "--quiet", IMAGE]
    with subprocess.Popen(
        [*push, f"docker-archive:/dev/stdout:{IMAGE}"], stdout=subprocess.PIPE
    ) as pushing:
        subprocess.run([NODE, "load"], stdin=pushing.stdout, check=True)
    assert pushing.returncode == 0
    return IMAGE


@pytest.fixture(scope="session")
def make_release(cluster, image, client):
    """Install releases: `make_release(name, "--set", ...)`, each in a namespace of its name."""
    made = []

    def make(name, *values):
        cluster.make_namespace(name)
        release = Release(cluster, image, name, [str(value) for value in values])
        made.append(release)
        release.install()
        # Nodes learn of a ready pod a little later, and refuse connections until then.
        wait_until(lambda: client.connects(release.host, 8000), f"a way to {name}", 60)
        return release

    yield make
    # The kit's node goes as a whole.
    for release in [] if cluster.is_kit else made:
        cluster.kubectl("delete", "namespace", release.namespace, "--ignore-not-found")


@pytest.fixture(scope="session")
def release(make_release):
    """The laptop's preset: four engines on simulated meshes in one worker pod, and a head pod."""
    return make_release("ttserve", *LAPTOP, "--set-file", f"serveConfig={SIMULATED}")


@pytest.fixture(scope="session")
def client(cluster, image):
    """A pod of a namespace of its own."""
    with cluster.namespace("somebody") as namespace:
        pod = Client(cluster, image, namespace)
        pod.start()
        yield pod


@pytest.fixture
def changed_file(tmp_path):
    """Write the served file with changed `args`: `changed_file({"router": {...}})`."""

    def write(args):
        file = yaml.safe_load(SIMULATED.read_text())
        file["applications"][0]["args"] |= args
        path = tmp_path / "serve.yaml"
        path.write_text(yaml.safe_dump(file))
        return path

    return write

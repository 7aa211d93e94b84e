"""A Kubernetes cluster for tests: kubectl and helm, releases, and a client's pod."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NODE = ROOT / "helm/kit/node.sh"
CHART = ROOT / "helm/ttserve"
IMAGE = "localhost/ttserve:test"
STREAMS = Path(__file__).with_name("streams.py")

_RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def wait_until(check, what, timeout_s=300.0):
    """Return the first true answer of `check`; fail with its last one if none comes in time."""
    deadline_s = time.monotonic() + timeout_s
    while not (answer := check()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what} did not come within {timeout_s:.0f} s")
        time.sleep(0.5)
    return answer


@dataclass
class Cluster:
    """A cluster: the kit's node, or that of the given KUBECONFIG. Runs commands against it."""

    prefix: list[str]
    is_kit: bool
    bin: Path

    def run(self, *command, check=True, timeout_s=600, **options):
        """Run a command to its end; its output is text."""
        done = subprocess.run(
            [*self.prefix, *map(str, command)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            **options,
        )
        if check and done.returncode:
            raise AssertionError(f"{command}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def start(self, *command, **options):
        return subprocess.Popen(
            [*self.prefix, *map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )

    def kubectl(self, *arguments, **options):
        return self.run("kubectl", *arguments, **options)

    def helm(self, *arguments, **options):
        return self.run(self.bin / "helm", *arguments, **options)

    def apply(self, *objects, **options):
        """Create or change objects, given as dictionaries."""
        whole = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        return self.kubectl("apply", "-f", "-", input=json.dumps(whole), **options)

    def get(self, kind, name=None, namespace=None, selector=None):
        """One object, or the list of them; None if there is no such object."""
        where = [*(["-n", namespace] if namespace else []), *(["-l", selector] if selector else [])]
        names = [name] if name else []
        found = self.kubectl("get", kind, *names, *where, "-o", "json", "--ignore-not-found").stdout
        if not found:
            return None if name else []
        return json.loads(found) if name else json.loads(found)["items"]

    def make_namespace(self, name):
        """A namespace that enforces Pod Security `restricted`."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        self.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        )

    @contextlib.contextmanager
    def namespace(self, name):
        self.make_namespace(name)
        try:
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=120s")


@dataclass
class Release:
    """A release of the chart; `name` is also that of its namespace, RayService and Service."""

    cluster: Cluster
    image: str
    name: str
    values: list[str]

    @property
    def namespace(self):
        return self.name

    @property
    def host(self):
        return f"{self.name}.{self.namespace}.svc"

    @property
    def url(self):
        return f"http://{self.host}:8000"

    def install(self):
        """Install it, wait until it can serve, and print the time that this took."""
        start_s = time.monotonic()
        self.cluster.helm("install", *self.arguments())
        self.wait_ready(900)
        ready_s = time.monotonic() - start_s
        print(f"\n{self.name}: {ready_s:.0f} s from `helm install` to Ready")

    def upgrade(self, *more, **options):
        """`helm upgrade` with more values behind those of the installation."""
        return self.cluster.helm("upgrade", *self.arguments(*more), **options)

    def uninstall(self):
        self.cluster.helm("uninstall", self.name, "-n", self.namespace, "--ignore-not-found")

    def arguments(self, *more):
        repository, _, tag = self.image.rpartition(":")
        own = f"fullnameOverride={self.name},image.repository={repository},image.tag={tag}"
        return [self.name, CHART, "-n", self.namespace, "--set", own, *self.values, *more]

    def service(self):
        return self.cluster.get("rayservice", self.name, self.namespace)

    def pods(self, component=None):
        """Running pods by name, head and workers; `component` is head or worker."""
        selector = f"app.kubernetes.io/instance={self.name},ray.io/node-type"
        if component:
            selector += f",ray.io/node-type={component}"
        found = self.cluster.get("pods", None, self.namespace, selector)
        return {pod["metadata"]["name"]: pod for pod in found}

    def wait_ready(self, timeout_s=300):
        """Wait until the RayService and every pod of the release are ready."""

        def is_whole():
            service, pods = self.service(), self.pods()
            return service and pods and all(map(is_ready, [service, *pods.values()]))

        try:
            wait_until(is_whole, f"readiness of {self.name}", timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.describe()}") from None

    def describe(self):
        """Return the state and logs of a release, to diagnose a failure."""
        parts = [
            self.cluster.kubectl("-n", self.namespace, *command, check=False).stdout
            for command in (
                ["describe", "rayservice", self.name],
                ["get", "pods", "-o", "wide"],
                ["get", "events", "--sort-by=.lastTimestamp"],
                [
                    "logs",
                    "-l",
                    f"app.kubernetes.io/instance={self.name}",
                    "--all-containers",
                    "--tail=30",
                ],
            )
        ]
        return "\n".join(parts)

    def ray(self, *command, **options):
        """Run a command in the head pod, as `ttserve` and `serve` have to."""
        (head,) = self.pods("head")
        shell = 'export RAY_ADDRESS=${RAY_ADDRESS:-127.0.0.1:6379}; exec "$@"'
        return self.cluster.kubectl(
            "-n", self.namespace, "exec", head, "-c", "ray-head", "--",
            "bash", "-c", shell, "-", *command, **options,
        )  # fmt: skip


def is_ready(thing):
    conditions = thing.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


@dataclass
class Client:
    """A pod outside of all releases, with the access of any pod in the cluster."""

    cluster: Cluster
    image: str
    namespace: str
    name: str = "client"

    def start(self):
        container = {
            "name": "client",
            "image": self.image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["sleep", "infinity"],
            "securityContext": _RESTRICTED,
        }
        self.cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": self.name, "namespace": self.namespace},
                "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
            }
        )
        self.cluster.kubectl(
            "-n", self.namespace, "wait", f"pod/{self.name}", "--for=condition=Ready",
            "--timeout=300s",
        )  # fmt: skip

    def python(self, program, *arguments, **options):
        """Run a program there; it has the standard library and the image's packages."""
        return self.cluster.run(*self._command(arguments), input=program, **options)

    def connects(self, address, port):
        """Return whether a connection is accepted."""
        program = (
            "import socket, sys\n"
            "try: socket.create_connection((sys.argv[1], int(sys.argv[2])), 3); print('open')\n"
            "except OSError as error: print(error)\n"
        )
        return self.python(program, address, port).stdout.strip() == "open"

    def streams(self, url, count, tokens):
        """Open streams; return once each of them has had its first token."""
        process = self.cluster.start(*self._command([url, count, tokens]))
        process.stdin.write(STREAMS.read_text())
        process.stdin.close()
        return Streams(process)

    def _command(self, arguments):
        return [
            "kubectl",
            "-n",
            self.namespace,
            "exec",
            "-i",
            self.name,
            "--",
            "python3",
            "-",
            *arguments,
        ]


class Streams:
    """Streams that run in the client's pod."""

    def __init__(self, process):
        self._process = process
        said = []
        for line in process.stdout:
            said.append(line)
            if line == "running\n":
                return
        raise AssertionError("the streams did not start: " + "".join(said))

    @property
    def are_running(self):
        return self._process.poll() is None

    def results(self):
        """One dictionary a stream, at the end of all; streams.py has its fields."""
        with self._process:
            said = self._process.stdout.read()
        assert self._process.returncode == 0, said
        return json.loads(said.splitlines()[-1])


def environment_cluster():
    """The cluster that KUBECONFIG names, or None."""
    if not os.environ.get("KUBECONFIG"):
        return None
    return Cluster([], is_kit=False, bin=kit_folder())


def kit_folder():
    return Path(os.environ.get("BIN") or ROOT / ".kit")

"""Connectivity of pods and ports, computed from the rendered NetworkPolicies.

The kit's node enforces no policy, so these tests check the rules themselves.
"""

from dataclasses import dataclass

import pytest

from tests.helm.conftest import groups, rayservice

PORTS = {
    6379: "Ray's store, or Redis",
    8000: "endpoint",
    8001: "metrics, KV and routes of an ingress",
    8080: "Ray's metrics",
    8265: "Ray's dashboard",
    8404: "HAProxy's statistics",
    8500: "Serve's proxy",
    9101: "HAProxy's metrics",
    10001: "Ray's clients",
    12345: "engines and Ray's workers",
    30000: "an ingress behind its proxy",
    44217: "the autoscaler's metrics",
}
EVERYTHING = "everything"

BY_DEFAULT = """
prometheus -> head: 8080 44217
prometheus -> decode: 8001 8080 44217
prometheus -> ingress: 8001 8080 44217
operator -> head: 8265
test -> decode: 8000 8001
test -> ingress: 8000 8001
head -> head: everything
head -> decode: everything
head -> ingress: everything
decode -> head: everything
decode -> decode: everything
decode -> ingress: everything
ingress -> head: everything
ingress -> decode: everything
ingress -> ingress: everything
"""
ADMITTED = "chat -> decode: 8000\nchat -> ingress: 8000" + BY_DEFAULT.replace(
    "head -> ingress: everything\n", "head -> ingress: everything\nhead -> redis: 6379\n"
)
ONE_CLIENT = ["--set", "networkPolicy.clients[0].podSelector.matchLabels.app=chat"]
REDIS = ["--set", "gcsFaultTolerance.enabled=true"]


@dataclass(frozen=True)
class Actor:
    """A pod at one end of a connection."""

    name: str
    namespace: str
    labels: dict


def actors(objects):
    """Return the release's pods, and examples of other pods."""
    config = rayservice(objects)["spec"]["rayClusterConfig"]
    made = groups(objects)
    own = {
        "head": config["headGroupSpec"]["template"],
        "decode": made["decode"]["template"],
        "ingress": made["ingress"]["template"],
    }
    for found in objects:
        if found["kind"] == "Pod":
            own["test"] = found
        elif found["kind"] == "Job":
            own["validate"] = found["spec"]["template"]
        elif found["kind"] == "Deployment":
            own["redis"] = found["spec"]["template"]
    others = [
        Actor("stranger", "default", {"app": "stranger"}),
        Actor("chat", "llm", {"app": "chat"}),
        Actor("prometheus", "monitoring", {}),
        Actor("operator", "kuberay", {"app.kubernetes.io/name": "kuberay-operator"}),
    ]
    return others, [Actor(n, "llm", pod["metadata"]["labels"]) for n, pod in own.items()]


def matches(selector, labels):
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for one in selector.get("matchExpressions", []):
        assert one["operator"] == "In", one
        if labels.get(one["key"]) not in one["values"]:
            return False
    return True


def is_peer(peer, actor):
    assert not peer.keys() - {"podSelector", "namespaceSelector"}, peer
    spaces = peer.get("namespaceSelector")
    if spaces is None:
        is_there = actor.namespace == "llm"
    else:
        is_there = matches(spaces, {"kubernetes.io/metadata.name": actor.namespace})
    return is_there and matches(peer.get("podSelector", {}), actor.labels)


def allows(policies, actor, other, port, direction):
    """Return whether the policies of one end admit this connection, by Kubernetes's rules."""
    side = {"Ingress": "from", "Egress": "to"}[direction]
    concerned = [
        policy["spec"]
        for policy in policies
        if actor.namespace == "llm"
        and direction in policy["spec"]["policyTypes"]
        and matches(policy["spec"]["podSelector"], actor.labels)
    ]
    if not concerned:
        return True
    return any(
        (not rule.get(side) or any(is_peer(peer, other) for peer in rule[side]))
        and (not rule.get("ports") or port in [p["port"] for p in rule["ports"]])
        for spec in concerned
        for rule in spec.get(direction.lower()) or []
    )


def table(objects):
    policies = [found for found in objects if found["kind"] == "NetworkPolicy"]
    others, own = actors(objects)
    lines = []
    for source in sorted([*others, *own], key=lambda a: ORDER.index(a.name)):
        for target in sorted(own, key=lambda a: ORDER.index(a.name)):
            ports = [
                port
                for port in PORTS
                if allows(policies, source, target, port, "Egress")
                and allows(policies, target, source, port, "Ingress")
            ]
            said = EVERYTHING if len(ports) == len(PORTS) else " ".join(map(str, ports))
            if said:
                lines.append(f"{source.name} -> {target.name}: {said}")
    return "\n".join(lines)


ORDER = [
    "stranger", "chat", "prometheus", "operator", "test", "validate",
    "head", "decode", "ingress", "redis",
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "golden"),
    [([], BY_DEFAULT), ([*ONE_CLIENT, *REDIS], ADMITTED)],
    ids=["by default", "one client and a Redis"],
)
def test_who_reaches_what(options, golden, render):
    assert table(render(*options)) == golden.strip()


def test_nothing_outside_reaches_what_runs_programs_or_says_too_much(render):
    """This holds even if every pod of the cluster may use the endpoint."""
    found = table(render(*REDIS, "--set-json", 'networkPolicy.clients=[{"namespaceSelector": {}}]'))
    assert "stranger -> decode: 8000\n" in found
    for line in found.splitlines():
        source, _, rest = line.partition(" -> ")
        ports = set(rest.partition(": ")[2].split())
        if source in {"stranger", "chat", "validate"}:
            assert ports == {"8000"}, line
        if source not in {"head", "decode", "ingress"}:
            assert not ports & {"6379", "8404", "8500", "9101", "10001", "12345", "30000"}, line
            assert EVERYTHING not in ports
        if source != "operator" and EVERYTHING not in ports:
            assert "8265" not in ports, line


def test_without_policies_everybody_reaches_everything(render):
    """The computation does not close anything without a policy."""
    assert "stranger -> head: everything" in table(render("--set", "networkPolicy.enabled=false"))


def test_pods_ask_for_names_and_nothing_else_outside(render):
    objects = render(*ONE_CLIENT)
    policies = [found for found in objects if found["kind"] == "NetworkPolicy"]
    _, own = actors(objects)
    world = Actor("world", "elsewhere", {})
    for actor in own:
        reached = [p for p in (53, 80, 443, 6443) if allows(policies, actor, world, p, "Egress")]
        assert reached == [53], actor.name

"""The end of the session's release; the last file, as the others need it."""

from tests.kubernetes.cluster import wait_until

# Kubernetes makes these in every namespace.
_EVERYWHERE = {"configmap/kube-root-ca.crt", "serviceaccount/default"}


def contents(cluster, namespace):
    """Return all objects of a namespace except events, as kind/name."""
    kinds = cluster.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").stdout
    asked = ",".join(kind for kind in kinds.split() if not kind.startswith("events"))
    found = cluster.get(asked, None, namespace)
    return {f"{item['kind']}/{item['metadata']['name']}".lower() for item in found} - _EVERYWHERE


def test_uninstall_leaves_nothing_but_the_secrets_that_are_kept(release):
    assert "pod" in {
        name.partition("/")[0] for name in contents(release.cluster, release.namespace)
    }
    said = release.cluster.helm("uninstall", release.name, "-n", release.namespace).stdout
    kept = {f"secret/{release.name}-keys"}
    left = contents(release.cluster, release.namespace)
    wait_until(
        lambda: contents(release.cluster, release.namespace) == kept,
        f"an end of all but {kept}; first {left}",
        700,
    )
    assert f"{release.name}-keys" in said

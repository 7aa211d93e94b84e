"""Where a cluster without a `key_file` has its secret from."""

from pathlib import Path

import pytest
import ray

from cluster.config.resolve import resolve
from cluster.lifecycle import secret
from cluster.lifecycle.secret import application_secret, deployment_keys

ARGS = {"pools": {"both": {}}}


@pytest.fixture
def store(monkeypatch):
    """Ray's key-value store, of this test."""
    values = {}

    def put(key, value, *, overwrite, namespace):
        assert not overwrite
        return values.setdefault((namespace, key), value) is not value

    def get(key, *, namespace):
        return values[namespace, key]

    monkeypatch.setattr(secret, "_internal_kv_put", put)
    monkeypatch.setattr(secret, "_internal_kv_get", get)
    return values


def test_every_replica_of_an_application_has_the_same_secret_and_another_one_has_its_own(store):
    rings = [deployment_keys(resolve(ARGS), name) for name in ("one", "one", "two")]
    assert rings[0] == rings[1] != rings[2]
    assert [len(ring.secrets) for ring in rings] == [1, 1, 1]
    assert {len(value) for value in store.values()} == {32}


def test_secrets_of_a_file_are_read_where_they_are_needed_and_stored_nowhere(store, tmp_path):
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text("00" * 32)
    keys = deployment_keys(resolve({**ARGS, "key_file": str(path)}), "one")
    assert (keys.secrets, store) == ((bytes(32),), {})


# Serve's own, when it is imported.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_serve_replaces_replicas_only_for_another_key_file(
    tmp_path,
):
    from ray.serve._private.deploy_utils import get_app_code_version
    from ray.serve.schema import ServeApplicationSchema

    def version(name, text):
        path = tmp_path / name
        path.write_text(text)
        application = {"import_path": "m:build", "args": {**ARGS, "key_file": str(path)}}
        return get_app_code_version(ServeApplicationSchema.model_validate(application))

    before = version("keys-1", "00" * 32)
    assert version("keys-1", "00" * 32 + "\n" + "11" * 32) == before
    assert version("keys-2", "00" * 32 + "\n" + "11" * 32) != before
    policy = (Path(__file__).resolve().parents[3] / "SECURITY.md").read_text()
    assert "To rotate, write in each step a file of another name" in policy


@pytest.mark.ray
def test_replicas_of_one_version_and_the_next_find_the_same_secret():
    ray.init(num_cpus=1, include_dashboard=False, configure_logging=False)
    try:
        read = ray.remote(max_calls=1)(application_secret)
        versions = [ray.get(read.remote("default")) for _ in range(2)]
        assert versions[0] == versions[1]
        assert versions[0] != ray.get(read.remote("another"))
    finally:
        ray.shutdown()

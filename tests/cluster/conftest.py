"""What a replica finds around it, without Ray."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def as_replica(monkeypatch):
    """Called with secrets and a rank, lets a replica be made as if Serve did it."""
    from cluster.lifecycle import deployments

    def arrange(keys, rank=0):
        context = SimpleNamespace(
            app_name="default", rank=SimpleNamespace(rank=rank), gang_context=None
        )
        monkeypatch.setattr(deployments.serve, "get_replica_context", lambda: context)
        monkeypatch.setattr(deployments, "deployment_keys", lambda _config, _application: keys)

    return arrange


@pytest.fixture
def started(monkeypatch):
    """The configurations of engines that replicas would have started."""
    from cluster.lifecycle import deployments

    class Engine:
        description = SimpleNamespace(incarnation="0")

        def call_at_exit(self, callback):
            pass

    def start_engine(config, **_):
        configs.append(config)
        return Engine()

    configs = []
    monkeypatch.setattr(deployments, "start_engine", start_engine)
    monkeypatch.delattr(deployments.PoolReplica, "__del__")  # nothing was started
    return configs

"""The classes that Serve makes, with real engines on a simulated mesh and without Ray."""

import asyncio
import contextlib
import os
import signal
import time
import warnings
from types import SimpleNamespace

import msgspec
import pytest

from kv_transfer.keys import KeyRing
from tests.cluster.edge.http_server import poll
from tests.cluster.edge.test_routes import Client
from tests.cluster.engines import until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from cluster.lifecycle import deployments as module
    from cluster.lifecycle.deployments import IngressReplica, PoolDirectory, PoolReplica

KEYS = KeyRing((b"a secret of sixteen bytes or more",))
TENANT = "x-tenant"
MESH = {"model": "Llama-3.2-1B", "board": "n150"}
ARGS = {
    "engine": {"block_size": 32, "max_model_len": 4096, "simulated_mesh": MESH},
    "pools": {"both": {"max_replicas": 2, "drain_timeout_s": 2.0, "engine": {"max_batch_size": 4}}},
}
OF_INGRESS = {
    "ingress": {"max_body_bytes": 50_000, "request_timeout_s": 3.0},
    "router": {
        "admission": {
            "ttft_s": 30.0, "tenant_header": TENANT, "tenants": {"small": {"max_requests": 1}}
        }
    },
}  # fmt: skip
TWO_POOLS = {**ARGS, "pools": {"prefill": {}, "decode": {"max_replicas": 3}}}
LONG = {"prompt": "Return the", "max_tokens": 4000, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 5}


class Replica(PoolReplica):
    """A replica of a pool whose end is called by name: Serve awaits it, the interpreter cannot."""

    end = PoolReplica.__del__

    def __del__(self):
        """End nothing: `made` does."""


@contextlib.contextmanager
def made(as_replica, args, role):
    """A replica whose engine runs, as Serve makes it; ends the engine."""
    as_replica(KEYS)
    replica = Replica(args, role)
    try:
        yield replica
    finally:
        replica._life.state = module.LifeState.DEAD
        replica._engine.stop()


class Handle:
    """A pool's handle, which reaches replicas in this process and answers with `extra` as well."""

    def __init__(self, *replicas, extra=()):
        self._replicas = replicas
        self._extra = extra

    def broadcast(self, method, *arguments):
        """Ask every replica."""

        def results(timeout_s, return_exceptions):
            assert 0.0 < timeout_s < 60.0
            assert return_exceptions
            answers = [
                asyncio.run(getattr(replica, method)(*arguments)) for replica in self._replicas
            ]
            return [*answers, *self._extra]

        return SimpleNamespace(results=results)


class BrokenHandle:
    """A pool's handle that fails."""

    def __init__(self, error):
        self._error = error

    def broadcast(self, method):
        """Fail."""
        raise self._error


# --- a replica of a pool -------------------------------------------------------------------------


@pytest.mark.process
def test_a_replica_changes_its_role_only_if_named(as_replica):
    with made(as_replica, TWO_POOLS, "decode") as replica:
        name = f"decode-{asyncio.run(replica.describe())['incarnation']}"
        role_status = asyncio.run(replica.role_status())
        assert role_status == {
            "replica": name, "role": "decode", "next_role": "decode",
            "has_connector": True, "in_gang": False, "is_scaled": True,
            "is_draining": False, "is_drained": False,
        }  # fmt: skip
        asyncio.run(replica.change_role("decode-of another", "prefill"))
        assert asyncio.run(replica.role_status()) == role_status
        asyncio.run(replica.set_draining("decode-of another", True))
        assert asyncio.run(replica.role_status()) == role_status
        asyncio.run(replica.set_draining(name, True))
        assert asyncio.run(replica.role_status())["is_draining"]
        poll(lambda: asyncio.run(replica.role_status())["is_drained"], "it has no request")
        asyncio.run(replica.set_draining(name, False))
        assert asyncio.run(replica.role_status()) == role_status
        asyncio.run(replica.change_role(name, "prefill"))
        assert asyncio.run(replica.role_status())["next_role"] == "prefill"
        deadline_s = time.monotonic() + 20.0
        while asyncio.run(replica.role_status())["role"] != "prefill":
            assert time.monotonic() < deadline_s, "the engine never took the role"
            time.sleep(0.02)


@pytest.mark.process
def test_a_replica_ends_its_process_when_its_engine_dies(as_replica, monkeypatch):
    codes = []
    monkeypatch.setattr(module.os, "_exit", codes.append)
    with made(as_replica, ARGS, "both") as replica:
        os.kill(replica._engine.description.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 20.0
        while not codes:
            assert time.monotonic() < deadline_s, "the replica outlives its engine"
            time.sleep(0.02)
    assert codes == [1]


# --- an ingress ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(ingress):
    """An ingress's app within its lifespan, once it knows a replica; yields `ask`."""
    app = ingress.__serve_build_asgi_app__()

    async def ask(path, body, **headers):
        named = [(name.replace("_", "-"), value) for name, value in headers.items()]
        return await Client(app).request("POST", path, body, named)

    async with app.router.lifespan_context(app):
        await until(lambda: ingress._ingress.is_ready()[0], "it is ready")
        yield ask


@pytest.fixture
def ingress(as_replica, monkeypatch):
    """An ingress over one replica that Serve runs, and that replica."""
    replicas = SimpleNamespace(replica_states={"RUNNING": 1})
    application = SimpleNamespace(deployments={"both": replicas})
    status = SimpleNamespace(applications={"default": application})
    monkeypatch.setattr(module.serve, "status", lambda: status)
    with made(as_replica, ARGS, "both") as replica:
        ingress = IngressReplica({**ARGS, **OF_INGRESS}, both=Handle(replica))
        monkeypatch.setattr(module.serve, "get_deployment_handle", lambda *_: Handle(ingress))
        yield ingress, replica


@pytest.mark.process
async def test_an_ingress_serves_as_its_configuration_says_and_both_report_to_serve(ingress):
    ingress, replica = ingress
    assert ingress.record_autoscaling_stats() == {}, "it has no app yet"
    async with serving(ingress) as ask:
        await ingress.check_health()
        assert (await ask("/v1/completions", SHORT)).status == 200
        size = replica.record_autoscaling_stats()
        assert size.pop("cold_start_s") > 0.0
        assert size == {"dp_groups": 1.0, "slots_per_group": 4.0}
        report = ingress.record_autoscaling_stats()
        assert (report["traffic_came"], report["traffic_ended"]) == (1.0, 1.0)
        assert report["refused_after_s"] == 30.0
        # The first of a tenant runs until the configured time is over, the second is refused.
        late, refused = await asyncio.gather(
            *(ask("/v1/completions", LONG, x_tenant="small") for _ in range(2))
        )
        assert [answer.body["error"]["code"] for answer in (late, refused)] == [
            "request_timeout", "quota"
        ]  # fmt: skip
        large = {**SHORT, "prompt": "x" * 50_000}
        answer = await ask("/v1/completions", large)
        assert (answer.status, answer.body["error"]["code"]) == (413, "payload_too_large")
        client = ingress._ingress.fleet.client
        assert client.incarnations == {replica._engine.description.incarnation}
    assert not client.incarnations, "its connections end with it"
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, "nothing runs on")


@pytest.mark.process
async def test_a_replica_that_stops_lets_streams_end_for_as_long_as_configured(ingress, caplog):
    ingress, replica = ingress
    async with serving(ingress) as ask:
        # The other one is longer than the drain, and than a request may be.
        asked = [{**SHORT, "max_tokens": 60}, LONG]
        streams = [asyncio.ensure_future(ask("/v1/completions", body)) for body in asked]
        snapshot = ingress._ingress.fleet.pools.snapshot
        incarnation = replica._engine.description.incarnation
        await until(lambda: snapshot(incarnation).groups[0].num_running == 2, "both decode")
        await replica.end()
        assert not replica._engine.is_alive
        assert [(await stream).status for stream in streams] == [200, 408]
    assert "stopping the engine with requests running" in caplog.text


async def test_an_ingress_that_cannot_find_any_replica_is_not_healthy(as_replica):
    as_replica(KEYS)
    ingress = IngressReplica(ARGS, both=BrokenHandle(OSError("no controller")))
    app = ingress.__serve_build_asgi_app__()
    loop = asyncio.get_running_loop()
    async with app.router.lifespan_context(app):
        fleet = ingress._ingress.fleet
        await until(lambda: fleet._failing_since_s is not None, "discovery fails")
        await ingress.check_health()
        fleet._failing_since_s = loop.time() - 3600.0
        with pytest.raises(RuntimeError, match="discovery keeps failing"):
            await ingress.check_health()


# --- finding replicas ----------------------------------------------------------------------------


def description(incarnation):
    """What a replica answers."""
    from tests.cluster.engines import make_member

    return msgspec.to_builtins(make_member("decode", incarnation).description)


def test_replicas_with_unreadable_answers_are_ignored():
    answers = [description("a"), TimeoutError(), {"incarnation": "of a later version"}]
    handles = {
        "decode": Handle(extra=answers),
        "prefill": BrokenHandle(module.RayServeException("it starts")),
    }
    found = asyncio.run(PoolDirectory(handles).find())
    assert [(member.pool, member.replica_id) for member in found] == [("decode", "decode-a")]


def test_a_pool_that_fails_hides_no_other_and_all_together_are_an_error():
    broken = BrokenHandle(OSError("no controller"))
    found = asyncio.run(
        PoolDirectory({"a": broken, "decode": Handle(extra=[description("a")])}).find()
    )
    assert [member.replica_id for member in found] == ["decode-a"]
    with pytest.raises(OSError, match="no controller"):
        asyncio.run(PoolDirectory({"a": broken}).find())


def test_num_wanted_counts_replicas_of_this_application_that_do_not_stop(as_replica, monkeypatch):
    as_replica(KEYS)

    def application(**counts):
        return SimpleNamespace(
            deployments={
                pool: SimpleNamespace(replica_states=states) for pool, states in counts.items()
            }
        )

    own = application(
        prefill={"RUNNING": 1}, decode={"STARTING": 2, "RUNNING": 1, "STOPPING": 4},
        ingress={"RUNNING": 8},
    )  # fmt: skip
    status = SimpleNamespace(
        applications={"other": application(prefill={"RUNNING": 16}), "default": own}
    )
    monkeypatch.setattr(module.serve, "status", lambda: status)
    directory = PoolDirectory({"prefill": None, "decode": None})
    assert asyncio.run(directory.num_wanted()) == 4
    status.applications.pop("default")
    assert asyncio.run(directory.num_wanted()) is None, "it is being deleted"

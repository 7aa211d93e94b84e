"""Calls of operators to real engines, without Ray, and over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
import warnings
from types import SimpleNamespace

import pytest

from cluster import admin as module
from cluster.admin import ClusterAdmin
from cluster.config.schema import AdminConfig
from cluster.edge.admin.cluster import (
    ConflictError,
    OrderFailedError,
    ReplicaUnresponsiveError,
    Target,
)
from cluster.edge.api_keys import new_key
from cluster.errors import ClusterConfigError, NotFoundError, NotReadyError
from replicas.messages import Utility, UtilityResult
from tests.cluster.engines import (
    KEYS,
    LocalReplicas,
    ScriptedEngine,
    engine_config,
    prompts,
    rig,
    running,
    sampling,
    until,
    until_idle,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from cluster.lifecycle.admin import AdminServer

ALL = Target()
LONG = sampling(1000)


class Found:
    """The discovery of engines that the test has."""

    def __init__(self, *engines):
        self.engines = list(engines)

    async def find(self):
        return [engine.member for engine in self.engines]

    async def num_wanted(self):
        return len(self.engines)


@contextlib.asynccontextmanager
async def administered(*engines, replicas=None):
    """A `ClusterAdmin` that is connected to engines."""
    admin = ClusterAdmin(KEYS, replicas or LocalReplicas(*engines))
    following = asyncio.create_task(admin.follow(Found(*engines)))
    try:
        for engine in engines:
            await until(
                lambda engine=engine: admin._fleet.pools.snapshot(
                    engine.member.description.incarnation
                ),
                "connected",
            )
        yield admin
    finally:
        following.cancel()
        await admin.close()


def two_of_each():
    pools = [("prefill", engine_config("prefill"))] * 2 + [("decode", engine_config("decode"))] * 2
    return running(*pools)


def name(engine):
    return engine.member.replica_id


async def states(admin):
    return {view.replica: view.state for view in await admin.replicas()}


async def reaches(admin, engine, state):
    """Wait until a replica is in a state; return its view."""
    while True:
        views = {view.replica: view for view in await admin.replicas()}
        if views[name(engine)].state == state:
            return views[name(engine)]
        await asyncio.sleep(0.05)


@pytest.mark.process
async def test_a_drained_engine_hands_its_streams_over_and_serves_again_once_undrained():
    asked = [(prompt, LONG) for prompt in prompts(4)]
    with two_of_each() as engines:
        _, _, decode, other = engines
        async with (
            rig(*engines, policy="round_robin") as made,
            administered(*engines) as admin,
        ):
            wanted = await asyncio.gather(*(made.tokens(*one) for one in asked))
            streams = [asyncio.ensure_future(made.tokens(*one)) for one in asked]

            def num_running(engine):
                snapshot = made.pools.snapshot(engine.incarnation)
                return sum(group.num_running for group in snapshot.groups)

            await until(lambda: num_running(decode) > 0, "streams run there")
            view = await admin.drain(name(decode))
            assert view.state in {"draining", "drained"}
            with pytest.raises(ConflictError, match="last engine with role decode"):
                await admin.drain(name(other))
            with pytest.raises(ConflictError, match="undrain it first"):
                await admin.change_role(name(decode), "prefill")
            view = await reaches(admin, decode, "drained")
            assert (view.running, view.reserved, view.waiting) == (0, 0, 0)
            assert not all(stream.done() for stream in streams), "they outlast the drain"
            assert await asyncio.gather(*streams) == wanted
            assert not made.lost
            before = (await made.engine_metrics(decode)).num_steps
            assert await made.tokens(*asked[0]) == wanted[0]
            assert (await made.engine_metrics(decode)).num_steps == before
            assert (await admin.undrain(name(decode))).state != "drained"
            await reaches(admin, decode, "ready")
            assert await asyncio.gather(*(made.tokens(*one) for one in asked)) == wanted
            assert (await made.engine_metrics(decode)).num_steps > before
            await until_idle(made, *engines)


@pytest.mark.process
async def test_a_role_changes_and_the_last_of_a_role_stays():
    with two_of_each() as engines:
        async with administered(*engines) as admin:
            view = await admin.change_role(name(engines[0]), "decode")
            assert "decode" in {view.role, view.next_role}
            view = await reaches(admin, engines[0], "ready")
            while view.role != "decode":
                view = await reaches(admin, engines[0], "ready")
            assert (view.pool, view.next_role) == ("prefill", None)
            with pytest.raises(ConflictError, match="last engine with role prefill"):
                await admin.change_role(name(engines[1]), "decode")
            with pytest.raises(NotFoundError, match="no replica"):
                await admin.change_role("decode-gone", "prefill")


@pytest.mark.process
async def test_engines_are_paused_one_by_one_by_pool_and_all_together():
    with two_of_each() as engines:
        first, second, decode, other = engines
        async with administered(*engines) as admin:
            await admin.pause(Target(replica=name(decode)), "keep", clear_cache=True)
            assert await admin.is_paused(Target(pool="decode")) == {
                name(decode): True, name(other): False
            }  # fmt: skip
            await reaches(admin, decode, "paused")
            await admin.pause(Target(pool="prefill"), "abort", clear_cache=False)
            assert sum((await admin.is_paused(ALL)).values()) == 3
            await admin.reset_prefix_cache(ALL, reset_running_requests=True)
            await admin.resume(ALL)
            assert not any((await admin.is_paused(ALL)).values())
            for target in (Target(replica="decode-gone"), Target(pool="both")):
                with pytest.raises(NotFoundError, match="GET /replicas"):
                    await admin.resume(target)
            await admin.drain(name(first))
            await reaches(admin, first, "drained")
            with pytest.raises(OrderFailedError, match=rf"{name(first)} \(the engine drains"):
                await admin.pause(Target(pool="prefill"), "keep", clear_cache=False)
            assert await admin.is_paused(Target(replica=name(second))) == {name(second): True}


@pytest.mark.process
async def test_a_profile_shows_where_the_core_spends_its_time():
    with running(("both", engine_config("both"))) as [engine]:
        async with administered(engine) as admin, rig(engine) as made:
            stream = asyncio.ensure_future(made.tokens(prompts(1)[0], LONG))
            first = await admin.profile(name(engine), 1.0)
            lines = [line.rpartition(" ") for line in first.splitlines()]
            assert lines
            assert all(int(count) > 0 for _, _, count in lines)
            assert [stack for stack, _, _ in lines if ".run:" not in stack] == []
            assert len(await stream) == 1000
            with pytest.raises(NotFoundError):
                await admin.profile("both-gone", 0.1)


async def test_a_cluster_without_replicas_takes_no_orders():
    async with administered() as admin:
        assert await admin.replicas() == []
        with pytest.raises(NotReadyError, match="no replica is known yet"):
            await admin.resume(ALL)


@pytest.mark.process
async def test_a_frozen_engine_ends_orders_in_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(module, "ORDER_S", 1.0)
    with running(("both", engine_config("both")), ("both", engine_config("both"))) as engines:
        frozen, moving = engines
        async with administered(*engines) as admin:
            with frozen.stopped(), pytest.raises(OrderFailedError) as raised:
                await admin.resume(ALL)
            assert f"1 of 2 replicas did not carry this out: {name(frozen)} (no answer" in str(
                raised.value
            )
            assert name(moving) not in str(raised.value)
            await reaches(admin, frozen, "ready")


async def test_a_call_that_an_engine_refuses_has_its_reason():
    def answers(message):
        if isinstance(message, Utility):
            return [UtilityResult(message.call_id, None, "the device is busy")]
        return []

    async with (
        ScriptedEngine("both", "aa", answers) as engine,
        administered(engine, replicas=Silent()) as admin,
    ):
        with pytest.raises(OrderFailedError, match=r"both-aa \(the device is busy\)"):
            await admin.resume(ALL)
        [view] = await admin.replicas()
        assert (view.replica, view.state) == ("both-aa", "unresponsive")
        with pytest.raises(ReplicaUnresponsiveError, match="both-aa does not answer"):
            await admin.drain("both-aa")


class Silent:
    """Actors of which none answers."""

    def role_statuses(self):
        return []

    def change_role(self, replica, role):
        """Reach none."""

    def set_draining(self, replica, is_draining):
        """Reach none."""


@pytest.mark.process
async def test_two_changes_at_a_time_are_refused():
    with two_of_each() as engines:
        first, second = name(engines[0]), name(engines[1])
        async with administered(*engines) as admin:
            found = await asyncio.gather(
                admin.drain(first), admin.drain(second), return_exceptions=True
            )
            assert isinstance(found[1], ConflictError)
            assert found[0].replica == first
            assert f"a change of {first} is being made" in str(found[1])


# --- over HTTP ------------------------------------------------------------------------------------


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def served(**changes):
    config = AdminConfig(port=free_port(), **changes)
    server = AdminServer(config, KEYS, Silent(), Found())
    try:
        yield server, config.port
    finally:
        server.stop()
        assert not server.is_running


def status_of(url, key="", **options):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=60, **options
        ) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            json.load(error)
            return error.code


def test_the_server_has_a_port_and_keys_of_its_own(tmp_path):
    key, line = new_key()
    path = tmp_path / "keys.yaml"
    path.write_text(f'ops: {{keys: ["{line}"], admin: true}}')
    with served(api_keys=str(path)) as (server, port):
        url = f"http://127.0.0.1:{port}"
        found = [status_of(f"{url}/replicas", each) for each in ("", "wrong", key)]
        assert (found, status_of(f"{url}/live")) == ([401, 401, 200], 200)
        assert server.is_running


def test_a_server_with_a_certificate_speaks_tls(tmp_path):
    pem = tmp_path / "admin.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost",
         "-days", "2", "-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "crt")],
        check=True, capture_output=True,
    )  # fmt: skip
    pem.write_text((tmp_path / "crt").read_text() + (tmp_path / "key").read_text())
    context = ssl.create_default_context(cafile=str(pem))
    context.check_hostname = False
    with served(certificate=str(pem)) as (_, port):
        assert status_of(f"https://127.0.0.1:{port}/replicas", context=context) == 200
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            status_of(f"http://127.0.0.1:{port}/replicas")


def test_a_server_that_cannot_start_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.lifecycle.admin.BIND_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"args.admin: .* 127.0.0.1:{port}: "):
            AdminServer(AdminConfig(port=port), KEYS, Silent(), Found())
    pem = tmp_path / "admin.pem"
    pem.write_text("no certificate")
    with pytest.raises(ssl.SSLError):
        AdminServer(AdminConfig(port=free_port(), certificate=str(pem)), KEYS, Silent(), Found())
    with pytest.raises(ClusterConfigError, match="file of API keys"):
        AdminServer(
            AdminConfig(port=free_port(), api_keys=str(tmp_path / "none")), KEYS, Silent(), Found()
        )


def test_a_server_waits_for_the_port_of_its_predecessor(monkeypatch):
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    waits = []

    def wait(seconds):
        waits.append(seconds)
        taken.close()

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=wait)
    monkeypatch.setattr("cluster.lifecycle.admin.time", clock)
    server = AdminServer(AdminConfig(port=port), KEYS, Silent(), Found())
    assert status_of(f"http://127.0.0.1:{port}/live") == 200
    assert len(waits) == 1
    server.stop()

"""HAProxy, an ingress and two engines under attack over HTTP beside 32 streams, without Ray.

The whole server under attack is `tests.e2e.test_attacks_under_load`.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cluster.config.resolve import resolve
from cluster.edge.routes import create_app
from cluster.ingress import Ingress
from tests.cluster.edge.http_server import poll
from tests.cluster.engines import KEYS, engine_config, prompts, running
from tests.cluster.lifecycle import haproxy_world
from tests.cluster.lifecycle.test_haproxy_process import behind_guard, world
from tests.e2e import http_attacks, steady_streams, vitals
from tests.e2e.attacker import Attack
from tests.e2e.long_model import MAX_MODEL_LEN, long_model_folder

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not haproxy_world.is_available, reason="no HAProxy here"),
]
ROOT = Path(__file__).resolve().parents[3]
NUM_STREAMS = 32
NUM_ROUTES = 256
MOST_ROUTES_BYTES = 2**16
MOST_MORE_MIB = 400
"""Memory that an attack may add to the process of the ingress."""
ONE_TOKEN = {"max_tokens": 1, "temperature": 0}
PROBES = [
    steady_streams.Probe("body", {"prompt": "hi", "user": "u" * 100_000, **ONE_TOKEN}),
    steady_streams.Probe("long", {"prompt": "the quick brown fox " * 220, **ONE_TOKEN}),
]


class IngressApp:
    """The application of an ingress, which lives on the loop of its server."""

    def __init__(self, members):
        self._members = members

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._app(scope, receive, send)

    async def _live(self, receive, send):
        pools = {"prefill": {}, "decode": {}}
        args = {"model": str(long_model_folder()), "model_name": "tiny", "pools": pools}
        config = resolve({**args, "router": {"min_remote_prefill_tokens": 0}})
        await receive()
        ingress = Ingress(config, KEYS)
        for member in self._members:
            await ingress.fleet.connect(member)
        self._app = create_app(ingress, config.ingress, version="0")
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await ingress.close()
        await send({"type": "lifespan.shutdown.complete"})


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    shared = tmp_path_factory.mktemp("front")
    shared.chmod(0o1777)
    common = {"model": str(long_model_folder()), "num_blocks": 5000}
    prefill = engine_config("prefill", **common, max_num_batched_tokens=2048)
    decode = engine_config("decode", **common, max_batch_size=2 * NUM_STREAMS)
    with running(("prefill", prefill), ("decode", decode)) as engines:
        app = behind_guard(IngressApp([engine.member for engine in engines]))
        with world(haproxy_world.serve_config(), shared, app) as front:
            yield front


@contextlib.contextmanager
def module(name, first_line):
    """A module of tests/e2e as a process, and its first line; it ends with its stdin."""
    with subprocess.Popen(
        [sys.executable, "-m", f"tests.e2e.{name}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        try:
            write(process, first_line)
            yield process
            process.stdin.close()
            process.wait(60)
        finally:
            process.kill()


def write(process, line):
    process.stdin.write(msgspec.json.encode(line).decode() + "\n")
    process.stdin.flush()


@pytest.fixture(scope="module")
def honest(front):
    """Look at the honest clients' report."""
    url = f"http://127.0.0.1:{front.port}"
    task = steady_streams.Task(url, "tiny", prompts(NUM_STREAMS), 48, PROBES)
    with module("steady_streams", task) as process:

        def report():
            write(process, "report")
            return msgspec.json.decode(process.stdout.readline(), type=steady_streams.Report)

        yield report


def routes_are_for_operators(came):
    assert {name for name in came if name.startswith("public")} == {"public 404"}
    assert came["operations 200"] > 0
    assert came["bytes of an answer"] < MOST_ROUTES_BYTES


def long_texts_are_bounded(came):
    assert not [name for name in came if name.startswith("8 MiB") and name.endswith(" 200")]
    assert {name.split()[-1] for name in came} <= {"200", "400", "413", "429"}


def one_probe_serves_all(came):
    assert came.keys() <= {"public 404", "operations 200", "operations 429"}


def bodies_have_a_share(came):
    # This process reads bodies of 64 MiB; a source has a quarter of 256 MiB.
    assert any(name.endswith(" 429") for name in came)
    assert {name.split()[1] for name in came} <= {"408", "413", "429", "held", "closed"}
    assert came[f"{8 * http_attacks.MIB - 1000} held"] <= 8


def idle_connections_are_closed(came):
    assert came["closed by the server"] == came["answered 200"] > 0


def http2_is_refused(came):
    # A client that is cut off while it sends may lose the 400.
    assert came.keys() <= {"400", "closed", "ConnectionResetError"}


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("fill_routes", lambda came: came == {"200": NUM_ROUTES}),
        ("debug_routes", routes_are_for_operators),
        ("long_texts", long_texts_are_bounded),
        ("special_tokens", lambda came: came.keys() <= {"TimeoutError", "200", "429"}),
        ("health_storm", one_probe_serves_all),
        ("held_bodies", bodies_have_a_share),
        ("idle_connections", idle_connections_are_closed),
        ("http2", http2_is_refused),
        ("resume_ids", lambda came: {name.split()[-1] for name in came} == {"400"}),
        (
            "web_pages",
            lambda came: came == {"text/plain 415": 1, "form 415": 1, "foreign host 421": 1},
        ),
        ("cache_oracle", lambda came: came == {"hidden": 1}),
    ],
)
def test_attack_breaks_no_honest_request(front, honest, name, check):
    target = http_attacks.Target(
        front.port, front.operations_port, "tiny", MAX_MODEL_LEN, num_routes=NUM_ROUTES
    )
    before = honest()
    vitals.forget_peak(os.getpid())
    before_mib = vitals.peak_mib(os.getpid())
    with module("attacker", Attack(name, target)) as process:
        came = msgspec.json.decode(process.stdout.readline(), type=dict[str, int])
    more_mib = vitals.peak_mib(os.getpid()) - before_mib
    print(name, came, f"{more_mib} MiB more")
    assert sum(came.values()) > 0, "the attack did nothing"
    assert check(came) is not False, came
    poll(lambda: honest().num_done >= before.num_done + NUM_STREAMS, "streams end", 120)
    assert not honest().failures
    assert more_mib < MOST_MORE_MIB

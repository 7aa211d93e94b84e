"""Where requests went, from real engines to what clients and scrapers read of it."""

import asyncio
import contextlib
import re

import msgspec
import pytest

from cluster.config.resolve import resolve
from cluster.edge.routes import create_app
from cluster.ingress import Ingress
from cluster.lab.replay import read, replay
from cluster.routing.demand import Demand
from cluster.routing.explain import KEPT
from tests.cluster.edge.test_routes import Client
from tests.cluster.engines import KEYS, engine_config, model_folder, running, until

pytestmark = pytest.mark.process

# So long that no noise in what steps cost outweighs what is cached of it.
PROMPT = "the quick brown fox jumps over the lazy dog. " * 30
CACHED = (len(PROMPT) - 1) // 32 * 32


@pytest.fixture(scope="module")
def pool():
    with running(*(("both", engine_config("both")) for _ in range(2))) as engines:
        yield engines


@contextlib.asynccontextmanager
async def serving(engines, **router):
    """An HTTP client of an ingress that has found these engines."""
    config = resolve(
        {"model": str(model_folder()), "pools": {"both": {"replicas": 2}}, "router": router}
    )
    ingress = Ingress(config, KEYS)
    try:
        ingress.fleet.add([engine.member for engine in engines])
        await until(lambda: len(ingress.fleet.pools.decode_views()) == 4, "all lanes are known")
        app = create_app(ingress, version="0", max_body_bytes=2**20, request_timeout_s=60)

        async def ask(method, path, body=b"", **headers):
            named = [(name.replace("_", "-"), value) for name, value in headers.items()]
            return await Client(app).request(method, path, body, named)

        yield ask, ingress
    finally:
        await ingress.close()


def body(prompt=PROMPT, **fields):
    return {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0, **fields}


def num_cached(ingress):
    """Tokens of the prompt that the ingress believes some engine to hold."""
    demand = Demand("look", ingress.tokenizer.encode(PROMPT))
    held = ingress.fleet.prefixes.cached_tokens(demand)
    ingress.fleet.prefixes.end(demand)
    return max(held.values(), default=0)


def test_a_request_is_told_where_it_went_and_how_that_was_predicted(pool, tmp_path):
    async def scenario():
        async with serving(pool, policy="least_delay", route_log=str(tmp_path)) as (ask, ingress):
            for number in range(6):
                await ask("POST", "/v1/completions", body(f"{number} {PROMPT}"))
            await ask("POST", "/v1/completions", body())
            await until(lambda: num_cached(ingress) == CACHED, "its engine has told what it holds")
            answer = await ask(
                "POST", "/v1/completions", body(stream=True), x_request_id="mine", x_debug_route="1"
            )
            assert answer.status == 200
            short = answer.headers["x-debug-route"]
            assert re.match(r'decode="both-[^"/]+/[01]";of=4;snapshot=\d+, placements=1, ', short)
            assert f"predicted-cached-tokens={CACHED}" in short
            assert f"actual-cached-tokens={CACHED}" in short
            [route] = (await ask("GET", "/debug/routes/mine")).body["routes"]
            assert (await ask("GET", "/debug/routes/min")).status == 404
            metrics = (await ask("GET", "/metrics")).chunks[0].decode()
        assert (route["policy"], route["outcome"]) == ("least_delay", "finished")
        assert (route["num_prompt_tokens"], route["num_tokens"]) == (len(PROMPT), 8)
        assert PROMPT[:9] not in str(route)
        [choice] = route["choices"]
        chosen, *others = choice["candidates"]
        assert chosen["replica"] in {engine.member.replica_id for engine in pool}
        assert chosen["missed_tokens"] == len(PROMPT) - CACHED
        assert all(other["cost"] >= chosen["cost"] * (1.0 - 1e-9) for other in others)
        assert {"first_token_s", "work_s"} <= chosen["terms"].keys()
        predicted, actual = route["predicted"], route["actual"]
        assert predicted["cached_tokens"] == actual["cached_tokens"] == CACHED
        assert predicted["ttft_s"] > 0.0
        assert predicted["token_s"] > 0.0
        assert 0.0 < actual["ttft_s"] <= route["ttft_s"]
        assert actual["token_s"] > 0.0
        counts = dict(
            re.findall(
                r'^ttserve_router_prediction_ratio_count\{.*of="(\w+)"\} (\S+)$', metrics, re.M
            )
        )
        assert float(counts["computed_tokens"]) == 8.0
        assert float(counts["token"]) >= 1.0
        assert float(counts["ttft"]) >= 1.0
        # The file that the ingress wrote meanwhile.
        logged, num_unreadable = read(tmp_path.iterdir())
        assert num_unreadable == 0
        assert len(logged) == 8
        assert [row.then for row in replay(logged, "least_delay")] == [
            row.now for row in replay(logged, "least_delay")
        ]
        assert PROMPT[:9].encode() not in b"".join(map(msgspec.json.encode, logged))

    asyncio.run(scenario())


def test_routes_of_both_sides_are_kept_and_the_oldest_are_forgotten(monkeypatch):
    async def scenario():
        monkeypatch.setattr("cluster.routing.explain.KEPT", 2)
        assert KEPT > 2
        kinds = ["prefill", "prefill", "decode"]
        with running(*((kind, engine_config(kind)) for kind in kinds)) as engines:
            config = resolve(
                {
                    "model": str(model_folder()),
                    "pools": {"prefill": {"replicas": 2}, "decode": {}},
                    "router": {"policy": "least_delay", "min_remote_prefill_tokens": 0},
                }
            )
            ingress = Ingress(config, KEYS)
            try:
                ingress.fleet.add([engine.member for engine in engines])
                pools = ingress.fleet.pools
                await until(
                    lambda: len(pools.decode_views()) == len(pools.prefill_views()) == 2, "known"
                )
                app = create_app(ingress, version="0", max_body_bytes=2**20, request_timeout_s=60)
                for number in range(5):
                    await Client(app).request(
                        "POST",
                        "/v1/completions",
                        body(f"{number} {PROMPT}"),
                        [("x-request-id", f"r{number}")],
                    )
                old = await Client(app).request("GET", "/debug/routes/r2")
                new = await Client(app).request("GET", "/debug/routes/r4")
                assert len(ingress.router.routes) == 2
            finally:
                await ingress.close()
        assert old.status == 404
        [route] = new.body["routes"]
        assert [choice["side"] for choice in route["choices"]] == ["prefill", "decode"]
        assert route["choices"][0]["candidates"][0]["dp_group"] is None
        assert route["predicted"]["ttft_s"] > 0.0
        assert route["actual"]["ttft_s"] > 0.0

    asyncio.run(scenario())

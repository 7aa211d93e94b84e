"""Where requests went, from real engines to what clients and scrapers read of it."""

import contextlib
import re

import msgspec
import pytest

from cluster.config.resolve import resolve
from cluster.ingress import Ingress
from cluster.lab.replay import read, replay
from cluster.routing.demand import Demand
from cluster.routing.explain import KEPT
from tests.cluster.edge.test_routes import OPERATOR, Client, make_app
from tests.cluster.engines import KEYS, engine_config, model_folder, running, until

pytestmark = pytest.mark.process

# Long enough that noise in the costs of steps never outweighs its cached part.
PROMPT = "the quick brown fox jumps over the lazy dog. " * 30
CACHED = (len(PROMPT) - 1) // 32 * 32


@pytest.fixture(scope="module")
def pool():
    with running(*(("both", engine_config("both")) for _ in range(2))) as engines:
        yield engines


@contextlib.asynccontextmanager
async def serving(engines, options=None, **router):
    """An HTTP client of an ingress that has found these engines; `options` are of its app."""
    config = resolve(
        {"model": str(model_folder()), "pools": {"both": {"replicas": 2}}, "router": router}
    )
    ingress = Ingress(config, KEYS)
    try:
        ingress.fleet.add([engine.member for engine in engines])
        await until(lambda: len(ingress.fleet.pools.decode_views()) == 4, "all lanes are known")
        app = make_app(ingress, admission=config.router.admission, **options or {})

        async def ask(method, path, body=b"", **headers):
            named = [(name.replace("_", "-"), value) for name, value in headers.items()]
            return await Client(app).request(method, path, body, [*named, *OPERATOR])

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


async def test_a_request_gets_its_route_and_the_predictions(pool, tmp_path):
    options = {"route_header": True}
    serve = serving(pool, options, policy="least_delay", route_log=str(tmp_path))
    async with serve as (ask, ingress):
        for number in range(6):
            await ask("POST", "/v1/completions", body(f"{number} {PROMPT}"))
        await ask("POST", "/v1/completions", body())
        await until(lambda: num_cached(ingress) == CACHED, "its engine has reported what it holds")
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
    assert (route["num_prompt_tokens"], route["num_output_tokens"]) == (len(PROMPT), 8)
    assert PROMPT[:9] not in str(route)
    [placement] = route["placements"]
    chosen, *others = placement["candidates"]
    assert chosen["replica"] in {engine.member.replica_id for engine in pool}
    assert chosen["uncached_tokens"] == len(PROMPT) - CACHED
    assert all(other["cost"] >= chosen["cost"] * (1.0 - 1e-9) for other in others)
    assert {"first_token_s", "work_s"} <= chosen["terms"].keys()
    predicted, actual = route["predicted"], route["actual"]
    assert predicted["cached_tokens"] == actual["cached_tokens"] == CACHED
    assert predicted["ttft_s"] > 0.0
    assert predicted["tpot_s"] > 0.0
    assert 0.0 < actual["ttft_s"] <= route["ttft_s"]
    assert actual["tpot_s"] > 0.0
    counts = dict(
        re.findall(r'^ttserve_router_prediction_ratio_count\{.*of="(\w+)"\} (\S+)$', metrics, re.M)
    )
    assert float(counts["computed_tokens"]) == 8.0
    assert float(counts["token"]) >= 1.0
    assert float(counts["ttft"]) >= 1.0
    # The file that the ingress wrote meanwhile.
    logged, num_unreadable = read(tmp_path.iterdir())
    assert num_unreadable == 0
    assert len(logged) == 8
    assert [row.logged for row in replay(logged, "least_delay")] == [
        row.replayed for row in replay(logged, "least_delay")
    ]
    assert PROMPT[:9].encode() not in b"".join(map(msgspec.json.encode, logged))


SECRET = "the account number is 1234 and the pin is {pin:02d}; "
PIN = 21
NUM_CACHES = 4
"""Of two engines with two DP groups each."""
TENANTS = {"tenant_header": "x-account"}


async def hits(ask, pins, **headers):
    """The guesses that some engine has cached, by any answer to them."""
    found = []
    for pin in pins:
        answer = await ask(
            "POST",
            "/v1/completions",
            body(SECRET.format(pin=pin) * 3, max_tokens=1),
            x_debug_route="1",
            **headers,
        )
        assert answer.status == 200
        usage = answer.body["usage"].get("prompt_tokens_details", {"cached_tokens": 0})
        short = answer.headers.get("x-debug-route", "actual-cached-tokens=0")
        cached = max(
            usage["cached_tokens"], int(re.findall(r"actual-cached-tokens=(\d+)", short)[0])
        )
        # All guesses have the first block in common, and only the right one has all of them.
        if cached > len(SECRET.format(pin=0)):
            found.append(pin)
    return found


async def test_no_answer_reveals_other_clients_prompts(pool):
    async with serving(pool) as (ask, _):
        await hits(ask, [PIN])
        assert await hits(ask, range(PIN - 5, PIN + 5)) == []


async def test_a_tenant_hits_its_own_cached_prompts_only(pool):
    options = {"prompt_tokens_details": True, "route_header": True}
    async with serving(pool, options, admission=TENANTS) as (ask, _):
        assert await hits(ask, [PIN], x_account="alice") == []
        assert await hits(ask, range(PIN - 5, PIN + 5), x_account="mallory") == []
        # There are four caches: at the fifth time the prompt is in the one that is asked.
        again = [await hits(ask, [PIN], x_account="alice") for _ in range(NUM_CACHES)]
        assert [PIN] in again


async def test_tenants_that_share_caches_hit_each_others_prompts(pool):
    options = {"prompt_tokens_details": True, "share_prefix_cache": True}
    async with serving(pool, options, admission=TENANTS) as (ask, _):
        each = [await hits(ask, [PIN], x_account=f"t{i}") for i in range(NUM_CACHES + 1)]
        assert [PIN] in each


async def test_routes_of_both_sides_are_kept_and_the_oldest_dropped(monkeypatch):
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
            app = make_app(ingress)
            for number in range(5):
                await Client(app).request(
                    "POST",
                    "/v1/completions",
                    body(f"{number} {PROMPT}"),
                    [("x-request-id", f"r{number}")],
                )
            old = await Client(app).request("GET", "/debug/routes/r2", headers=OPERATOR)
            new = await Client(app).request("GET", "/debug/routes/r4", headers=OPERATOR)
            assert len(ingress.router.routes) == 2
        finally:
            await ingress.close()
    assert old.status == 404
    [route] = new.body["routes"]
    assert [placement["side"] for placement in route["placements"]] == ["prefill", "decode"]
    assert route["placements"][0]["candidates"][0]["dp_group"] is None
    assert route["predicted"]["ttft_s"] > 0.0
    assert route["actual"]["ttft_s"] > 0.0

"""Where prompts are computed under a configuration that says nothing of it, by real engines."""

import asyncio

import pytest

from cluster.config.resolve import replica_engine, resolve
from cluster.ingress import Ingress
from replicas.messages import EngineRequest
from tests.cluster.engines import KEYS, running, sampling, until

pytestmark = pytest.mark.process

SIMULATED = {"model": "Llama-3.2-1B", "board": "n150"}
ARGS = {
    "engine": {"block_size": 64, "max_model_len": 4096, "simulated_mesh": SIMULATED},
    "pools": {"prefill": {}, "decode": {}},
}


def test_a_short_prompt_behind_long_ones_is_computed_on_its_decode_engine():
    config = resolve(ARGS)

    async def scenario(prefill, decode):
        ingress = Ingress(config, KEYS)
        client = ingress.fleet.client

        async def ask(number, num_tokens):
            prompt = [2 + (number + 3 * i) % 200 for i in range(num_tokens)]

            async def emit(_delta):
                pass

            await ingress.generate(EngineRequest(f"r{number}", prompt, sampling(2)), emit)

        async def computed(engine):
            metrics = await client.metrics(engine.incarnation)
            return sum(group.prompt_tokens for group in metrics.groups)

        try:
            ingress.fleet.add([prefill.member, decode.member])
            await until(lambda: ingress.is_ready()[0], "both are known")
            # Long ones, each longer than those before, go to the idle prefill engine.
            for number in range(3):
                await ask(number, 500 + number)
            assert (await computed(prefill), await computed(decode)) == (1503, 0)
            long = [asyncio.ensure_future(ask(number, 2000 + number)) for number in range(3, 7)]
            await until(lambda: ingress.router.traffic.as_dict()["came"] == 7.0, "all have come")
            await ask(7, 20)
            assert await computed(decode) == 20
            await asyncio.gather(*long)
            assert await computed(decode) == 20
        finally:
            await ingress.close()

    engines = [
        (role, replica_engine(config, role, 0, host="127.0.0.1", keys=KEYS))
        for role in ("prefill", "decode")
    ]
    with running(*engines) as (prefill, decode):
        asyncio.run(scenario(prefill, decode))

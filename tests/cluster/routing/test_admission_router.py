"""Admission in front of real engines: equal tokens, and no work for refused requests."""

import asyncio
import contextlib
from typing import get_args

import msgspec
import pytest

from cluster.config.schema import AdmissionConfig, OrderName, TenantConfig
from cluster.errors import NotReadyError, OverloadedError, QueueTimeoutError
from tests.cluster.engines import engine_config, prompts, rig, running, sampling, until

pytestmark = pytest.mark.process

LONG = 1500


@pytest.fixture(scope="module")
def pair():
    """One prefill and one decode engine that every test leaves as it found them."""
    kinds = ["prefill", "decode"]
    with running(*((kind, engine_config(kind)) for kind in kinds)) as engines:
        yield engines


@contextlib.asynccontextmanager
async def guarded(*engines, order="decode_first", **admission):
    """A rig with admission; at its end nothing may be left."""
    config = AdmissionConfig(**admission)
    async with rig(*engines, order=order, admission=config) as made:
        yield made
        made.router.admission.admission.check_invariants()
        made.router.admission.admission.check_empty()


async def num_prompts(made, engine):
    groups = (await made.engine_metrics(engine)).groups
    return sum(group.prompt_tokens for group in groups)


@pytest.mark.parametrize("order", get_args(OrderName))
def test_tokens_equal_those_without_admission(pair, order):
    cases = [(prompt, sampling(6 + i % 5)) for i, prompt in enumerate(prompts(24))]

    async def main(**admission):
        making = guarded(*pair, order=order, **admission) if admission else rig(*pair, order=order)
        async with making as made:
            return await asyncio.gather(*(made.tokens(*case) for case in cases))

    plain = asyncio.run(main())
    assert asyncio.run(main(ttft_s=60.0, tpot_s=10.0, max_queued_tokens=10**6)) == plain


async def test_a_late_request_is_refused_before_any_engine_is_asked(pair):
    async with guarded(*pair, ttft_s=30.0) as made:
        for prompt in prompts(4):
            await made.tokens(prompt)
        prefill, _ = pair
        running_task = asyncio.create_task(made.tokens(prompts(1)[0] * 300, sampling(2)))
        await until(lambda: made.router.admission.admission.num_let_in, "it is let in")
        before = await num_prompts(made, prefill)
        hasty = msgspec.structs.replace(made.request(prompts(9)[8]), ttft_s=1e-6)
        with pytest.raises(OverloadedError) as refused:
            await made.router.run(hasty, emit_nothing)
        assert made.count("ttserve_router_turned_away_total", code="overloaded") == 1
        assert {part.mode for part in made.router.parts()} <= {"prefill", "decode"}
        assert made.router.parts()
        await running_task
        assert not made.router.parts()
        after = await num_prompts(made, prefill)
        refused = refused.value
        num_tokens = len(prompts(1)[0]) * 300
    assert refused.status == 429
    assert refused.retry_after_s >= 1
    assert after - before <= num_tokens


async def emit_nothing(_output):
    raise AssertionError("nothing was to be said")


async def test_a_queued_request_whose_client_leaves_costs_nothing(pair):
    tenants = {"slow": TenantConfig(priority=1)}
    async with guarded(*pair, tenant_header="x-t", tenants=tenants) as made:
        await made.tokens(prompts(3)[2])
        first = [asyncio.create_task(made.tokens([5] * LONG)) for _ in range(3)]
        await until(lambda: made.router.admission.admission, "a request is queued")
        last = msgspec.structs.replace(made.request([5] * LONG), tenant="slow")
        task = asyncio.create_task(made.router.run(last, emit_nothing))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        result = await asyncio.gather(*first)
    assert len(result) == 3


async def test_a_queued_request_without_an_objective_times_out(pair):
    async with guarded(*pair) as made:
        first = [asyncio.create_task(made.tokens([9] * LONG)) for _ in range(4)]
        await until(lambda: made.router.admission.admission, "a request is queued")
        hasty = msgspec.structs.replace(made.request([9] * LONG), timeout_s=0.001)
        with pytest.raises(QueueTimeoutError):
            await made.router.run(hasty, emit_nothing)
        await asyncio.gather(*first)


async def test_without_a_decode_replica_admission_refuses():
    async with guarded(ttft_s=1.0) as made:
        with pytest.raises(NotReadyError):
            await made.tokens([7] * 4)


async def test_a_request_ended_by_a_stop_string_teaches_slot_times(pair):
    async with guarded(*pair) as made:
        outputs = []

        async def emit(output):
            outputs.append(output)
            return len(outputs) < 5

        forecast = made.router.admission.admission.forecast
        before_s = forecast.slot_s
        await made.router.run(made.request(prompts(1)[0], sampling(40)), emit)
        num_outputs = len(outputs)
        after_s = forecast.slot_s
    assert num_outputs == 5
    assert after_s != before_s

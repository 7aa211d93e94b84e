"""Real engines that change their roles while they serve: same processes, same tokens."""

import asyncio
import signal
import warnings
from typing import get_args

import pytest

from cluster.config.schema import OrderName
from cluster.scaling.flip import LastOfRoleError
from tests.cluster.engines import (
    LocalReplicas,
    engine_config,
    prompts,
    rig,
    running,
    sampling,
    until,
    until_idle,
)
from tests.cluster.lifecycle.test_drain import keep_kv

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from cluster.lifecycle.flip import FlipTimeoutError, flip

# Long enough that several run at once on a busy machine too, where prompts take their time.
LONG = sampling(1000)
SEEDED = sampling(1000, temperature=0.8, top_p=0.9, seed=11)


def num_sent(metrics):
    return sum(path.num_sent for path in metrics.transfer.paths.values())


def two_and_two():
    pools = [("prefill", engine_config("prefill"))] * 2 + [("decode", engine_config("decode"))] * 2
    return running(*pools)


async def changes(made, engine, role):
    """Let an engine change its role, and wait until the ingress believes it."""
    assert engine.handle.change_role(role)

    def is_there():
        snapshot = made.pools.snapshot(engine.incarnation)
        return snapshot is not None and not snapshot.draining and snapshot.role == role

    await until(is_there, f"{engine.member.replica_id} takes {role}", 60.0)


@pytest.mark.process
@pytest.mark.parametrize("order", get_args(OrderName))
async def test_streams_that_run_while_roles_change_have_the_tokens_of_an_undisturbed_run(order):
    asked = [(prompt, LONG if i % 2 else SEEDED) for i, prompt in enumerate(prompts(6))]
    with two_and_two() as engines:
        first, second, decode, other = engines
        # In turn: half of the streams are on the engine that changes, whatever its steps cost.
        async with rig(*engines, order=order, policy="round_robin") as made:
            wanted = await asyncio.gather(*(made.tokens(*one) for one in asked))
            streams = [asyncio.ensure_future(made.tokens(*one)) for one in asked]
            await until(lambda: _num_running(made, decode) > 1, "streams run there")
            await changes(made, decode, "prefill")
            assert not any(stream.done() for stream in streams), "they outlast the change"
            assert await asyncio.gather(*streams) == wanted
            # It computes prompts for the other one now, and its KV goes there.
            for prefill in (first, second):
                if prefill is first:
                    await changes(made, prefill, "decode")
            await asyncio.to_thread(second.handle.drain, 20.0)
            before = await made.engine_metrics(decode)
            assert await asyncio.gather(*(made.tokens(*one) for one in asked)) == wanted
            after = await made.engine_metrics(decode)
            assert num_sent(after) == num_sent(before) + len(asked)
            assert made.count("ttserve_router_migrations_total", reason="leaving") > 1
            assert not made.count("ttserve_router_lost_legs_total", leg="decode")
            assert not made.lost
            assert [engine.handle.role for engine in engines] == [
                "decode", "prefill", "prefill", "decode"
            ]  # fmt: skip
            await until_idle(made, first, decode, other)


@pytest.mark.process
async def test_a_change_of_roles_waits_for_kv_that_is_lent():
    with running(("prefill", engine_config("prefill"))) as [engine]:
        async with rig(engine) as made:
            stream = await keep_kv(made, engine, "kept")
            engine.handle.change_role("decode")
            await until(lambda: not made.pools.prefill_views(), "it takes no more")
            await asyncio.sleep(0.3)
            assert (engine.handle.role, engine.handle.next_role) == ("prefill", "decode")
            assert len(made.pools.decode_views()) == 0
            stream.close(abort=True)
            await until(made.pools.decode_views, "it decodes")


def _num_running(made, engine):
    snapshot = made.pools.snapshot(engine.incarnation)
    return sum(group.num_running for group in snapshot.groups)


@pytest.mark.process
def test_flip_returns_after_the_change_and_refuses_the_last_of_a_role():
    pools = [("prefill", engine_config("prefill")), ("decode", engine_config("decode"))]
    with running(*pools, pools[1]) as [prefill, decode, other]:
        replicas, said = LocalReplicas(prefill, decode, other), []
        name = decode.member.replica_id
        flip(replicas, name, "prefill", 60.0, said.append)
        assert (decode.handle.role, said[-1]) == ("prefill", f"{name} has role prefill")
        with pytest.raises(LastOfRoleError):
            flip(replicas, other.member.replica_id, "prefill", 60.0, said.append)
        assert other.handle.next_role == "decode"
        prefill.signal(signal.SIGSTOP)
        with pytest.raises(FlipTimeoutError, match="to cancel, flip it to its old role"):
            flip(replicas, prefill.member.replica_id, "decode", 0.0, said.append)
        prefill.signal(signal.SIGCONT)

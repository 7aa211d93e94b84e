"""Rolling updates and changed roles under load, with streams that outlast every drain: none fails.

Real engine processes on simulated meshes, and two ingresses without HTTP that find them as they do
on Ray. Who decides is here what Serve does: one replica of a pool goes before its successor comes.
"""

import asyncio
import contextlib
import itertools

import pytest

from cluster.routing.pools import Member
from replicas.config import SimulatedMeshConfig
from replicas.generators.simulated.tokens import expected_tokens
from replicas.launch import start_engine
from tests.cluster.engines import engine_config, rig, sampling, until

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

DRAIN_S = 5.0
LONG = sampling(300)
SHORT = sampling(8)
ROLES = ("prefill", "prefill", "decode", "decode")


def config(role):
    mesh = SimulatedMeshConfig(model="Llama-3.1-8B", board="n150")
    return engine_config(
        role, simulated_mesh=mesh, dtype="auto", block_size=64, num_blocks=None, max_batch_size=16,
        tt_data_parallel=1, max_num_batched_tokens=1024, max_model_len=2048, num_threads=None,
    )  # fmt: skip


class Places:
    """What Serve does for the pools: four places and who fills them; a `Discovery`."""

    def __init__(self):
        self.handles = {}
        self.num_starts = 0

    async def find(self):
        return [self._member(place, handle) for place, handle in self.handles.items()]

    async def num_wanted(self):
        return len(ROLES)

    async def start(self, place):
        self.num_starts += 1
        self.handles[place] = await asyncio.to_thread(start_engine, config(ROLES[place]))

    async def replace(self, place):
        """As Serve with `PoolReplica`: listed no more, drained, stopped, started anew."""
        handle = self.handles.pop(place)
        is_drained = await asyncio.to_thread(handle.drain, DRAIN_S)
        await asyncio.to_thread(handle.stop)
        await self.start(place)
        return is_drained

    async def change_role(self, place, role):
        handle = self.handles[place]
        assert handle.change_role(role)
        await until(lambda: handle.role == role, f"{place} takes {role}", 60.0)

    async def close(self):
        await asyncio.gather(*(asyncio.to_thread(h.stop) for h in self.handles.values()))

    @staticmethod
    def _member(place, handle):
        description = handle.description
        return Member(ROLES[place], f"{ROLES[place]}-{description.incarnation}", description)


class Load:
    """Streams that follow each other as long as it lasts, each checked token by token."""

    def __init__(self, *ingresses):
        self.num_done = {LONG.max_tokens: 0, SHORT.max_tokens: 0}
        self.num_open = 0
        self._is_over = False
        numbers = itertools.count()
        self._tasks = [
            asyncio.create_task(self._ask(made, params, numbers))
            for made in ingresses
            for params in (LONG, LONG, SHORT)
        ]

    async def end(self):
        """Let all come to their ends; whatever failed is raised here."""
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _ask(self, made, params, numbers):
        while not self._is_over:
            n = next(numbers)
            prompt = [2 + (7 * n + 11 * j) % 250 for j in range(100 + n % 70)]
            found = await made.tokens(prompt, params)
            description = next(iter(made.pools.members())).description
            wanted = expected_tokens(
                prompt, params.max_tokens, description.vocab_size, description.eos_token_ids
            )
            assert found == wanted, n
            self.num_done[params.max_tokens] += 1


@contextlib.asynccontextmanager
async def loaded():
    """Four replicas, two ingresses that know them, and their load."""
    places = Places()
    try:
        await asyncio.gather(*map(places.start, range(len(ROLES))))
        async with rig() as one, rig() as other:
            following = [asyncio.create_task(made.fleet.follow(places)) for made in (one, other)]
            for made in (one, other):
                await until(lambda made=made: made.pools.num_open == len(ROLES), "all are known")
            load = Load(one, other)
            yield places, load, (one, other)
            await load.end()
            for task in following:
                task.cancel()
    finally:
        await places.close()


def num_migrated(ingresses, reason):
    return sum(made.count("ttserve_router_migrations_total", reason=reason) for made in ingresses)


async def test_a_rolling_update_under_load_fails_no_request():
    async with loaded() as (places, load, ingresses):
        for place in range(len(ROLES)):
            assert await places.replace(place), "nothing of it was left"
            for made in ingresses:
                await until(lambda made=made: made.pools.num_open == len(ROLES), "known", 60.0)
    assert places.num_starts == 2 * len(ROLES)
    assert num_migrated(ingresses, "leaving") > 0, "streams outlasted drains"
    assert num_migrated(ingresses, "lost") == 0
    assert min(load.num_done.values()) > len(ROLES)


async def test_every_role_changes_under_load_and_no_request_fails():
    async with loaded() as (places, load, ingresses):
        for place, role in ((0, "decode"), (2, "prefill"), (1, "decode"), (3, "prefill")):
            await places.change_role(place, role)
            await asyncio.sleep(2.0)
    assert places.num_starts == len(ROLES)
    assert [places.handles[place].role for place in range(4)] == [
        "decode", "decode", "prefill", "prefill"
    ]  # fmt: skip
    assert num_migrated(ingresses, "leaving") > 0
    assert num_migrated(ingresses, "lost") == 0
    assert min(load.num_done.values()) > 2

"""The prefix cache gives a request only the KV of its own prefix."""

from __future__ import annotations

import struct

import msgspec
import pytest
import xxhash

from kv_transfer.keys import KeyRing
from replicas.engine.scheduler import Scheduler
from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, make_config, num_prefix_hits
from tests.kv_groups import one_kv_group
from tests.models import model_folder
from tests.replicas.engine.fakes import PREFIX_CACHE_KEY, make_sequence, result_of
from tests.replicas.engine.fakes import make_config as make_scheduler_config
from tests.replicas.engine.test_block_pool import CountingIndex

OURS, NEXT, THEIRS = (name * 8 for name in (b"ours", b"next", b"them"))
PROMPT = [(7 * i) % 149 for i in range(70)]
POISON = [(11 * i + 5) % 149 for i in range(32)] + PROMPT[32:]
"""Another prompt whose first block has the same xxh3: see `break_xxh3`."""


def config(**changes):
    return make_config(model_folder("llama-gqa"), **changes)


def indexed(keys):
    """Hashes that an engine with these secrets has of a prompt's blocks, once it is answered."""
    with engine_core(config(keys=keys)) as core:
        generate(core, [PROMPT])
        return set(core._scheduler._kv._pools[0][0]._block_by_hash)


def test_engines_of_one_deployment_agree_and_no_others_do():
    ours = indexed(KeyRing((OURS, NEXT)))
    assert len(ours) == 2
    assert indexed(KeyRing((OURS,))) == ours, "the first secret counts"
    for others in (KeyRing((THEIRS,)), KeyRing((NEXT, OURS)), KeyRing()):
        assert not indexed(others) & ours


def test_without_secrets_each_engine_draws_a_key():
    assert not indexed(KeyRing()) & indexed(KeyRing())


@pytest.fixture
def _break_xxh3(monkeypatch):
    """Simulate a second preimage: two first blocks have the same xxh3."""
    first, poison = (struct.pack("<32i", *prompt[:32]) for prompt in (PROMPT, POISON))
    for name in ("xxh3_128_digest", "xxh3_64_digest", "xxh128_digest"):
        digest = getattr(xxhash, name)
        monkeypatch.setattr(
            xxhash, name, lambda data, _digest=digest: _digest(data.replace(poison, first))
        )


@pytest.mark.usefixtures("_break_xxh3")
def test_a_collision_of_xxh3_poisons_nobodys_prefix():
    with engine_core(config(enable_prefix_caching=False)) as core:
        [wanted] = generate(core, [PROMPT])
    with engine_core(config()) as core:
        [other] = generate(core, [POISON])
        assert other != wanted
        assert generate(core, [PROMPT]) == [wanted], "answered from the KV of another prompt"
        assert num_prefix_hits(core) == 0


def test_no_xxh3_is_taken_of_a_prompt(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("xxh3 of what a client chose")

    for name in [name for name in dir(xxhash) if name.startswith(("xxh", "XXH"))]:
        monkeypatch.setattr(xxhash, name, refuse)
    with engine_core(config()) as core:
        first, second = (generate(core, [PROMPT]) for _ in range(2))
        assert first == second
        assert num_prefix_hits(core) == 64


# --- waiting prompts ------------------------------------------------------------------------------


NUM_PREFIX = 200


class Queue:
    """A scheduler whose cache is full, and a long prompt that waits, most of which is there."""

    def __init__(self, num_groups=1):
        config = make_scheduler_config(
            tt_data_parallel=num_groups, max_num_batched_tokens=8192, max_num_waiting=None
        )
        self.scheduler = Scheduler(
            config,
            kv_groups=one_kv_group(260, config.block_size),
            prefix_cache_key=PREFIX_CACHE_KEY,
            max_model_len=1036,
            eos_token_ids=frozenset(),
        )
        self.prompt = [(7 * i) % 149 for i in range(4 * NUM_PREFIX)]
        # One leaves the prefix behind in each group, the other one takes what else there is.
        for group in range(num_groups):
            self.add(f"first{group}", self.prompt, dp_group=group, max_tokens=1)
            self.step()
            self.add(f"running{group}", [1] * 150, dp_group=group, max_tokens=600)
            self.step()
        self.add("waiting", [*self.prompt, *[2] * 200])
        self.indexes = []
        for [pool] in self.scheduler._kv._pools:
            index = CountingIndex(pool._block_by_hash)
            pool._block_by_hash = index
            self.indexes.append(index)

    def add(self, request_id, prompt, **fields):
        assert self.scheduler.add(make_sequence(request_id, prompt, **fields), 0.0) is None

    def step(self):
        batch = self.scheduler.schedule()
        by_slot = {seq.place.slot: seq for seq in self.scheduler.table.rows}
        tokens = [None if by_slot[slot].num_new_tokens else 5 for slot in batch.slots]
        self.scheduler.update(batch, result_of(tokens))
        self.scheduler.check_invariants()

    def lookups_of_a_step(self):
        before = sum(index.num_lookups for index in self.indexes)
        self.step()
        return sum(index.num_lookups for index in self.indexes) - before


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_long_prompt_that_waits_looks_for_its_prefix_once(num_groups):
    queue = Queue(num_groups)
    assert queue.lookups_of_a_step() == num_groups * (NUM_PREFIX + 1)
    # Other sequences fill blocks, which are indexed: no reason to restart the walk.
    for _ in range(20):
        assert queue.lookups_of_a_step() <= num_groups
    assert len(queue.scheduler.table.queue) == 1


def test_what_a_waiting_prompt_found_is_looked_for_again_when_it_may_be_gone():
    queue = Queue()
    queue.step()
    queue.scheduler.reset_prefix_cache()
    queue.add("more", [3] * 4)
    assert queue.lookups_of_a_step() <= 1
    queue.scheduler.abort("running0")
    queue.step()
    [waited] = [seq for seq in queue.scheduler.table.rows if seq.request_id == "waiting"]
    assert waited.place.num_cached_tokens == 0


def test_a_prompt_that_waited_gets_the_prefix_that_is_there_when_it_is_admitted():
    queue = Queue()
    for _ in range(5):
        queue.step()
    queue.scheduler.abort("running0")
    queue.step()
    [waited] = [seq for seq in queue.scheduler.table.rows if seq.request_id == "waiting"]
    assert waited.place.num_cached_tokens == 4 * NUM_PREFIX
    assert not waited.place.walks


@pytest.mark.parametrize(
    "params", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 0}], ids=str
)
def test_a_request_that_does_not_read_the_cache_fills_it(params):
    plain = SamplingParams(max_tokens=4, temperature=0.0, seed=0)
    apart = msgspec.structs.replace(plain, **params)
    with engine_core(config()) as core:
        wanted = generate(core, [PROMPT], apart)
        assert generate(core, [PROMPT], apart) == wanted
        assert num_prefix_hits(core) == 0
        assert core.metrics(0.0).groups[0].prefix_cache_queries == 0
        assert generate(core, [PROMPT], plain) == wanted
        assert num_prefix_hits(core) == 64

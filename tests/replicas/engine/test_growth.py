"""An engine that has served thousands is as large as one that has served a few."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Mapping, Set
from pathlib import Path

import pytest

from replicas.client import SyncMPClient
from replicas.messages import EngineRequest
from replicas.sampling_params import SamplingParams
from tests.engines import make_config, take_events
from tests.models import model_folder
from tests.replicas.engine.fakes import KEYS
from tests.replicas.engine.pair import CLIENT, Pair

DEMO_MODEL = Path(__file__).resolve().parents[3] / "configs" / "demo-model"
MB = 2**20
NUM_BLOCKS = 64
ENDED_LEASES = "producer._leases._ended"
"""The only table of ended transfers: bounded, and full after 4,096 of them."""


def config(**changes):
    return make_config(
        model_folder("llama-gqa"), **{"max_batch_size": 16, "num_blocks": NUM_BLOCKS, **changes}
    )


def anonymous_bytes(process_id):
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@pytest.mark.process
def test_prompts_of_every_length_leave_nothing_in_an_engines_memory():
    """In bfloat16 each shape is a kernel that is compiled and kept."""
    one = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
    changes = {"dtype": "bfloat16", "max_model_len": 256, "enable_prefix_caching": False}
    client = SyncMPClient(make_config(str(DEMO_MODEL), **changes))
    try:

        def serve(lengths):
            for length in lengths:
                client.add_request(EngineRequest(f"r{length}", [3] * length, one))
                while not any(output.finish_reason for output in client.get_outputs()):
                    pass
            return anonymous_bytes(client.description.pid)

        before = serve(range(40, 80))
        assert serve(range(80, 180)) - before < 32 * MB
    finally:
        client.shutdown()


def walk(owner, path=""):
    """Yield (path, length) of every container in our objects, and of nested ones."""
    seen, todo = set(), [(path, owner)]
    while todo:
        path, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping | Set | list | tuple | deque | bytearray):
            yield path, len(value)
            items = value.values() if isinstance(value, Mapping) else value
            todo += [(f"{path}[]", item) for item in items if not isinstance(item, int | bytes)]
        elif type(value).__module__.split(".")[0] in {"replicas", "kv_transfer"}:
            todo += [(f"{path}.{name}", item) for name, item in attributes(value)]


def attributes(value):
    names = set(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        names.update(getattr(kind, "__slots__", ()))
    return [(name, getattr(value, name)) for name in sorted(names) if hasattr(value, name)]


def sizes(pair):
    """Length of each container of both engines; together where a path leads to several."""
    found = {}
    for node in (pair.prefill, pair.decode):
        for path, length in walk(node.core, node.name):
            found[path] = found.get(path, 0) + length
    return found


def serve(pair, first, count):
    """Hand requests from prefill to decode, sixteen at a time; every fifth is given up on."""
    rng = random.Random(first)
    for start in range(first, first + count, 16):
        ids = [f"r{number}" for number in range(start, start + 16)]
        for request_id in ids:
            prompt = [rng.randrange(150) for _ in range(rng.randrange(1, 90))]
            params = SamplingParams(max_tokens=rng.randrange(1, 4), temperature=0.0, seed=0)
            pair.start(request_id, prompt, params)
        given_up = {request_id for request_id in ids if rng.random() < 0.2}
        turns = iter(range(rng.randrange(1, 5)))
        pair.run_until(lambda turns=turns: next(turns, None) is None, "a few turns")
        for request_id in given_up:
            pair.abort(request_id)
        wanted = set(ids) - given_up
        pair.run_until(lambda wanted=wanted: wanted <= pair.finished.keys(), "all have ended")
        pair.run_until(pair.is_idle, "everything given back")


@pytest.fixture
def pair():
    changes = {"kv_connector": "p2p", "keys": KEYS, "max_model_len": 128}
    made = Pair(config(**changes), config(**changes, tt_data_parallel=2))
    yield made
    made.close()


def test_no_table_of_an_engine_grows_with_the_requests_that_it_has_served(pair):
    serve(pair, 0, 320)
    before = sizes(pair)
    gc.collect()
    num_objects = len(gc.get_objects())
    serve(pair, 320, 960)
    for node in (pair.prefill, pair.decode):
        take_events(node.core).get(CLIENT)
    # What the test itself has kept: a request, a list of tokens, a sampling, …
    kept = 16 * (len(pair.outputs) + 1)
    gc.collect()
    grown = {
        path: (before.get(path, 0), length)
        for path, length in sizes(pair).items()
        if length > before.get(path, 0) + NUM_BLOCKS and not path.endswith(ENDED_LEASES)
    }
    assert not grown
    assert len(gc.get_objects()) - num_objects < kept


def test_a_table_that_grows_would_be_seen(pair):
    def tombstones():
        return [n for path, n in sizes(pair).items() if path.endswith("._scheduler._tombstones")]

    assert not tombstones()
    pair.decode.core._scheduler._tombstones = [{f"r{number}"} for number in range(200)]
    assert tombstones() == [200]

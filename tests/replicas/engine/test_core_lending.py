"""A stream goes from one core to another: the same tokens, with its KV, without it, or with a part.

Real cores on a real model, and real sockets between them.
"""

from __future__ import annotations

import msgspec
import pytest

import kv_transfer.consumer
from kv_transfer.config import TransferConfig
from replicas.messages import Abort, Activate, AddRequest, EngineRequest, KVLoaded, LendKV, LoadKV
from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, make_config
from tests.models import model_folder
from tests.replicas.engine.fakes import KEYS
from tests.replicas.engine.pair import Pair, seal_ticket

PROMPTS = [[(11 * i + 5 * j + i * j) % 157 for j in range(70 + 35 * i)] for i in range(4)]
NUM_TOKENS = 60
GREEDY = [SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, seed=0, ignore_eos=True)] * 4
SEEDED = [
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, seed=i, ignore_eos=True)
    for i in range(4)
]


def config(**changes):
    fields = {"max_batch_size": 8, "num_blocks": 130, "max_model_len": 256, "kv_connector": "p2p"}
    return make_config(model_folder("llama-gqa"), **{**fields, "keys": KEYS, **changes})


class HandOver(Pair):
    """The first core has streams, and hands them over to the second one.

    Attributes:
        loaded: For each stream the reason why its KV did not come; None where it did.
    """

    def __init__(self, lender, heir):
        super().__init__(config(**lender), config(**heir))
        self.activate_on_first_token = False
        self.loaded = {}

    @property
    def lender(self):
        return self.prefill

    @property
    def heir(self):
        return self.decode

    def begin(self, request_id, prompt, sampling, num_tokens):
        """Decode so many tokens on the first core, and reserve for them on the second one."""
        request = self._requests[request_id] = EngineRequest(request_id, list(prompt), sampling)
        self.outputs[request_id] = []
        self.lender.is_slow = False
        self.lender.handle(AddRequest(request, "local"))
        self.run_until(lambda: len(self.outputs[request_id]) >= num_tokens, "decoded so far")
        self.lender.is_slow = True
        known = [list(self.outputs[request_id])]
        self.heir.handle(AddRequest(request, "decode", token_ids=known))
        self._take_events()

    def lend(self, request_id):
        """Let the second core fetch the first one's full blocks."""
        ticket = self.stream_ticket(request_id)
        self.lender.handle(LendKV(request_id, ticket, 1))
        self.heir.handle(LoadKV(request_id, ticket, 1))

    def stream_ticket(self, request_id):
        core = self.lender.core
        block_size = core.config.block_size
        num_known = self.heir.core._scheduler.table.get(request_id).num_tokens
        num_full = (num_known - 1) // block_size * block_size
        return seal_ticket(core, request_id, num_full, epoch=1)

    def until_loaded(self, request_id):
        self.run_until(lambda: request_id in self.loaded, "it is known how the transfer ended")

    def go_on(self, request_id):
        """Leave the first core, and let the second one continue after the client's tokens."""
        if not self.lender.is_gone:
            self.lender.handle(Abort([request_id]))
        self._take_events()
        self.heir.handle(Activate(request_id, [list(self.outputs[request_id])]))

    def end(self):
        """Run until every stream is over, and nothing is held for any."""
        if not self.lender.is_gone:
            self.lender.is_slow = False
            self.lender.handle(Abort([]))
        self.run_until(lambda: self.finished.keys() >= self._requests.keys(), "all are over")
        self.run_until(self.is_idle, "everything given back")
        return [self.outputs[request_id] for request_id in self._requests]

    def _take(self, node, event):
        if isinstance(event, KVLoaded):
            self.loaded[event.request_id] = event.failure
        else:
            super()._take(node, event)

    def _take_tokens(self, node, event):
        if event.finish_reason is not None and node is self.lender and not node.is_gone:
            self.heir.handle(Abort([event.request_id]))
        super()._take_tokens(node, event)


@pytest.fixture(scope="module")
def local():
    """Tokens of a single core."""
    with engine_core(config(kv_connector=None)) as core:
        yield lambda prompts, sampling: generate(core, prompts, sampling)


@pytest.fixture
def make():
    """Makes two cores and closes them."""
    made = []

    def make_one(lender=None, heir=None):
        made.append(HandOver(lender or {}, heir or {}))
        return made[-1]

    yield make_one
    for pair in made:
        pair.close()


def received(node):
    return sum(p.bytes_received for p in node.core.metrics(0.0).transfer.paths.values())


def row_bytes(node):
    [kv_group] = node.core.facts.kv_groups
    return kv_group.bytes_per_block * 32 // node.core.config.block_size


SHAPES = {
    "memory of the other": ({}, {}),
    "sockets": ({"role": "decode"}, {"role": "decode"}),
    "larger to smaller blocks, lanes": ({"block_size": 64}, {"tt_data_parallel": 2}),
    "smaller to larger blocks, two calls": ({}, {"block_size": 64, "mixed_batches": False}),
    "nothing is cached": ({"enable_prefix_caching": False}, {"enable_prefix_caching": False}),
}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_stream_goes_on_with_kv_of_the_other_core_and_has_the_same_tokens(
    make, local, shape, sampling
):
    pair = make(*shape)
    for i, prompt in enumerate(PROMPTS):
        pair.begin(f"r{i}", prompt, sampling[i], 4 + i)
    computed = pair.heir.core.metrics(0.0).scheduled_tokens
    for i in range(len(PROMPTS)):
        pair.lend(f"r{i}")
        pair.until_loaded(f"r{i}")
    assert set(pair.loaded.values()) == {None}
    assert received(pair.heir) > 0
    for i in range(len(PROMPTS)):
        pair.go_on(f"r{i}")
    assert pair.end() == local(PROMPTS, sampling)
    most = len(PROMPTS) * (NUM_TOKENS + 2 * 64)
    assert pair.heir.core.metrics(0.0).scheduled_tokens - computed < most, "prompts did not move"


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_stream_goes_on_without_kv_of_the_other_core_and_has_the_same_tokens(
    make, local, sampling
):
    pair = make()
    for i, prompt in enumerate(PROMPTS):
        pair.begin(f"r{i}", prompt, sampling[i], 4 + i)
        pair.go_on(f"r{i}")
    assert pair.end() == local(PROMPTS, sampling)
    assert received(pair.heir) == 0


def test_only_what_the_other_core_lacks_is_fetched(make, local):
    pair = make()
    pair.begin("r", PROMPTS[3], GREEDY[3], 20)
    pair.lend("r")
    pair.until_loaded("r")
    pair.go_on("r")
    assert pair.end() == local(PROMPTS[3:], GREEDY[3:])
    before = received(pair.heir)
    assert before == (len(PROMPTS[3]) + 20 - 1) // 32 * row_bytes(pair.heir)
    # The prompt and, but for a little, all of its output are in the prefix cache by now.
    pair.begin("again", PROMPTS[3], GREEDY[3], 58)
    assert pair.heir.core._scheduler.table.get("again").num_computed_tokens == 224
    pair.go_on("again")
    assert pair.end()[1] == pair.outputs["r"]
    assert received(pair.heir) == before


def test_a_stream_that_ends_while_it_is_fetched_leaves_nothing(make, local):
    pair = make()
    pair.begin("r", PROMPTS[3], GREEDY[3], NUM_TOKENS - 1)
    pair.heir.is_frozen, pair.lender.is_slow = True, False
    pair.lend("r")
    pair.run_until(lambda: "r" in pair.finished, "it ended where it was")
    assert pair.lender.core.num_live == 1, "its blocks are lent"
    pair.heir.is_frozen = False
    assert pair.end() == local(PROMPTS[3:], GREEDY[3:])


def one_row_at_a_time(monkeypatch):
    """Let each chunk be a row, and be there before the next one is sent."""
    monkeypatch.setattr(TransferConfig, "chunk_rows", lambda _self, _row_bytes: 1)
    monkeypatch.setattr(TransferConfig, "window_rows", lambda _self, _row_bytes: 1)


def done_rows(pair):
    return sum(t.done_rows for t in pair.heir.core.kv_transfers(0.0).transfers)


def is_aborted(pair):
    pair.lender.handle(Abort(["r"]))


def is_preempted(pair):
    scheduler = pair.lender.core._scheduler
    scheduler._preempt(scheduler.table.get("r"))


def vanishes(pair):
    pair.lender.vanish()


def freezes(pair):
    pair.lender.is_frozen = True


@pytest.mark.parametrize("happens", [is_aborted, is_preempted, vanishes, freezes])
def test_a_transfer_that_breaks_off_costs_no_more_than_what_did_not_come(
    make, local, monkeypatch, happens
):
    one_row_at_a_time(monkeypatch)
    pair = make({"role": "decode"}, {"role": "decode"})
    pair.begin("r", PROMPTS[3], SEEDED[3], 20)
    pair.lend("r")
    pair.run_until(lambda: done_rows(pair) >= 2, "some of it is here")
    assert "r" not in pair.loaded
    happens(pair)
    if happens is not freezes:
        pair.until_loaded("r")
        assert pair.loaded["r"] is not None
    # The client leaves the lending core: nothing may wait for the rest of the transfer.
    pair.go_on("r")
    pair.run_until(lambda: "r" in pair.finished, "it went on")
    pair.lender.is_frozen = False
    assert pair.end() == local(PROMPTS[3:], SEEDED[3:])
    computed = pair.heir.core.metrics(0.0).scheduled_tokens
    assert computed < len(PROMPTS[3]) + NUM_TOKENS - 64, "what had come was used"


def test_kv_that_comes_corrupt_is_computed_instead(make, local, monkeypatch):
    pair = make({"role": "decode"}, {"role": "decode"})
    pair.begin("r", PROMPTS[3], GREEDY[3], 20)
    right = kv_transfer.consumer.chunk_checksum
    monkeypatch.setattr(kv_transfer.consumer, "chunk_checksum", lambda *chunk: right(*chunk) ^ 1)
    pair.lend("r")
    pair.until_loaded("r")
    assert pair.loaded == {"r": "checksum"}
    pair.go_on("r")
    assert pair.end() == local(PROMPTS[3:], GREEDY[3:])
    assert received(pair.heir) == 0


def test_a_ticket_that_is_no_good_is_answered_and_the_stream_goes_on(make, local):
    pair = make()
    pair.begin("r", PROMPTS[3], GREEDY[3], 20)
    ticket = KEYS.unseal(pair.stream_ticket("r"), 0.0)
    other = msgspec.structs.replace(ticket, producer_incarnation="another")
    pair.lender.handle(LendKV("r", KEYS.seal(other), 1))
    pair.until_loaded("r")
    assert pair.loaded == {"r": "incarnation"}
    pair.heir.handle(Abort(["r"]))
    assert pair.end() == local(PROMPTS[3:], GREEDY[3:])

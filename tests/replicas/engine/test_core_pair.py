"""Prefill on one core, decode on another: the same tokens, and no leak after any ending."""

from __future__ import annotations

import msgspec
import pytest

from replicas.messages import (
    KV_TRANSFER_FAILED,
    Abort,
    Accepted,
    Activate,
    AddRequest,
    EngineRequest,
    KVLoaded,
    LoadKV,
    Refused,
)
from replicas.sampling_params import SamplingParams
from tests.engines import engine_core, generate, make_config, take_events
from tests.models import model_folder
from tests.replicas.engine.fakes import KEYS
from tests.replicas.engine.pair import CLIENT, Pair

PROMPTS = [[(11 * i + 5 * j + i * j) % 157 for j in range(3 + 4 * i)] for i in range(24)]
LONG = [(3 * j + 7) % 151 for j in range(100)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, seed=0, ignore_eos=True)
SEEDED = [
    SamplingParams(max_tokens=8, temperature=0.9, top_k=40, top_p=0.95, seed=i, ignore_eos=True)
    for i in range(len(PROMPTS))
]


def config(**changes):
    return make_config(
        model_folder("llama-gqa"),
        **{
            "max_batch_size": 32,
            "num_blocks": 130,
            "kv_connector": "p2p",
            "keys": KEYS,
            **changes,
        },
    )


@pytest.fixture(scope="module")
def local():
    """Tokens of a single core, with one sampling for all, or one each."""
    with engine_core(config(kv_connector=None)) as core:
        yield lambda prompts, sampling: generate(core, prompts, sampling)


@pytest.fixture
def make_pair():
    """Makes pairs of cores and closes them."""
    pairs = []

    def make(prefill=None, decode=None):
        pairs.append(Pair(config(**(prefill or {})), config(**(decode or {}))))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def stats(node):
    return node.core.metrics(0.0).transfer


def num_sent(node):
    """Delivered and failed transfers as producer."""
    found = stats(node)
    return sum(p.num_sent for p in found.paths.values()), sum(found.send_failures.values())


def num_received(node):
    """Delivered and failed transfers as consumer."""
    found = stats(node)
    return sum(p.num_received for p in found.paths.values()), sum(found.receive_failures.values())


def bytes_per_block(node):
    [kv_group] = node.core.facts.kv_groups
    return kv_group.bytes_per_block


def bytes_received(node):
    return sum(p.bytes_received for p in stats(node).paths.values())


@pytest.mark.parametrize("sampling", [[GREEDY] * len(PROMPTS), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"max_num_batched_tokens": 64}, {"tt_data_parallel": 2}),
        ({"enable_chunked_prefill": False, "mixed_batches": False}, {"mixed_batches": False}),
        ({"tt_data_parallel": 4}, {"enable_prefix_caching": False}),
    ],
    ids=["chunks to two lanes", "two calls", "four lanes to one"],
)
def test_tokens_equal_those_of_a_single_core(make_pair, local, prefill, decode, sampling):
    pair = make_pair(prefill, decode)
    assert pair.generate(PROMPTS, sampling) == local(PROMPTS, sampling)
    assert pair.failures == {}
    assert num_sent(pair.prefill) == num_received(pair.decode) == (len(PROMPTS), 0)


THREE = SamplingParams(max_tokens=8, temperature=1.5, seed=5, n=3, ignore_eos=True)


class Choices(Pair):
    """A pair whose client asks for three choices of each request."""

    def __init__(self, *configs):
        super().__init__(*configs)
        self.tokens = [[], [], []]
        self.is_activated = False
        self.activate_on_first_token = False

    def _take_tokens(self, node, event):
        known = self.tokens[event.choice]
        known += event.token_ids[len(known) - event.index :]
        self.finished[f"{event.request_id}.{event.choice}"] = event.finish_reason
        if all(self.tokens) and not self.is_activated:
            self.is_activated = True
            self.decode.handle(Activate(event.request_id, self.tokens))

    def run(self):
        wanted = {f"r.{i}": "length" for i in range(3)}
        self.run_until(lambda: self.finished == wanted, "all choices finished")
        self.prefill.handle(Abort(["r"]))
        self.run_until(self.is_idle, "everything given back")
        return self.tokens


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("ending", ["loaded", "recomputed", "lost"])
def test_choices_go_on_from_the_first_tokens_of_prefill(caching, ending, local):
    alone = [
        msgspec.structs.replace(THREE, n=1, seed=THREE.seed + choice) for choice in range(THREE.n)
    ]
    changes = {"enable_prefix_caching": caching}
    pair = Choices(config(**changes), config(**changes))
    try:
        pair.reserve("r", LONG, THREE)
        pair.start_prefill("r")
        if ending != "recomputed":
            pair.start_load("r")
        if ending == "lost":
            pair.run_until(lambda: all(pair.tokens), "the first tokens")
            pair.prefill.handle(Abort(["r"]))
        assert pair.run() == local([LONG] * 3, alone)
        if ending == "loaded":
            # The prompt is fetched once, for choice 0; the others share its blocks.
            assert num_received(pair.decode) == (1, 0)
            assert pair.decode.core.metrics(0.0).kv_recompute_tokens == 0
    finally:
        pair.close()


class Scored(Choices):
    """Such a pair that keeps the log probabilities of prompts, by the core that reported them."""

    def __init__(self, *configs):
        super().__init__(*configs)
        self.found = {"prefill": [], "decode": []}

    def _take_tokens(self, node, event):
        if event.prompt_logprobs is not None:
            assert (event.index, event.choice) == (0, 0)
            self.found[node.name].append(event.prompt_logprobs)
        super()._take_tokens(node, event)


@pytest.mark.parametrize("has_tokens", [True, False])
def test_the_core_that_draws_the_first_token_reports_the_prompt_s_log_probabilities(has_tokens):
    """Without tokens the prompt is computed again, although its KV has come."""
    params = msgspec.structs.replace(THREE, prompt_logprobs=1)
    pair = Scored(config(max_num_batched_tokens=32), config(max_num_batched_tokens=32))
    try:
        pair.reserve("r", LONG, params)
        pair.start_prefill("r")
        pair.start_load("r")
        if not has_tokens:
            sequence = pair.decode.core._scheduler.table.get("r")
            pair.is_activated = True
            pair.run_until(lambda: sequence.num_computed_tokens == len(LONG), "KV has come")
            pair.decode.handle(Activate("r", []))
        pair.run()
        [scored] = pair.found["prefill"]
        assert scored[0] == []
        assert [entries[0].token_id for entries in scored[1:]] == LONG[1:]
        assert pair.found["decode"] == ([] if has_tokens else [scored])
    finally:
        pair.close()


def test_transferred_bytes_are_blocks_times_bytes_per_block(make_pair):
    pair = make_pair(decode={"enable_prefix_caching": False})
    pair.generate(PROMPTS, [GREEDY] * len(PROMPTS))
    blocks = sum(-(-len(prompt) // 32) for prompt in PROMPTS)
    assert bytes_received(pair.decode) == blocks * bytes_per_block(pair.decode)
    num_bytes = sum(p.bytes_sent for p in stats(pair.prefill).paths.values())
    assert num_bytes == bytes_received(pair.decode)


def test_only_an_engine_that_others_fetch_from_shows_its_memory(make_pair):
    pair = make_pair({"role": "prefill"}, {"role": "decode"})
    shown = [
        [endpoint for endpoint in node.core.kv_endpoints if endpoint.startswith("shm://")]
        for node in (pair.prefill, pair.decode)
    ]
    assert [len(endpoints) for endpoints in shown] == [1, 0]


def test_second_request_of_a_prompt_transfers_only_what_is_not_cached(make_pair, local):
    pair = make_pair()
    first = pair.generate([LONG], [GREEDY])
    pair.start("again", LONG, GREEDY)
    pair.run_until(lambda: "again" in pair.finished, "finished")
    assert [pair.outputs["again"]] == first == local([LONG], GREEDY)
    assert bytes_received(pair.decode) == (4 + 1) * bytes_per_block(pair.decode)


def test_prefill_pool_smaller_than_the_work_serves_it_in_turn(make_pair, local):
    # Handed-over blocks come back with the peer's confirmation only: nothing else wakes the core.
    pair = make_pair(prefill={"num_blocks": 5})
    prompts = [[i, *LONG[:90]] for i in range(6)]
    assert pair.generate(prompts, [GREEDY] * 6) == local(prompts, GREEDY)


def test_decode_pool_that_must_preempt_gives_the_same_tokens(make_pair, local):
    pair = make_pair(decode={"num_blocks": 9, "max_batch_size": 4})
    params = [SamplingParams(max_tokens=60, temperature=0.0, seed=0, ignore_eos=True)] * 4
    prompts = [[i, *LONG[:30]] for i in range(4)]
    assert pair.generate(prompts, params) == local(prompts, params)
    assert sum(g.num_preemptions for g in pair.decode.core.metrics(0.0).groups)


def test_request_that_ends_with_its_first_token_leaves_nothing_on_either_core(make_pair, local):
    pair = make_pair()
    one = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    assert pair.generate(PROMPTS, [one] * len(PROMPTS)) == local(PROMPTS, one)


# --- endings -----------------------------------------------------------------------------------


def reserved(pair):
    pair.reserve("r", LONG, GREEDY)


def loading_from_a_core_that_knows_nothing(pair):
    reserved(pair)
    pair.start_load("r")
    pair.decode.step_if_due()


def queued_for_prefill(pair):
    reserved(pair)
    pair.start_prefill("r")


def within_prefill(pair):
    pair.start("r", LONG, GREEDY)
    for node in (pair.decode, pair.prefill, pair.decode):
        node.step_if_due()
    assert 0 < pair.prefill.core._scheduler.table.get("r").num_computed_tokens < len(LONG)


def handed_over_and_not_fetched(pair):
    pair.activate_on_first_token = False
    reserved(pair)
    pair.start_prefill("r")
    pair.run_until(lambda: pair.outputs["r"] != [], "first token")


def activated_and_not_fetched(pair):
    handed_over_and_not_fetched(pair)
    pair.activate("r", list(pair.outputs["r"]))


def activated_before_its_kv_came(pair):
    handed_over_and_not_fetched(pair)
    pair.prefill.is_frozen = True
    pair.start_load("r")
    pair.activate("r", list(pair.outputs["r"]))
    pair.decode.step_if_due()
    assert pair.decode.core.snapshot(0).groups[0].num_reserved == 1
    pair.prefill.is_frozen = False


def loaded_and_not_activated(pair):
    handed_over_and_not_fetched(pair)
    pair.start_load("r")
    sequence = pair.decode.core._scheduler.table.get("r")
    pair.run_until(lambda: sequence.num_computed_tokens == len(LONG), "KV has come")


def decoding(pair):
    pair.start("r", LONG, GREEDY)
    pair.run_until(lambda: len(pair.outputs["r"]) >= 3, "third token")


STATES = [
    reserved,
    loading_from_a_core_that_knows_nothing,
    queued_for_prefill,
    within_prefill,
    handed_over_and_not_fetched,
    activated_and_not_fetched,
    activated_before_its_kv_came,
    loaded_and_not_activated,
    decoding,
]


@pytest.fixture(scope="module")
def busy():
    """One pair for all endings: each must leave it as new."""
    pair = Pair(config(max_num_batched_tokens=32), config(tt_data_parallel=2))
    yield pair
    pair.close()


@pytest.mark.parametrize("how", ["abort", "client gone"])
@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__)
def test_request_dropped_in_any_state_leaves_both_cores_as_new(busy, reach, how):
    busy.outputs.clear()
    busy._is_activated.clear()
    busy.activate_on_first_token = True
    # Each run needs other transfer ids, and a prompt that is not cached.
    busy.ticket = lambda _id, epoch=0, **_: Pair.ticket(busy, "r", epoch + 1000 * busy_run(busy))
    for node in (busy.prefill, busy.decode):
        node.core._scheduler.reset_prefix_cache()
    reach(busy)
    if how == "abort":
        busy.abort("r")
    else:
        for node in (busy.prefill, busy.decode):
            node.core.client_gone(b"ingress")
            node._is_due = True
    busy.run_until(busy.is_idle, "both cores idle")
    busy.run = busy_run(busy) + 1


def asked_again(pair):
    """One inbox has the end of a request that is being computed, and the same request again."""
    within_prefill(pair)
    pair._take_events()
    pair.prefill.handle(Abort(["r"]))
    assert pair.prefill.core.num_live == 1, "its transfer has not ended"
    ticket = pair.ticket("r", epoch=1)
    pair.prefill.handle(AddRequest(pair._requests["r"], "prefill", ticket=ticket))
    assert take_events(pair.prefill.core) == {}


def test_request_that_follows_its_own_abort_waits_for_the_end_of_that(make_pair, local):
    pair = make_pair({"max_num_batched_tokens": 32})
    asked_again(pair)
    pair.start_load("r", epoch=1)
    pair.run_until(lambda: "r" in pair.finished, "finished")
    assert [pair.outputs["r"]] == local([LONG], GREEDY)
    assert num_sent(pair.prefill) == (1, 1), "the prompt was computed there, not here"
    pair.run_until(pair.is_idle, "both cores idle")


def test_request_that_is_given_up_while_it_waits_for_an_earlier_end_is_answered(make_pair):
    """The client counts answers: otherwise it would take the next answer for this one."""
    pair = make_pair({"max_num_batched_tokens": 32})
    asked_again(pair)
    core = pair.prefill.core
    pair.prefill.handle(Abort(["r"]))
    [refused] = take_events(core)[CLIENT]
    assert isinstance(refused, Refused)
    pair.prefill.step_if_due()
    assert (take_events(core), core.num_live) == ({}, 0)


def test_request_whose_client_goes_while_it_waits_for_an_earlier_end_is_dropped(make_pair):
    pair = make_pair({"max_num_batched_tokens": 32})
    asked_again(pair)
    core = pair.prefill.core
    core.client_gone(CLIENT)
    pair.prefill.step_if_due()
    assert (take_events(core), core.num_live) == ({}, 0)


def test_only_one_request_waits_for_an_earlier_end(make_pair):
    pair = make_pair({"max_num_batched_tokens": 32})
    asked_again(pair)
    third = AddRequest(pair._requests["r"], "prefill", ticket=pair.ticket("r", epoch=2))
    pair.prefill.handle(third)
    [refused] = take_events(pair.prefill.core)[CLIENT]
    assert isinstance(refused, Refused)
    assert refused.reason == "duplicate"
    pair.prefill.step_if_due()
    assert isinstance(take_events(pair.prefill.core)[CLIENT][0], Accepted)


def test_id_whose_kv_still_waits_to_be_fetched_is_refused(make_pair):
    pair = make_pair()
    handed_over_and_not_fetched(pair)
    pair.prefill.handle(AddRequest(pair._requests["r"], "prefill", ticket=pair.ticket("r", 1)))
    [refused] = take_events(pair.prefill.core)[CLIENT]
    assert refused.reason == "duplicate"


def busy_run(pair):
    return getattr(pair, "run", 1)


@pytest.mark.parametrize(
    "reach",
    [loading_from_a_core_that_knows_nothing, within_prefill, activated_before_its_kv_came],
    ids=lambda reach: reach.__name__,
)
def test_decode_core_computes_the_prompt_itself_when_the_producer_vanishes(make_pair, local, reach):
    pair = make_pair(prefill={"max_num_batched_tokens": 32})
    reach(pair)
    pair.activate_on_first_token = True
    pair.prefill.vanish()
    pair.run_until(lambda: "r" in pair.finished, "finished")
    assert [pair.outputs["r"]] == local([LONG], GREEDY)
    assert pair.failures["r"] == "peer_dead"
    pair.run_until(pair.is_idle, "decode core idle")


def test_second_ticket_replaces_the_first(make_pair, local):
    pair = make_pair()
    loading_from_a_core_that_knows_nothing(pair)
    pair.ticket = lambda _id, _epoch=0, **_: Pair.ticket(pair, "r", 1)
    pair.start_prefill("r")
    pair.start_load("r", epoch=1)
    pair.run_until(lambda: "r" in pair.finished, "finished")
    assert [pair.outputs["r"]] == local([LONG], GREEDY)
    assert pair.failures == {}
    pair.run_until(pair.is_idle, "both cores idle")


# --- KV that does not come ---------------------------------------------------------------------


def two_rows_loaded(pair):
    """Prefill stands still after two chunks of 32 tokens, which the decode core has."""
    pair.activate_on_first_token = False
    pair.start("r", LONG, GREEDY)
    sequence = pair.prefill.core._scheduler.table.get("r")
    pair.run_until(lambda: sequence.num_computed_tokens >= 64, "two chunks computed")
    assert sequence.num_computed_tokens == 64
    pair.prefill.core._scheduler.schedule = lambda: None

    def num_rows():
        [info] = pair.decode.core.kv_transfers(0.0).transfers
        return info.done_rows

    pair.run_until(lambda: num_rows() == 2, "two rows loaded")


def test_the_verified_part_of_a_failed_transfer_is_not_computed_again(make_pair, local):
    pair = make_pair(prefill={"max_num_batched_tokens": 32})
    two_rows_loaded(pair)
    pair.prefill.vanish()
    pair.run_until(lambda: pair.failures == {"r": "peer_dead"}, "told")
    pair.activate("r", [])
    pair.run_until(lambda: "r" in pair.finished, "finished")
    assert [pair.outputs["r"]] == local([LONG], GREEDY)
    metrics = pair.decode.core.metrics(0.0)
    assert metrics.kv_recompute_tokens == len(LONG) - 64
    assert metrics.scheduled_tokens == len(LONG) - 64 + GREEDY.max_tokens - 1
    pair.run_until(pair.is_idle, "decode core idle")


def test_a_second_ticket_fetches_only_what_the_first_did_not_bring(make_pair, local):
    pair = make_pair(prefill={"max_num_batched_tokens": 32})
    two_rows_loaded(pair)
    del pair.prefill.core._scheduler.schedule
    pair.prefill.handle(Abort(["r"]))
    pair.run_until(lambda: pair.prefill.core.num_live == 0, "given up")
    pair.run_until(lambda: "r" in pair.failures, "told")
    pair.activate_on_first_token = True
    pair.ticket = lambda _id, _epoch=0, **_: Pair.ticket(pair, "r", 1)
    pair.start_prefill("r")
    pair.start_load("r", epoch=1)
    pair.run_until(lambda: "r" in pair.finished, "finished")
    assert [pair.outputs["r"]] == local([LONG], GREEDY)
    assert pair.failures == {"r": "cancelled"}
    assert bytes_received(pair.decode) == 2 * bytes_per_block(pair.decode)
    assert pair.decode.core.metrics(0.0).kv_recompute_tokens == 0
    pair.run_until(pair.is_idle, "both cores idle")


def test_an_engine_that_must_not_recompute_ends_the_request_and_says_why(make_pair):
    pair = make_pair(decode={"kv_load_failure_policy": "fail"})
    activated_before_its_kv_came(pair)
    pair.prefill.vanish()
    pair.run_until(lambda: "r" in pair.finished, "finished")
    assert pair.finished["r"] == "error"
    assert pair.errors["r"] == f"{KV_TRANSFER_FAILED}: peer_dead"
    assert pair.decode.core.metrics(0.0).kv_recompute_tokens == 0
    pair.run_until(pair.is_idle, "decode core idle")


def test_an_engine_that_must_not_recompute_does_not_without_a_ticket_either(make_pair):
    pair = make_pair(decode={"kv_load_failure_policy": "fail"})
    activated_and_not_fetched(pair)
    pair.run_until(lambda: "r" in pair.finished, "finished")
    assert pair.errors["r"] == f"{KV_TRANSFER_FAILED}: no_ticket"
    pair.abort("r")
    pair.run_until(pair.is_idle, "both cores idle")


def test_a_forged_ticket_is_refused_and_the_request_goes_on(make_pair, local):
    pair = make_pair()
    reserved(pair)
    pair.activate_on_first_token = False
    sealed = bytearray(pair.ticket("r"))
    sealed[0] ^= 1
    request = EngineRequest("p", LONG, GREEDY)
    pair.prefill.handle(AddRequest(request, "prefill", ticket=bytes(sealed)))
    [refused] = take_events(pair.prefill.core)[CLIENT]
    assert (refused.reason, pair.prefill.core.num_live) == ("invalid", 0)
    pair.decode.handle(LoadKV("r", bytes(sealed), 5))
    [loaded] = take_events(pair.decode.core)[CLIENT]
    assert loaded == KVLoaded("r", 5, "auth")
    pair.activate("r", [])
    pair.run_until(lambda: "r" in pair.finished, "finished")
    assert [pair.outputs["r"]] == local([LONG], GREEDY)
    assert pair.decode.core.metrics(0.0).kv_recompute_tokens == len(LONG)

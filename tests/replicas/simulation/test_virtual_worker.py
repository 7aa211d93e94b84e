"""The simulator's worker gives what a real worker gives on a simulated mesh: tokens and seconds."""

from __future__ import annotations

from itertools import accumulate

import msgspec
import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from replicas.config import EngineConfig
from replicas.engine.core import WORKER_METHODS, EngineCore
from replicas.engine.step import ModelFacts, NewRow, ScheduledBatch
from replicas.faults import Fault, ReplicaFaults
from replicas.generators.simulated.profiles import engine_timing
from replicas.generators.simulated.timing import LinkTiming
from replicas.messages import HostSeconds
from replicas.sampling.preparation import Preparation, Prepared
from replicas.sampling_params import SamplingParams, StructuredOutputs
from replicas.simulation.virtual_worker import Chances, StepClock
from tests.engines import generate, num_preemptions, num_prefix_hits
from tests.kv_groups import one_kv_group
from tests.kv_transfer.virtual_wire import Net
from tests.replicas.engine.fakes import KEYS
from tests.replicas.engine.virtual import (
    CountingClock,
    LoopPair,
    OneWorker,
    Side,
    real_side,
    virtual_side,
    virtual_worker,
)
from tests.replicas.generators.simulated.engines import (
    FOUR_CHIPS,
    LONG,
    NUM_NEW,
    PROMPTS,
    right_tokens,
    simulated_config,
)

MISS, FOUR_LANES = {"enable_prefix_caching": False}, {"tt_data_parallel": 4}
CHUNKED = {"max_num_batched_tokens": 16}
WHOLE = {"enable_chunked_prefill": False, "max_num_batched_tokens": 256}


def sampling(max_tokens=NUM_NEW):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)


def both(config, monkeypatch):
    return real_side(config, monkeypatch), virtual_side(config)


def counters(core):
    """All of them but seconds, of which the real side has its own idea."""
    return msgspec.structs.replace(
        core.metrics(0.0), device_seconds=0.0, host_seconds=HostSeconds()
    )


def assert_same(real, virtual):
    assert real.clock.spent == virtual.clock.spent
    assert counters(real.core) == counters(virtual.core)


@pytest.mark.parametrize("method", WORKER_METHODS)
def test_a_virtual_worker_has_the_methods_that_clients_may_call(method):
    core = virtual_side(simulated_config()).core
    [answer] = core.call_workers(method)
    assert answer.generator == "replicas.simulation.virtual_worker:VirtualWorker"


# --- the same tokens in the same time -----------------------------------------------------------


@st.composite
def runs(draw):
    lanes = draw(st.sampled_from([1, 2, 4]))
    config = simulated_config(
        tt_data_parallel=lanes,
        max_batch_size=8,
        num_blocks=draw(st.sampled_from([6, 9, 64])),
        enable_prefix_caching=draw(st.booleans()),
        prefill_steps_per_decode_step=draw(st.integers(1, 3)),
        steps_in_flight=draw(st.sampled_from([1, 2])),
        **draw(st.sampled_from([WHOLE, *({"max_num_batched_tokens": n} for n in (8, 48, 256))])),
    )
    # With its output the longest fills the model's 128 tokens.
    sizes = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 28)), min_size=1))
    prompts = [[*LONG[:start], *range(i, i + own)] for i, (start, own) in enumerate(sizes, 1)]
    lengths = [draw(st.integers(1, 40)) for _ in prompts]
    return config, prompts, lengths, draw(st.integers(0, 4))


def scarce(**changes):
    """Blocks for two and a half of eight sequences of 100 tokens."""
    prompts = [[100 * i + j for j in range(60)] for i in range(8)]
    return simulated_config(num_blocks=20, **changes), prompts, [40] * 8, 0


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(runs())
@example(scarce(steps_in_flight=1))
@example(scarce(steps_in_flight=2, **CHUNKED))
@example((simulated_config(**FOUR_LANES), PROMPTS, [NUM_NEW] * len(PROMPTS), 3))
def test_whatever_runs_it_costs_the_same(run):
    """The second time most prompts are found in the prefix cache."""
    config, prompts, lengths, stagger = run
    params = [sampling(n) for n in lengths]
    with pytest.MonkeyPatch.context() as monkeypatch:
        real, virtual = both(config, monkeypatch)
        assert real.core.facts == virtual.core.facts
        right = right_tokens(prompts, max(lengths))
        for side in (real, virtual):
            for _ in range(2):
                found = generate(side.core, prompts, params, stagger=stagger)
                assert found == [r[:n] for r, n in zip(right, lengths, strict=True)]
        assert_same(real, virtual)
    assert sum(virtual.clock.spent) == virtual.core.metrics(0.0).device_seconds > 0
    event(f"preempts: {num_preemptions(virtual.core) > 0}")
    event(f"finds prefixes: {num_prefix_hits(virtual.core) > 0}")


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(WHOLE, MISS), (CHUNKED, {"tt_data_parallel": 2}), (FOUR_LANES, {}), (WHOLE, FOUR_LANES)],
    ids=["whole", "chunks to two lanes", "four lanes to one", "one lane to four"],
)
def test_a_prompt_computed_elsewhere_costs_both_the_same(prefill, decode, monkeypatch):
    common = {"num_blocks": 130, "max_batch_size": 16}
    pairs = []
    for make in (lambda *args: real_side(args[0], monkeypatch, *args[1:]), virtual_side):
        net = Net()
        pair = LoopPair(
            make(simulated_config(**common, **prefill), net, "prefill"),
            make(simulated_config(**common, **decode), net, "decode"),
            net,
        )
        for _ in range(2):
            found = pair.generate(PROMPTS, sampling())[-len(PROMPTS) :]
            assert found == right_tokens(PROMPTS, NUM_NEW)
        assert set(pair.loaded.values()) == {None}
        assert len(pair.loaded) == 2 * len(PROMPTS)
        pairs.append(pair)
    real, virtual = pairs
    assert_same(real.prefill, virtual.prefill)
    assert_same(real.decode, virtual.decode)
    assert virtual.decode.core.metrics(0.0).transfer.paths["inline"].num_received > 0
    for pair in pairs:
        pair.prefill.core.shutdown()
        pair.decode.core.shutdown()


def test_a_wrong_block_shows_in_the_tokens():
    """The other tests assume this: a virtual token depends on every row that is read for it."""
    virtual = virtual_side(simulated_config(**WHOLE))
    [cache] = virtual.core._executor.worker._caches
    original = cache.context_sums
    cache.context_sums = lambda lanes, tables, counts: original(lanes, tables[:, ::-1], counts)
    (found,) = generate(virtual.core, [LONG[:70]], sampling())
    assert [found] != right_tokens([LONG[:70]], NUM_NEW)


# --- without KV ---------------------------------------------------------------------------------


def test_a_turn_waits_for_the_pass_that_was_begun_a_turn_before():
    """One step at a time leaves the device idle while its host works; two do not."""
    clock = StepClock()
    worker = plain_worker(clock)
    batch = ScheduledBatch("decode", [0], [1], [new(0, 9, num_computed=8)], [], num_passes=3)
    again = msgspec.structs.replace(batch, new=[], num_passes=2)
    worker.submit_step(batch, None, 0.0)
    assert worker.wait_s() == 69.0
    assert worker.plan_turns(10.0, is_ahead=False) == [79.0, 159.0, 240.0]
    assert worker.plan_turns(10.0, is_ahead=True) == [79.0, 149.0, 220.0]
    worker.stop_after(1)
    # The turn that takes the first over submits the second, a turn before it is read.
    worker.submit_step(again, None, 0.0)
    assert worker.collect_step().device_s == 69.0
    clock.start(79.0)
    assert worker.plan_turns(10.0, is_ahead=True) == [149.0, 220.0]
    worker.stop_after(2)
    clock.start(149.0)
    result = worker.collect_step()
    assert result.passes_s == [60.0, 61.0]
    assert (worker._timeline.free_s, worker._timeline.busy_s) == (210.0, 210.0)


class OddTiming:
    """Prompts of a second per token, decode steps of a minute, mixed passes of an hour."""

    host_s = host_row_s = 0.0
    bytes_per_token = 1
    link = LinkTiming(0.0, 1.0)

    def prefill_s(self, chunks):
        return float(sum(end - start for _, start, end in chunks))

    def decode_s(self, rows):
        return 60.0 + sum(context for _, context in rows)

    def decode_run_s(self, rows, num_steps):
        return [self.decode_s([(lane, n + i) for lane, n in rows]) for i in range(num_steps)]

    def mixed_s(self, chunks, rows):
        return 3600.0 + self.prefill_s(chunks) + self.decode_s(rows)

    def warm_up_s(self):
        return 0.0


FACTS = ModelFacts(
    max_position_embeddings=1000, vocab_size=100, eos_token_ids=[0],
    kv_groups=one_kv_group(50, block_size=8), supports_mixed_batch=True,
    supports_chunked_prefill=True, supports_prefix_caching=True,
)  # fmt: skip


def plain_config(**changes):
    fields = {"model": "none", "max_batch_size": 4, "block_size": 8, "max_num_batched_tokens": 64}
    fields["max_model_len"] = 100
    return EngineConfig(**{**fields, **changes})


def plain_worker(clock=None, *, models_kv=False, num_scheduler_steps=1, **more):
    config = plain_config(tt_data_parallel=2, num_scheduler_steps=num_scheduler_steps)
    worker = virtual_worker(
        config, clock or CountingClock(), timing=OddTiming(), facts=FACTS, models_kv=models_kv,
        **more,
    )  # fmt: skip
    worker.initialize_kv_cache(FACTS.kv_groups, 100)
    return worker


def new(slot, num_tokens, *, num_computed=0, num_prompt=None, seed=0):
    return NewRow(
        slot, slot // 2, list(range(20, 20 + num_tokens)), num_prompt or num_tokens, num_computed,
        [list(range(1, 2 + num_tokens // 8))], SamplingParams(temperature=0.0, seed=seed),
    )  # fmt: skip


def run(worker, kind, slots, counts, new_sequences=()):
    batch = ScheduledBatch(kind, slots, counts, list(new_sequences), [])
    return execute(worker, batch)


def turns(worker, batch, num_passes):
    """Submit a step of these passes, and return when the turn of each ends."""
    worker.submit_step(msgspec.structs.replace(batch, num_passes=num_passes), None, 0.0)
    return worker.plan_turns(0.0, is_ahead=False)


def execute(worker, batch):
    worker.submit_step(batch, None, 0.0)
    return worker.collect_step()


def test_each_kind_of_step_costs_its_own():
    worker = plain_worker()
    result = run(worker, "prefill", [0, 2], [5, 3], [new(0, 5), new(2, 9)])
    assert (result.device_s, result.counts) == (8.0, [1, 0])
    assert run(worker, "decode", [0], [1]).device_s == 60.0 + 6
    mixed = run(worker, "mixed", [0, 2], [1, 6])
    assert mixed.device_s == 3600.0 + 6 + 60.0 + 7
    assert worker._clock.spent == [8.0, 66.0, 3673.0]


def test_a_prompt_of_one_token_is_a_prefill_where_the_step_is():
    worker = plain_worker()
    assert run(worker, "prefill", [0], [1], [new(0, 1)]).device_s == 1.0


def test_a_slow_device_takes_longer_while_it_is_slow():
    clock = StepClock()
    fault = Fault(at_s=10.0, target="both/0", kind="slow", duration_s=5.0, factor=3.0)
    seconds = []
    for now_s in (9.0, 10.0, 14.9, 15.0):
        worker = plain_worker(clock, faults=ReplicaFaults([fault]))
        clock.start(now_s)
        seconds.append(run(worker, "prefill", [0], [4], [new(0, 9)]).device_s)
        assert clock.spent_s == seconds[-1]
        assert clock.now_s() == now_s + seconds[-1]
    assert seconds == [4.0, 12.0, pytest.approx(12.0), 4.0]
    worker = plain_worker(clock, faults=ReplicaFaults([fault]))
    clock.start(12.0)
    run_batch = ScheduledBatch("decode", [0], [1], [new(0, 9, num_computed=8)], [])
    assert turns(worker, run_batch, 2) == [12.0 + 3 * 69.0, 12.0 + 3 * 69.0 + 70.0]


def test_tokens_without_kv_are_of_the_request_alone():
    """Wherever it runs, whatever was computed before and in whatever company."""
    config = plain_config()
    params = [
        SamplingParams(max_tokens=9, temperature=0.0, seed=s, ignore_eos=True) for s in (5, 6)
    ]
    outputs = []
    for prompts in ([[1, 2, 3], [4]], [[9] * 40, [8] * 12]):
        worker = virtual_worker(
            config, CountingClock(), timing=OddTiming(), facts=FACTS, models_kv=False
        )
        outputs.append(generate(EngineCore(config, OneWorker(worker)), prompts, params))
    assert outputs[0] == outputs[1]
    assert outputs[0][0] != outputs[0][1]
    assert all(16 <= t < 100 for tokens in outputs[0] for t in tokens)
    worker = plain_worker()
    half = new(0, 3 + 4, num_computed=3 + 3, num_prompt=3, seed=5)
    assert run(worker, "decode", [0], [1], [half]).token_ids == outputs[0][0][4:5]


@pytest.mark.parametrize("models_kv", [False, True])
def test_passes_give_the_tokens_and_seconds_of_as_many_steps(models_kv):
    sequences = [new(0, 9, num_computed=8, num_prompt=4), new(3, 4, num_computed=3, seed=7)]
    once, ahead = plain_worker(models_kv=models_kv), plain_worker(models_kv=models_kv)
    batch = ScheduledBatch("decode", [0, 3], [1, 1], sequences, [])
    again = msgspec.structs.replace(batch, new=[])
    results = [execute(once, b) for b in (batch, again, again, again)]
    ends_s = list(accumulate(r.device_s for r in results))
    assert turns(ahead, batch, 4) == ends_s
    assert ahead._clock.spent == [], "whoever asks passes the time"
    ahead.stop_after(3)
    ahead._clock.spend(ends_s[1])
    run_ = ahead.collect_step()
    assert run_.passes_s == [r.device_s for r in results[:3]]
    assert run_.token_ids == [r.token_ids[row] for row in range(2) for r in results[:3]]
    assert run_.counts == [3, 3]
    # Fewer passes were made than planned: the next step continues from there.
    assert turns(ahead, again, 1) == ends_s[3:]
    assert ahead.collect_step() == results[3]


@pytest.mark.parametrize("models_kv", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_give_the_tokens_of_plain_steps(models_kv, temperature):
    """Right and wrong ones, over the edge of a block."""
    sequence = new(0, 6, num_prompt=4)
    sampling = SamplingParams(temperature=temperature, seed=9)
    sequence = msgspec.structs.replace(sequence, sampling=sampling, block_ids=[list(range(1, 7))])
    plain = plain_worker(models_kv=models_kv)
    expected = run(plain, "mixed", [0], [6], [sequence]).token_ids
    while len(expected) < 40:
        expected += run(plain, "mixed", [0], [1]).token_ids
    worker = plain_worker(models_kv=models_kv, chances=Chances(right_draft=0.7))
    batch = ScheduledBatch("mixed", [0], [6], [sequence], [], max_drafts=3)
    tokens, runs, num_drafts = [], set(), 0
    while len(tokens) < 36:
        result = execute(worker, batch)
        tokens += result.token_ids
        runs.add((num_drafts, len(result.token_ids) - 1))
        [num_drafts] = result.num_drafts
        batch = msgspec.structs.replace(batch, num_scheduled_tokens=[1 + num_drafts], new=[])
    assert tokens == expected[: len(tokens)]
    assert {0, 1, 2, 3} == {num_drafts for num_drafts, _ in runs}
    assert any(num_right > 0 for _, num_right in runs)
    assert any(num_right < num_drafts for num_drafts, num_right in runs)


def test_no_more_drafts_are_proposed_than_the_longest_sequence_has_room_for():
    worker = plain_worker()
    row = new(0, 98, num_computed=97, num_prompt=4)
    batch = ScheduledBatch("mixed", [0], [1], [row], [], max_drafts=3)
    assert execute(worker, batch).num_drafts == [0]


def test_rows_that_are_not_greedy_draw_with_their_seed():
    tokens = []
    for temperature, seed in ((0.0, 1), (0.0, 2), (1.0, 1), (1.0, 2), (1.0, 2)):
        sampling = SamplingParams(temperature=temperature, seed=seed)
        row = msgspec.structs.replace(new(0, 9), sampling=sampling)
        tokens += run(plain_worker(models_kv=True), "prefill", [0], [9], [row]).token_ids
    assert tokens[0] == tokens[1]
    assert tokens[3] == tokens[4]
    assert len(set(tokens[1:4])) == 3


def test_rows_fail_now_and_then():
    rows = [new(slot, 9) for slot in range(4)]
    worker = plain_worker(chances=Chances(failed_row=0.5))
    results = [run(worker, "prefill", [0, 1, 2, 3], [9] * 4, rows) for _ in range(20)]
    failures = [failure for result in results for failure in result.failed]
    assert {failure.reason for failure in failures} == {"no_distribution", "no_allowed_token"}
    assert {failure.row for failure in failures} == {0, 1, 2, 3}
    for result in results:
        counts = result.counts or [1] * 4
        assert [row for row in range(4) if not counts[row]] == [f.row for f in result.failed]
        assert len(result.token_ids) == sum(counts)


@pytest.mark.parametrize("models_kv", [False, True])
def test_a_row_that_fails_in_a_later_pass_keeps_its_tokens(models_kv):
    row = msgspec.structs.replace(new(0, 1), block_ids=[list(range(1, 8))])
    plain = plain_worker(models_kv=models_kv)
    expected = run(plain, "decode", [0], [1], [row]).token_ids
    while len(expected) < 44:
        expected += run(plain, "decode", [0], [1]).token_ids
    chances = Chances(failed_row=0.8)
    worker = plain_worker(models_kv=models_kv, num_scheduler_steps=4, chances=chances)
    batch, tokens, lengths = ScheduledBatch("decode", [0], [1], [row], [], 4), [], set()
    while len(tokens) < 40:
        result = execute(worker, batch)
        tokens += result.token_ids
        lengths.add(len(result.token_ids))
        assert len(result.failed) == (not result.token_ids)
        batch = msgspec.structs.replace(batch, new=[])
    assert tokens == expected[: len(tokens)]
    assert lengths == {0, 1, 2, 3, 4}


def grammars(count):
    return [StructuredOutputs(regex=f"[a-z]{{{i}}}") for i in range(1, count + 1)]


def test_a_grammar_is_compiled_at_once_if_nothing_is_late():
    orders = [Preparation(grammar) for grammar in grammars(3)]
    worker = plain_worker()
    assert worker.prepare(orders) == [Prepared(grammar) for grammar in grammars(3)]
    assert worker.next_prepared_s is None


def test_grammars_are_late_and_bad():
    clock = StepClock()
    worker = plain_worker(clock, chances=Chances(slow_grammar=1.0, bad_grammar=0.5))
    assert worker.prepare([Preparation(grammar) for grammar in grammars(20)]) == []
    moments_s, results = [], []
    while worker.next_prepared_s is not None:
        moments_s.append(worker.next_prepared_s)
        clock.start(worker.next_prepared_s)
        results += worker.prepare([])
    assert moments_s == sorted(set(moments_s))
    assert {result.grammar for result in results} == set(grammars(20))
    assert len({result.error for result in results}) == 2


def test_a_row_needs_its_grammar():
    worker = plain_worker()
    [grammar] = grammars(1)
    sampling = SamplingParams(temperature=0.0, structured_outputs=grammar)
    row = msgspec.structs.replace(new(0, 5), sampling=sampling)
    worker.prepare([Preparation(grammar)])
    run(worker, "prefill", [0], [5], [row])
    worker.prepare([Preparation(grammar, is_wanted=False)])
    with pytest.raises(AssertionError, match="is not compiled"):
        run(worker, "prefill", [0], [5], [row])


def test_kv_without_rows_moves_as_many_bytes_and_none_of_them():
    """In simulations of thousands of replicas transfers take time and carry nothing."""
    net, sides = Net(), {}
    config = simulated_config(kv_connector="p2p", keys=KEYS)
    for name in ("prefill", "decode"):
        clock = CountingClock()
        worker = virtual_worker(config, clock, models_kv=False, net=net, name=name)
        sides[name] = Side(EngineCore(config, OneWorker(worker), name), clock)
    pair = LoopPair(sides["prefill"], sides["decode"], net)
    found = pair.generate([LONG[:70]], sampling())
    assert len(found[0]) == NUM_NEW
    inline = pair.decode.core.metrics(0.0).transfer.paths["inline"]
    assert (inline.num_received, inline.bytes_received) == (1, 3 * 512)
    timing = engine_timing(config, FOUR_CHIPS, 0.0)
    transfer_s = timing.link.transfer_s(3 * 32 * timing.bytes_per_token)
    assert pair.decode.clock.spent[0] == transfer_s
    assert pytest.approx(transfer_s) in pair.prefill.clock.spent

"""A request of n choices is n sequences: the same tokens as n requests with the derived seeds."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest

from replicas.config import SpeculativeConfig
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.engine.kv_cache import KVCacheManager
from replicas.engine.step import RowFailure, StepResult
from replicas.generators.torch.generator import TorchGenerator
from replicas.messages import (
    LAPSED,
    NO_ALLOWED_TOKEN,
    Abort,
    Accepted,
    Activate,
    AddRequest,
    EngineRequest,
    TokenOutput,
)
from replicas.sampling_params import SamplingParams
from tests.engines import (
    CLIENT,
    engine_core,
    generate,
    make_config,
    num_preemptions,
    num_prefix_hits,
    take_events,
)
from tests.models import model_folder
from tests.replicas.engine import fakes

if TYPE_CHECKING:
    from replicas.generators.protocol import ModelCapabilities

PROMPT = [3 + 5 * i % 61 for i in range(70)]
"""Two blocks of 32 and six tokens."""
FOUR = SamplingParams(max_tokens=9, temperature=1.5, seed=7, n=4, ignore_eos=True)


class WholePrompts(TorchGenerator):
    """A generator that computes prompts from their first token only."""

    model_capabilities: ClassVar[ModelCapabilities] = {
        **TorchGenerator.model_capabilities,
        "supports_prefix_caching": False,
        "supports_chunked_prefill": False,
        "supports_mixed_batch": False,
    }


class BrokenAt(TorchGenerator):
    """A generator whose logits of one slot are no numbers from some position on."""

    def _forward(self, batch: Any, *args: Any, **options: Any) -> Any:
        logits = super()._forward(batch, *args, **options)
        bad = batch.positions[batch.logits_indices] == 73
        logits[bad.nonzero()[-1:]] = float("nan")
        return logits


@pytest.fixture(scope="module")
def folder():
    return model_folder("llama-gqa")


def seeds_apart(sampling):
    """The parameters of as many requests, each of one choice."""
    return [
        msgspec.structs.replace(sampling, n=1, seed=sampling.seed + i) for i in range(sampling.n)
    ]


@pytest.fixture(scope="module")
def expected(folder):
    """The tokens of four requests."""
    with engine_core(make_config(folder)) as core:
        return generate(core, [PROMPT] * 4, seeds_apart(FOUR))


class Request:
    """A request on an engine of its own, and what its client has got."""

    def __init__(self, core, sampling=FOUR, request_id="r", **message):
        self.core = core
        self.request_id = request_id
        self.tokens = defaultdict(list)
        self.ends = {}
        self.accepted = None
        self.errors = []
        request = EngineRequest(request_id, PROMPT, sampling)
        core.handle(CLIENT, AddRequest(request, **message), 0.0)
        self.read()

    def read(self):
        for event in take_events(self.core).get(CLIENT, []):
            if isinstance(event, Accepted) and event.request_id == self.request_id:
                self.accepted = event
            elif isinstance(event, TokenOutput) and event.request_id == self.request_id:
                assert event.choice not in self.ends
                assert event.index == len(self.tokens[event.choice])
                self.errors += [event.error] if event.error else []
                self.tokens[event.choice] += event.token_ids
                if event.finish_reason is not None:
                    self.ends[event.choice] = event.finish_reason

    def step(self):
        has_run = self.core.step(0.0)
        self.core.check_invariants()
        self.read()
        return has_run

    def run(self):
        """Run to the end; return the tokens of the choices, in order."""
        while self.step():
            pass
        return [self.tokens[choice] for choice in sorted(self.tokens)]

    def abort(self, *choices, reason="stop"):
        self.core.handle(CLIENT, Abort([self.request_id], reason, list(choices)), 0.0)
        self.core.check_invariants()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_batch_size": 2, "max_num_batched_tokens": 128},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 24},
        {"tt_data_parallel": 2, "max_batch_size": 4},
        {"generator": f"{__name__}:WholePrompts"},
        {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=3)},
    ],
    ids=["plain", "no prefix cache", "two slots", "chunks", "two lanes", "whole prompts", "drafts"],
)
def test_choices_are_requests_with_the_derived_seeds(folder, expected, changes):
    with engine_core(make_config(folder, **changes)) as core:
        request = Request(core)
        assert (request.accepted.num_choices, request.accepted.handle) == (4, 1)
        assert request.run() == expected
        assert request.ends == dict.fromkeys(range(4), "length")
        metrics = core.metrics(0.0)
        assert (
            sum(g.requests_finished["length"] for g in metrics.groups if g.requests_finished) == 4
        )
        again = Request(core, request_id="s")
        assert again.accepted.handle == 5
        assert again.run() == expected


def test_seeds_wrap_to_64_bits(folder):
    sampling = msgspec.structs.replace(FOUR, n=2, seed=2**63 - 1)
    seeds = [msgspec.structs.replace(FOUR, n=1, seed=seed) for seed in (2**63 - 1, -(2**63))]
    with engine_core(make_config(folder)) as core:
        assert Request(core, sampling).run() == generate(core, [PROMPT] * 2, seeds)


@pytest.mark.parametrize("caching", [True, False])
def test_full_blocks_of_the_prompt_are_shared(folder, caching):
    with engine_core(make_config(folder, enable_prefix_caching=caching)) as core:
        free = core.snapshot(0).groups[0].num_free_blocks[0]
        request = Request(core)
        while len(request.tokens) < 4:
            request.step()
        # Two shared blocks, and one of each choice.
        assert core.snapshot(0).groups[0].num_free_blocks[0] == free - 2 - 4
        assert core.metrics(0.0).groups[0].prompt_tokens == len(PROMPT)
        request.run()


def test_a_preempted_sibling_gives_the_same_tokens(folder, expected):
    long = msgspec.structs.replace(FOUR, max_tokens=58)
    with engine_core(make_config(folder, num_blocks=40)) as core:
        want = generate(core, [PROMPT] * 4, seeds_apart(long))
    for caching in (True, False):
        # Each choice fills its third block and needs a fourth: 2 + 4 + 4 blocks in all.
        config = make_config(folder, num_blocks=1 + 8, enable_prefix_caching=caching)
        with engine_core(config) as core:
            assert Request(core, long).run() == want
            assert num_preemptions(core) > 0
    assert [tokens[:9] for tokens in want] == expected


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
@pytest.mark.parametrize("choice", [0, 2])
def test_a_choice_that_is_stopped_leaves_the_others_as_they_were(
    folder, expected, num_steps, choice
):
    with engine_core(make_config(folder, enable_prefix_caching=False)) as core:
        request = Request(core)
        for _ in range(num_steps):
            request.step()
        before = len(request.tokens[choice])
        request.abort(choice)
        request.run()
        others = [i for i in range(4) if i != choice]
        assert [request.tokens[i] for i in others] == [expected[i] for i in others]
        assert (len(request.tokens[choice]), sorted(request.ends)) == (before, others)
        assert core.metrics(0.0).groups[0].requests_finished == {"stop": 1, "length": 3}


def test_an_abort_drops_every_choice(folder):
    with engine_core(make_config(folder, max_batch_size=2)) as core:
        request = Request(core)
        for _ in range(4):
            request.step()
        request.abort(reason="abort")
        assert (core.num_live, core.snapshot(0).num_waiting) == (0, 0)
        assert not request.step()
        assert core.metrics(0.0).groups[0].requests_finished == {"abort": 4}


def test_a_client_that_is_gone_leaves_no_choice(folder):
    with engine_core(make_config(folder)) as core:
        request = Request(core)
        request.step()
        core.client_gone(CLIENT)
        assert core.num_live == 0


def test_a_choice_without_a_distribution_fails_all(folder):
    with engine_core(make_config(folder, generator=f"{__name__}:BrokenAt")) as core:
        request = Request(core)
        request.run()
        assert list(request.ends.values()) == ["error"]
        assert core.metrics(0.0).groups[0].requests_finished == {"error": 4}


def test_a_choice_that_fails_drops_the_first_token_of_another_in_the_same_step():
    scheduler = fakes.scheduler_of(20)
    first = fakes.make_sequence("r", [1] * 4, n=2, temperature=1.0, max_tokens=5)
    [second] = fakes.make_siblings(first)
    scheduler.add(first, 0.0, [second])
    scheduler.update(scheduler.schedule(), StepResult([7], [0.0]))
    batch = scheduler.schedule()
    failures = [RowFailure(0, "no_distribution")]
    outputs = scheduler.update(batch, StepResult([8], [0.0], [0, 1], failures))
    assert [seq for seq, _ in outputs.failed] == [first]
    assert outputs.sequences == []
    scheduler.check_invariants()
    assert scheduler.table.num_live == 0


@pytest.mark.parametrize(("limit", "num_choices"), [(0, 3), (5, 8)])
@pytest.mark.parametrize("mode", ["local", "decode"])
def test_further_choices_of_a_full_queue_are_refused(mode, limit, num_choices):
    """Four slots, of which the first choice of a reservation takes one."""
    scheduler = fakes.scheduler_of(60, max_num_waiting=limit)
    enter = scheduler.reserve if mode == "decode" else scheduler.add
    answers = {}
    for name in "abcd":
        seq = fakes.make_sequence(name, [1] * 4, mode=mode, n=num_choices)
        answers[name] = enter(seq, 0.0, fakes.make_siblings(seq))
    assert answers == {"a": None, "b": None, "c": "queue_full", "d": "queue_full"}
    if mode == "decode":
        alone = fakes.make_sequence("alone", [1] * 4, mode=mode)
        assert enter(alone, 0.0) is None, "it queues nothing"


def test_a_request_is_not_over_while_a_choice_runs():
    scheduler = fakes.scheduler_of(20, connector=fakes.FakeConnector())
    first = fakes.make_sequence("r", [1] * 5, n=2, max_tokens=5)
    [second] = fakes.make_siblings(first)
    scheduler.add(first, 0.0, [second])
    scheduler.update(scheduler.schedule(), StepResult([7], [0.0]))
    scheduler.lend("r", fakes.make_ticket("r", 5, producer="here"), 0.0)
    scheduler.abort_choice("r", 0, "abort")
    assert scheduler.table.held
    assert not scheduler.table.is_ending("r")
    scheduler.abort_choice("r", 1, "abort")
    assert scheduler.table.is_ending("r")


def test_a_sequence_that_is_aborted_in_its_first_step_gets_no_token():
    scheduler = fakes.scheduler_of(20)
    scheduler.add(fakes.make_sequence("r", [1] * 4, max_tokens=5), 0.0)
    batch = scheduler.schedule()
    scheduler.abort("r")
    assert scheduler.update(batch, StepResult([7], [0.0])).sequences == []
    scheduler.check_invariants()


def test_choices_without_an_allowed_second_token_all_fail(folder):
    only_once = SamplingParams(
        max_tokens=9,
        n=2,
        seed=7,
        temperature=1.0,
        ignore_eos=True,
        allowed_token_ids=(5,),
        bad_words_token_ids=((5, 5),),
    )
    with engine_core(make_config(folder)) as core:
        request = Request(core, only_once)
        request.run()
        assert request.errors == [NO_ALLOWED_TOKEN]
        assert core.num_live == 0


def test_stop_tokens_end_each_choice_by_itself(folder, expected):
    stop = expected[0][2]
    sampling = msgspec.structs.replace(FOUR, stop_token_ids=frozenset({stop}))
    cut = [t[: t.index(stop) + 1] if stop in t else t for t in expected]
    with engine_core(make_config(folder)) as core:
        assert Request(core, sampling).run() == cut


def test_several_requests_of_several_choices_share_an_engine(folder, expected):
    with engine_core(make_config(folder, max_batch_size=3)) as core:
        requests = [Request(core, request_id=f"r{i}") for i in range(3)]
        while core.num_live:
            core.step(0.0)
            core.check_invariants()
            events = take_events(core).get(CLIENT, [])
            for event in events:
                if isinstance(event, TokenOutput):
                    requests[int(event.request_id[1:])].tokens[event.choice] += event.token_ids
        for request in requests:
            assert [request.tokens[i] for i in range(4)] == expected
        assert num_prefix_hits(core) >= 0


@pytest.mark.parametrize("num_known", [0, 1, 4])
@pytest.mark.parametrize("caching", [True, False])
def test_a_reservation_is_that_of_choice_0_and_all_choices_follow(
    folder, expected, num_known, caching
):
    with engine_core(make_config(folder, enable_prefix_caching=caching)) as core:
        request = Request(core, mode="decode")
        assert request.accepted.slot == 0
        assert not request.step()
        known = [tokens[:num_known] for tokens in expected]
        request.tokens.update(enumerate([*tokens] for tokens in known))
        core.handle(CLIENT, Activate("r", known if num_known else []), 0.0)
        assert request.run() == expected


@pytest.mark.parametrize("choice", [0, 1])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_choice_that_had_ended_elsewhere_is_dropped_before_the_others_start(
    folder, expected, choice, num_steps
):
    """Even if the engine steps before it reads the activation, with the tokens of the others."""
    with engine_core(make_config(folder)) as core:
        request = Request(core, mode="decode")
        known = [tokens[:2] for tokens in expected]
        # Its tokens leave no room: nothing more is expected of it.
        known[choice] = [1] * 100
        request.tokens.update(enumerate([*tokens] for tokens in known))
        request.abort(choice)
        assert not any(request.step() for _ in range(num_steps))
        core.handle(CLIENT, Activate("r", known), 0.0)
        request.run()
        others = [i for i in range(4) if i != choice]
        assert [request.tokens[i] for i in others] == [expected[i] for i in others]


@pytest.mark.parametrize(
    ("lists", "error"),
    [
        ([[5]], "it has 4 choices, and was given tokens of 1"),
        ([[5], [5], [5], [10**6]], "a token id is outside the vocabulary"),
        ([[5], [5], [5] * 58, [5]], "leaves no room below max_model_len 128"),
    ],
)
def test_an_activation_of_other_choices_fails_the_request(folder, lists, error):
    with engine_core(make_config(folder)) as core:
        request = Request(core, mode="decode")
        core.handle(CLIENT, Activate("r", lists), 0.0)
        request.run()
        assert error in request.errors[0]
        assert core.num_live == 0


@pytest.mark.parametrize("dropped", [[], [0], [0, 2]])
def test_a_reservation_that_lapses_drops_every_choice(folder, dropped):
    with engine_core(make_config(folder)) as core:
        request = Request(core, mode="decode")
        for choice in dropped:
            request.abort(choice)
        assert not request.step()
        core.step(core.next_deadline_s())
        core.check_invariants()
        request.read()
        assert (request.errors, core.num_live) == ([LAPSED], 0)
        assert core.next_deadline_s() is None


@pytest.mark.parametrize("choices", [[], [0, 1, 2, 3], [3, 2, 1, 0]])
def test_a_reservation_whose_choices_are_all_dropped_leaves_nothing(folder, choices):
    with engine_core(make_config(folder)) as core:
        request = Request(core, mode="decode")
        request.abort(0)
        for choice in choices:
            request.abort(choice)
        if not choices:
            request.abort(reason="abort")
        assert (core.num_live, core.next_deadline_s()) == (0, None)
        again = Request(core, mode="decode")
        assert again.accepted is not None
        again.abort(reason="abort")


def test_sharing_a_block_that_is_still_written_is_found(folder, monkeypatch):
    fork = KVCacheManager.fork

    def fork_too_much(self, seq, parent, *args):
        place = fork(self, seq, parent, *args)
        if place is not None:
            place.hits[0].append(parent.place.block_ids[0][len(place.hits[0])])
        return place

    monkeypatch.setattr(KVCacheManager, "fork", fork_too_much)
    config = make_config(folder, enable_prefix_caching=False)
    core = EngineCore(config, UniProcExecutor(config))
    try:
        with pytest.raises(AssertionError, match="writes to blocks"):
            Request(core).run()
    finally:
        core.shutdown()

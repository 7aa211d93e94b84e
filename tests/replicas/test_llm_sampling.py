"""Parameters of sampling act through the whole engine."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from replicas import LLM, BeamSearchParams, SamplingParams
from replicas.errors import InvalidRequestError
from tests.models import chat_folder

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, temperature=0.9, seed=11, ignore_eos=True)
PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def llm():
    settings = {"dtype": "float32", "max_model_len": 64, "max_batch_size": 4, "num_blocks": 40}
    with LLM(chat_folder(), multiprocess=False, num_threads=1, **settings) as llm:
        yield llm


def test_a_beam_search_of_one_is_greedy_and_a_wider_one_finds_no_less_likely_text(llm):
    [greedy] = llm.generate(
        PROMPT, msgspec.structs.replace(GREEDY, max_tokens=6, logprobs=0), use_tqdm=False
    )
    choice = greedy.outputs[0]
    logprob = sum(drawn.logprob for drawn, *_ in choice.logprobs)
    found = {}
    for width in (1, 4):
        params = BeamSearchParams(beam_width=width, max_tokens=6, ignore_eos=True)
        [output] = llm.beam_search([PROMPT], params)
        assert len(output.sequences) == width
        found[width] = output.sequences
    [one] = found[1]
    assert one.tokens == [*PROMPT, *choice.token_ids]
    assert one.text == choice.text
    assert one.cum_logprob == pytest.approx(logprob, abs=1e-4)
    assert found[4][0].cum_logprob >= one.cum_logprob - 1e-4


def test_an_engine_s_own_limit_of_log_probabilities_is_that_of_its_front_end():
    settings = {"dtype": "float32", "max_model_len": 64, "max_batch_size": 4, "num_blocks": 40}
    with LLM(chat_folder(), multiprocess=False, max_logprobs=25, **settings) as llm:
        [output] = llm.generate(
            PROMPT, msgspec.structs.replace(GREEDY, logprobs=25), use_tqdm=False
        )
        assert {len(entries) for entries in output.outputs[0].logprobs} == {26}
        with pytest.raises(InvalidRequestError, match="logprobs must be 0 to 25, got 26"):
            llm.generate(PROMPT, msgspec.structs.replace(GREEDY, logprobs=26), use_tqdm=False)


def test_priorities_reach_an_engine_that_schedules_by_them():
    settings = {"dtype": "float32", "max_model_len": 64, "max_batch_size": 1, "num_blocks": 40}
    params = msgspec.structs.replace(GREEDY, max_tokens=2)
    with LLM(chat_folder(), multiprocess=False, scheduling_policy="priority", **settings) as llm:
        engine, ended = llm.llm_engine, []
        for priority in (3, 1, 2):
            engine.add_request(PROMPT, params, f"p{priority}", priority=priority)
        while engine.has_unfinished_requests():
            ended += [output.request_id for output in engine.step() if output.finished]
        assert ended == ["p1", "p2", "p3"]
        assert len(llm.generate([PROMPT] * 2, params, use_tqdm=False, priority=[1, -1])) == 2
        with pytest.raises(ValueError, match="1 priorities for 2 prompts"):
            llm.generate([PROMPT] * 2, params, use_tqdm=False, priority=[1])


def test_a_priority_is_refused_in_order_of_arrival(llm):
    with pytest.raises(InvalidRequestError, match="prompt 2 of 2: priority is 1") as refused:
        llm.generate([PROMPT] * 2, GREEDY, use_tqdm=False, priority=[0, 1])
    assert refused.value.param == "priority"


def generate(llm, *params):
    """The choice of each request; all run side by side."""
    outputs = llm.generate([PROMPT] * len(params), list(params), use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def tokens(llm, params, **changes):
    [choice] = generate(llm, msgspec.structs.replace(params, **changes))
    return choice.token_ids


def test_a_high_repetition_penalty_leaves_each_token_once(llm):
    found = tokens(llm, GREEDY, repetition_penalty=1000.0)
    assert len({*found, *PROMPT}) == len(found) + len(set(PROMPT))


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e38, 1e308])
def test_a_repetition_penalty_of_any_size_leaves_a_distribution(llm, penalty):
    found = tokens(llm, SEEDED, temperature=0.01, repetition_penalty=penalty)
    assert len(found) == 12
    assert penalty < 1.0 or len({*found, *PROMPT}) == len(found) + len(set(PROMPT))


def test_a_negative_presence_penalty_keeps_the_first_token(llm):
    first = tokens(llm, GREEDY)[0]
    assert tokens(llm, GREEDY, presence_penalty=-2.0, frequency_penalty=-2.0) == [first] * 12


def test_min_p_of_one_leaves_the_likeliest_token(llm):
    assert tokens(llm, SEEDED, min_p=1.0) == tokens(llm, GREEDY)
    assert tokens(llm, SEEDED) != tokens(llm, GREEDY)


def test_only_allowed_tokens_are_drawn(llm):
    assert {*tokens(llm, SEEDED, allowed_token_ids=(70, 71, 300))} <= {70, 71, 300}


def test_a_bias_favours_its_token(llm):
    assert tokens(llm, GREEDY, logit_bias={65: 100.0}) == [65] * 12
    first = tokens(llm, GREEDY)[0]
    assert first not in tokens(llm, GREEDY, logit_bias={first: -100.0})


def test_a_bad_word_is_not_completed(llm):
    first, second = tokens(llm, GREEDY)[:2]
    found = tokens(llm, GREEDY, bad_words_token_ids=((first, second),))
    assert found[0] == first
    assert (first, second) not in pairwise(found)


def test_a_row_ends_only_once_it_is_long_enough(llm):
    end = tokens(llm, GREEDY)[0]
    ends = {"stop_token_ids": frozenset({end})}
    assert tokens(llm, GREEDY, **ends) == [end]
    [choice] = generate(llm, msgspec.structs.replace(GREEDY, **ends, min_tokens=5))
    assert len(choice.token_ids) >= 6
    assert end not in choice.token_ids[:5]
    assert (choice.finish_reason, choice.stop_reason) in {("stop", end), ("length", None)}


def test_a_row_whose_parameters_forbid_every_token_fails_alone(llm):
    [word, _] = words = (65,), (66,)
    forbids = {"allowed_token_ids": (65, 66), "bad_words_token_ids": words}
    one_left = {**forbids, "bad_words_token_ids": (word,)}
    bad, good, left = generate(
        llm, *(msgspec.structs.replace(GREEDY, **how) for how in (forbids, {}, one_left))
    )
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert good.token_ids == tokens(llm, GREEDY)
    assert left.token_ids == [66] * 12


def test_each_token_has_its_log_probability_and_the_likeliest(llm):
    params = msgspec.structs.replace(SEEDED, logprobs=3)
    with_them, plain = generate(llm, params, SEEDED)
    assert with_them.token_ids == plain.token_ids
    assert plain.logprobs is None
    assert [position[0].token_id for position in with_them.logprobs] == with_them.token_ids
    assert all(len(position) == 4 for position in with_them.logprobs)
    assert all(p[1].logprob >= p[2].logprob >= p[3].logprob for p in with_them.logprobs)


def test_a_stop_string_cuts_the_log_probabilities_with_the_tokens(llm):
    [whole] = generate(llm, GREEDY)
    params = msgspec.structs.replace(GREEDY, logprobs=0, stop=(whole.text[4:6],))
    [cut] = generate(llm, params)
    assert cut.finish_reason == "stop"
    assert [position[0].token_id for position in cut.logprobs] == cut.token_ids


def test_each_token_of_the_prompt_but_the_first_has_its_log_probability(llm):
    params = msgspec.structs.replace(SEEDED, n=2, max_tokens=2, prompt_logprobs=1)
    prompts = [PROMPT, [*PROMPT, 33]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.generate(prompts, SEEDED, use_tqdm=False)[0].prompt_logprobs is None
    for prompt, output in zip(prompts, outputs, strict=True):
        first, *rest = output.prompt_logprobs
        assert first == []
        assert [entries[0].token_id for entries in rest] == prompt[1:]
        assert all(len(entries) == 2 for entries in rest)
    # What follows alters nothing.
    for one, other in zip(*(output.prompt_logprobs for output in outputs), strict=False):
        assert [e.logprob for e in one] == pytest.approx([e.logprob for e in other], abs=1e-5)

"""Requests with grammars through a whole engine: whatever happens to them, the same tokens."""

from __future__ import annotations

import contextlib
import json

import pytest

from replicas.config import SpeculativeConfig
from replicas.messages import (
    BAD_GRAMMAR,
    NO_ALLOWED_TOKEN,
    Activate,
    AddRequest,
    EngineRequest,
    TokenOutput,
)
from replicas.sampling_params import SamplingParams, StructuredOutputs
from tests.engines import CLIENT, engine_core, generate, make_config, num_preemptions, take_events
from tests.replicas.engine.fakes import KEYS
from tests.replicas.engine.pair import Pair
from tests.replicas.test_grammars import EOS, MODEL, TOKENIZER

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Lima", "Kyiv"]},
        "visits": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
    "required": ["city", "visits"],
}
SPEC = StructuredOutputs(
    json=SCHEMA, disable_any_whitespace=True, disable_additional_properties=True
)


def sampling(seed, **changes):
    options = {"max_tokens": 40, "temperature": 1.0, "structured_outputs": SPEC}
    return SamplingParams(**{**options, "seed": seed, **changes})


PROMPTS = [[20 + i, 30, 40] for i in range(6)]
PARAMS = [
    sampling(0),
    sampling(1, temperature=0.0),
    sampling(2, structured_outputs=None),
    sampling(3, repetition_penalty=1.3, top_k=20),
    sampling(4, structured_outputs=StructuredOutputs(choice=("yes", "no"))),
    sampling(5, presence_penalty=1.0, top_p=0.9),
]


@pytest.fixture(scope="module")
def core():
    with engine_core(make_config(str(MODEL), block_size=16)) as core:
        yield core


@pytest.fixture(scope="module")
def wanted(core):
    return generate(core, PROMPTS, PARAMS)


def test_outputs_follow_their_grammars_beside_one_without(core, wanted):
    for output, params in zip(wanted, PARAMS, strict=True):
        text = TOKENIZER.decode(output)
        if params.structured_outputs is None:
            continue
        if params.structured_outputs.choice:
            assert text in {"yes", "no"}
        elif output[-1] == EOS:
            assert json.loads(text)["city"] in {"Paris", "Lima", "Kyiv"}
        else:
            assert text.startswith('{"city":"')
    assert generate(core, [PROMPTS[2]], PARAMS[2]) == [wanted[2]]
    assert sum(output[-1] == EOS for output in wanted) >= 2


def test_preempted_rows_get_the_same_tokens(wanted):
    with engine_core(make_config(str(MODEL), block_size=16, num_blocks=9)) as small:
        assert generate(small, PROMPTS, PARAMS) == wanted
        assert num_preemptions(small) > 0


@pytest.mark.parametrize("row", [0, 3])
def test_a_row_that_resumes_in_the_middle_of_its_grammar_gets_the_same_tokens(core, wanted, row):
    """As after a migration, or after a prefill elsewhere that has drawn one token."""
    for num_known in (1, len(wanted[row]) // 2):
        known = wanted[row][:num_known]
        request = EngineRequest("r", PROMPTS[row], PARAMS[row])
        core.handle(CLIENT, AddRequest(request, "decode", token_ids=[known]), 0.0)
        core.handle(CLIENT, Activate("r", [known]), 0.0)
        output, is_over = [*known], False
        while not is_over:
            core.step(0.0)
            for event in take_events(core).get(CLIENT, []):
                if isinstance(event, TokenOutput):
                    output += event.token_ids
                    is_over = event.finish_reason is not None
        assert output == wanted[row]


def test_prefill_on_one_engine_and_decode_on_another_give_the_same_tokens(wanted):
    config = make_config(str(MODEL), kv_connector="p2p", keys=KEYS)
    with contextlib.closing(Pair(config, config)) as pair:
        assert pair.generate(PROMPTS, PARAMS) == wanted


def test_drafts_change_no_token(wanted):
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)
    config = make_config(str(MODEL), block_size=16, speculative_config=drafts)
    with engine_core(config) as drafting:
        assert generate(drafting, PROMPTS, PARAMS) == wanted


def test_tokens_that_the_grammar_does_not_allow_end_a_request_with_both_names(core):
    request = EngineRequest("r", [1, 2], sampling(0))
    core.handle(CLIENT, AddRequest(request, "decode", token_ids=[[50, 51]]), 0.0)
    core.handle(CLIENT, Activate("r", [[50, 51]]), 0.0)
    assert end_of(core, "r").error == NO_ALLOWED_TOKEN


def end_of(core, request_id):
    """The last output of a request."""
    while True:
        core.step(0.0)
        for event in take_events(core).get(CLIENT, []):
            if isinstance(event, TokenOutput) and event.finish_reason is not None:
                assert event.request_id == request_id
                return event


def test_a_bad_grammar_ends_its_request_alone(core, wanted):
    bad = sampling(0, structured_outputs=StructuredOutputs(regex="(?=a)"))
    core.handle(CLIENT, AddRequest(EngineRequest("bad", [1, 2], bad)), 0.0)
    core.handle(CLIENT, AddRequest(EngineRequest("good", PROMPTS[4], PARAMS[4])), 0.0)
    found = {}
    while len(found) < 2:
        core.step(0.0)
        for event in take_events(core).get(CLIENT, []):
            if isinstance(event, TokenOutput) and event.finish_reason is not None:
                found[event.request_id] = event
    assert found["good"].finish_reason == "stop"
    assert found["bad"].finish_reason == "error"
    assert found["bad"].error.startswith(f"{BAD_GRAMMAR}: structured_outputs.regex")


def test_an_engine_without_a_tokenizer_says_so(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(MODEL / name)
    with engine_core(make_config(str(tmp_path))) as core:
        core.handle(CLIENT, AddRequest(EngineRequest("r", [1, 2], sampling(0))), 0.0)
        assert "tokenizer.json" in end_of(core, "r").error


def test_each_choice_follows_the_grammar_as_a_request_of_its_own(core):
    three = sampling(7, n=3)
    alone = [sampling(seed) for seed in (7, 8, 9)]
    wanted = generate(core, [PROMPTS[0]] * 3, alone)
    bad = sampling(0, n=3, structured_outputs=StructuredOutputs(regex="(?=a)"))
    core.handle(CLIENT, AddRequest(EngineRequest("good", PROMPTS[0], three)), 0.0)
    core.handle(CLIENT, AddRequest(EngineRequest("bad", PROMPTS[0], bad)), 0.0)
    outputs, errors = [[], [], []], []
    while core.num_live:
        core.step(0.0)
        core.check_invariants()
        for event in take_events(core).get(CLIENT, []):
            if isinstance(event, TokenOutput) and event.request_id == "good":
                outputs[event.choice] += event.token_ids
            elif isinstance(event, TokenOutput):
                errors.append(event.error)
    assert outputs == wanted
    assert len(errors) == 1
    assert errors[0].startswith(BAD_GRAMMAR)

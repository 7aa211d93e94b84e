"""Log probabilities, greedy tokens and ends are those that `benchmarks.record_vllm` recorded."""

from __future__ import annotations

import copy
import json
from itertools import pairwise

import pytest

from benchmarks.record_vllm import (
    LOGPROBS_MODE,
    MAX_MODEL_LEN,
    RECORDING,
    ParameterSet,
    case_of,
    parameter_sets,
    parameters_of,
    recording_of,
    write,
)
from replicas.llm import LLM
from replicas.sampling_params import SamplingParams

TOLERANCE = 1e-4
"""Largest difference of two log probabilities in float32, and of two that are a tie."""


@pytest.fixture(scope="module")
def llm():
    with LLM(
        str(RECORDING.parents[4] / "configs/demo-model"),
        multiprocess=False,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_batch_size=16,
        num_threads=1,
        logprobs_mode=LOGPROBS_MODE,
    ) as llm:
        yield llm


def ask(llm: LLM, sets: list[ParameterSet]) -> list[dict[str, object]]:
    """Our answers in the form of a recording's cases."""
    outputs = llm.generate(
        [parameters.prompt for parameters in sets],
        [sampling_params(parameters) for parameters in sets],
        use_tqdm=False,
    )
    cases = []
    for parameters, request in zip(sets, outputs, strict=True):
        [output] = request.outputs
        logprobs = [{t.token_id: t.logprob for t in position} for position in output.logprobs]
        ends = output.finish_reason, output.stop_reason
        cases.append(case_of(parameters, list(output.token_ids), *ends, logprobs))
    return cases


def sampling_params(parameters: ParameterSet) -> SamplingParams:
    fields = dict(parameters.sampling)
    for name in ("bad_words", "allowed_token_ids"):
        if name in fields:
            fields[name] = tuple(fields[name])
    fields["stop_token_ids"] = frozenset(fields.get("stop_token_ids", ()))
    return SamplingParams(**fields)


def difference(wanted: dict, found: dict) -> str | None:
    """Return what is not as recorded in a case, up to a near tie of its tokens; None if nothing is.

    Greedy tokens may differ where the likeliest two are a tie, and everything after that.
    """
    for index, (ours, theirs) in enumerate(
        zip(found["logprobs"], wanted["logprobs"], strict=False)
    ):
        text = _distribution(dict(map(tuple, theirs)), dict(map(tuple, ours)))
        if text is not None:
            return f"position {index}: {text}"
        if not wanted["token_ids"]:
            continue
        if index >= len(found["token_ids"]):
            return f"ends after {index} tokens, not {len(wanted['token_ids'])}"
        if found["token_ids"][index] != wanted["token_ids"][index]:
            best = [value for _, value in theirs[:2]]
            if any(first - second <= TOLERANCE for first, second in pairwise(best)):
                return None
            return f"token {index} is {found['token_ids'][index]}"
    for name in ("token_ids", "finish_reason", "stop_reason"):
        if found[name] != wanted[name]:
            return f"{name} is {found[name]!r}, not {wanted[name]!r}"
    return None


def _distribution(theirs: dict[int, float], ours: dict[int, float]) -> str | None:
    """Compare log probabilities of the likeliest tokens, and of one more that was drawn.

    A token that only one side names may be tied with the last of the others.
    """
    for token in theirs.keys() & ours.keys():
        if abs(theirs[token] - ours[token]) > TOLERANCE:
            return f"token {token} has {ours[token]}, not {theirs[token]}"
    common = theirs.keys() & ours.keys()
    if not common:
        return "no token is on both sides"
    for one, other in ((theirs, ours), (ours, theirs)):
        # All but the drawn one are the likeliest of their side.
        least = sorted(other.values(), reverse=True)[:-1][-1:] or [max(other.values())]
        extra = [token for token in one.keys() - other.keys() if one[token] > least[0] + TOLERANCE]
        if extra:
            return f"tokens {sorted(extra)} are on one side only"
    return None


def test_answers_are_those_of_vllm(llm):
    recording = json.loads(RECORDING.read_text())
    assert recording["weights_sha256"] == recording_of("ours", [])["weights_sha256"], "record again"
    cases = recording["cases"]
    found = ask(llm, [parameters_of(case) for case in cases])
    differences = {
        index: text
        for index, (theirs, ours) in enumerate(zip(cases, found, strict=True))
        if (text := difference(theirs, ours)) is not None
    }
    assert differences == {}, f"{len(differences)} of {len(cases)}; {recording['engine']}"


def test_parameter_sets_are_legal_and_of_all_kinds():
    sets = parameter_sets()
    assert sets == parameter_sets()
    assert len(sets) == 200
    for parameters in sets:
        sampling_params(parameters).validate(4096)
    names = set().union(*(parameters.sampling for parameters in sets))
    assert names == {
        "temperature", "max_tokens", "logprobs", "seed", "top_k", "top_p", "min_p",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
        "allowed_token_ids", "bad_words", "min_tokens", "stop_token_ids", "ignore_eos",
    }  # fmt: skip
    assert sum(parameters.is_greedy for parameters in sets) == 134


def test_a_recording_of_ours_is_read_back_and_found_equal(llm, tmp_path):
    """Of an engine in small batches: its answers do not depend on what else runs."""
    sets = parameter_sets(30)
    cases = [case for start in range(0, 30, 10) for case in ask(llm, sets[start : start + 10])]
    write(tmp_path / "new" / "ours.json", recording_of("ours", cases))
    read = json.loads((tmp_path / "new" / "ours.json").read_text())
    assert read["engine"] == "ours"
    assert [parameters_of(case) for case in read["cases"]] == sets
    again = ask(llm, sets)
    assert [difference(*pair) for pair in zip(read["cases"], again, strict=True)] == [None] * 30
    reasons = {case["finish_reason"] for case in read["cases"]}
    assert reasons == {None, "length", "stop"}


CASE = {
    "token_ids": [5, 7],
    "finish_reason": "length",
    "stop_reason": None,
    "logprobs": [[[5, -0.5], [6, -1.5]], [[7, -0.5], [8, -0.50005]]],
}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"logprobs": [[[5, -0.50009], [6, -1.5]], [[7, -0.5], [8, -0.5]]]}, None),
        ({"logprobs": [[[5, -0.5], [6, -1.6]], []]}, "position 0: token 6 has -1.6, not -1.5"),
        ({"token_ids": [5, 8]}, None),
        ({"token_ids": [6, 7]}, "token 0 is 6"),
        ({"token_ids": [5]}, "ends after 1 tokens, not 2"),
        ({"token_ids": [5, 7, 9]}, "token_ids is [5, 7, 9], not [5, 7]"),
        ({"finish_reason": "stop"}, "finish_reason is 'stop', not 'length'"),
        ({"stop_reason": 7}, "stop_reason is 7, not None"),
        ({"logprobs": [[[5, -0.5], [9, -0.4]], []]}, "position 0: tokens [9] are on one side only"),
    ],
)
def test_differences_are_found_but_for_ties(changes, text):
    found = copy.deepcopy(CASE) | changes
    assert difference(CASE, found) == text

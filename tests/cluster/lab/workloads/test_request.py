"""A workload's prompts follow from its block ids alone; cutting and speeding up keep them."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lab.workloads.errors import WorkloadError
from cluster.lab.workloads.request import FIRST_PROMPT_TOKEN, TraceRequest, Workload

VOCAB_SIZE = 1000


def workload(*requests, block_tokens=4):
    return Workload("test", requests, block_tokens)


def request(num_tokens, *block_ids, arrival_s=0.0):
    return TraceRequest(arrival_s, num_tokens, 1, block_ids)


@given(
    st.lists(st.integers(0, 3), max_size=4),
    st.lists(st.integers(0, 3), max_size=4),
    st.integers(1, 20),
    st.integers(1, 20),
)
def test_prompts_are_alike_exactly_as_far_as_their_blocks(ids, other_ids, length, other_length):
    pair = workload(request(length, *ids), request(other_length, *other_ids))
    prompt, other = pair.prompt(0, VOCAB_SIZE), pair.prompt(1, VOCAB_SIZE)
    assert (len(prompt), len(other)) == (length, other_length)
    num_equal = next(
        (n for n, (a, b) in enumerate(zip(ids, other_ids, strict=False)) if a != b),
        min(len(ids), len(other_ids)),
    )
    shared = min(num_equal * 4, length, other_length)
    assert prompt[:shared] == other[:shared]
    end = min(length, other_length, shared + 4)
    if end == shared + 4:
        assert prompt[shared:end] != other[shared:end], "no more is alike than the blocks say"


def test_requests_without_blocks_have_prompts_of_their_own():
    pair = workload(request(64), request(64))
    assert pair.prompt(0, VOCAB_SIZE) != pair.prompt(1, VOCAB_SIZE)


def test_block_has_other_tokens_than_the_request_of_its_number():
    mixed = workload(request(8), request(8, 0, 1))
    assert mixed.prompt(0, VOCAB_SIZE)[:4] != mixed.prompt(1, VOCAB_SIZE)[:4]


@given(st.integers(FIRST_PROMPT_TOKEN + 1, 300_000), st.integers(1, 600))
def test_tokens_are_in_the_vocabulary_and_never_special(vocab_size, length):
    prompt = workload(request(length, 7)).prompt(0, vocab_size)
    assert all(type(token) is int for token in prompt)
    assert min(prompt) >= FIRST_PROMPT_TOKEN
    assert max(prompt) < vocab_size


def test_whole_vocabulary_is_used_evenly():
    prompt = workload(request(16_000)).prompt(0, FIRST_PROMPT_TOKEN + 16)
    counts = [prompt.count(token) for token in range(FIRST_PROMPT_TOKEN, FIRST_PROMPT_TOKEN + 16)]
    assert min(counts) > 850
    assert max(counts) < 1150


def test_tokens_are_shared_objects():
    pair = workload(request(2000, 1), request(2000, 2))
    tokens = pair.prompt(0, 5000) + pair.prompt(1, 5000)
    assert len({id(token) for token in tokens}) == len(set(tokens))


def test_prompts_are_equal_in_every_process():
    code = (
        "from cluster.lab.workloads.request import *\n"
        "w = Workload('w', (TraceRequest(0.0, 9, 1, (5,)), TraceRequest(0.0, 9, 1)), 4)\n"
        "print(w.prompt(0, 1000), w.prompt(1, 1000))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "77"}, capture_output=True, check=True
    ).stdout.decode()
    here = workload(request(9, 5), request(9))
    assert printed.strip() == f"{here.prompt(0, VOCAB_SIZE)} {here.prompt(1, VOCAB_SIZE)}"
    assert here.prompt(0, VOCAB_SIZE)[:4] == [907, 426, 543, 786], "recorded results stay valid"


def test_speed_up_divides_arrivals_and_nothing_else():
    slow = workload(request(5, 1, arrival_s=1.0), request(6, 2, arrival_s=4.0))
    fast = slow.speed_up(2.0)
    assert [r.arrival_s for r in fast.requests] == [0.5, 2.0]
    assert [r.block_ids for r in fast.requests] == [(1,), (2,)]
    assert fast.prompt(1, VOCAB_SIZE) == slow.prompt(1, VOCAB_SIZE)


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_speed_up_is_refused(ratio):
    with pytest.raises(WorkloadError, match="above 0"):
        workload(request(1)).speed_up(ratio)


def test_head_keeps_the_first_requests():
    requests = [request(n, arrival_s=n / 2) for n in range(1, 5)]
    assert workload(*requests).head(2).requests == tuple(requests[:2])
    assert workload(*requests).head(9).requests == tuple(requests)
    with pytest.raises(WorkloadError, match="from 0"):
        workload(*requests).head(-1)

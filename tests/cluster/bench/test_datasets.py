"""Requests that a benchmark draws, or reads from files."""

import json

import numpy as np
import pytest

from cluster.bench.datasets import (
    Lengths,
    TextRow,
    oversampled,
    prefix_requests,
    random_requests,
    read_custom,
    read_hf,
    sharegpt_requests,
    sonnet_requests,
    text_requests,
)
from cluster.bench.errors import BenchError
from cluster.bench.samples import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("demo")


def generator(seed=0):
    return np.random.default_rng(seed)


def test_random_prompts_have_their_lengths_and_prefix(tokenizer):
    lengths = Lengths(input_len=40, output_len=9, prefix_len=12)
    requests = random_requests(tokenizer, 20, lengths, generator())
    num_special = len(tokenizer.encode(""))
    counts = [len(tokenizer.encode(request.prompt)) for request in requests]
    # Texts of random tokens can rarely be encoded to exactly the same number.
    assert np.mean(np.array(counts) == 12 + 40) >= 0.9
    assert {request.prompt_len for request in requests} == {52}
    assert {request.output_len for request in requests} == {9}
    heads = {tuple(tokenizer.encode(r.prompt)[: num_special + 10]) for r in requests}
    assert len(heads) == 1
    assert len({request.prompt for request in requests}) == 20
    assert requests == random_requests(tokenizer, 20, lengths, generator())
    assert requests != random_requests(tokenizer, 20, lengths, generator(1))


def test_random_lengths_vary_by_their_range(tokenizer):
    num_special = len(tokenizer.encode(""))
    lengths = Lengths(input_len=20 + num_special, output_len=10, range_ratio=0.5)
    requests = random_requests(tokenizer, 200, lengths, generator())
    inputs = {request.prompt_len - num_special for request in requests}
    outputs = {request.output_len for request in requests}
    assert inputs == set(range(10, 31))
    assert outputs == set(range(5, 16))


def test_a_random_prompt_without_a_token_is_refused(tokenizer):
    with pytest.raises(BenchError, match="random-input-len"):
        random_requests(tokenizer, 2, Lengths(input_len=0), generator())


@pytest.mark.parametrize(
    ("field", "value"), [("range_ratio", 1.0), ("output_len", 0), ("prefix_len", -1)]
)
def test_lengths_that_cannot_be_are_refused(field, value):
    with pytest.raises(BenchError, match=field.replace("_", "-")):
        Lengths(**{field: value})


def conversation(*texts):
    return {"id": "a", "conversations": [{"from": "x", "value": text} for text in texts]}


GOOD = conversation("def add(first, second, third):", "return the sum of all of these numbers")
FILE = [
    GOOD,
    conversation("only a prompt and no answer at all"),
    conversation("a", "the prompt of this conversation is too short"),
    conversation("this conversation has an answer that is short", "a"),
    conversation("word " * 1100, "the prompt of this conversation is too long"),
    {"id": "b"},
]


def test_conversations_that_fit_are_read(tmp_path, tokenizer):
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(FILE))
    prompt, answer = (turn["value"] for turn in GOOD["conversations"])
    (request,) = sharegpt_requests(path, tokenizer, 10, None, generator())
    assert request.prompt == prompt
    assert request.prompt_len == len(tokenizer.encode(prompt))
    assert request.output_len == len(tokenizer.encode(answer))
    # With a given length answers may be short.
    given = sharegpt_requests(path, tokenizer, 10, 7, generator())
    assert [r.output_len for r in given] == [7, 7]
    assert len(sharegpt_requests(path, tokenizer, 1, 7, generator())) == 1


def test_a_short_file_is_repeated(tmp_path, tokenizer):
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(FILE))
    requests = sharegpt_requests(path, tokenizer, 5, 7, generator())
    repeated = oversampled(requests, 5, generator())
    assert len(repeated) == 5
    assert repeated[:2] == requests
    assert {r.prompt for r in repeated} == {r.prompt for r in requests}
    assert oversampled(requests, 1, generator()) == requests[:1]


@pytest.mark.parametrize("text", [None, "[1]", "{", "[]"])
def test_a_file_that_is_no_sharegpt_is_refused(tmp_path, tokenizer, text):
    path = tmp_path / "sharegpt.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BenchError, match=r"sharegpt\.json: .*(check|is it)"):
        sharegpt_requests(path, tokenizer, 1, None, generator())


POEM = [
    f"the day {word} of the small and open file" for word in ["one", "two", "three", "four", "five"]
]


def test_sonnets_share_their_first_lines(tmp_path, tokenizer):
    path = tmp_path / "poem.txt"
    path.write_text("\n".join([*POEM, ""]))
    lengths = Lengths(input_len=160, output_len=9, prefix_len=80)
    requests = sonnet_requests(path, tokenizer, 12, lengths, generator())
    assert {r.output_len for r in requests} == {9}
    assert all(abs(r.prompt_len - 160) <= 20 for r in requests)
    assert all(r.prompt_len == len(tokenizer.encode(r.prompt)) for r in requests)
    lines = [r.prompt.splitlines()[1:] for r in requests]
    assert all(line in POEM for prompt in lines for line in prompt)
    shared = [column for column in zip(*lines, strict=True) if len(set(column)) == 1]
    assert [column[0] for column in shared] == POEM[: len(shared)]
    assert len(tokenizer.encode("\n".join(column[0] for column in shared))) == pytest.approx(
        60, abs=30
    )
    with pytest.raises(BenchError, match="sonnet-input-len"):
        sonnet_requests(path, tokenizer, 1, Lengths(input_len=60, prefix_len=80), generator())


def test_prefixes_are_shared_by_equal_numbers(tokenizer):
    lengths = Lengths(input_len=10, output_len=3, prefix_len=30)
    requests = prefix_requests(tokenizer, 11, 3, lengths, generator())
    assert len(requests) == 9
    assert {r.prompt_len for r in requests} == {40}
    heads = [r.prompt[:20] for r in requests]
    assert sorted(heads.count(head) for head in set(heads)) == [3, 3, 3]
    assert len({r.prompt for r in requests}) == 9
    assert heads != sorted(heads)
    with pytest.raises(BenchError, match="give 1 to --num-prompts 2"):
        prefix_requests(tokenizer, 2, 3, lengths, generator())


def test_custom_rows_have_lengths(tmp_path, tokenizer):
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "def add", "output_tokens": 5}\n\n{"prompt": "def sub"}\n')
    rows = read_custom(path)
    first, second = text_requests(rows, tokenizer, 7, as_chat=False)
    assert (first.prompt, first.output_len, second.output_len) == ("def add", 7, 7)
    assert first.prompt_len == len(tokenizer.encode("def add"))
    assert text_requests(rows[:1], tokenizer, None, as_chat=False)[0].output_len == 5
    with pytest.raises(BenchError, match="custom-output-len"):
        text_requests(rows, tokenizer, None, as_chat=False)
    (chat,) = text_requests(rows[:1], tokenizer, 7, as_chat=True)
    assert chat.prompt == tokenizer.apply_chat_template([{"role": "user", "content": "def add"}])


def test_a_folder_of_hugging_face_is_read(tmp_path):
    (tmp_path / "data").mkdir()
    rows = [{"input": "x = 1", "instruction": "rename x", "output": "y = 1"}, {"instruction": "go"}]
    (tmp_path / "data" / "train.json").write_text(json.dumps(rows))
    (tmp_path / "test.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "world"}\n')
    (tmp_path / "info.txt").write_text("no rows")
    assert read_hf(tmp_path) == [
        TextRow("x = 1\n\nrename x"),
        TextRow("go"),
        TextRow("hello"),
        TextRow("world"),
    ]


def test_a_folder_without_rows_is_refused(tmp_path):
    (tmp_path / "dataset_info.json").write_text('{"name": "x"}')
    with pytest.raises(BenchError, match="no \\.json or \\.jsonl file has rows"):
        read_hf(tmp_path)

"""A beam search finds what a search through all sequences finds, where its width suffices."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from replicas import LLM, BeamSearchParams
from replicas.beam_search import BeamSearch
from replicas.errors import InvalidRequestError
from replicas.llm_engine import CompletionOutput, RequestOutput
from replicas.messages import TokenLogprob
from replicas.tokenizer import Tokenizer
from tests.models import chat_folder

EOS = 0
SPECIAL = 1
"""The special token "</s>" of `chat_folder`."""
PROMPT = [3, 2]


class TableLLM(LLM):
    """A front end whose model is a table, by length and last token, so that no sequences tie."""

    def __init__(self, vocab_size: int, seed: int, max_model_len: int = 64) -> None:
        logits = np.random.default_rng(seed).normal(size=(16, vocab_size, vocab_size)) * 2
        self.logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        self._tokenizer = None
        self._client = SimpleNamespace(
            description=SimpleNamespace(
                max_model_len=max_model_len,
                vocab_size=vocab_size,
                max_logprobs=20,
                logprobs_mode="raw_logprobs",
            )
        )
        self.llm_engine = SimpleNamespace(eos_token_ids=frozenset({EOS}))
        self.num_asked = []

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True):
        assert (sampling_params.max_tokens, sampling_params.temperature) == (1, 0.0)
        self.num_asked.append(len(prompts))
        return [self.answer(prompt, sampling_params.logprobs) for prompt in prompts]

    def answer(self, prompt, count):
        row = self.logprobs[len(prompt) % 16, prompt[-1]]
        order = np.argsort(-row, kind="stable")[:count].tolist()
        entries = [TokenLogprob(i, float(row[i]), 1 + rank) for rank, i in enumerate(order)]
        choice = CompletionOutput(0, [order[0]], "length", logprobs=[[entries[0], *entries]])
        return RequestOutput("r", None, prompt, [choice], finished=True)

    def logprob_of(self, tokens):
        pairs = itertools.pairwise([PROMPT[-1], *tokens])
        return sum(self.logprobs[i, a, b] for i, (a, b) in enumerate(pairs, start=len(PROMPT)))


def all_sequences(llm, max_tokens, *, ignore_eos):
    """Every output that ends, with its log probability."""
    vocab = range(llm.logprobs.shape[-1])
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(vocab, repeat=length):
            ends = tokens[-1] == EOS and not ignore_eos
            inner = tokens[:-1] if ends else tokens
            if (EOS in inner and not ignore_eos) or not (ends or length == max_tokens):
                continue
            yield [*inner], llm.logprob_of(tokens), ends


def brute_force(llm, max_tokens, width, length_penalty, *, ignore_eos):
    def score(found):
        inner, logprob, _ = found
        return logprob / (len(PROMPT) + len(inner)) ** length_penalty

    return sorted(all_sequences(llm, max_tokens, ignore_eos=ignore_eos), key=score)[::-1][:width]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize(("vocab_size", "max_tokens"), [(4, 3), (10, 2), (4, 1)])
def test_a_search_that_drops_nothing_equals_brute_force(
    seed, length_penalty, vocab_size, max_tokens
):
    llm = TableLLM(vocab_size, seed)
    params = BeamSearchParams(beam_width=10, max_tokens=max_tokens, length_penalty=length_penalty)
    [output] = llm.beam_search(PROMPT, params)
    expected = brute_force(llm, max_tokens, 10, length_penalty, ignore_eos=False)
    assert [s.tokens[2:] for s in output.sequences] == [tokens for tokens, _, _ in expected]
    for found, (_, logprob, ends) in zip(output.sequences, expected, strict=True):
        assert found.tokens[:2] == PROMPT
        assert found.cum_logprob == pytest.approx(logprob)
        assert found.finish_reason == ("stop" if ends else "length")


@pytest.mark.parametrize("seed", range(4))
def test_end_tokens_may_be_ignored_or_kept(seed):
    llm = TableLLM(4, seed)
    params = BeamSearchParams(beam_width=9, max_tokens=2, ignore_eos=True)
    [output] = llm.beam_search(PROMPT, params)
    expected = brute_force(llm, 2, 9, 1.0, ignore_eos=True)
    assert [s.tokens[2:] for s in output.sequences] == [tokens for tokens, _, _ in expected]
    kept = BeamSearchParams(beam_width=9, max_tokens=2, include_stop_str_in_output=True)
    [output] = llm.beam_search(PROMPT, kept)
    assert all((s.tokens[-1] == EOS) == (s.finish_reason == "stop") for s in output.sequences)


@pytest.mark.parametrize("keeps_end", [False, True])
def test_every_token_has_its_log_probability_and_the_likeliest(keeps_end):
    llm = TableLLM(10, 3)
    params = BeamSearchParams(
        beam_width=4, max_tokens=3, include_stop_str_in_output=keeps_end, length_penalty=0.0
    )
    [output] = llm.beam_search(PROMPT, params)
    assert {s.finish_reason for s in output.sequences} == {"stop", "length"}
    for found in output.sequences:
        tokens = found.tokens[len(PROMPT) :]
        assert [drawn.token_id for drawn, *_ in found.logprobs] == tokens
        assert all(len(likeliest) == 8 for _, *likeliest in found.logprobs)
        if keeps_end or found.finish_reason == "length":
            total = sum(drawn.logprob for drawn, *_ in found.logprobs)
            assert found.cum_logprob == pytest.approx(total)


@pytest.mark.parametrize("keeps_end", [False, True])
@pytest.mark.parametrize(("skips", "text"), [(True, "☃"), (False, "☃</s>")])
def test_a_text_never_has_its_end_token_and_has_special_ones_if_asked(skips, text, keeps_end):
    tokenizer = Tokenizer.from_folder(chat_folder())
    *first, last, end = tokenizer.encode("☃x", add_special_tokens=False)
    params = BeamSearchParams(
        beam_width=1, max_tokens=4, length_penalty=0.0, skip_special_tokens=skips,
        include_stop_str_in_output=keeps_end,
    )  # fmt: skip
    search = BeamSearch([end, *first], params, {end}, 64)  # the prompt ends within a character
    for token_id in (last, SPECIAL, end, SPECIAL):
        likeliest = [TokenLogprob(token_id, -0.1, 1), TokenLogprob(SPECIAL, -9.0, 2)]
        search.extend([likeliest])
    [found] = search.best(tokenizer)
    assert (found.text, found.finish_reason) == (text, "stop")
    assert found.tokens == [end, *first, last, SPECIAL, *[end] * keeps_end]


def test_a_width_of_one_follows_the_likeliest_token():
    llm = TableLLM(20, 5)
    llm.logprobs[..., EOS] = -100.0
    [output] = llm.beam_search(PROMPT, BeamSearchParams(beam_width=1, max_tokens=6))
    tokens = [*PROMPT]
    for _ in range(6):
        tokens.append(int(llm.logprobs[len(tokens), tokens[-1]].argmax()))
    [found] = output.sequences
    assert found.tokens == tokens


def test_a_wider_search_of_a_twenty_token_model_finds_no_less_likely_sequence():
    for seed in range(10):
        best = []
        for width in (1, 3, 10):
            llm = TableLLM(20, seed)
            params = BeamSearchParams(
                beam_width=width, max_tokens=5, length_penalty=0.0, ignore_eos=True
            )
            [output] = llm.beam_search(PROMPT, params)
            assert len(output.sequences) == width
            best.append(output.sequences[0].cum_logprob)
            assert best[-1] == pytest.approx(llm.logprob_of(output.sequences[0].tokens[2:]))
        assert best[0] <= best[-1] + 1e-9


def test_prompts_are_searched_together_and_end_at_the_longest_sequence():
    llm = TableLLM(20, 1, max_model_len=5)
    params = BeamSearchParams(beam_width=2, max_tokens=9, ignore_eos=True)
    outputs = llm.beam_search([PROMPT, [3], [1, 2, 3, 4]], params)
    assert [len(o.sequences[0].tokens) for o in outputs] == [5, 5, 5]
    assert llm.num_asked == [3, 4, 4, 2]
    alone = TableLLM(20, 1, max_model_len=5).beam_search([3], params)
    assert alone == outputs[1:2]


@pytest.mark.parametrize(
    ("changes", "param", "text"),
    [
        ({"beam_width": 0}, "beam_width", "beam_width must be at least 1, got 0"),
        ({"beam_width": 11}, "beam_width", "beam_width must be at most 10, got 11"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
        ({"length_penalty": float("nan")}, "length_penalty", "length_penalty must be -10 to 10"),
        ({"length_penalty": 1e300}, "length_penalty", "length_penalty must be -10 to 10, got 1e"),
        ({"length_penalty": -1e300}, "length_penalty", "length_penalty must be -10 to 10, got -1"),
    ],
)
def test_a_search_that_cannot_work_is_refused_by_its_field(changes, param, text):
    params = BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **changes})
    with pytest.raises(InvalidRequestError, match=f"^{text}") as caught:
        TableLLM(4, 0).beam_search(PROMPT, params)
    assert caught.value.param == param


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_a_search_over_logits_is_refused(mode):
    llm = TableLLM(4, 0)
    llm._client.description.logprobs_mode = mode
    with pytest.raises(InvalidRequestError, match=f"logprobs_mode is '{mode}'") as caught:
        llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=2))
    assert caught.value.param == "beam_search"
    assert llm.num_asked == []

"""Grammars on the worker: the cache, masks, and rows whose output follows a grammar."""

import json
import threading
import time

import numpy as np
import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import torch

from replicas.engine.step import NewRow
from replicas.errors import InvalidRequestError
from replicas.grammars import GrammarCompiler
from replicas.sampling import grammar, sampler
from replicas.sampling.grammar import GrammarCache, apply_mask
from replicas.sampling.order import row_processors
from replicas.sampling.preparation import Preparation, Prepared
from replicas.sampling.processor import LogitRows
from replicas.sampling_params import SamplingParams, StructuredOutputs
from tests.replicas.sampling.row_runner import Rows


def byte_level_tokenizer():
    """A tokenizer of bytes, a few pairs of them, and an end token."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pairs = [('"', ":"), ("{", '"'), ("n", "a"), ("m", "e")]
    tokens = [*letters, *(a + b for a, b in pairs)]
    model = tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, pairs)
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|eos|>"])
    return made


TOKENIZER = byte_level_tokenizer()
TEXT, VOCAB, EOS = TOKENIZER.to_str(), TOKENIZER.get_vocab_size(), TOKENIZER.token_to_id("<|eos|>")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Bo"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "age"],
}
STRICT = StructuredOutputs(
    json=SCHEMA, disable_any_whitespace=True, disable_additional_properties=True
)


def prepared(cache, *specs):
    """The cache, once it has compiled these."""
    wanted = {s.grammar for s in cache.prepare([Preparation(spec) for spec in specs])}
    while wanted != set(specs):
        wanted |= {result.grammar for result in cache.prepare([])}
    return cache


def new_cache(**options):
    return GrammarCache(lambda: GrammarCompiler.for_model(TEXT, VOCAB, [EOS]), **options)


@pytest.fixture(scope="module")
def cache():
    return prepared(new_cache(), STRICT, StructuredOutputs(regex="[ab]{3}"))


def text_of(token_ids):
    return TOKENIZER.decode(token_ids, skip_special_tokens=False)


# --- masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 31, 32, 1000, 4097])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_a_mask_keeps_the_allowed_logits_and_no_others(vocab, share):
    generator = np.random.default_rng(vocab)
    allowed = generator.random(vocab) < share
    # A row may have fewer or more logits than the mask has bits.
    for width in (vocab, vocab + 40):
        bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
        bits[:vocab] = allowed
        mask = np.packbits(bits, bitorder="little").view(np.int32)
        logits = generator.standard_normal(width).astype(np.float32)
        wanted = np.where(np.append(allowed, np.zeros(width - vocab, bool)), logits, -np.inf)
        apply_mask(logits, mask)
        np.testing.assert_array_equal(logits, wanted)


# --- rows -----------------------------------------------------------------------------------------


def run(rows, slot, prompt, limit=40):
    """The output of a row, up to its end."""
    for _ in range(limit):
        rows.step()
        if rows.token_ids[slot][-1] == EOS:
            break
    return rows.token_ids[slot][len(prompt) :]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_output_follows_its_schema_and_ends(cache, temperature):
    for seed in range(5):
        rows = Rows(row_processors([], cache), seed, VOCAB)
        rows.add(0, [5, 6], structured_outputs=STRICT, temperature=temperature, seed=seed)
        output = run(rows, 0, [5, 6])
        assert output[-1] == EOS
        found = json.loads(text_of(output[:-1]))
        assert found.keys() == {"name", "age"}
        assert found["name"] in {"Ann", "Bo"}
        assert isinstance(found["age"], int)


def test_a_row_beside_rows_with_grammars_draws_as_if_it_were_alone(cache):
    alone, beside = Rows([], 3, VOCAB), Rows(row_processors([], cache), 3, VOCAB)
    beside.add(2, [9], structured_outputs=STRICT, temperature=1.0)
    for rows in (alone, beside):
        rows.add(1, [5, 6], temperature=1.0)
        for _ in range(6):
            rows.step()
    assert beside.token_ids[1] == alone.token_ids[1]
    assert text_of(beside.token_ids[2][1:3]).startswith("{")


@pytest.mark.parametrize(
    "sampling",
    [{}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.5}, {"top_k": 5}, {"temperature": 0}],
    ids=str,
)
def test_a_row_that_is_rebuilt_in_the_middle_of_its_grammar_continues_alike(cache, sampling):
    """Preemption, migration, prefill elsewhere and resumption all send a row whole again."""
    sampling = {"temperature": 1.0, "structured_outputs": STRICT, **sampling}
    stays = Rows(row_processors([], cache), 1, VOCAB)
    stays.add(0, [5], **sampling)
    wanted = run(stays, 0, [5])
    for num_output in (0, 1, len(wanted) // 2, len(wanted) - 1):
        moved = Rows(row_processors([], cache), 1, VOCAB)
        moved.add(3, [7, 7], structured_outputs=STRICT)
        moved.step()
        moved.remove(3)
        moved.add(3, [5], output=wanted[:num_output], **sampling)
        assert run(moved, 3, [5]) == wanted


def test_only_end_tokens_follow_the_end_even_if_they_are_ignored(cache):
    rows = Rows(row_processors([], cache), 0, VOCAB)
    spec = StructuredOutputs(regex="[ab]{3}")
    rows.add(0, [5], structured_outputs=spec, temperature=1.0, ignore_eos=True)
    for _ in range(8):
        rows.step()
    output = rows.token_ids[0][1:]
    end = output.index(EOS)
    assert set(output[end:]) == {EOS}
    assert len(text_of(output[:end])) == 3


def test_an_output_may_end_with_its_grammar_before_it_has_min_tokens():
    specs = StructuredOutputs(regex="[ab]+"), StructuredOutputs(regex="[ab]{3}")
    cache = prepared(new_cache(), *specs)
    rows = Rows(row_processors([EOS], cache), 0, VOCAB)
    for slot, spec in enumerate(specs):
        rows.add(slot, [5], structured_outputs=spec, min_tokens=7)
    for _ in range(4):
        rows.step()
    assert EOS not in rows.token_ids[0]
    assert rows.token_ids[1].index(EOS) == 4


def test_a_row_whose_output_its_grammar_does_not_allow_fails_alone(cache):
    rows = Rows(row_processors([], cache), 0, VOCAB)
    rows.add(0, [5], output=[11, 12, 13], structured_outputs=STRICT)
    rows.add(1, [5], structured_outputs=STRICT)
    rows.step()
    assert rows.failed == {0: "no_allowed_token"}
    assert text_of(rows.token_ids[1][1:]).startswith("{")


def test_rows_that_are_changed_in_parts_get_their_own_masks(cache, monkeypatch):
    def tokens():
        rows = Rows(row_processors([], cache), 0, VOCAB)
        rows.add(0, [5], structured_outputs=STRICT)
        rows.add(1, [5], presence_penalty=1.0)
        rows.add(2, [5], structured_outputs=StructuredOutputs(regex="[ab]{3}"))
        rows.add(3, [5], output=[11], structured_outputs=STRICT)
        rows.step()
        assert rows.failed == {3: "no_allowed_token"}
        for _ in range(2):
            rows.step()
        return rows.token_ids

    whole = tokens()
    assert set(text_of(whole[2][1:])) <= set("ab")
    monkeypatch.setattr(sampler, "_ELEMENTS_AT_ONCE", VOCAB)
    assert tokens() == whole


def test_each_draft_has_the_mask_that_follows_it(cache):
    """As if the drafts were tokens of the row; those behind a wrong draft do not matter."""
    right = TOKENIZER.encode('{"name":"Bo', add_special_tokens=False).ids
    drafts = [*right, 11, 12]
    sampling = SamplingParams(structured_outputs=STRICT)
    [processor] = row_processors([], cache)[:1]
    assert processor.add(NewRow(1, 0, [5], 1, 0, [[1]], sampling))
    count = len(drafts) + 1
    rows = LogitRows(np.full(count, 1), np.arange(count), [drafts[:i] for i in range(count)])
    processor.prepare(rows)
    together = torch.zeros(count, VOCAB)
    processor.apply(together, rows, np.arange(count))
    for i in range(len(right) + 1):
        processor.add(NewRow(1, 0, [5, *right[:i]], 1, 0, [[1]], sampling))
        single = LogitRows(np.array([1]), np.array([i]))
        processor.prepare(single)
        logits = torch.zeros(1, VOCAB)
        processor.apply(logits, single, np.arange(1))
        assert torch.equal(together[i], logits[0])
    processor.add(NewRow(1, 0, [5], 1, 0, [[1]], sampling))
    processor.accept(1, right)
    processor.prepare(single)
    logits = torch.zeros(1, VOCAB)
    processor.apply(logits, single, np.arange(1))
    assert torch.equal(together[len(right)], logits[0]), "drafts left a trace in the matcher"


# --- the cache ------------------------------------------------------------------------------------


def test_grammars_in_use_stay_and_the_least_recently_used_of_the_others_go():
    specs = [StructuredOutputs(regex=letter) for letter in "abcd"]
    size = grammar.estimated_bytes(specs[0])
    cache = prepared(new_cache(max_bytes=3 * size), *specs[:3])
    cache.prepare([Preparation(spec, is_wanted=False) for spec in specs[:2]])
    # Wanted once more, so that the second one is the one to go.
    assert cache.prepare([Preparation(specs[0])]) == [Prepared(specs[0])]
    prepared(cache, specs[3])
    assert cache.num_bytes == 3 * size
    for spec in (specs[0], specs[2], specs[3]):
        assert cache.matcher(spec, []) is not None
    [late] = wait_for(cache, specs[1])
    assert "memory" in late.error
    cache.prepare([Preparation(specs[3], is_wanted=False)])
    assert wait_for(cache, specs[1]) == [Prepared(specs[1])]


def wait_for(cache, spec):
    ended = cache.prepare([Preparation(spec)])
    while not ended:
        ended = cache.prepare([])
    return ended


def test_the_cpu_time_of_a_compilation_counts_while_it_lasts():
    go_on, found = threading.Event(), []

    class Slow(GrammarCompiler):
        def compile(self, spec):
            started_s = time.thread_time()
            while not go_on.is_set():
                found.append(time.thread_time() - started_s)
            return super().compile(spec)

    cache = GrammarCache(lambda: Slow.for_model(TEXT, VOCAB, [EOS]))
    spec = StructuredOutputs(regex="a")
    assert cache.progress() == []
    assert cache.prepare([Preparation(spec)]) == []
    while len(found) < 100:
        time.sleep(0.001)
    least_s = found[99]
    [progress] = cache.progress()
    assert progress.grammar == spec
    assert progress.cpu_s > least_s
    go_on.set()
    assert wait_for(cache, spec) == [Prepared(spec)]
    assert cache.progress() == []


def test_large_grammars_count_for_more():
    small, large = StructuredOutputs(choice=("a",)), StructuredOutputs(choice=("a" * 9999,) * 9)
    assert grammar.estimated_bytes(large) > 100 * grammar.estimated_bytes(small)


def test_errors_of_any_kind_become_results_and_notify():
    told = threading.Event()

    def broken():
        raise RuntimeError("no vocabulary")

    [result] = wait_for(GrammarCache(broken, told.set), STRICT)
    assert "no vocabulary" in result.error
    assert told.wait(5)
    [result] = wait_for(new_cache(), StructuredOutputs(regex="(?=a)"))
    assert "structured_outputs.regex" in result.error

    def missing():
        raise InvalidRequestError("structured_outputs", "there is no tokenizer.json")

    [result] = wait_for(GrammarCache(missing), STRICT)
    assert result.error == "there is no tokenizer.json"


def test_an_order_that_is_repeated_while_it_is_compiled_is_answered_once():
    entered, go = threading.Event(), threading.Event()

    def make():
        entered.set()
        assert go.wait(10)
        return GrammarCompiler.for_model(TEXT, VOCAB, [EOS])

    cache = GrammarCache(make)
    assert cache.prepare([Preparation(STRICT)]) == []
    assert entered.wait(10)
    assert cache.prepare([Preparation(STRICT, is_wanted=False), Preparation(STRICT)]) == []
    go.set()
    ended = []
    while not ended:
        ended = cache.prepare([])
    assert ended == [Prepared(STRICT)]
    assert cache.prepare([]) == []

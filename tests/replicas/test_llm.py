"""The three front ends give the same tokens and texts, and end requests as asked."""

from __future__ import annotations

import asyncio
import os

import msgspec
import numpy as np
import pytest

from replicas import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from replicas.config import EngineConfig, MeshConfig
from replicas.errors import (
    ConfigError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    RequestRefusedError,
)
from tests.models import chat_folder

SETTINGS = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_batch_size": 4,
    "num_blocks": 40,
    "num_threads": 1,
}
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=20, temperature=0.9, top_k=50, top_p=0.95, seed=11)
PROMPTS = ["hello world", "x", "größer 你好", "two  spaces\n\nand lines"]


@pytest.fixture(scope="module")
def llm():
    with LLM(chat_folder(), multiprocess=False, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm_process():
    with LLM(chat_folder(), **SETTINGS) as llm:
        yield llm


def texts(outputs):
    return [(output.outputs[0].text, output.outputs[0].token_ids) for output in outputs]


def generate(llm, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.fixture(scope="module")
def greedy(llm):
    """The whole output of the first prompt."""
    return generate(llm, PROMPTS[0])[0].outputs[0]


def test_outputs_come_in_the_order_of_the_prompts(llm):
    params = [msgspec.structs.replace(GREEDY, max_tokens=n) for n in (9, 2, 7, 1)]
    outputs = generate(llm, PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 7, 1]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


def test_token_ids_are_a_prompt_too(llm, greedy):
    [output] = generate(llm, llm.get_tokenizer().encode(PROMPTS[0]))
    assert output.prompt is None
    assert output.outputs[0] == greedy


def test_text_is_that_of_the_tokens(llm, greedy):
    backend = llm.get_tokenizer().backend
    assert greedy.text == backend.decode(greedy.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("keep", [False, True])
def test_stop_string_cuts_the_text_and_is_named(llm, greedy, keep):
    stop = greedy.text[6:9]
    params = msgspec.structs.replace(GREEDY, stop=(stop,), include_stop_str_in_output=keep)
    output = generate(llm, PROMPTS[0], params)[0].outputs[0]
    end = greedy.text.index(stop) + len(stop) * keep
    assert (output.text, output.finish_reason, output.stop_reason) == (
        greedy.text[:end], "stop", stop,
    )  # fmt: skip
    assert len(output.token_ids) < len(greedy.token_ids)


def test_engine_stops_at_a_stop_string(llm, greedy):
    before = llm.get_metrics().groups[0]
    generate(llm, PROMPTS[0], msgspec.structs.replace(GREEDY, stop=(greedy.text[6:9],)))
    after = llm.get_metrics().groups[0]
    for reason, count in (("stop", 1), ("abort", 0), ("length", 0)):
        num_ended = [group.requests_finished.get(reason, 0) for group in (before, after)]
        assert num_ended[1] == num_ended[0] + count, reason
    assert after.num_empty_slots == 4


def test_choices_are_requests_with_the_derived_seeds_and_stop_by_themselves(llm):
    one = [SamplingParams(max_tokens=12, temperature=1.5, seed=5 + i) for i in range(3)]
    alone = [o.outputs[0] for o in generate(llm, [PROMPTS[0]] * 3, one)]
    params = msgspec.structs.replace(one[0], n=3)
    [output] = generate(llm, PROMPTS[0], params)
    assert [(c.index, c.token_ids, c.text) for c in output.outputs] == [
        (i, c.token_ids, c.text) for i, c in enumerate(alone)
    ]
    stop = alone[1].text[3:6]
    [output] = generate(llm, PROMPTS[0], msgspec.structs.replace(params, stop=(stop,)))
    for choice, whole in zip(output.outputs, alone, strict=True):
        is_cut = stop in whole.text
        assert choice.text == whole.text.partition(stop)[0]
        assert choice.stop_reason == (stop if is_cut else whole.stop_reason)
    assert output.outputs[1].finish_reason == "stop"
    assert llm.get_metrics().groups[0].num_empty_slots == 4


def test_stop_token_ends_the_text_before_it(llm, greedy):
    token_id = greedy.token_ids[4]
    params = msgspec.structs.replace(GREEDY, stop_token_ids=frozenset({token_id}))
    output = generate(llm, PROMPTS[0], params)[0].outputs[0]
    cut = greedy.token_ids.index(token_id)
    assert output.token_ids == greedy.token_ids[: cut + 1]
    assert output.stop_reason == token_id
    assert greedy.text.startswith(output.text)


def test_end_token_ends_a_text_unless_ignored(llm):
    params = [SamplingParams(max_tokens=100, temperature=2.0, seed=seed) for seed in range(20)]
    ignoring = [msgspec.structs.replace(param, ignore_eos=True) for param in params]
    ended, whole = (generate(llm, ["x"] * 20, each) for each in (params, ignoring))
    assert {o.outputs[0].finish_reason for o in ended} == {"stop", "length"}
    for short, full in zip(ended, whole, strict=True):
        tokens = full.outputs[0].token_ids
        cut = tokens.index(1) + 1 if 1 in tokens else len(tokens)
        assert short.outputs[0].token_ids == tokens[:cut]


def test_chat_answers_through_the_template(llm):
    [output] = llm.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)
    token_ids = llm.get_tokenizer().encode("<|user|>user: hello<|user|>", add_special_tokens=False)
    assert output.prompt_token_ids == token_ids
    assert texts([output]) == texts(generate(llm, token_ids))


def test_chat_answers_many_conversations_in_their_order(llm):
    turns = [[{"role": "user", "content": text}] for text in PROMPTS]
    params = [msgspec.structs.replace(GREEDY, max_tokens=n) for n in (3, 5, 2, 4)]
    alone = [llm.chat(t, p, use_tqdm=False)[0] for t, p in zip(turns, params, strict=True)]
    together = llm.chat(turns, params, use_tqdm=False)
    assert texts(together) == texts(alone)
    assert [o.prompt_token_ids for o in together] == [o.prompt_token_ids for o in alone]
    assert llm.chat([], use_tqdm=False) == []


def test_chat_passes_options_to_the_template(llm):
    turn = [{"role": "user", "content": "hello"}]
    opened, plain = (
        llm.chat(turn, GREEDY, add_generation_prompt=is_open, use_tqdm=False)[0].prompt_token_ids
        for is_open in (True, False)
    )
    assert opened[: len(plain)] == plain
    assert len(opened) > len(plain)
    with pytest.raises(InvalidRequestError, match="messages"):
        llm.chat(turn, GREEDY, chat_template_kwargs={"messages": 1}, use_tqdm=False)


def test_chat_shows_tools_to_the_template(llm, monkeypatch):
    tokenizer, seen = llm.get_tokenizer(), []
    render = tokenizer.apply_chat_template

    def apply(messages, opens, variables, tools):
        seen.append(tools)
        return render(messages, opens, variables, tools)

    monkeypatch.setattr(tokenizer, "apply_chat_template", apply)
    tool = {"type": "function", "function": {"name": "f"}}
    llm.chat([{"role": "user", "content": "hello"}], GREEDY, tools=[tool], use_tqdm=False)
    assert seen == [[tool]]


def test_half_a_character_in_a_conversation_is_refused(llm):
    with pytest.raises(InvalidRequestError, match=r"1 of 1: .* lone surrogate"):
        llm.chat([{"role": "user", "content": "a\ud800"}], GREEDY, use_tqdm=False)


def test_a_bad_conversation_among_good_ones_is_named(llm):
    with pytest.raises(InvalidRequestError, match="conversation 2 of 2: it has no turn"):
        llm.chat([[{"role": "user", "content": "hello"}], []], GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_workers_describe_themselves_and_do_nothing_else_when_called(llm):
    [worker] = llm.collective_rpc("describe")
    assert worker.generator.endswith(":TorchGenerator")
    assert (worker.dtype, worker.num_threads) == ("float32", 1)
    assert worker.peak_resident_bytes > 2**20
    for method in ("shutdown", "__init__", "", "_init_mesh"):
        with pytest.raises(EngineError, match="only describe"):
            llm.collective_rpc(method)


def test_second_prompt_of_a_kind_comes_from_the_cache_until_it_is_forgotten(llm):
    prompt = [token % 380 for token in range(2, 100)]
    assert generate(llm, prompt)[0].num_cached_tokens == 0
    assert generate(llm, prompt)[0].num_cached_tokens == 96
    assert llm.reset_prefix_cache()
    assert generate(llm, prompt)[0].num_cached_tokens == 0
    assert llm.reset_prefix_cache(reset_running_requests=True)


def test_minted_seeds_differ_by_request_and_repeat_by_llm_seed():
    free = msgspec.structs.replace(SEEDED, seed=None)
    runs = []
    for seed in (5, 5, 6):
        with LLM(chat_folder(), multiprocess=False, seed=seed, **SETTINGS) as llm:
            runs.append(texts(generate(llm, ["x", "x"], free)))
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


@pytest.mark.parametrize(
    ("prompt", "params", "name", "words"),
    [
        ([], GREEDY, "prompt", ["empty"]),
        ([5] * 128, GREEDY, "prompt", ["128 tokens", "max_model_len is 128"]),
        ([5, 384], GREEDY, "prompt", ["prompt 2 of 2", "prompt[1] is 384", "0 to 383"]),
        ([1.5], GREEDY, "prompt", ["prompt 2 of 2", "prompt[0]", "1.5"]),
        ([5, True], GREEDY, "prompt", ["prompt[1]", "True"]),
        (["a", "b"], GREEDY, "prompt", ["prompt[0]", "'a'"]),
        ([5, b"x"], GREEDY, "prompt", ["prompt[1]", "b'x'"]),
        (b"x", GREEDY, "prompt", ["prompt 2 of 2", "bytes"]),
        (np.array([5, 6]), GREEDY, "prompt", ["prompt 2 of 2", "ndarray"]),
        ("ab\ud800", GREEDY, "prompt", ["prompt[2]", "surrogate"]),
        ("x", SamplingParams(max_tokens=2.5), "max_tokens", ["prompt 2 of 2", "max_tokens", "int"]),
        ("x", SamplingParams(max_tokens=True), "max_tokens", ["max_tokens", "bool"]),
        ("x", SamplingParams(temperature="1"), "temperature", ["temperature", "str"]),
        ("x", SamplingParams(stop_token_ids=[384]), "stop_token_ids", ["384", "0 to 383"]),
        ("x", SamplingParams(max_tokens=0), "max_tokens", ["0"]),
        ("x", SamplingParams(temperature=float("inf")), "temperature", ["inf"]),
        ("x", SamplingParams(stop=("",)), "stop", ["empty"]),
        ("x", SamplingParams(max_tokens=10**30), "max_tokens", ["max_tokens cannot be sent"]),
        ("x", SamplingParams(top_k=10**30), "top_k", ["top_k cannot be sent"]),
        ("x", SamplingParams(stop=("\ud800",)), "stop", ["stop cannot be sent", "surrogates"]),
        ("x", SamplingParams(bad_words=("\ud800",)), "bad_words", ["bad_words", "surrogates"]),
    ],
)
def test_bad_prompt_among_good_ones_is_named_and_nothing_runs(llm, prompt, params, name, words):
    before = llm.get_metrics()
    with pytest.raises(InvalidRequestError) as caught:
        generate(llm, ["hello", prompt], [GREEDY, params])
    assert caught.value.param == name
    for word in words:
        assert word in str(caught.value)
    assert not llm.llm_engine.has_unfinished_requests()
    after = llm.get_metrics()
    assert after.num_steps == before.num_steps
    assert after.groups[0].num_free_blocks == after.groups[0].num_blocks


@pytest.mark.parametrize("prompt", [[1.5], [True, 5], b"x", np.array([5]), 5])
def test_prompt_of_a_wrong_type_alone_is_refused(llm, prompt):
    with pytest.raises(InvalidRequestError, match="prompt 1 of 1") as caught:
        generate(llm, prompt, GREEDY)
    assert caught.value.param == "prompt"


def test_numbers_of_numpy_and_a_stop_string_alone_are_taken(llm, greedy):
    params = SamplingParams(max_tokens=np.int64(4), temperature=np.float32(0.0), stop="no such")
    assert params.stop == ("no such",)
    plain = generate(llm, [5, 6], SamplingParams(max_tokens=4, temperature=0.0))
    assert texts(generate(llm, [np.int32(5), np.int64(6)], params)) == texts(plain)


@pytest.mark.parametrize(
    ("most", "side", "kept"),
    [(4, "left", [6, 7, 8, 9]), (4, "right", [5, 6, 7, 8]), (-1, "left", [7, 8, 9])],
)
def test_a_prompt_is_truncated_before_the_engine_gets_it(llm, most, side, kept):
    max_tokens = 125  # of 128, so that -1 leaves three for the prompt
    params = SamplingParams(
        max_tokens=2 if most > 0 else max_tokens, temperature=0.0,
        truncate_prompt_tokens=most, truncation_side=side,
    )  # fmt: skip
    [output] = generate(llm, [5, 6, 7, 8, 9], params)
    assert output.prompt_token_ids == kept
    plain = msgspec.structs.replace(params, truncate_prompt_tokens=None)
    assert texts([output]) == texts(generate(llm, kept, plain))


def test_a_truncated_prompt_may_be_longer_than_the_model_takes(llm):
    params = SamplingParams(max_tokens=1, temperature=0.0, truncate_prompt_tokens=100)
    [output] = generate(llm, [5] * 500, params)
    assert output.prompt_token_ids == [5] * 100
    too_long = msgspec.structs.replace(params, truncate_prompt_tokens=128)
    with pytest.raises(InvalidRequestError, match="is 128 and max_model_len is 128") as caught:
        generate(llm, [5] * 500, too_long)
    assert caught.value.param == "truncate_prompt_tokens"


def test_aborted_request_gives_nothing_more(llm):
    engine = llm.llm_engine
    kept, dropped = (engine.add_request(prompt, GREEDY) for prompt in ("x", "hello"))
    engine.step()
    engine.abort_request([dropped, "unknown"])
    seen = set()
    while engine.has_unfinished_requests():
        seen |= {output.request_id for output in engine.step()}
    assert seen == {kept}
    assert llm.get_metrics().groups[0].num_empty_slots == 4


def test_live_request_id_is_refused(llm):
    llm.llm_engine.add_request("x", GREEDY, request_id="mine")
    with pytest.raises(InvalidRequestError, match="mine"):
        llm.llm_engine.add_request("x", GREEDY, request_id="mine")
    llm.llm_engine.abort_request(["mine"])


def test_text_may_be_read_at_any_time(llm):
    engine = llm.llm_engine
    read = engine.add_request(PROMPTS[2], GREEDY)
    engine.add_request(PROMPTS[2], GREEDY)
    stopped = msgspec.structs.replace(GREEDY, stop=("\x00never",))
    engine.add_request(PROMPTS[2], stopped)
    seen, outputs = [""], {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        seen.append(outputs[read].outputs[0].text)
        assert seen[-1].startswith(seen[-2])
    assert len(set(seen)) > 5
    assert {output.outputs[0].text for output in outputs.values()} == {seen[-1]}


def test_llm_without_a_tokenizer_works_on_token_ids(llm, greedy):
    with LLM(chat_folder(), multiprocess=False, skip_tokenizer_init=True, **SETTINGS) as plain:
        [output] = generate(plain, llm.get_tokenizer().encode(PROMPTS[0]))
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", greedy.token_ids)
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            generate(plain, "text")
        for name in ("stop", "bad_words"):
            params = msgspec.structs.replace(GREEDY, **{name: ("word",)})
            with pytest.raises(InvalidRequestError, match=f"{name} needs a tokenizer") as caught:
                generate(plain, [5], params)
            assert caught.value.param == name
        with pytest.raises(ModelLoadError, match="tokenizer"):
            plain.chat([{"role": "user", "content": "hello"}])


# --- the same through every client -------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_engine_process_gives_the_same_outputs(llm, llm_process, params):
    assert texts(generate(llm_process, PROMPTS, params)) == texts(generate(llm, PROMPTS, params))


@pytest.mark.process
def test_a_stop_string_ends_the_request_in_the_engine_process(llm, llm_process, greedy):
    params = msgspec.structs.replace(GREEDY, stop=(greedy.text[6:9],))
    assert texts(generate(llm_process, PROMPTS, params)) == texts(generate(llm, PROMPTS, params))
    # The next call's requests and this abort travel in order: nothing is left once it has ended.
    generate(llm_process, "x", msgspec.structs.replace(GREEDY, max_tokens=1))
    [group] = llm_process.get_metrics().groups
    assert (group.num_empty_slots, group.num_free_blocks) == (4, [39])


CHOICE = msgspec.structs.replace(
    GREEDY, structured_outputs=StructuredOutputs(choice=("red", "green")), ignore_eos=False
)


@pytest.mark.process
def test_an_output_follows_its_grammar_and_a_bad_grammar_is_refused_before_it_runs(
    llm, llm_process
):
    [output] = generate(llm, PROMPTS[0], CHOICE)
    assert output.outputs[0].text in {"red", "green"}
    assert output.outputs[0].finish_reason == "stop"
    assert texts(generate(llm_process, PROMPTS[0], CHOICE)) == texts([output])
    bad = SamplingParams(structured_outputs=StructuredOutputs(json="{bad"))
    with pytest.raises(InvalidRequestError, match="structured_outputs") as caught:
        generate(llm, PROMPTS, [GREEDY, bad, GREEDY, GREEDY])
    assert caught.value.param == "structured_outputs.json"


@pytest.mark.process
def test_asynchronous_front_end_gives_the_same_outputs(llm, greedy):
    async def last(engine, prompt, params):
        lengths = []
        async for output in engine.generate(prompt, params):
            lengths.append(len(output.outputs[0].token_ids))
        assert lengths == sorted(lengths)
        return output

    async def run():
        engine = await AsyncLLM.start(EngineConfig(model=chat_folder(), **SETTINGS))
        try:
            found = []
            for params in (GREEDY, SEEDED):
                jobs = (last(engine, prompt, params) for prompt in PROMPTS)
                found.append(texts(await asyncio.gather(*jobs)))
            stream = engine.generate("x", GREEDY)
            await anext(stream)
            await stream.aclose()
            stop = msgspec.structs.replace(GREEDY, stop=(greedy.text[6:9],))
            found.append(texts([await last(engine, PROMPTS[0], stop)]))
            three = msgspec.structs.replace(SEEDED, n=3)
            whole = (await last(engine, PROMPTS[0], three)).outputs
            cut = msgspec.structs.replace(three, stop=(whole[1].text[:2],))
            found.append([c.text for c in (await last(engine, PROMPTS[0], cut)).outputs])
            with pytest.raises(InvalidRequestError):
                await last(engine, [], GREEDY)
            return found
        finally:
            await engine.shutdown()

    stop = msgspec.structs.replace(GREEDY, stop=(greedy.text[6:9],))
    wanted = [texts(generate(llm, PROMPTS, params)) for params in (GREEDY, SEEDED)]
    three = msgspec.structs.replace(SEEDED, n=3)
    [whole] = generate(llm, PROMPTS[0], three)
    first = whole.outputs[1].text[:2]
    choices = [choice.text.partition(first)[0] for choice in whole.outputs]
    assert asyncio.run(run()) == [*wanted, texts(generate(llm, PROMPTS[0], stop)), choices]


@pytest.mark.process
def test_the_asynchronous_front_end_aborts_measures_and_resets(llm):
    endless = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    # What is aborted must not have ended by then.
    settings = SETTINGS | {"generator": "tests.replicas.slow_generators:Unhurried"}

    async def run():
        engine = await AsyncLLM.start(EngineConfig(model=chat_folder(), **settings))
        try:
            dropped = engine.generate("hello world", endless, "mine")
            output = await anext(dropped)
            engine.abort(["mine", "unknown"])
            rest = [(o.finished, o.outputs[0].finish_reason) async for o in dropped]
            assert rest[-1] == (True, "abort")
            assert output.outputs[0].token_ids
            engine.abort("mine")  # it is over
            kept = [o async for o in engine.generate("hello world", GREEDY, "mine")][-1]
            twice = engine.generate("x", endless, "mine")
            await anext(twice)
            with pytest.raises(InvalidRequestError, match="'mine' is running already"):
                await anext(engine.generate("x", endless, "mine"))
            await twice.aclose()
            prompt = [*range(5, 75)]
            hits = []
            for _ in range(2):
                last = [o async for o in engine.generate(prompt, GREEDY)][-1]
                hits.append(last.num_cached_tokens)
            assert await engine.reset_prefix_cache()
            last = [o async for o in engine.generate(prompt, GREEDY)][-1]
            hits.append(last.num_cached_tokens)
            metrics = await engine.get_metrics()
            [worker] = await engine.collective_rpc("describe")
            with pytest.raises(EngineError, match="only describe"):
                await engine.collective_rpc("shutdown")
            return kept, hits, metrics, worker
        finally:
            await engine.shutdown()

    kept, hits, metrics, worker = asyncio.run(run())
    assert texts([kept]) == texts(generate(llm, "hello world"))
    assert hits == [0, 64, 0]
    assert metrics.groups[0].requests_finished["abort"] == 2
    assert worker.pid != os.getpid()


@pytest.mark.process
def test_the_asynchronous_front_end_pauses_and_resumes(llm):
    async def last(engine, request_id):
        return [o async for o in engine.generate("hello world", GREEDY, request_id)][-1]

    async def run():
        engine = await AsyncLLM.start(EngineConfig(model=chat_folder(), **SETTINGS))
        try:
            stream = engine.generate("hello world", GREEDY, "kept")
            await anext(stream)
            await engine.pause_generation(mode="keep")
            assert await engine.is_paused()
            assert await engine.reset_prefix_cache(reset_running_requests=True)
            queued = asyncio.create_task(last(engine, "queued"))
            await engine.resume_generation()
            kept = [o async for o in stream][-1]
            outputs = [kept, await queued]
            stream = engine.generate("hello world", GREEDY)
            await anext(stream)
            await engine.pause_generation(mode="wait")
            outputs.append([o async for o in stream][-1])
            await engine.resume_generation()
            stream = engine.generate("hello world", GREEDY)
            await anext(stream)
            await engine.pause_generation()
            ends = [o.outputs[0].finish_reason async for o in stream]
            assert ends[-1] == "abort"
            with pytest.raises(EngineError, match="'nap'"):
                await engine.pause_generation(mode="nap")
            return outputs, (await engine.get_metrics()).groups[0].num_preemptions
        finally:
            await engine.shutdown()

    outputs, num_preemptions = asyncio.run(run())
    assert texts(outputs) == 3 * texts(generate(llm, "hello world"))
    assert num_preemptions == 1


@pytest.mark.parametrize(
    "params",
    [
        msgspec.structs.replace(GREEDY, stop=5),
        msgspec.structs.replace(GREEDY, max_tokens=1.5),
    ],
    ids=["number for a list of texts", "fraction"],
)
def test_value_of_a_wrong_type_is_refused_and_the_next_prompt_runs(llm_process, greedy, params):
    with pytest.raises(InvalidRequestError, match="wrong type"):
        generate(llm_process, PROMPTS[0], params)
    assert texts(generate(llm_process, PROMPTS[0])) == [(greedy.text, greedy.token_ids)]


def test_engine_option_of_a_wrong_type_is_named():
    with pytest.raises(ConfigError, match="max_batch_size"):
        LLM(chat_folder(), **{**SETTINGS, "max_batch_size": "many"})


@pytest.mark.parametrize(
    "option",
    [
        {"reservation_timeout_s": float("nan")},
        {"reservation_timeout_s": -1.0},
        {"max_model_len": -5},
        {"max_num_waiting": -1},
        {"num_threads": 0},
        {"niceness": 3, "multiprocess": False},
        {"niceness": 20},
        {"niceness": -1},
    ],
    ids=str,
)
def test_absurd_engine_options_are_refused(option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        LLM(chat_folder(), **{**SETTINGS, **option})


def test_refusals_of_one_call_do_not_fail_the_next():
    options = {**SETTINGS, "max_batch_size": 2, "max_num_waiting": 0}
    with LLM(chat_folder(), **options) as small:
        with pytest.raises(RequestRefusedError, match="queue"):
            generate(small, [PROMPTS[0]] * 7)
        assert len(generate(small, PROMPTS[0])) == 1


def test_a_foreign_class_on_a_mesh_gets_a_process_of_its_own():
    """The class reads its environment on import, and writes beside the model by default."""
    mesh = MeshConfig(name="N150")
    for generator in ("tt-metal", "theirs:Class"):
        with pytest.raises(ConfigError, match=rf"'{generator}' .*set multiprocess=True"):
            LLM(chat_folder(), multiprocess=False, block_size=64, mesh=mesh, generator=generator)

"""Fields of chats that say what the prompt is, and what the answer repeats."""

import json

import pytest

from cluster.edge.openai import Usage
from cluster.edge.openai_fields import MAX_TEMPLATE_CHARS
from replicas.output_processor import OutputDelta
from replicas.tokenizer import Tokenizer
from tests.cluster.edge.fake_backend import FakeBackend, make_tokenizer
from tests.cluster.edge.test_routes import call

PATH = "/v1/chat/completions"
TOKENIZER = make_tokenizer()
USER = {"role": "user", "content": "hi"}
SHOWS_ALL = """{{ documents | tojson }}{{ verbosity }}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"""


class LongBackend(FakeBackend):
    max_model_len = 512


def with_template(template):
    backend = LongBackend()
    backend.tokenizer = Tokenizer(
        TOKENIZER.backend, vocab_size=256, eos_token_ids=frozenset(), special_tokens={},
        chat_template=template,
    )  # fmt: skip
    return backend


def ask(service, messages=(USER,), stream=False, settings=None, **fields):
    body = {"messages": [*messages], "max_tokens": 4, "stream": stream, **fields}
    return call(service, "POST", PATH, body, **(settings or {}))


def prompt_of(service):
    [request] = service.requests
    return TOKENIZER.decode(request.prompt_token_ids)


@pytest.mark.parametrize("path", [PATH, "/tokenize"])
def test_an_answer_continues_the_final_message(path):
    service = FakeBackend()
    messages = [USER, {"role": "assistant", "content": "well, "}]
    body = {"messages": messages, "continue_final_message": True}
    answer = call(service, "POST", path, body)
    if path == PATH:
        assert prompt_of(service) == "[user]hi[assistant]well, "
    else:
        assert TOKENIZER.decode(answer.body["tokens"]) == "[user]hi[assistant]well, "


def test_a_final_message_is_not_continued_behind_a_generation_prompt():
    fields = {"continue_final_message": True, "add_generation_prompt": True}
    answer = ask(FakeBackend(), **fields)
    assert (answer.status, answer.body["error"]["param"]) == (400, "continue_final_message")


def test_a_final_message_without_text_cannot_be_continued():
    answer = ask(
        FakeBackend(), [USER, {"role": "assistant", "content": " "}], continue_final_message=True
    )
    assert (answer.status, answer.body["error"]["param"]) == (400, "continue_final_message")


CHATML = """{% for m in messages %}<|im_start|>{{ m.role + '\\n' + m.content }}<|im_end|>
{% endfor %}"""
TRIMS = CHATML.replace("m.content", "m.content | trim")


@pytest.mark.parametrize(
    "content", ["well", "<", "end", "|", "e", "<|im_end|>", "hi", "user", "well, ", " well \n"]
)
@pytest.mark.parametrize("template", [CHATML, TRIMS])
def test_a_prompt_is_cut_behind_the_final_message(template, content):
    service = with_template(template)
    ask(service, [USER, {"role": "assistant", "content": content}], continue_final_message=True)
    shown = content if template == CHATML else content.strip()
    head = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(service) == head + shown


def test_a_final_message_that_the_template_hides_cannot_be_continued():
    service = with_template("{{ messages[0].content }}")
    answer = ask(
        service, [USER, {"role": "assistant", "content": "hi"}], continue_final_message=True
    )
    assert (answer.status, answer.body["error"]["param"]) == (400, "continue_final_message")


def test_documents_and_verbosity_are_variables_of_the_template():
    service = with_template(SHOWS_ALL)
    ask(service, documents=[{"title": "t", "text": "x"}], verbosity="low")
    assert prompt_of(service) == '[{"title": "t", "text": "x"}]low[user]hi'
    assert ask(FakeBackend(), verbosity="loud").status == 400
    assert ask(FakeBackend(), documents=["x"]).body["error"]["param"] == "documents[0]"


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (SHOWS_ALL, "null[system]a\nb[user]hi"),
        ("{# 'developer' #}" + SHOWS_ALL, "null[system]a[user]hi[developer]b"),
    ],
    ids=["unknown", "known"],
)
def test_a_developer_message_is_a_system_message_where_templates_know_no_other(template, prompt):
    service = with_template(template)
    system = {"role": "system", "content": "a"}
    ask(service, [system, USER, {"role": "developer", "content": "b"}])
    assert prompt_of(service) == prompt


TRUSTED = {"trust_request_chat_template": True}


@pytest.mark.parametrize("path", [PATH, "/tokenize"])
def test_a_clients_own_template_is_refused_unless_clients_are_trusted(path):
    service = LongBackend()
    body = {"messages": [USER], "chat_template": "<{{ messages[0].content }}>"}
    refused = call(service, "POST", path, body)
    assert (refused.status, refused.body["error"]["param"]) == (400, "chat_template")
    assert "trust_request_chat_template" in refused.body["error"]["message"]
    answer = call(service, "POST", path, body, **TRUSTED)
    assert answer.status == 200
    if path == PATH:
        assert prompt_of(service) == "<hi>"


@pytest.mark.parametrize(
    ("template", "param"),
    [
        ("{% if %}", "chat_template"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "chat_template"),
        ("{{ messages.__class__.__mro__ }}", "messages"),
        ("{{ messages.append(1) }}", "messages"),
    ],
    ids=["syntax", "size", "classes", "changes"],
)
def test_a_clients_own_template_is_bounded_and_runs_in_the_sandbox(template, param):
    answer = ask(LongBackend(), chat_template=template, settings=TRUSTED)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_may_have_the_text_of_its_prompt(stream):
    answer = ask(FakeBackend(), stream=stream, return_prompt_text=True)
    if stream:
        found = [event.get("prompt_text") for event in answer.events[:-1]]
        assert found == ["[user]hi[assistant]", None, None, None]
    else:
        assert answer.body["prompt_text"] == "[user]hi[assistant]"
    assert "prompt_text" not in ask(FakeBackend()).body


def test_a_service_tier_is_answered_if_one_is_asked_for():
    assert ask(FakeBackend(), service_tier="flex").body["service_tier"] == "default"
    assert "service_tier" not in ask(FakeBackend()).body


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
@pytest.mark.parametrize(("interval", "texts"), [(1, 6), (2, 4), (4, 3), (100, 2)])
def test_events_have_at_least_as_many_tokens_as_asked_for(path, interval, texts):
    prompt = {"prompt": "abcdef"} if path != PATH else {"messages": [USER]}
    body = {**prompt, "max_tokens": 6, "stream": True, "stream_interval": interval}
    events = call(FakeBackend(), "POST", path, body).events[:-1]
    pieces = [e["choices"][0].get("text", e["choices"][0].get("delta")) for e in events]
    pieces = [piece if isinstance(piece, str) else piece["content"] for piece in pieces]
    assert len(pieces) == texts
    assert "".join(pieces) == ("abcdef" if path != PATH else "[user]")


def test_a_stream_interval_is_at_least_one():
    answer = ask(FakeBackend(), stream=True, stream_interval=0)
    assert (answer.status, answer.body["error"]["param"]) == (400, "stream_interval")


def test_log_probabilities_may_name_tokens_by_their_ids():
    [a] = TOKENIZER.encode("a")
    fields = {"prompt": "a", "max_tokens": 1, "return_tokens_as_token_ids": True, "logprobs": 1}
    found = call(FakeBackend(), "POST", "/v1/completions", fields).body["choices"][0]["logprobs"]
    assert found["tokens"] == [f"token_id:{a}"]
    assert list(found["top_logprobs"][0]) == [f"token_id:{a}"]
    answer = ask(FakeBackend(), logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    [bracket] = TOKENIZER.encode("[")
    token = answer.body["choices"][0]["logprobs"]["content"][0]
    assert (token["token"], token["bytes"]) == (f"token_id:{bracket}", [ord("[")])
    assert token["top_logprobs"][0]["token"] == f"token_id:{bracket}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shows", [False, True])
def test_usage_counts_the_tokens_of_reasoning_whose_marks_are_no_tokens_by_its_text(stream, shows):
    async def script(request, emit):
        texts = ["<think>", "hm", "m", "</think>", "so", "."]
        for i, text in enumerate(texts):
            await emit(OutputDelta(0, text, [i], "stop" if i == 5 else None))
        return Usage(3, 6)

    service = FakeBackend(script)
    service.reasoning_parser = "deepseek_r1"
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = ask(service, stream=stream, include_reasoning=shows, **options)
    usage = answer.events[-2]["usage"] if stream else answer.body["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 1}
    assert usage["completion_tokens"] == 6
    assert "completion_tokens_details" not in json.dumps(ask(FakeBackend()).body)

import dataclasses

import pytest

from cluster.edge import apis
from cluster.edge.field_names import naming_fields
from cluster.edge.fields import FieldTable, acts, bad_field
from cluster.edge.openai_apis import ChatCompletionsApi
from cluster.errors import BadRequestError, ReplicaLostError, SaturatedError
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_routes import call

PATH = "/v1/chat/completions"


class _Writer:
    def __init__(self, spec):
        self._spec = spec

    def add(self, delta):
        return f"<{delta.text}>".encode()

    def finish(self, usage):
        return f"end {usage.completion_tokens} {self._spec.own}".encode()

    def fail(self, error):
        return f"failed: {error.message}".encode()


class OtherApi(ChatCompletionsApi):
    """An API whose prompt is called `ask`, with events and errors of its own."""

    is_resumable = False
    fields = FieldTable("Other", dict.fromkeys(("ask", "limit", "stream"), acts({}, "Any value.")))

    async def parse(self, body, tenant):
        names = {"messages[0].content": "ask", "max_tokens": "limit"}
        chat = {
            "messages": [{"role": "user", "content": body["ask"]}],
            "max_tokens": body.get("limit"),
            "stream": body.get("stream"),
        }
        with naming_fields(names):
            parsed = await super().parse(chat, tenant)
        options = {**parsed.response_options, "own": body["ask"]}
        return dataclasses.replace(parsed, field_names=names, response_options=options)

    def whole(self, request, spec, deltas, usage):
        return {"answer": "".join(delta.text for delta in deltas), "asked": spec.own}

    def stream(self, request, spec):
        return _Writer(spec)

    @staticmethod
    def error_status(error):
        return 529 if error.status == 429 else error.status

    @staticmethod
    def error_body(error, request_id):
        return {"oops": error.message, "field": error.param, "id": request_id}


@pytest.fixture
def served(monkeypatch):
    """Serve `OtherApi` on the path of chats."""
    served = [OtherApi if api is ChatCompletionsApi else api for api in apis._OF_TOKENIZER]
    monkeypatch.setattr(apis, "_OF_TOKENIZER", served)
    monkeypatch.setitem(apis._API_OF_PATH, PATH, OtherApi)


@pytest.mark.usefixtures("served")
def test_an_api_translates_its_body_and_makes_its_own_answer():
    service = FakeBackend()
    answer = call(service, "POST", PATH, {"ask": "hi", "limit": 3})
    assert answer.body == {"answer": "[us", "asked": "hi"}
    streamed = call(service, "POST", PATH, {"ask": "hi", "limit": 3, "stream": True})
    assert b"".join(streamed.chunks) == b"<[><u><s>end 3 hi"


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"ask": 7}, "ask"),
        ({"ask": "hi", "limit": 65}, "limit"),
        ({"ask": "hi", "limit": 0}, "limit"),
    ],
    ids=["translation", "length", "range"],
)
def test_errors_name_the_field_of_the_own_body(body, field):
    answer = call(FakeBackend(), "POST", PATH, body)
    assert (answer.status, answer.body["field"]) == (400, field)
    assert answer.body["oops"].startswith(field)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", PATH, [("content-type", "text/plain")], 415),
        ("POST", PATH, [("content-length", "9999999")], 413),
        ("POST", f"{PATH}/more", [], 404),
        ("GET", PATH, [], 405),
        ("POST", PATH, [("last-event-id", "0")], 400),
    ],
)
def test_every_error_on_the_path_has_the_form_of_its_api(method, path, headers, status):
    headers = [*headers, ("x-request-id", "one")]
    answer = call(FakeBackend(), method, path, {"ask": "hi", "stream": True}, headers=headers)
    assert (answer.status, set(answer.body)) == (status, {"oops", "field", "id"})
    assert answer.body["id"] == "one"


@pytest.mark.usefixtures("served")
def test_an_api_may_have_statuses_of_its_own():
    async def script(request, emit):
        raise SaturatedError("full")

    answer = call(FakeBackend(script), "POST", PATH, {"ask": "hi"})
    assert (answer.status, answer.headers["retry-after"]) == (529, "1")


@pytest.mark.usefixtures("served")
def test_a_stream_that_fails_ends_as_its_api_says():
    async def script(request, emit):
        await emit(OutputDelta(0, "he", [1]))
        raise ReplicaLostError("the replica died")

    answer = call(FakeBackend(script), "POST", PATH, {"ask": "hi", "stream": True})
    assert b"".join(answer.chunks) == b"<he>failed: the replica died"


DATA = "data:image/png;base64," + "A" * 2**14


@pytest.mark.parametrize(
    ("path", "body", "part", "param", "error_type"),
    [
        (
            PATH,
            "messages",
            {"type": "image_url", "image_url": {"url": DATA}},
            "messages[0].content[1].type",
            "BadRequestError",
        ),
        (
            "/v1/responses",
            "input",
            {"type": "input_image", "image_url": DATA},
            "input[0].content[1].type",
            "BadRequestError",
        ),
        (
            "/v1/messages",
            "messages",
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": DATA},
            },
            "messages[0].content[1].type",
            "invalid_request_error",
        ),
    ],
    ids=["chat", "responses", "messages"],
)
def test_an_image_is_refused_by_the_path_of_its_part(path, body, part, param, error_type):
    text = {"type": "input_text" if body == "input" else "text", "text": "What is this?"}
    message = {"role": "user", "content": [text, part]}
    answer = call(FakeBackend(), "POST", path, {"model": "demo", "max_tokens": 9, body: [message]})
    error = answer.body["error"]
    assert (answer.status, error["type"]) == (400, error_type)
    assert error["message"].startswith(param)
    assert f'"{part["type"]}"' in error["message"]
    assert error.get("param", param) == param
    assert len(error["message"]) < 200


@pytest.mark.parametrize("path", ["/v1/chat/completion", "/v1/chat/completionsx", "/nothing"])
def test_other_paths_have_errors_of_openais_form(path):
    answer = call(FakeBackend(), "POST", path, {})
    assert (answer.status, answer.body["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("messages", "input"),
        ("messages[2].content", "input[1].content"),
        ("tools", "tools"),
        ("messages2", "messages2"),
    ],
)
def test_the_longest_path_above_a_field_names_it(path, own):
    names = {"messages": "input", "messages[2]": "input[1]"}
    with pytest.raises(BadRequestError) as refused, naming_fields(names):
        raise bad_field(path, "is wrong")
    assert (refused.value.param, refused.value.message) == (own, f"{own} is wrong")

import asyncio
import contextlib
import gc
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.schema import AdmissionConfig, IngressConfig
from cluster.edge import text_jobs
from cluster.edge.openai import Usage
from cluster.edge.openai_requests import ParsedRequest, parse_chat_completion
from cluster.edge.routes import create_app
from cluster.edge.tenants import cache_salt
from cluster.errors import NotReadyError, QueueTimeoutError, ReplicaLostError, SaturatedError
from replicas.errors import InvalidRequestError
from replicas.output_processor import OutputDelta
from replicas.sampling_params import SamplingDefaults
from tests.cluster.edge.fake_backend import FakeBackend

GENERATE = ["/v1/completions", "/v1/chat/completions"]
PROMPTS = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}
MAX_BODY_BYTES = 2**20


OPERATOR = [("x-ttserve-listener", "operations")]
"""What HAProxy adds to requests of the operations listener."""


class Client:
    """One ASGI request at a time, with the client's side of the connection in the test's hand."""

    def __init__(self, app, address="test"):
        self._app = app
        self._address = address
        self.gone = asyncio.Event()
        self.status = None
        self.headers = {}
        self.chunks = []

    async def request(self, method, path, body=b"", headers=()):
        if method == "POST" and not any(name == "content-type" for name, _ in headers):
            headers = [*headers, ("content-type", "application/json")]
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        path, _, query = path.partition("?")
        parts = [body[i : i + 1000] for i in range(0, len(body), 1000)] or [b""]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(k.encode(), v.encode("latin-1")) for k, v in headers if v is not None],
            "server": ("test", 80),
            "client": (self._address, 1),
            "scheme": "http",
        }

        async def receive():
            if parts:
                part = parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(parts)}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                self.chunks.append(message["body"])

        await self._app(scope, receive, send)
        return self

    @property
    def body(self):
        return json.loads(b"".join(self.chunks))

    @property
    def events(self):
        lines = b"".join(self.chunks).decode().split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") for line in lines)
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def make_app(service, max_body_bytes=MAX_BODY_BYTES, admission=None, **options):
    return create_app(
        service,
        IngressConfig(max_body_bytes=max_body_bytes, request_timeout_s=60, **options),
        version="1.2.3",
        admission=admission,
    )


def call(service, method, path, body=b"", *, headers=(), max_body_bytes=MAX_BODY_BYTES, **options):
    app = make_app(service, max_body_bytes, **options)
    return asyncio.run(Client(app).request(method, path, body, headers))


# --- listeners and hosts --------------------------------------------------------------------------

OPERATIONS = [
    "/metrics",
    "/kv",
    "/debug/slots",
    "/debug/routes/r1",
    "/health_generate",
]


@pytest.mark.parametrize("path", OPERATIONS)
def test_operations_routes_are_on_their_own_listener_alone(path):
    refused = call(FakeBackend(), "GET", path)
    assert refused.status == 404
    assert "operations listener" in refused.body["error"]["message"]
    answered = call(FakeBackend(), "GET", path, headers=OPERATOR)
    assert "operations listener" not in str(answered.chunks)


@pytest.mark.parametrize("path", ["/health", "/live", "/version"])
@pytest.mark.parametrize("headers", [[], OPERATOR])
def test_probes_are_answered_on_both_listeners(path, headers):
    assert call(FakeBackend(), "GET", path, headers=headers).status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST.:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]", 200),
        ("[::1]:8000", 200),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
def test_a_loopback_listener_answers_to_loopback_names_alone(host, status):
    headers = [("x-ttserve-bound", "loopback"), ("host", host)]
    answer = call(FakeBackend(), "GET", "/live", headers=headers)
    assert answer.status == status
    if status != 200:
        assert answer.body["error"]["code"] == "misdirected"


@pytest.mark.parametrize("bound", [[], [("x-ttserve-bound", "loopback")]])
@pytest.mark.parametrize(
    ("host", "status"),
    [("llm.example:80", 200), ("evil.example", 421), ("localhost.evil.example", 421)],
)
def test_configured_hosts_are_served_on_every_listener(bound, host, status):
    assert status_of_live(host, bound) == status


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000"])
@pytest.mark.parametrize("bound", [[], [("x-ttserve-bound", "loopback")]])
def test_probes_from_the_host_are_answered_with_any_allowed_hosts(bound, host):
    assert status_of_live(host, bound) == 200


@pytest.mark.parametrize("host", ["10.0.0.7:8001", "[fd00::7]:8001"])
def test_an_address_names_a_listener_that_other_hosts_reach(host):
    assert status_of_live(host, []) == 200
    assert status_of_live(host, [("x-ttserve-bound", "loopback")]) == 421


def status_of_live(host, bound):
    """The status of a request with this Host, where the configuration allows `llm.example`."""
    app = make_app(FakeBackend(), allowed_hosts=["llm.example"])
    headers = [*bound, ("host", host)]
    return asyncio.run(Client(app).request("GET", "/live", b"", headers)).status


async def test_a_full_ingress_refuses_requests_and_answers_its_probes():
    started, done = asyncio.Event(), asyncio.Event()

    async def waits(request, emit):
        started.set()
        await done.wait()
        await emit(OutputDelta(0, "a", [1], "length"))
        return Usage(1, 1)

    config = IngressConfig(max_ongoing_requests=1)
    app = create_app(FakeBackend(waits), config, version="1")

    async def ask(method, path, body=b"", headers=()):
        return await Client(app).request(method, path, body, headers)

    first = asyncio.create_task(ask("POST", "/v1/completions", {"prompt": "hi"}))
    await started.wait()
    refused = await ask("POST", "/v1/completions", {"prompt": "hi"})
    assert (refused.status, refused.body["error"]["code"]) == (429, "saturated")
    assert refused.headers["retry-after"] == "1"
    for path in ("/health", "/live", "/version", "/v1/models", *OPERATIONS[:3]):
        assert (await ask("GET", path, headers=OPERATOR)).status == 200
    done.set()
    assert (await first).status == 200
    assert (await ask("POST", "/v1/completions", {"prompt": "hi"})).status == 200


# --- the model's own defaults ---------------------------------------------------------------------


def generated(path, body, **changes):
    response = call(FakeBackend(), "POST", path, {**PROMPTS[path], **body}, **changes)
    assert response.status == 200, response.body
    return response.body


def streamed(path, body):
    response = call(FakeBackend(), "POST", path, {**PROMPTS[path], **body, "stream": True})
    events = [e for e in b"".join(response.chunks).decode().split("\n\n") if e]
    return [json.loads(event[6:]) for event in events if event != "data: [DONE]"]


@pytest.mark.parametrize("prompt", ["hi", [104, 105]], ids=["text", "token ids"])
def test_an_echo_precedes_every_choice_of_a_completion(prompt):
    tokenizer = FakeBackend().tokenizer
    prompt = prompt if isinstance(prompt, str) else tokenizer.encode("hi")
    body = {"prompt": prompt, "echo": True, "n": 2, "max_tokens": 2}
    choices = generated("/v1/completions", body)["choices"]
    assert [c["text"] for c in choices] == ["hihi"] * 2
    texts = ["", ""]
    for chunk in streamed("/v1/completions", body):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["hihi"] * 2


def test_an_echo_with_log_probabilities_has_those_of_the_prompt():
    body = {"echo": True, "logprobs": 1, "max_tokens": 1}
    [choice] = generated("/v1/completions", body)["choices"]
    found = choice["logprobs"]
    assert found["tokens"] == ["h", "i", "h"]
    assert found["token_logprobs"] == [None, -0.5, -0.5]
    assert found["top_logprobs"][0] is None
    assert found["text_offset"] == [0, 1, 2]
    assert "prompt_logprobs" not in choice
    [chunk] = streamed("/v1/completions", body)
    assert chunk["choices"][0]["logprobs"] == found


def test_an_echo_alone_scores_the_prompt_and_generates_nothing():
    body = {"echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True}
    answer = generated("/v1/completions", body)
    [choice] = answer["choices"]
    assert (choice["text"], choice["token_ids"]) == ("hi", [])
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}
    refused = call(
        FakeBackend(), "POST", "/v1/completions",
        {"prompt": "hi", "echo": True, "max_tokens": 0, "stream": True},
    )  # fmt: skip
    assert refused.body["error"]["param"] == "max_tokens"


def test_an_echo_of_a_chat_repeats_the_turn_that_it_continues():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so "}]
    body = {"messages": turns, "echo": True, "max_tokens": 3}
    message = generated("/v1/chat/completions", body)["choices"][0]["message"]
    assert message["content"] == "so [us"
    deltas = [c["choices"][0]["delta"] for c in streamed("/v1/chat/completions", body)]
    assert "".join(d.get("content", "") for d in deltas) == "so [us"
    assert generated("/v1/chat/completions", {"echo": True, "max_tokens": 3})["choices"][0][
        "message"
    ]["content"] == "[us"  # fmt: skip


@pytest.mark.parametrize("path", GENERATE)
def test_log_probabilities_of_the_prompt_have_the_form_of_vllm(path):
    answer = generated(path, {"prompt_logprobs": 1, "max_tokens": 1})
    holder = answer["choices"][0] if path == "/v1/completions" else answer
    first, second, *_ = holder["prompt_logprobs"]
    assert first is None
    [(token_id, entry)] = second.items()
    tokenizer = FakeBackend().tokenizer
    assert entry == {
        "logprob": -0.5, "rank": 1,
        "decoded_token": tokenizer.decode([int(token_id)]),
    }  # fmt: skip
    body = {**PROMPTS[path], "prompt_logprobs": 1, "stream": True}
    assert call(FakeBackend(), "POST", path, body).body["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("prompt", ["x" * 500, [7] * 500], ids=["text", "token ids"])
def test_a_prompt_that_is_truncated_may_be_longer_than_the_model_takes(prompt):
    service = FakeBackend()
    body = {"prompt": prompt, "max_tokens": 4, "truncate_prompt_tokens": 10}
    response = call(service, "POST", "/v1/completions", body)
    assert response.body["usage"]["prompt_tokens"] == 10
    assert call(service, "POST", "/v1/completions", {"prompt": prompt}).status == 400


SLOW_SCHEMA = {
    "type": "string", "allOf": [{"pattern": f".*a.{{{i + 5}}}b.*"} for i in range(300)],
}  # fmt: skip
"""Would take minutes to compile."""


@pytest.mark.process
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look-around"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema is no grammar",
        ),
        ({"structured_outputs": {"json": SLOW_SCHEMA}}, "structured_outputs.json", "too long"),
    ],
    ids=["regex", "schema", "slow"],
)
def test_a_grammar_that_does_not_compile_is_refused_before_any_work(fields, param, words):
    """The slow one is checked beside a request that it does not hold up."""
    backend = FakeBackend()

    async def run():
        app = make_app(backend)
        body = {"prompt": "hi"}
        bad = asyncio.create_task(
            Client(app).request("POST", "/v1/completions", {**body, **fields})
        )
        await asyncio.sleep(0)
        good = await Client(app).request("POST", "/v1/completions", body)
        assert not bad.done()
        return good, await bad

    good, bad = asyncio.run(run())
    assert good.status == 200
    assert bad.status == 400
    assert bad.body["error"]["param"] == param
    assert words in bad.body["error"]["message"]
    assert len(backend.requests) == 1


@pytest.mark.process
def test_a_grammar_that_compiles_is_checked_once(monkeypatch):
    backend = FakeBackend()
    app = make_app(backend)
    fields = {"prompt": "hi", "structured_outputs": {"choice": ["a", "b"]}}
    checked, check = [], text_jobs.check_grammar
    monkeypatch.setattr(
        text_jobs, "check_grammar", lambda *args: (checked.append(args), check(*args))
    )
    for _ in range(2):
        answer = asyncio.run(Client(app).request("POST", "/v1/completions", fields))
        assert answer.status == 200
    assert len(checked) == 1
    assert backend.requests[1].sampling.structured_outputs.choice == ("a", "b")


@pytest.mark.parametrize("path", GENERATE)
def test_request_takes_from_the_model_what_it_leaves_out(path):
    service = FakeBackend()
    service.defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20)
    assert call(service, "POST", path, {**PROMPTS[path], "top_p": 0.5}).status == 200
    [request] = service.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.5, 20)


# --- tenants and objectives ----------------------------------------------------------------------

CLAIMS = [("x-account", "alice"), ("x-slo-ttft-ms", "1500"), ("x-slo-tpot-ms", "80.5")]


def claimed(admission, headers):
    service = FakeBackend()
    app = make_app(service, admission=admission)
    client = Client(app)
    asyncio.run(client.request("POST", "/v1/completions", {"prompt": "hi"}, headers))
    return client, service.requests


def test_headers_name_a_tenant_and_objectives_where_that_is_configured():
    client, [request] = claimed(AdmissionConfig(tenant_header="X-Account"), CLAIMS)
    assert client.status == 200
    assert (request.tenant, request.ttft_s, request.tpot_s) == ("alice", 1.5, 0.0805)
    _, [request] = claimed(AdmissionConfig(), CLAIMS)
    assert (request.tenant, request.ttft_s) == ("", 1.5)


def test_tenant_and_objective_headers_are_ignored_without_admission():
    _, [request] = claimed(None, CLAIMS)
    assert (request.tenant, request.ttft_s, request.tpot_s) == ("", None, None)


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf"])
def test_an_invalid_objective_is_refused_by_name(value):
    client, requests = claimed(AdmissionConfig(ttft_s=1.0), [("x-slo-ttft-ms", value)])
    assert client.status == 400
    assert client.body["error"]["param"] == "x-slo-ttft-ms"
    assert not requests


@pytest.mark.parametrize("names", [["a" * 129], ["alice", "bob"], ["alice, bob"]])
def test_a_tenant_that_might_be_another_is_refused(names):
    admission = AdmissionConfig(tenant_header="x-account")
    client, requests = claimed(admission, [("x-account", name) for name in names])
    assert client.status == 400
    assert client.body["error"]["param"] == "x-account"
    assert not requests


def test_the_longest_tenant_counts_and_one_named_twice_is_one():
    admission = AdmissionConfig(tenant_header="x-account")
    _, [request] = claimed(admission, [("x-account", "a" * 128)] * 2)
    assert request.tenant == "a" * 128


def salt_of(tenant, **fields):
    """The salt under which a tenant's request is cached."""
    service = FakeBackend()
    ingress = IngressConfig(share_prefix_cache=fields.pop("share_prefix_cache", False))
    admission = AdmissionConfig(tenant_header="x-account")
    headers = [("x-account", tenant)] if tenant else []
    body = {"prompt": "hi", **fields}
    app = create_app(service, ingress, version="1", admission=admission)
    asyncio.run(Client(app).request("POST", "/v1/completions", body, headers))
    [request] = service.requests
    return request.cache_salt


NAMES = st.text(alphabet="abc0123456789:", max_size=4)


@given(mine=st.tuples(NAMES, NAMES), other=st.tuples(NAMES, NAMES))
def test_no_salt_of_one_tenant_is_a_salt_of_another(mine, other):
    salts = [cache_salt(tenant, given, is_shared=False) for tenant, given in (mine, other)]
    assert (salts[0] == salts[1]) == (mine == other)


def test_the_salt_of_a_request_is_its_tenants_unless_tenants_share():
    assert salt_of("alice") == salt_of("alice")
    assert len({salt_of("alice"), salt_of("bob"), salt_of(""), salt_of("bob", cache_salt="s")}) == 4
    assert salt_of("alice", share_prefix_cache=True) == salt_of("", share_prefix_cache=True) == ""


def generate(service, path, **fields):
    return call(service, "POST", path, {**PROMPTS[path], **fields})


POSTS = [*GENERATE, "/tokenize", "/detokenize"]
BODIES = {**PROMPTS, "/tokenize": {"prompt": "hi"}, "/detokenize": {"tokens": [104]}}


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "types",
    [
        [None],
        [""],
        ["text/plain"],
        ["text/plain;charset=UTF-8"],
        ["application/x-www-form-urlencoded"],
        ["multipart/form-data; boundary=application/json"],
        ["application/json; charset=utf-16"],
        ["application/jsonx"],
        ["text/plain, application/json"],
        ["application/json", "text/plain"],
    ],
)
def test_a_body_that_a_web_page_can_send_without_permission_is_refused(path, types):
    service = FakeBackend()
    headers = [("content-type", kind) for kind in types]
    response = call(service, "POST", path, BODIES[path], headers=headers)
    assert response.status == 415
    assert response.body["error"]["code"] == "unsupported_media_type"
    assert not service.requests


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "kind",
    ["application/json", "Application/JSON", 'application/json; charset="UTF-8"'],
)
def test_every_spelling_of_the_json_content_type_is_accepted(path, kind):
    headers = [("content-type", kind)]
    assert call(FakeBackend(), "POST", path, BODIES[path], headers=headers).status == 200


async def poll(predicate):
    deadline = asyncio.get_running_loop().time() + 5
    while not predicate():
        assert asyncio.get_running_loop().time() < deadline, "the predicate never became true"
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_runs_keeps_nothing_of_its_body(stream):
    kept = []

    async def script(request, emit):
        # Other tests' garbage may wait for its collection.
        gc.collect()
        # Not isinstance: it reads `__class__` of other libraries' lazy objects, which may warn.
        kept.extend(x for x in gc.get_objects() if type(x) is ParsedRequest)
        await emit(OutputDelta(0, "x", [1], "length"))
        return Usage(len(request.prompt_token_ids), 1)

    service = FakeBackend(script)
    answer = call(service, "POST", "/v1/completions", {"prompt": "hi", "stream": stream})
    assert answer.status == 200
    assert kept == []


@pytest.mark.parametrize("path", GENERATE)
def test_a_stream_gives_the_same_text_and_ends_with_done(path):
    whole = generate(FakeBackend(), path).body["choices"][0]
    response = generate(FakeBackend(), path, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, done = response.events
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
    assert text == (whole["text"] if "text" in whole else whole["message"]["content"])
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "length"


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize("given", [None, "job-7", "a b\tc\xe9\x01d", "x" * 500])
def test_a_request_id_is_made_safe_and_echoed(path, given):
    service = FakeBackend()
    headers = [] if given is None else [("x-request-id", given)]
    for _ in range(2):
        response = call(service, "POST", path, PROMPTS[path], headers=headers)
        echoed = response.headers["x-request-id"]
        expected = {"job-7": "job-7", "a b\tc\xe9\x01d": "abcd", "x" * 500: "x" * 128}
        assert echoed == expected.get(given, echoed)
        assert response.body["id"].endswith(f"-{echoed}")
        assert service.requests[-1].request_id.startswith(f"{echoed}-")
    assert len({request.request_id for request in service.requests}) == 2


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize(
    ("extra", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"temperature": 9}, 400, "temperature"),
        ({"max_tokens": 65}, 400, "max_tokens"),
        ({"mm_payload": 1}, 400, "mm_payload"),
        ({"stop": [1], "n": 3}, 400, None),
    ],
)
def test_a_bad_request_reaches_no_replica(path, extra, status, param):
    service = FakeBackend()
    response = generate(service, path, **extra, stream=True)
    error = response.body["error"]
    assert response.status == status
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param or param is None
    assert service.requests == []


def test_a_long_prompt_is_refused_with_both_numbers():
    service = FakeBackend()
    response = call(service, "POST", "/v1/completions", {"prompt": "x" * 64})
    assert response.status == 400
    assert "64 tokens and max_model_len is 64" in response.body["error"]["message"]
    assert service.requests == []


@pytest.mark.parametrize("path", [*GENERATE, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"prompt": NaN}', b"[" * 60_000])
def test_a_malformed_body_is_a_bad_request(path, raw):
    assert call(FakeBackend(), "POST", path, raw).status == 400


@pytest.mark.parametrize("headers", [[], [("content-length", "3000")], [("content-length", "x")]])
def test_a_large_body_is_refused(headers):
    body = {"prompt": "x" * 3000}
    response = call(
        FakeBackend(), "POST", "/v1/completions", body, headers=headers, max_body_bytes=2000
    )
    assert response.status == 413
    assert "2000 bytes" in response.body["error"]["message"]


def test_a_long_text_is_encoded_off_the_event_loop_with_the_same_result(monkeypatch):
    inline = [generate(FakeBackend(), path).body["choices"] for path in GENERATE]
    monkeypatch.setattr(text_jobs, "MAX_INLINE_COST", 1)
    assert [generate(FakeBackend(), path).body["choices"] for path in GENERATE] == inline


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (SaturatedError("every slot is taken"), 429, "1"),
        (SaturatedError("every slot is taken", retry_after_s=7), 429, "7"),
        (QueueTimeoutError("waited too long"), 408, None),
        (NotReadyError("no replica is ready", retry_after_s=3), 503, "3"),
        (ReplicaLostError("gone"), 503, None),
        (InvalidRequestError("prompt", "too large for the KV pool"), 400, None),
        (RuntimeError("a secret detail"), 500, None),
    ],
)
def test_an_error_before_the_first_event_has_its_status(error, status, retry_after, stream):
    async def script(request, emit):
        raise error

    response = generate(FakeBackend(script), "/v1/completions", stream=stream)
    assert response.status == status
    assert response.headers.get("retry-after") == retry_after
    assert "x-request-id" in response.headers
    assert "secret" not in response.body["error"]["message"]


@pytest.mark.parametrize("error", [ReplicaLostError("the replica died"), ValueError("a secret")])
def test_an_error_mid_stream_is_the_last_event(error):
    async def script(request, emit):
        await emit(OutputDelta(0, "he", [1]))
        raise error

    service = FakeBackend(script)
    response = generate(service, "/v1/completions", stream=True)
    first, last = response.events
    assert response.status == 200
    assert first["choices"][0]["text"] == "he"
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in last["error"]["message"]
    assert service.num_open == 0
    whole = generate(service, "/v1/completions")
    assert whole.status >= 500
    assert whole.body["error"]["code"] == last["error"]["code"]


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_without_an_end_is_an_error(stream):
    async def script(request, emit):
        await emit(OutputDelta(0, "he", [1]))
        return Usage(2, 1)

    response = generate(FakeBackend(script), "/v1/completions", stream=stream)
    error = response.events[-1] if stream else response.body
    assert error["error"]["code"] == "internal_error"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_events", [0, 2])
async def test_a_client_that_leaves_ends_the_request_at_once(stream, num_events):
    reached = asyncio.Event()

    async def script(request, emit):
        for i in range(num_events):
            await emit(OutputDelta(0, "x", [i]))
        reached.set()
        await asyncio.Event().wait()

    service = FakeBackend(script)
    client = Client(make_app(service))
    body = {"prompt": "hi", "stream": stream}
    running = asyncio.create_task(client.request("POST", "/v1/completions", body))
    await asyncio.wait_for(reached.wait(), 5)
    assert service.num_open == 1
    client.gone.set()
    await asyncio.wait_for(running, 5)
    assert service.num_open == 0
    assert client.status == (200 if stream and num_events else 499)


async def test_a_cancelled_request_ends_the_request():
    reached = asyncio.Event()

    async def script(request, emit):
        await emit(OutputDelta(0, "x", [1]))
        reached.set()
        await asyncio.Event().wait()

    service = FakeBackend(script)
    client = Client(make_app(service))
    body = {"prompt": "hi", "stream": True}
    running = asyncio.create_task(client.request("POST", "/v1/completions", body))
    await asyncio.wait_for(reached.wait(), 5)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert service.num_open == 0
    assert len(asyncio.all_tasks()) == 1


async def test_a_client_that_stops_reading_and_leaves_ends_the_request():
    async def script(request, emit):
        while True:
            await emit(OutputDelta(0, "x", [1]))

    service = FakeBackend(script)
    app = make_app(service)
    is_stuck = asyncio.Event()

    async def app_with_full_socket(scope, receive, send):
        async def send_nothing(message):
            is_stuck.set()
            await asyncio.Event().wait()

        await app(scope, receive, send_nothing)

    client = Client(app_with_full_socket)
    body = {"prompt": "hi", "stream": True}
    running = asyncio.create_task(client.request("POST", "/v1/completions", body))
    await asyncio.wait_for(is_stuck.wait(), 5)
    assert service.num_open == 1
    client.gone.set()
    await poll(lambda: service.num_open == 0)
    running.cancel()


def test_models_are_listed_and_found_by_id():
    listed = call(FakeBackend(), "GET", "/v1/models").body
    assert [card["id"] for card in listed["data"]] == ["demo"]
    card = call(FakeBackend(), "GET", "/v1/models/demo").body
    assert card == listed["data"][0]
    assert (card["root"], card["max_model_len"], card["created"]) == ("demo-folder", 64, 17)
    assert call(FakeBackend(), "GET", "/v1/models/org/other").status == 404


def test_tokenize_and_detokenize_are_inverse():
    service = FakeBackend()
    tokenized = call(service, "POST", "/tokenize", {"prompt": "hé", "return_token_strs": True}).body
    assert (tokenized["count"], tokenized["max_model_len"]) == (3, 64)
    assert tokenized["token_strs"] == ["h", "Ã", "©"]
    body = {"tokens": tokenized["tokens"], "model": "demo"}
    assert call(service, "POST", "/detokenize", body).body == {"prompt": "hé"}
    chat = call(service, "POST", "/tokenize", PROMPTS["/v1/chat/completions"]).body
    assert service.tokenizer.decode(chat["tokens"]) == "[user]hi[assistant]"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, 400, "return_token_strs"),
        ("/detokenize", {"tokens": [1, 256]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [1, "2"]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_bad_tokenize_bodies_are_refused(path, body, status, param):
    response = call(FakeBackend(), "POST", path, body)
    assert (response.status, response.body["error"]["param"]) == (status, param)


def test_health_says_why_it_is_not_ready_while_live_stays_well():
    service = FakeBackend()
    assert call(service, "GET", "/health").status == 200
    service.ready = (False, "draining")
    response = call(service, "GET", "/health")
    assert (response.status, response.body["reason"]) == (503, "draining")
    assert call(service, "GET", "/live").status == 200


def test_health_is_degraded_while_a_part_is_ill_and_the_rest_serves():
    service = FakeBackend()
    service.ready = (True, "replicas that do not get on: 1")
    response = call(service, "GET", "/health")
    assert (response.status, response.body["status"]) == (200, "degraded")
    assert response.body["reason"] == "replicas that do not get on: 1"


def test_metrics_and_version():
    response = call(FakeBackend(), "GET", "/metrics", headers=OPERATOR)
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"".join(response.chunks) == b"vllm:num_requests_running 0\n"
    assert call(FakeBackend(), "GET", "/version").body == {"version": "1.2.3"}


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)]
)
def test_paths_and_methods_that_do_not_exist_answer_in_the_same_form(method, path, status):
    response = call(FakeBackend(), method, path)
    assert response.status == status
    assert set(response.body["error"]) == {"message", "type", "param", "code"}
    assert "x-request-id" in response.headers


@pytest.mark.parametrize(
    ("steps", "status", "body"),
    [
        ({"d1": True, "d2": True}, 200, b""),
        ({"d1": True, "d2": False}, 200, b'{"status":"degraded","silent":["d2"]}'),
        ({"d1": False}, 503, b'{"status":"not ready","silent":["d1"]}'),
        ({}, 503, b'{"status":"not ready","silent":[]}'),
    ],
)
def test_health_generate_reports_which_replicas_ended_a_step(steps, status, body):
    backend = FakeBackend()
    backend.steps = steps
    response = call(backend, "GET", "/health_generate", headers=OPERATOR)
    assert (response.status, b"".join(response.chunks)) == (status, body)


def test_debug_slots_returns_the_backends_view():
    client = call(FakeBackend(), "GET", "/debug/slots", headers=OPERATOR)
    assert client.status == 200
    expected = {"num_queued": 3, "num_awaiting_admission": 1, "replicas": [], "num_ingresses": 1}
    assert client.body == expected


def test_a_request_that_is_not_known_has_no_route():
    client = call(FakeBackend(), "GET", "/debug/routes/some/id", headers=OPERATOR)
    assert client.status == 404
    assert "'some/id'" in client.body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("headers", "answer"),
    [((), None), ([("x-debug-route", "0")], None), ([("x-debug-route", "1")], "decode=3")],
)
def test_the_route_header_is_sent_on_request_only(stream, headers, answer):
    body = {"prompt": "abc", "stream": stream}
    ask = ("POST", "/v1/completions", body)
    client = call(FakeBackend(), *ask, headers=headers, route_header=True)
    assert client.status == 200
    assert client.headers.get("x-debug-route") == answer
    assert "x-debug-route" not in call(FakeBackend(), *ask, headers=headers).headers


def test_kv_returns_the_running_transfers():
    client = call(FakeBackend(), "GET", "/kv", headers=OPERATOR)
    assert client.status == 200
    assert client.headers["content-type"] == "application/json"
    [replica] = client.body["replicas"]
    assert (replica["replica"], replica["is_silent"], replica["transfers"]) == (
        "decode-d",
        False,
        [],
    )


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize(
    "field",
    [
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"}},
        {"ec_transfer_params": {}},
        {"vllm_xargs": {"kv_transfer_params": "{}"}},
        {"ticket": "AAAA"},
        {"kv_ticket": "AAAA"},
        {"do_remote_prefill": True},
        {"do_remote_decode": False},
        {"remote_block_ids": [1]},
        {"remote_engine_id": "x"},
        {"bootstrap_room": 1},
        {"transfer_id": "0" * 32},
        {"producer_endpoints": ["tcp://10.0.0.1:1"]},
        {"stream_options": {"kv_transfer_params": {}}, "stream": True},
    ],
    ids=lambda field: next(iter(field)),
)
def test_body_cannot_bring_a_ticket_or_an_endpoint(path, field):
    """Documented ones are refused; others are no part of the request."""
    service = FakeBackend()
    body = {**PROMPTS[path], "seed": 7}
    assert call(service, "POST", path, body).status == 200
    client = call(service, "POST", path, {**body, **field})
    if client.status == 200:
        [plain, given] = service.requests
        assert given == msgspec.structs.replace(plain, request_id=given.request_id)
    else:
        assert client.status == 400
        assert next(iter(field)) in client.body["error"]["message"]
        assert len(service.requests) == 1
    refused = call(service, "POST", path, {**body, **field}, unknown_fields="refuse")
    assert refused.status == 400
    assert next(iter(field)) in refused.body["error"]["message"]


@pytest.mark.parametrize("path", GENERATE)
def test_the_cache_salt_is_passed_on_unchanged(path):
    service = FakeBackend()
    assert call(service, "POST", path, PROMPTS[path]).status == 200
    for salt in ("s", "tenant ü", "x" * 256):
        assert call(service, "POST", path, {**PROMPTS[path], "cache_salt": salt}).status == 200
    assert [request.cache_salt for request in service.requests] == [
        "",
        "s",
        "tenant ü",
        "x" * 256,
    ]


@pytest.mark.parametrize("salt", ["", "secret" * 43, 7, ["s"], {}, True])
def test_an_invalid_cache_salt_is_refused_and_not_shown(salt):
    client = call(FakeBackend(), "POST", GENERATE[0], {"prompt": "hi", "cache_salt": salt})
    assert (client.status, client.body["error"]["param"]) == (400, "cache_salt")
    assert "secret" not in client.body["error"]["message"]


@pytest.mark.parametrize("field", ["session_id", "prompt_cache_key"])
def test_a_request_that_waits_to_be_encoded_keeps_no_long_name_of_its_session(field):
    messages = [{"role": "user", "content": "hi"}]
    parsed = parse_chat_completion({"messages": messages, field: "s" * 100_000})
    assert len(parsed.values[field]) == 32


def test_requests_of_one_session_have_a_short_name_in_common():
    service = FakeBackend()
    completions, chat = GENERATE
    for path, fields in (
        (completions, {}),
        (completions, {"session_id": "s"}),
        (chat, {"session_id": "s"}),
        (chat, {"prompt_cache_key": "s"}),
        (chat, {"prompt_cache_key": "k" * 9000, "session_id": "s"}),
        (chat, {"prompt_cache_key": "", "session_id": ""}),
    ):
        generate(service, path, **fields)
    none, first, *same, other, empty = [request.session for request in service.requests]
    assert none == empty == ""
    assert set(same) == {first}
    assert other not in {"", first}, "the key of the cache counts before the session"
    assert len(other) == len(first) == 32


@pytest.mark.parametrize("path", GENERATE)
def test_a_seed_is_minted_for_a_request_that_has_none(path):
    service = FakeBackend()
    for extra in ({}, {}, {"seed": -1}, {"seed": 7}):
        generate(service, path, **extra)
    *minted, given = [request.sampling.seed for request in service.requests]
    assert given == 7
    assert len(set(minted)) == 3
    assert all(0 <= seed < 2**63 for seed in minted)


@pytest.mark.parametrize("path", GENERATE)
def test_an_adapters_name_selects_it_and_its_base_models_name_does_not(path):
    service = FakeBackend(adapters=["pirate"])
    for model in ("pirate", "demo", None):
        response = generate(service, path, model=model)
        assert response.body["model"] == (model or "demo")
    assert [request.adapter for request in service.requests] == ["pirate", "", ""]


@pytest.mark.parametrize("path", GENERATE)
def test_a_delta_is_one_message(path):
    async def script(request, emit):
        for i in range(5):
            await emit(OutputDelta(0, "x", [i]))
        await emit(OutputDelta(0, "x", [5], "length"))
        return Usage(2, 6)

    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = generate(FakeBackend(script), path, **options)
    assert len(response.chunks) == 6
    assert len(response.events) == 8, "the counts and [DONE] go out with the last delta"

"""The OpenAPI document tells the truth about routes, fields and answers; its page loads nothing."""

import base64
import hashlib
import re

import jsonschema
import pytest

from cluster.edge.fields import Support
from cluster.edge.openai_fields import CHAT_FIELDS, MESSAGE_FIELDS
from cluster.edge.openapi import OPERATIONS, openapi_document, tables_of
from cluster.edge.openapi_schemas import SCHEMAS as ANSWERS
from cluster.edge.openapi_schemas import view_schemas
from cluster.edge.route_table import ROUTES
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_routes import OPERATOR, PROMPTS, call

DOCUMENT = openapi_document("1.2.3", "operations", has_keys=True, is_closed=False)
SCHEMAS = DOCUMENT["components"]["schemas"]


def problems(schema, value):
    """What is wrong with a value by a schema of the document."""
    validator = jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]})
    return [error.message for error in validator.iter_errors(value)]


def test_every_route_has_one_operation():
    assert sorted(OPERATIONS) == sorted(spec.name for spec in ROUTES)
    ids = [each["operationId"] for path in DOCUMENT["paths"].values() for each in path.values()]
    assert sorted(ids) == sorted(OPERATIONS)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_is_one_and_refers_to_others_of_the_document(name):
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    assert set(re.findall(r"#/components/schemas/(\w+)", str(SCHEMAS[name]))) <= set(SCHEMAS)


def test_the_fields_of_requests_are_those_of_the_tables():
    for operation in OPERATIONS.values():
        for name, table in tables_of(operation.fields).items() if operation.fields else ():
            assert SCHEMAS[name]["properties"].keys() == table.keys()
            assert SCHEMAS[name].get("required", []) == list(table.required)
    for name, row in CHAT_FIELDS.items():
        shown = SCHEMAS["ChatCompletionRequest"]["properties"][name]
        assert shown["description"].endswith(row.text)
        if row.support is Support.NOT_YET:
            assert shown["enum"] == [*row.neutral, None]
    assert MESSAGE_FIELDS.name in SCHEMAS


def test_no_two_objects_share_the_name_of_a_schema():
    named = {}
    for operation in OPERATIONS.values():
        for name, table in tables_of(operation.fields).items() if operation.fields else ():
            assert named.setdefault(name, table) is table, name
    assert not named.keys() & {*ANSWERS, *view_schemas()}


def test_required_fields_cannot_be_null_and_others_can():
    assert problems(SCHEMAS["ChatCompletionRequest"], {"messages": None})
    optional = dict.fromkeys(CHAT_FIELDS.keys() - {"messages"})
    message = {"role": "user", "content": "hi"}
    assert not problems(SCHEMAS["ChatCompletionRequest"], {"messages": [message], **optional})


@pytest.mark.parametrize("is_closed", [True, False])
def test_unknown_fields_are_part_of_the_document_if_they_are_ignored(is_closed):
    document = openapi_document("1", "both", has_keys=False, is_closed=is_closed)
    request = document["components"]["schemas"]["CompletionRequest"]
    assert request["additionalProperties"] is not is_closed


def test_routes_of_operators_and_their_schemas_are_shown_to_operators_alone():
    public = call(FakeBackend(), "GET", "/openapi.json").body
    whole = call(FakeBackend(), "GET", "/openapi.json", headers=OPERATOR).body
    hidden = {spec.path.replace(":path", "") for spec in ROUTES if spec.listener == "operations"}
    assert hidden == whole["paths"].keys() - public["paths"].keys()
    assert "SlotsView" in whole["components"]["schemas"]
    assert "SlotsView" not in public["components"]["schemas"]
    page = b"".join(call(FakeBackend(), "GET", "/docs").chunks).decode()
    assert not [path for path in hidden if path in page]


def test_routes_need_a_key_where_there_are_keys():
    for spec in ROUTES:
        shown = DOCUMENT["paths"][spec.path.replace(":path", "")][spec.method.lower()]
        assert ("security" in shown) == ("401" in shown["responses"]) == (spec.access != "open")
    document = call(FakeBackend(), "GET", "/openapi.json").body
    assert "401" not in str(document)
    assert "securitySchemes" not in document["components"]


TOOL_TEXT = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]
MESSAGES = {**PROMPTS["/v1/chat/completions"], "max_tokens": 99}
CASES = [
    ("POST", "/v1/completions", {"prompt": "hi"}),
    ("POST", "/v1/completions", {"prompt": "hi", "n": 2, "logprobs": 1, "temperature": 1}),
    ("POST", "/v1/completions", {"prompt": "hi", "return_token_ids": True, "prompt_logprobs": 1}),
    ("POST", "/v1/completions", {"prompt": 5}),
    ("POST", "/v1/chat/completions", PROMPTS["/v1/chat/completions"]),
    ("POST", "/v1/chat/completions", {**PROMPTS["/v1/chat/completions"], "logprobs": True}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": TOOL_TEXT}],
                                      "tools": TOOLS, "return_token_ids": True}),
    ("POST", "/v1/messages", MESSAGES),
    ("POST", "/v1/messages", {**MESSAGES, "max_tokens": None}),
    ("POST", "/v1/messages", {**MESSAGES, "thread": {"type": "create"}}),
    ("POST", "/v1/messages/count_tokens", MESSAGES),
    ("POST", "/v1/responses", {"model": "demo", "input": "hi"}),
    ("POST", "/v1/responses", {"model": "demo", "input": TOOL_TEXT,
                               "tools": [{"type": "function", "name": "f"}]}),
    ("POST", "/v1/responses", {"input": "hi"}),
    ("POST", "/v1/responses/compact", {}),
    ("GET", "/v1/responses/{response_id}", b""),
    ("DELETE", "/v1/responses/{response_id}", b""),
    ("POST", "/v1/responses/{response_id}/cancel", b""),
    ("POST", "/tokenize", {"prompt": "hi"}),
    ("POST", "/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [104]}),
    ("GET", "/v1/models", b""),
    ("GET", "/v1/models/{model_id}", b""),
    ("GET", "/version", b""),
    ("GET", "/health_generate", b""),
    ("GET", "/kv", b""),
    ("GET", "/debug/slots", b""),
    ("GET", "/debug/routes/{request_id}", b""),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body"), CASES)
def test_answers_and_errors_fit_their_schemas(method, path, body):
    service = FakeBackend()
    service.tool_call_parser = "hermes"
    service.max_model_len = 4096
    real = path.replace("{model_id}", "demo").replace("{request_id}", "none")
    answer = call(service, method, real, body, headers=OPERATOR)
    shown = DOCUMENT["paths"][path][method.lower()]["responses"][str(answer.status)]
    assert problems(shown["content"]["application/json"]["schema"], answer.body) == []


def test_the_page_shows_routes_and_fields_and_loads_nothing():
    answer = call(FakeBackend(), "GET", "/docs")
    page = b"".join(answer.chunks).decode()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "POST /v1/chat/completions" in page
    assert "parallel_tool_calls" in page
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|https?://", page)
    assert re.findall("href='([^#][^']*)'", page) == ["openapi.json"]
    anchors = set(re.findall("href='#([^']*)'", page))
    assert anchors <= set(re.findall("id='([^']*)'", page))


def test_the_policy_of_the_page_allows_its_own_style_alone():
    answer = call(FakeBackend(), "GET", "/docs")
    [style] = re.findall("<style>(.*?)</style>", b"".join(answer.chunks).decode(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; ")
    assert "unsafe" not in policy

"""Requests that schemathesis makes of the OpenAPI document: no 5xx, and nothing undocumented.

`run(route, mode, 5_000)` makes more of them.
"""

import functools
import os
import sys

import pytest
from hypothesis import HealthCheck, given, settings

from cluster.edge.openapi import OPERATIONS
from cluster.edge.route_table import ROUTES
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_routes import OPERATOR, make_app

# In CI a missing package would hide what it finds.
if not os.environ.get("CI") or sys.version_info < (3, 11):
    pytest.importorskip("schemathesis", reason="part of the dev extra from Python 3.11 on")

import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    allow_header_conformance,
]
HEADERS = dict(OPERATOR)
NUM_VALID, NUM_INVALID, NUM_WITHOUT_BODY = 12, 6, 2


class Backend(FakeBackend):
    """A model that calls tools; one replica that obeys."""

    max_model_len = 256
    tool_call_parser = "hermes"

    def __init__(self):
        super().__init__()
        self.steps = {"decode-0": True}


def plausible(body):
    """Change a body where fields depend on each other, which its schema does not say."""
    if not isinstance(body, dict):
        return
    for name in ("model", "use_beam_search"):
        body.pop(name, None)
    if "input" in body:  # a response, which needs a model
        body["model"] = "demo"
        body.pop("previous_response_id", None)
    if "messages" in body:
        body.pop("prompt", None)
    for message in body.get("messages") or ():
        if isinstance(message, dict):
            if message.get("content") is None:
                message["content"] = "hi"
            if message.get("role") != "assistant":
                message.pop("tool_calls", None)


@functools.cache
def document():
    """The document of one application, which all tests share."""
    app = make_app(Backend())
    return schemathesis.openapi.from_asgi("/openapi.json", app, headers=HEADERS)


def documented(name):
    """A route of the application, as the document describes it."""
    spec = next(spec for spec in ROUTES if spec.name == name)
    return document()[spec.path.replace(":path", "")][spec.method]


def run(name, mode, num_cases):
    """Send cases of one route; return the number of each status."""
    operation, counts = documented(name), {}

    @settings(max_examples=num_cases, deadline=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def check(case):
        if mode is GenerationMode.POSITIVE:
            plausible(case.body)
        response = case.call(headers=HEADERS)
        case.validate_response(response, checks=CHECKS)
        counts[response.status_code] = counts.get(response.status_code, 0) + 1

    check()
    return counts


WITH_BODY = [name for name, operation in OPERATIONS.items() if operation.fields is not None]


@pytest.mark.parametrize("name", OPERATIONS)
def test_valid_requests_get_documented_answers(name):
    num_cases = NUM_VALID if name in WITH_BODY else NUM_WITHOUT_BODY
    assert sum(run(name, GenerationMode.POSITIVE, num_cases).values()) > 0


@pytest.mark.parametrize("name", WITH_BODY)
def test_invalid_requests_are_refused_as_documented(name):
    counts = run(name, GenerationMode.NEGATIVE, NUM_INVALID)
    assert counts.keys() <= {400, 404, 413, 415}


MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
STREAMED = {
    "completions": {"prompt": "hi"},
    "chat_completions": MESSAGES,
    "messages": {**MESSAGES, "max_tokens": 5, "model": "demo"},
}


@pytest.mark.parametrize("name", STREAMED)
def test_the_events_of_streams_are_documented(name):
    body = {**STREAMED[name], "stream": True}
    case = documented(name).Case(body=body, media_type="application/json")
    response = case.call(headers=HEADERS)
    assert response.status_code == 200
    case.validate_response(response, checks=CHECKS)

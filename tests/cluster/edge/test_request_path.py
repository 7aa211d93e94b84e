"""Limits of what a plain request calls at the edge: lower them with each change that calls less."""

import asyncio
import sys
from pathlib import Path

import pytest

import cluster
import replicas
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_routes import GENERATE, PROMPTS, Client, make_app

MAX_CALLS = {"/v1/completions": 146, "/v1/chat/completions": 173}
OURS = tuple(f"{Path(package.__file__).parent}/" for package in (cluster, replicas))


def calls_of(path):
    """Return the functions of ours that a streamed request of one token calls, in order."""
    calls = []

    def record(frame, event, arg):
        del arg
        code = frame.f_code
        # Comprehensions are functions of their own before Python 3.12.
        if event == "call" and code.co_filename.startswith(OURS) and code.co_name[0] != "<":
            calls.append(f"{code.co_filename}:{code.co_firstlineno} {code.co_name}")

    async def run():
        app = make_app(FakeBackend())
        body = {**PROMPTS[path], "max_tokens": 1, "stream": True}
        await Client(app).request("POST", path, body)  # fills caches
        sys.setprofile(record)
        try:
            await Client(app).request("POST", path, body)
        finally:
            sys.setprofile(None)

    asyncio.run(run())
    return calls


@pytest.mark.parametrize("path", GENERATE)
def test_a_plain_request_calls_no_more_functions(path):
    calls = calls_of(path)
    assert len(calls) <= MAX_CALLS[path], "\n".join(calls)

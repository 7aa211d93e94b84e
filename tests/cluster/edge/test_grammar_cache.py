"""Grammars of calls: built once for the same tools, long ones off the event loop."""

import asyncio
import threading

from cluster.edge.grammar_cache import GrammarCache
from cluster.edge.message_output import MessageOutput
from cluster.edge.structured_outputs import Grammar
from replicas.sampling_params import StructuredOutputs
from tests.cluster.edge.test_routes import MAX_BODY_BYTES, Client, make_app
from tests.cluster.edge.test_tool_calls import PATH, TOOL, USER, ToolBackend


def test_the_least_recently_used_grammars_are_dropped():
    cache = GrammarCache(max_chars=10)
    grammars = [Grammar(StructuredOutputs(grammar="x" * size), "tools") for size in (4, 4, 11, 4)]
    for key, grammar in enumerate(grammars[:3]):
        cache.add(key, grammar)
    assert cache.get(0) is grammars[0]
    cache.add(3, grammars[3])
    assert [cache.get(key) for key in range(4)] == [grammars[0], None, None, grammars[3]]


def built_for(monkeypatch, bodies):
    """The threads in which grammars were built for some requests, one after the other."""
    threads = []
    build = MessageOutput.grammar

    def grammar(output, own, ids, end):
        threads.append(threading.current_thread())
        return build(output, own, ids, end)

    monkeypatch.setattr(MessageOutput, "grammar", grammar)
    backend = ToolBackend()
    app = make_app(backend, MAX_BODY_BYTES)

    async def send():
        return [await Client(app).request("POST", PATH, body) for body in bodies]

    assert {answer.status for answer in asyncio.run(send())} == {200}
    return threads, [each.sampling.structured_outputs for each in backend.requests]


def test_the_grammar_of_the_same_tools_is_built_once(monkeypatch):
    body = {"messages": [USER], "tools": [TOOL], "tool_choice": "required"}
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    later = {**body, "messages": [USER, {"role": "assistant", "content": "a"}, USER]}
    others = [{**body, "tools": [strict]}, {**body, "parallel_tool_calls": False}]
    threads, grammars = built_for(monkeypatch, [body, later, *others])
    # One is for the check before the prompt's tokens are known.
    assert len(threads) == 3 * 2
    assert grammars[0] == grammars[1] == grammars[2]
    assert grammars[0] != grammars[3]


def test_a_large_grammar_is_built_off_the_event_loop(monkeypatch):
    function = {**TOOL["function"], "parameters": {"description": "x" * 5_000}}
    body = {"messages": [USER], "tools": [TOOL], "tool_choice": "required"}
    large = {**body, "tools": [{"type": "function", "function": function}]}
    threads, _ = built_for(monkeypatch, [body, large])
    main = threading.main_thread()
    assert [thread is main for thread in threads] == [True, True, False, False]

"""Budgets of reasoning in requests."""

import pytest

from cluster.edge.families.table import REASONING_FORMATS
from cluster.edge.message_output import BUDGET_FIELD, MessageOutput
from cluster.edge.openai import Usage
from cluster.edge.tool_requests import NO_TOOLS
from cluster.errors import BadRequestError
from replicas.output_processor import OutputDelta
from replicas.sampling_params import ReasoningBudget, ReasoningMarks
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_routes import call

PATH = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}
START, END = 256, 257


class ThinkingBackend(FakeBackend):
    """A model with tokens around its reasoning that says a text."""

    max_model_len = 4096
    reasoning_parser = "qwen3"

    def __init__(self, text="", marks=("<think>", "</think>")):
        super().__init__(self.say)
        self.text = text
        self.tokenizer.backend.add_tokens(list(marks))
        self.tokenizer.vocab_size = 256 + len(marks)

    async def say(self, request, emit):
        ids = self.tokenizer.encode(self.text)
        for choice in range(request.sampling.n):
            for token_id in ids:
                text = self.tokenizer.decode([token_id], skip_special_tokens=False)
                await emit(OutputDelta(choice, text, [token_id]))
            await emit(OutputDelta(choice, "", [], "stop"))
        return Usage(len(request.prompt_token_ids), len(ids))


def test_a_budget_reaches_the_engine():
    backend = ThinkingBackend("a")
    call(backend, "POST", PATH, {**BODY, "thinking_token_budget": 3})
    call(backend, "POST", PATH, BODY)
    marks = ReasoningMarks(start_token_ids=(START,), end_token_ids=(END,))
    budgets = [request.sampling.reasoning_budget for request in backend.requests]
    assert budgets == [ReasoningBudget(max_tokens=3, marks=marks), None]


@pytest.mark.parametrize(
    ("extra", "options", "words"),
    [
        ({}, {"reasoning_parser": None}, "args.reasoning_parser"),
        ({}, {"marks": ("<other>",)}, "no tokens that end its reasoning"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {}, "this grammar"),
        ({"use_beam_search": True}, {}, "use_beam_search"),
        ({"thinking_token_budget": -1}, {}, "at least 0"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(extra, options, words):
    backend = ThinkingBackend(marks=options.pop("marks", ("<think>", "</think>")))
    vars(backend).update(options)
    client = call(backend, "POST", PATH, {**BODY, "thinking_token_budget": 5, **extra})
    assert (client.status, client.body["error"]["param"]) == (400, "thinking_token_budget")
    assert words in client.body["error"]["message"]


@pytest.mark.parametrize(
    ("parser", "marks", "budget"),
    [("qwen3", ("<think>", "</think>"), 1024), ("qwen3", ("<other>",), None), (None, (), None)],
)
def test_a_budget_of_anthropics_api_is_dropped_where_it_cannot_be_kept(parser, marks, budget):
    backend = ThinkingBackend("a", marks)
    backend.reasoning_parser = parser
    thinking = {"type": "enabled", "budget_tokens": 1024}
    client = call(backend, "POST", "/v1/messages", {**BODY, "max_tokens": 9, "thinking": thinking})
    assert client.status == 200
    given = backend.requests[0].sampling.reasoning_budget
    assert (given and given.max_tokens) == budget


@pytest.mark.parametrize(
    ("name", "prompt_end", "wanted"),
    [
        ("qwen3", "<think>\n", ("<think>", "</think>", True)),
        ("qwen3", "<think>\n\n</think>\n\n", None),
        ("deepseek_r1", "", ("<think>", "</think>", True)),
        ("gemma4", "", ("<|channel>thought", "<channel|>", False)),
        ("mistral", "", ("[THINK]", "[/THINK]", False)),
        ("kimi_k3", "<|open|>think<|sep|>",
         ("<|open|>think<|sep|>", "<|close|>think<|sep|>", True)),
        ("kimi_k3", "<|open|>response<|sep|>", None),
    ],
)  # fmt: skip
def test_each_format_knows_the_tokens_around_its_reasoning(name, prompt_end, wanted):
    output = MessageOutput(None, REASONING_FORMATS[name], NO_TOOLS)
    known = {}

    def token_ids_of(text):
        return (known.setdefault(text, len(known)),)

    budget = output.reasoning_budget(1, token_ids_of, prompt_end)
    assert (budget and (*known, budget.marks.is_open)) == wanted


def test_reasoning_that_may_begin_again_has_no_budget():
    output = MessageOutput(None, REASONING_FORMATS["openai_gptoss"], NO_TOOLS)
    with pytest.raises(BadRequestError, match="set reasoning_effort"):
        output.reasoning_budget(1, lambda text: (1,), "")


def test_a_budget_of_a_response_reaches_the_engine():
    backend = ThinkingBackend("a")
    client = call(
        backend, "POST", "/v1/responses", {"model": "demo", "input": "hi", BUDGET_FIELD: 3}
    )
    assert client.status == 200, client.body
    assert backend.requests[0].sampling.reasoning_budget.max_tokens == 3

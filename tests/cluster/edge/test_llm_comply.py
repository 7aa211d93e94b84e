"""Score of the APIs in llm-comply, a suite for the APIs of OpenAI and Anthropic.

A scripted model takes the part of the engines: the suite judges the form of answers and streams.
"""

import dataclasses
import os
from pathlib import Path

import pytest

from cluster.config.schema import IngressConfig
from cluster.edge.openai import Usage
from cluster.edge.routes import create_app
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.http_server import serving

if not os.environ.get("CI"):  # where a missing package would hide the score
    pytest.importorskip("llm_comply", reason="part of the dev extra")

import llm_comply
from llm_comply import cli, config, runner, schema

MODEL = "deepseek-r1-claude-opus"
"""A name by which the suite knows that the model reasons."""
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Bern"}}\n</tool_call>'
NO_IMAGES = "the served models read text alone"
MISSES = {
    "openai-chat": {
        "chat-image-input": NO_IMAGES,
        "chat-error-handling": "wants model to be required, as OpenAI does; vLLM does not",
    },
    "open-responses": {"image-input": NO_IMAGES},
    "anthropic": {"anth-image-input": NO_IMAGES},
}
"""Tests that fail, and why."""
FORMATS = {"openai-chat": 9, "open-responses": 13, "anthropic": 9}
"""Number of tests of each format."""


class ScriptedModel(FakeBackend):
    """A model that calls a tool if it has to, reasons if it is asked to, and else says hello."""

    max_model_len = 4096
    tool_call_parser, reasoning_parser = "hermes", "qwen3"

    def __init__(self):
        super().__init__(self.say)

    def models(self):
        return [dataclasses.replace(card, id=MODEL) for card in super().models()]

    async def say(self, request, emit):
        prompt = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        text = "Hello there, friend."
        if "weather" in prompt:
            text = CALL
        elif "15 * 37" in prompt:
            text = "<think>\n15 * 37 is 555.\n</think>\n\n555"
        for begin in range(0, len(text), 5):
            piece = text[begin : begin + 5]
            await emit(OutputDelta(0, piece, self.tokenizer.encode(piece)))
        await emit(OutputDelta(0, "", [], "stop"))
        return Usage(len(request.prompt_token_ids), len(text))


@pytest.mark.filterwarnings("ignore:jsonschema.RefResolver is deprecated")
@pytest.mark.parametrize("name", FORMATS)
def test_the_score_never_falls(name, record_property):
    specification = cli._SPEC_FILES.get(name)
    folder = Path(llm_comply.__file__).parent / "specs"
    loader = schema.SpecLoader(str(folder / specification) if specification else None)
    with serving(create_app(ScriptedModel(), IngressConfig(), version="0")) as port:
        options = config.ComplianceConfig(f"http://127.0.0.1:{port}/v1", "key", MODEL, timeout=10)
        suite = runner.TestRunner(options, cli._get_tests(name), loader).run_all()
    assert suite.total == FORMATS[name]
    record_property("summary", f"llm-comply {name}: {suite.passed} of {suite.total}")
    failed = {each.id: each.errors for each in suite.results if each.status.value != "passed"}
    assert failed.keys() == MISSES[name].keys(), failed

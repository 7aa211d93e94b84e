"""Required calls of a model that knows no tools: arguments follow random schemas."""

import json
import random

import jsonschema
import pytest

from cluster.config.resolve import demo_model_folder
from cluster.edge.families.formats import OutputContext
from cluster.edge.families.grammar import CallRules, message_grammar
from cluster.edge.families.message import Tool
from cluster.edge.families.parser import OutputParser
from cluster.edge.families.table import TOOL_FORMATS
from replicas import LLM, SamplingParams
from replicas.sampling_params import StructuredOutputs

FORMATS = ["hermes", "qwen3_coder", "gemma4"]
NUM_SCHEMAS = 6
"""Random schemas for each format."""


def schema(rng, depth=0):
    """A random schema whose values are short."""
    kind = rng.choice(
        ["string", "enum", "integer", "boolean", "null", "array", "object"][: 7 - depth]
    )
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 6)}
    if kind == "enum":
        return {"type": "string", "enum": rng.sample(["a", "b c", 'd"e', "é", "\\"], 3)}
    if kind == "integer":
        return {"type": "integer", "minimum": rng.randint(-9, 0), "maximum": rng.randint(1, 99)}
    if kind == "array":
        return {"type": "array", "items": schema(rng, depth + 1), "maxItems": rng.randint(1, 2)}
    if kind == "object":
        return parameters(rng, depth + 1)
    return {"type": kind}


def parameters(rng, depth=0):
    names = rng.sample(["city", "days", "unit", "x_1", "flag"], rng.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


@pytest.fixture(scope="module")
def llm():
    with LLM(demo_model_folder(), multiprocess=False, max_model_len=512, max_batch_size=8) as llm:
        yield llm


@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_follow_their_schemas(llm, name):
    tools, params = [], []
    for seed in range(NUM_SCHEMAS):
        tool = Tool(f"tool_{seed}", parameters(random.Random(f"{name}{seed}")))
        rules = CallRules([tool], is_required=True, is_parallel=False)
        grammar = message_grammar(TOOL_FORMATS[name], None, rules, {})
        tools.append(tool)
        params.append(
            SamplingParams(
                max_tokens=400,
                seed=seed,
                skip_special_tokens=False,
                structured_outputs=StructuredOutputs(grammar=grammar),
            )
        )
    outputs = llm.generate(["Call it."] * NUM_SCHEMAS, params, use_tqdm=False)
    for tool, output in zip(tools, outputs, strict=True):
        choice = output.outputs[0]
        assert choice.finish_reason == "stop", choice.text
        parser = OutputParser(TOOL_FORMATS[name], None, OutputContext({tool.name: tool}))
        message = parser.read(choice.text)
        [call] = message.calls
        assert (call.name, message.content) == (tool.name, "")
        jsonschema.validate(json.loads(call.arguments), tool.parameters)

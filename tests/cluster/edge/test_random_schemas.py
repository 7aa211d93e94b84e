"""Required and named calls drawn from their grammars at random: arguments follow their schemas.

The tokens are those of the demo model, which knows no tools.
"""

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from cluster.config.resolve import demo_model_folder
from cluster.edge.families.table import TOOL_FORMATS
from cluster.edge.message_output import MessageOutput
from cluster.edge.tool_requests import read_tool_use
from replicas.grammars import GrammarCompiler
from replicas.tokenizer import Tokenizer

NUM_SCHEMAS = 500
LEAVES = [
    {"type": "string", "maxLength": 5},
    {"type": "string", "enum": ["a", "b c", 'd"e', "é", "\\"]},
    {"type": "string", "pattern": "^[a-z]{1,4}-?[0-9]$"},
    {"type": "integer", "minimum": -9, "maximum": 99},
    {"type": "boolean"},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": ["integer", "boolean"], "maximum": 5, "minimum": 0},
    {"enum": ["x", 1, None]},
    {"const": "y"},
    {"$ref": "#/$defs/short"},
    {"$ref": "#/$defs/pair"},
    {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/short"}]},
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}]},
]
DEFINITIONS = {
    "short": {"type": "string", "maxLength": 3},
    "pair": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
}


def schema(rng, depth=0):
    kind = rng.random()
    if depth < 2 and kind < 0.15:
        return {"type": "array", "items": schema(rng, depth + 1), "maxItems": rng.randint(1, 2)}
    if depth < 2 and kind < 0.3:
        return record(rng, depth + 1)
    return rng.choice(LEAVES)


def record(rng, depth=0):
    names = rng.sample(["city", "days", "unit", "x_1", "flag"], rng.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def request(rng):
    """The tools of a request and its choice: required, or by name."""
    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": parameters}}
        for i in range(2)
        for parameters in [{**record(rng), "$defs": DEFINITIONS}]
    ]
    named = {"type": "function", "function": {"name": "tool_1"}}
    choice = rng.choice(["required", named])
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(demo_model_folder())


def drawn(matcher, rng, begin, decode):
    """A text that a grammar accepts, whose tokens are drawn at random behind the first ones."""
    token_ids = list(begin)
    assert all(map(matcher.consume_token, begin))
    while not matcher.is_stopped():
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        token_id = int(allowed[rng.randrange(len(allowed))])
        assert matcher.consume_token(token_id)
        token_ids.append(token_id)
        assert len(token_ids) < 1000
    assert matcher.is_accepting()
    return decode(token_ids)


def test_required_and_named_calls_follow_their_schemas(tokenizer):
    folder = Path(demo_model_folder())
    text = (folder / "tokenizer.json").read_text()
    compiler = GrammarCompiler.for_model(text, tokenizer.vocab_size, tokenizer.eos_token_ids)
    # Whole formats have texts of any length before a call, unless the output begins behind them.
    prompt_ends = {"kimi_k3": "<|open|>response<|sep|>"}
    begins = {"openai": tokenizer.encode(" to=", add_special_tokens=False)}
    names = list(TOOL_FORMATS)
    num_valid = 0
    for seed in range(NUM_SCHEMAS):
        rng, name = random.Random(seed), names[seed % len(names)]
        values = request(rng)
        prompt_end = prompt_ends.get(name, "")
        output = MessageOutput(TOOL_FORMATS[name], None, read_tool_use(values))
        grammar = output.grammar(None, tokenizer.special_token_ids, prompt_end)
        matcher = compiler.compile(grammar.spec)
        text = drawn(matcher, rng, begins.get(name, ()), tokenizer.decode)
        message = output.parser((), prompt_end)().read(text)
        [call] = message.calls
        offered = {each["function"]["name"]: each["function"] for each in values["tools"]}
        assert call.name in offered
        assert isinstance(values["tool_choice"], str) or call.name == "tool_1"
        jsonschema.validate(json.loads(call.arguments), offered[call.name]["parameters"])
        assert message.content == ""
        num_valid += 1
    assert num_valid == NUM_SCHEMAS

"""The reader of one choice's message: counts of its reasoning."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.edge.families.message import Tool
from cluster.edge.families.table import REASONING_FORMATS, TOOL_FORMATS
from cluster.edge.message_output import MessageOutput
from cluster.edge.message_reader import MessageReader
from cluster.edge.openai import ResponseSpec
from cluster.edge.tool_requests import NO_TOOLS, ToolUse
from replicas.output_processor import OutputDelta

MARKS = {"<think>": (1,), "</think>": (2,)}
CALLS = ToolUse((Tool("f", {}),), "auto")
LINE, TALE = "<think>|hm|, so|</think>|a|n|swer", "<think>|hm|, so| it| is|</think>|\n\n|a|n"


def counted(text, sizes, *, parser="qwen3", marks=MARKS, prompt_end="", use=NO_TOOLS):
    """The count of an output, tokens apart by "|", in deltas of some tokens each."""
    tokens = text.split("|")
    output = MessageOutput(TOOL_FORMATS["hermes"], REASONING_FORMATS[parser], use)
    spec = ResponseSpec(
        "id",
        0,
        "m",
        new_parser=output.parser((), prompt_end),
        reasoning_marks=output.reasoning_marks(marks.get, prompt_end),
    )
    reader = MessageReader(spec, holds_calls=True)
    ids = [marks.get(token, (9,))[0] for token in tokens]
    begin, pieces = 0, []
    while begin < len(tokens):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append((tokens[begin : begin + size], ids[begin : begin + size]))
        begin += size
    for i, (own, own_ids) in enumerate(pieces):
        reason = "stop" if i == len(pieces) - 1 else None
        reader.read(OutputDelta(0, "".join(own), own_ids, reason))
    return reader.num_reasoning_tokens


@pytest.mark.parametrize(
    ("text", "options", "wanted"),
    [
        (LINE, {}, 2),
        (TALE, {}, 4),
        ("an|swer", {}, 0),
        ("<think>|\n\n|</think>|\n\n|a", {}, 1),
        ("hm|, so|</think>|a", {"prompt_end": "<think>\n"}, 2),
        ("hm|, so", {"prompt_end": "<think>\n"}, 2),
        ("a|b", {"prompt_end": "<think>\n\n</think>\n\n"}, 0),
        # Marks that are no tokens: six of 28 characters are reasoning, of seven tokens.
        (LINE, {"marks": {}}, 2),
        ("an|swer", {"marks": {}}, 0),
        # The other pair of marks of this family, whose tokens its budget does not know.
        (LINE, {"parser": "mistral", "marks": {"[THINK]": (1,), "[/THINK]": (2,)}}, 2),
        # A call ends the reasoning: six of 71 characters, of six tokens.
        ("<think>|hm|, so|<tool_call>|{\"name\": \"f\", \"arguments\": {}}|</tool_call>",
         {"use": CALLS}, 1),
    ],
)  # fmt: skip
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_reasoning_counts_the_same_however_its_tokens_come(text, options, wanted, sizes):
    assert counted(text, sizes, **options) == wanted

"""Formats by the names that vLLM and Tenstorrent's catalogue use."""

from __future__ import annotations

from cluster.edge.families.formats import ReasoningFormat, ToolFormat
from cluster.edge.families.hermes import Hermes

_THINK = ReasoningFormat("<think>", "</think>")

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": Hermes(),
}
"""Formats of `args.tool_call_parser`."""

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat("<think>", "</think>", calls_end_it=True),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", is_default=True),
}
"""Formats of `args.reasoning_parser`."""

"""Formats by the names that vLLM and Tenstorrent's catalogue use."""

from __future__ import annotations

from cluster.edge.families.deepseek import DeepSeekElements, DeepSeekJson
from cluster.edge.families.formats import ReasoningFormat, ToolFormat
from cluster.edge.families.gemma4 import Gemma4
from cluster.edge.families.glm import Glm
from cluster.edge.families.harmony import Harmony
from cluster.edge.families.hermes import Hermes
from cluster.edge.families.kimi import KimiK2
from cluster.edge.families.kimi_k3 import KimiK3
from cluster.edge.families.llama import Llama3Json
from cluster.edge.families.mistral import Mistral
from cluster.edge.families.pythonic import Pythonic
from cluster.edge.families.qwen3_coder import Qwen3Coder

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": Hermes(),
    "llama3_json": Llama3Json(),
    "qwen3_coder": Qwen3Coder(),
    "deepseek_v3": DeepSeekJson(is_fenced=True),
    "deepseek_v31": DeepSeekJson(is_fenced=False),
    "deepseek_v32": DeepSeekElements("function_calls"),
    "deepseek_v4": DeepSeekElements("tool_calls"),
    "deepseek_v41": DeepSeekElements(" calls", " "),
    "openai": Harmony(),
    "gemma4": Gemma4(),
    "mistral": Mistral(),
    "pythonic": Pythonic(),
    "llama4_pythonic": Pythonic(),
    "glm45": Glm("\n"),
    "glm47": Glm(""),
    "kimi_k2": KimiK2(),
    "kimi_k3": KimiK3(),
}
"""Formats of `args.tool_call_parser`."""

_THINK = ReasoningFormat("<think>", "</think>")

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat("<think>", "</think>", calls_end_it=True),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", is_default=True),
    "deepseek_v3": _THINK,
    "deepseek_v4": _THINK,
    "deepseek_v41": _THINK,
    "openai_gptoss": ReasoningFormat("", "", whole=Harmony(), efforts=("low", "medium", "high")),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", alternative=("<think>", "</think>")),
    "glm45": _THINK,
    "glm47": _THINK,
    "kimi_k2": _THINK,
    "kimi_k3": ReasoningFormat("", "", whole=KimiK3()),
}
"""Formats of `args.reasoning_parser`."""

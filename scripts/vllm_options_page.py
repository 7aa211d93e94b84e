"""Writes docs/vllm-options.md: what options of vLLM's engine mean here, from their table.

python scripts/vllm_options_page.py
"""

from __future__ import annotations

from pathlib import Path

from replicas.vllm_options import OPTIONS

DOCUMENT = Path(__file__).resolve().parents[1] / "docs/vllm-options.md"

_INTRODUCTION = """# Options of vLLM's engine

What options of vLLM mean here, in `args.engine` of a config file and as arguments of `LLM`. Made
from `replicas/vllm_options.py` by `python scripts/vllm_options_page.py`; a test keeps it true. Any
other key must be one of [configuration.md](configuration.md); unknown ones are refused.

| option | effect | meaning |
|---|---|---|
"""


def page() -> str:
    """Return the whole document."""
    rows = (
        f"| `{option.name}` | {option.effect} | {option.meaning[0].upper()}{option.meaning[1:]} |"
        for option in OPTIONS
    )
    return _INTRODUCTION + "\n".join([*rows, ""])


def main() -> None:
    """Write the page."""
    DOCUMENT.write_text(page())


if __name__ == "__main__":
    main()

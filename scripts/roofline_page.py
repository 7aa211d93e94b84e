"""Writes docs/roofline.md: bytes, arithmetic and estimated times of the native models' steps.

python -m scripts.roofline_page
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.roofline.page import text

PAGE = Path(__file__).resolve().parents[1] / "docs/roofline.md"


def main(arguments: list[str] | None = None) -> None:
    """Write the page, unless asked for help."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0]).parse_args(arguments)
    PAGE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()

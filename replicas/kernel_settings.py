"""What the libraries that a generator computes with are told by the environment."""

from __future__ import annotations

import os
import sys

KERNEL_SETTINGS = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
    "GOMP_SPINCOUNT": "1000",
}
"""What they read once, when they are loaded; the environment that there is goes over it.

How many compiled kernels oneDNN, and PyTorch's layer above it, keep; else 1,024. In bfloat16 every
shape of a product is a kernel of some 250 KB in each, and prompts come in all lengths. Those that
are thrown away leave holes in the heap, so an engine grew for as long as it met new shapes.

How long threads of OpenMP wait for each other busily, some microseconds, before they sleep. Those
that do not sleep keep the core from the very thread that they wait for, as soon as anything else
wants a core, too. Those that sleep at once are woken for every operation. benchmarks/RESULTS.md
has what either costs.
"""


def settle_here() -> None:
    """Tell them for an engine in this process; too late where PyTorch is loaded."""
    if "torch" not in sys.modules:
        for name, value in KERNEL_SETTINGS.items():
            os.environ.setdefault(name, value)  # noqa: TID251 - set, not read

"""Environment variables for the compute libraries of a generator."""

from __future__ import annotations

import os
import sys

KERNEL_SETTINGS = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
    "GOMP_SPINCOUNT": "1000",
}
"""Defaults that the libraries read once, when loaded; the existing environment takes precedence.

The cache capacities limit how many compiled kernels oneDNN, and PyTorch's layer above it, keep
(default 1,024). In bfloat16 every shape of a product is a kernel of some 250 KB in each, and
prompts come in all lengths. Evicted kernels leave holes in the heap, so an engine's memory grew for
as long as it met new shapes.

GOMP_SPINCOUNT limits how long OpenMP threads spin for each other before they sleep: some
microseconds. Threads that spin longer take the core from the thread that they wait for as soon as
other work wants a core. Threads that sleep at once must be woken for every operation. Measured
costs of both: benchmarks/RESULTS.md.
"""


def settle_here() -> None:
    """Set them for an engine in this process; has no effect once PyTorch is loaded."""
    if "torch" not in sys.modules:
        for name, value in KERNEL_SETTINGS.items():
            os.environ.setdefault(name, value)  # noqa: TID251 - set, not read

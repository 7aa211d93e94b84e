"""Products with weights packed as pairs against oneDNN's packed ones, on one thread, bfloat16.

By turns, CPU time of a call, medians; ratios above 1 ours is faster; the last column is ours
against itself (A/A). Needs a processor that multiplies pairs (AVX512-BF16).

    python -m benchmarks.products
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from replicas.generators.torch.linear import PackedLinear
from replicas.generators.torch.panels import PanelLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROUNDS = 9
CALLS_OF = 2e9
"""Products of a round, in at most so many calls as follow."""
MOST_CALLS = 200
SHAPES = (
    (128, 256), (256, 704), (256, 4096), (576, 1536), (1536, 576), (2048, 2048), (4096, 14336),
)  # fmt: skip
ROWS = (1, 4, 16, 32, 64, 128, 512, 2048)


def times(calls: Sequence[Callable[[], object]], count: int) -> list[float]:
    """Seconds of CPU time of each, by turns, the median of rounds of so many calls."""
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, seconds in zip(calls, found, strict=True):
            begin = time.thread_time()
            for _ in range(count):
                call()
            seconds.append((time.thread_time() - begin) / count)
    return [statistics.median(seconds) for seconds in found]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| K -> N | rows | ours, us | oneDNN, us | ours, GFLOP/s | ratio | A/A |")
    print("|---|---|---|---|---|---|---|")
    for size, num_outputs in SHAPES:
        weight = torch.randn(num_outputs, size).bfloat16()
        ours, peer = PanelLinear(weight, None), PackedLinear(weight, None)
        for num_rows in ROWS:
            x = torch.randn(num_rows, size).bfloat16()
            products = num_rows * size * num_outputs
            count = max(2, min(MOST_CALLS, int(CALLS_OF / products)))
            run = (partial(ours, x), partial(peer, x), partial(ours, x))
            one, other, again = times(run, count)
            print(
                f"| {size} -> {num_outputs} | {num_rows} | {1e6 * one:,.0f} | {1e6 * other:,.0f} | "
                f"{2e-9 * products / one:.0f} | {other / one:.2f} | {again / one:.2f} |"
            )


if __name__ == "__main__":
    main()

"""Attention of the torch generator against PyTorch's own, on one thread, bfloat16.

Prompts: causal `scaled_dot_product_attention` over contiguous keys. Decodes: the same over blocks
that are gathered first, because PyTorch needs contiguous keys. Both sides run by turns; figures are
medians of CPU time. A ratio above 1 means that ours is faster. The last column is ours against
itself (A/A).

    python -m benchmarks.attention
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from replicas.generators.torch.fast_attention import FastAttention
from replicas.generators.torch.inputs import PagedBatch
from replicas.generators.torch.kv_cache import TorchKVCache

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 32
ROUNDS = 20
# Requests, tokens of each in the pass and in all, query heads, KV heads, head size.
CASES = {
    "16 prompts of 128, 0.56 M model": (16, 128, 128, 4, 2, 32),
    "16 prompts of 128, 135 M model": (16, 128, 128, 9, 3, 64),
    "1 prompt of 128, demo model": (1, 128, 128, 8, 4, 32),
    "1 prompt of 2,048, 8 B model": (1, 2048, 2048, 32, 8, 128),
    "64 decodes at 160, 0.56 M model": (64, 1, 160, 4, 2, 32),
    "32 decodes at 160, 135 M model": (32, 1, 160, 9, 3, 64),
    "8 decodes at 2,000, 8 B model": (8, 1, 2000, 32, 8, 128),
}


def case(
    requests: int, new: int, length: int, heads: int, kv_heads: int, size: int
) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """Ours and PyTorch's, over the same numbers."""
    columns = -(-length // BLOCK)
    shape = (requests * columns + 1, kv_heads, BLOCK, size)
    cache = TorchKVCache(shape, torch.bfloat16, num_layers=1, num_lanes=1)
    planes = cache.planes[0]
    for plane in planes:
        plane.normal_()
    tables = np.random.default_rng(0).permutation(requests * columns).reshape(requests, columns) + 1
    q = torch.randn(requests * new, heads, size).bfloat16()
    batch = PagedBatch(
        input_ids=torch.zeros(requests * new, dtype=torch.int64),
        positions=torch.zeros(requests * new, dtype=torch.int64),
        kv_positions=torch.zeros(requests * new, dtype=torch.int64),
        query_start_loc=np.arange(requests + 1) * new,
        seq_lens=np.full(requests, length),
        block_table=tables,
        logits_indices=torch.arange(requests),
    )
    attend = FastAttention(torch.bfloat16, size, heads // kv_heads).prepare(batch, cache)
    places = torch.from_numpy(tables)

    def gathered() -> list[torch.Tensor]:
        return [p[places].transpose(1, 2).flatten(2, 3)[:, :, :length] for p in planes]

    together = gathered()

    def theirs() -> torch.Tensor:
        k, v = together if new > 1 else gathered()
        queries = q.view(requests, new, heads, size).transpose(1, 2)
        found = functional.scaled_dot_product_attention(
            queries, k, v, is_causal=new > 1, enable_gqa=True
        )
        return found.transpose(1, 2).reshape(q.shape)

    return lambda: attend(0, q), theirs


def seconds(run: Callable[[], torch.Tensor]) -> float:
    """CPU time of this thread."""
    started_s = time.thread_time()
    run()
    return time.thread_time() - started_s


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| case | ours, us | PyTorch, us | ratio | A/A |\n|---|---|---|---|---|")
    for name, sizes in CASES.items():
        ours, theirs = case(*sizes)
        torch.testing.assert_close(ours(), theirs(), rtol=2e-2, atol=2e-2)
        rounds = [[seconds(run) for run in (ours, theirs) * 2] for _ in range(ROUNDS)]
        medians = (statistics.median(times) for times in zip(*rounds, strict=True))
        mine, peer, again, _ = medians
        ratios = f"{peer / mine:.2f} | {mine / again:.2f}"
        print(f"| {name} | {1e6 * mine:,.0f} | {1e6 * peer:,.0f} | {ratios} |")


if __name__ == "__main__":
    main()

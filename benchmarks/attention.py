"""Attention of the CPU engine on one thread, bfloat16: against PyTorch's, or an earlier commit's.

Prompts: causal `scaled_dot_product_attention` over contiguous keys. Decodes: the same over blocks
that are gathered first, because PyTorch needs contiguous keys. Batched is what hosts without the
kernels run. With `--before FOLDER`, a checkout
of an earlier commit, the other side is that commit's attention, in a process of its own.

Both sides run by turns; figures are medians of CPU time. A ratio above 1 means that ours is faster.
The last column is ours against itself (A/A).

    python -m benchmarks.attention
    git worktree add /tmp/before COMMIT && python -m benchmarks.attention --before /tmp/before
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from replicas.generators.layer_specs import AttentionSpec, LinearSpec
from replicas.generators.rope_config import RopeConfig
from replicas.generators.torch.backends import make_attention
from replicas.generators.torch.inputs import PagedBatch
from replicas.generators.torch.kv_cache import TorchKVCache

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 32
_SERVE = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
ROUNDS = 20
# Requests, tokens of each in the pass and in all, query heads, KV heads, head size.
CASES = {
    "16 prompts of 128, 0.56 M model": (16, 128, 128, 4, 2, 32),
    "16 prompts of 128, 135 M model": (16, 128, 128, 9, 3, 64),
    "1 prompt of 128, demo model": (1, 128, 128, 8, 4, 32),
    "1 prompt of 2,048, 8 B model": (1, 2048, 2048, 32, 8, 128),
    "1 decode at 160, 135 M model": (1, 1, 160, 9, 3, 64),
    "8 decodes at 160, 135 M model": (8, 1, 160, 9, 3, 64),
    "32 decodes at 160, 135 M model": (32, 1, 160, 9, 3, 64),
    "128 decodes at 160, 135 M model": (128, 1, 160, 9, 3, 64),
    "64 decodes at 160, 0.56 M model": (64, 1, 160, 4, 2, 32),
    "8 decodes at 2,000, 8 B model": (8, 1, 2000, 32, 8, 128),
}


def case(
    requests: int, new: int, length: int, heads: int, kv_heads: int, size: int
) -> tuple[Callable[[], torch.Tensor], ...]:
    """Ours, PyTorch's and the batched one, over the same numbers."""
    torch.manual_seed(0)
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
        kv_positions=torch.zeros(1, requests * new, dtype=torch.int64),
        query_start_loc=np.arange(requests + 1) * new,
        seq_lens=np.full(requests, length),
        block_table=tables[None],
        logits_indices=torch.arange(requests),
    )
    attend, batched = (
        make_attention(name, torch.bfloat16).prepare(batch, cache) for name in ("fast", "batched")
    )
    none = LinearSpec((), 0)
    spec = AttentionSpec(heads, kv_heads, size, qkv=none, o=none, rope=RopeConfig("default", 1e4))
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

    return lambda: attend(0, q, spec), theirs, lambda: batched(0, q, spec)


def seconds(run: Callable[[], torch.Tensor]) -> float:
    """CPU time of this thread."""
    started_s = time.thread_time()
    run()
    return time.thread_time() - started_s


class Earlier:
    """The attention of another checkout, in a process of its own.

    Args:
        folder: The checkout.
    """

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(Path(__file__).resolve()), "--serve"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, name: str) -> float:
        """CPU time of one call of a case."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def serve() -> None:
    """Print the seconds of one call for each name of a case on the standard input."""
    runs: dict[str, Callable[[], torch.Tensor]] = {}
    for line in sys.stdin:
        name = line.rstrip("\n")
        if name not in runs:
            runs = {name: case(*CASES[name])[0]}
            runs[name]()
        print(seconds(runs[name]), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Attention on one thread, bfloat16.")
    parser.add_argument("--before", metavar="FOLDER", help="checkout of an earlier commit")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.serve:
        serve()
        return
    earlier = Earlier(given.before) if given.before else None
    other = "PyTorch" if earlier is None else "before"
    print(
        f"| case | ours, us | {other}, us | ratio | A/A | batched, us |\n|---|---|---|---|---|---|"
    )
    for name, sizes in CASES.items():
        ours, theirs, batched = case(*sizes)
        torch.testing.assert_close(ours(), theirs(), rtol=2e-2, atol=2e-2)
        rounds = []
        for _ in range(ROUNDS):
            peer = seconds(theirs) if earlier is None else earlier.seconds(name)
            rounds.append((seconds(ours), peer, seconds(ours), seconds(batched)))
        mine, peer, again, second = (
            statistics.median(times) for times in zip(*rounds, strict=True)
        )
        ratios = f"{peer / mine:.2f} | {mine / again:.2f}"
        times = f"{1e6 * mine:,.0f} | {1e6 * peer:,.0f} | {ratios} | {1e6 * second:,.0f}"
        print(f"| {name} | {times} |")
    if earlier is not None:
        earlier.close()


if __name__ == "__main__":
    main()

"""Cost of sampling on the host in each step, beside plain PyTorch.

The peer is the usual way: temperature in float32, top-k and top-p by one sort of the vocabulary,
softmax, and an exponential race instead of an inverted distribution, as engines without a compiled
sampler do on the CPU. One thread each; alternately; logits of a normal distribution, whose nucleus
is far larger than a model's. The A/A row is the first one again.

    python -m benchmarks.host_sampling [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from replicas.engine.sampler import SamplingColumns, sample

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_ROWS = 32
VOCABULARIES = (4096, 128_256)
SPREAD = 3.0
"""Standard deviation of the logits."""


class Asked(NamedTuple):
    """Sampling parameters of every row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


CASES = {
    "default": Asked(),
    "greedy": Asked(temperature=0.0),
    "top-k 50": Asked(top_k=50),
    "top-p 0.9": Asked(temperature=0.7, top_p=0.9),
    "top-k 50, top-p 0.9": Asked(temperature=0.7, top_k=50, top_p=0.9),
    "default again (A/A)": Asked(),
}


def plain(logits: torch.Tensor, asked: Asked) -> list[int]:
    """The peer."""
    if asked.temperature == 0.0:
        return [int(token) for token in logits.argmax(dim=-1)]
    logits = logits.float() / asked.temperature
    if asked.top_k or asked.top_p < 1.0:
        ordered, order = logits.sort(dim=-1)
        if asked.top_k:
            ordered[:, : -asked.top_k] = -torch.inf
        if asked.top_p < 1.0:
            outside = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - asked.top_p
            outside[:, -1] = False
            ordered.masked_fill_(outside, -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    probs = logits.softmax(dim=-1)
    return [int(token) for token in (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1)]


def ours(logits: torch.Tensor, asked: Asked) -> list[int]:
    """The engine's sampler."""
    rows = len(logits)
    columns = SamplingColumns(rows)
    columns.temperature[:], columns.top_k[:], columns.top_p[:] = asked
    numbers = np.random.default_rng(0).random(rows)
    tokens: list[int] = sample(logits, columns, np.arange(rows), numbers).tolist()
    return tokens


def seconds(draw: Callable[[torch.Tensor, Asked], list[int]], *case: torch.Tensor | Asked) -> float:
    """One call."""
    started = time.perf_counter()
    draw(*case)  # type: ignore[arg-type]
    return time.perf_counter() - started


def main() -> None:
    """Print a table, then one line of JSON: milliseconds of ours, and times the peer's speed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 9")
    rounds = 3 if parser.parse_args().quick else 9
    torch.set_num_threads(1)
    results = {}
    print(f"{NUM_ROWS} rows, bfloat16       V  ours ms   peer ms  ratio")
    for vocab in VOCABULARIES:
        logits = torch.randn(NUM_ROWS, vocab, generator=torch.Generator().manual_seed(0)) * SPREAD
        logits = logits.bfloat16()
        for name, asked in CASES.items():
            pairs = [
                (seconds(ours, logits, asked), seconds(plain, logits, asked)) for _ in range(rounds)
            ]
            mine, peer = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
            results[f"{name} {vocab}"] = {"ms": round(mine, 2), "ratio": round(peer / mine, 1)}
            print(f"{name:24s}{vocab:7d}{mine:9.2f}{peer:10.2f}{peer / mine:7.1f}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()

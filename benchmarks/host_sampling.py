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

from replicas.engine.step import NewRow
from replicas.sampling.logprobs import Logprobs
from replicas.sampling.order import row_processors
from replicas.sampling.processor import LogitRows, RowProcessors
from replicas.sampling.sampler import SamplingColumns, sample
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]

NUM_ROWS = 32
NUM_TOKENS = 512
VOCABULARIES = (4096, 128_256)
SPREAD = 3.0
"""Standard deviation of the logits."""


class Asked(NamedTuple):
    """Sampling parameters of every row.

    With `penalties` a row has `NUM_TOKENS` tokens, half of them output, and all three penalties.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    penalties: bool = False
    logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None

    def sampling(self) -> SamplingParams:
        """Return the parameters of a request."""
        penalty = 0.5 if self.penalties else 0.0
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            repetition_penalty=1.0 + penalty,
            presence_penalty=penalty,
            frequency_penalty=penalty,
            logprobs=self.logprobs,
            allowed_token_ids=self.allowed_token_ids,
        )


CASES = {
    "default": Asked(),
    "greedy": Asked(temperature=0.0),
    "top-k 50": Asked(top_k=50),
    "top-p 0.9": Asked(temperature=0.7, top_p=0.9),
    "top-k 50, top-p 0.9": Asked(temperature=0.7, top_k=50, top_p=0.9),
    "top-k 50, 8 allowed": Asked(top_k=50, allowed_token_ids=tuple(range(0, 4000, 500))),
    "default again (A/A)": Asked(),
    "penalties": Asked(penalties=True),
    "greedy, penalties": Asked(temperature=0.0, penalties=True),
    "logprobs 5": Asked(logprobs=5),
    "logprobs 20": Asked(logprobs=20),
    "greedy, logprobs 20": Asked(temperature=0.0, logprobs=20),
}


class Plain:
    """The peer; penalties need dense counts of each row's tokens.

    Args:
        asked: What every row asks for.
        token_ids: (R, T) tokens of each row; the first half is its prompt.
        vocab: Width of the logits.
    """

    def __init__(self, asked: Asked, token_ids: IntArray, vocab: int) -> None:
        self._asked = asked
        self._counts = torch.zeros(len(token_ids), vocab)
        self._is_seen = torch.zeros(len(token_ids), vocab, dtype=torch.bool)
        if asked.penalties:
            tokens = torch.from_numpy(token_ids)
            output = tokens[:, tokens.shape[1] // 2 :]
            self._counts.scatter_add_(1, output, torch.ones(output.shape))
            self._is_seen.scatter_(1, tokens, value=True)

    def draw(self, logits: torch.Tensor) -> list[int]:
        """Return a token for each row."""
        asked = self._asked.sampling()
        if self._asked.penalties:
            factor, logits = asked.repetition_penalty, logits.float()
            scaled = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(self._is_seen, scaled, logits)
            logits -= asked.frequency_penalty * self._counts
            logits -= asked.presence_penalty * (self._counts > 0)
        if asked.allowed_token_ids is not None:
            allowed = list(asked.allowed_token_ids)
            masked = torch.full_like(logits, -torch.inf)
            masked[:, allowed] = logits[:, allowed]
            logits = masked
        tokens = _draw(logits, self._asked)
        if asked.logprobs is not None:
            values = logits.float().log_softmax(dim=-1)
            drawn = values.gather(1, torch.tensor(tokens)[:, None])
            ranks = (values >= drawn).sum(dim=-1)
            likeliest = values.topk(asked.logprobs, dim=-1)
            [found.tolist() for found in (drawn, ranks, *likeliest)]
        return tokens


def _draw(logits: torch.Tensor, asked: Asked) -> list[int]:
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


class Ours:
    """The engine's sampler and row processors; arguments as of `Plain`."""

    def __init__(self, asked: Asked, token_ids: IntArray) -> None:
        num_rows, length = token_ids.shape
        self._columns = SamplingColumns(num_rows)
        self._logprobs = Logprobs("raw_logprobs")
        processors = row_processors((), logprobs=self._logprobs)
        self._processors = RowProcessors(processors, num_rows)
        self._slots = np.arange(num_rows)
        self._numbers = np.random.default_rng(0).random((num_rows,))
        self._rows = LogitRows(self._slots, np.full(num_rows, length // 2))
        for slot, tokens in enumerate(token_ids.tolist()):
            row = NewRow(slot, 0, tokens, length // 2, 0, [], asked.sampling())
            self._columns.add(row)
            self._processors.add(row)

    def draw(self, logits: torch.Tensor) -> list[int]:
        """Return a token for each row."""
        changes = None
        if self._processors.num_touched:
            changes = self._processors.prepare(self._rows)
        drawn = sample(logits, self._columns, self._slots, self._numbers, None, changes)
        tokens: list[int] = drawn.tolist()
        if changes is not None:
            self._logprobs.read_model(logits, self._slots, self._slots, drawn)
            for slot, token_id in zip(self._slots.tolist(), tokens, strict=True):
                self._processors.accept(slot, [token_id])
            self._logprobs.take()
        return tokens


def seconds(draw: Callable[[torch.Tensor], object], logits: torch.Tensor) -> float:
    """One call."""
    started = time.perf_counter()
    draw(logits)
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
        token_ids = np.random.default_rng(0).integers(vocab, size=(NUM_ROWS, NUM_TOKENS))
        for name, asked in CASES.items():
            ours, plain = Ours(asked, token_ids), Plain(asked, token_ids, vocab)
            pairs = [
                (seconds(ours.draw, logits), seconds(plain.draw, logits)) for _ in range(rounds)
            ]
            mine, peer = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
            results[f"{name} {vocab}"] = {"ms": round(mine, 2), "ratio": round(peer / mine, 1)}
            print(f"{name:24s}{vocab:7d}{mine:9.2f}{peer:10.2f}{peer / mine:7.1f}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()

"""Which states of recurrent layers a pass reads and writes; see `replicas.kv_groups.KVGroup`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from replicas.generators.torch.inputs import Int64Array, PagedBatch


class StateRun(NamedTuple):
    """Consecutive tokens of a request between two states.

    Attributes:
        begin: Index of the first in the pass.
        end: Index behind the last.
        read: Block of the state before them; None at the start of a sequence.
        written: Block of the state after them.
    """

    begin: int
    end: int
    read: int | None
    written: int


@dataclass(frozen=True, slots=True, eq=False)
class StatePlaces:
    """States that a pass reads and writes.

    Attributes:
        singles: int64 (n,), indices of tokens that are alone in their request's pass.
        read: int64 (n,), blocks of the states before them.
        written: int64 (n,), of the states after them.
        is_first: bool (n,): no token is before, so that the state is zero.
        runs: All other tokens, those of a request in order.
    """

    singles: torch.Tensor
    read: torch.Tensor
    written: torch.Tensor
    is_first: torch.Tensor
    runs: list[StateRun]


def state_places(batch: PagedBatch, table: Int64Array, block_size: int) -> StatePlaces:
    """Return the states of a pass.

    The state after a token is in the block of that token. Tokens of several blocks of the table
    that are one and the same block leave the last state there. So each block that differs from the
    one behind it keeps the state at its end.

    Args:
        batch: The pass.
        table: int64 (R, K), global ids of the blocks of states.
        block_size: Tokens of an entry of the table.
    """
    first_tokens, ends = batch.query_start_loc, batch.seq_lens
    counts = np.diff(first_tokens)
    starts, rows = ends - counts, np.arange(len(counts))
    read = table[rows, np.maximum(starts - 1, 0) // block_size]
    written = table[rows, (ends - 1) // block_size]
    alone = np.flatnonzero(counts == 1)
    runs = []
    for row in np.flatnonzero(counts > 1):
        first, last = starts[row] // block_size, (ends[row] - 1) // block_size
        blocks = table[row, first : last + 1]
        changes = np.flatnonzero(blocks[1:] != blocks[:-1])
        begin, before = int(first_tokens[row]), int(read[row]) if starts[row] else None
        for change in (*changes, last - first):
            end = min((first + change + 1) * block_size, ends[row]) - starts[row]
            run = StateRun(begin, int(first_tokens[row] + end), before, int(blocks[change]))
            runs.append(run)
            begin, before = run.end, run.written
    return StatePlaces(
        torch.from_numpy(first_tokens[alone]),
        torch.from_numpy(read[alone]),
        torch.from_numpy(written[alone]),
        torch.from_numpy(starts[alone] == 0),
        runs,
    )


@dataclass(frozen=True, slots=True, eq=False)
class DeltaTokens:
    """What a recurrent layer computes of the tokens of a pass.

    Dimensions: T tokens, C channels, V value heads, E of a value.

    Attributes:
        mixed: (T, C), before the convolution.
        rates: (T, V).
        decays: (T, V), before the exponential.
        convolution: (kernel, C).
        out: (T, V, E), written.
    """

    mixed: torch.Tensor
    rates: torch.Tensor
    decays: torch.Tensor
    convolution: torch.Tensor
    out: torch.Tensor

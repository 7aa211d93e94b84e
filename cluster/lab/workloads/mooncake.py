"""Mooncake traces: one JSON object per line, with the prompt's identity in blocks of 512 tokens.

Source: the traces published with "Mooncake: Trading More Storage for Less Computation", FAST 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from cluster.lab.workloads.errors import WorkloadError
from cluster.lab.workloads.request import MOONCAKE_BLOCK_TOKENS, TraceRequest, Workload
from cluster.lab.workloads.rows import (
    BlockId,
    OutputCount,
    Time,
    TokenCount,
    decode_lines,
    in_arrival_order,
    num_asked,
    random_generator,
)

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

MIN_TICK_MS = 1000
"""Shortest tick to which timestamps are taken to be rounded."""

TICK_TOLERANCE_MS = 10
"""How far a timestamp may be from its tick."""


class MooncakeRow(msgspec.Struct, frozen=True, gc=False):
    """One line. Other keys, such as `session_id`, are ignored.

    Attributes:
        timestamp: Arrival, in milliseconds.
        hash_ids: One number per block of the prompt; equal numbers are equal prefixes.
    """

    timestamp: Time
    input_length: TokenCount
    output_length: OutputCount
    hash_ids: tuple[BlockId, ...] = ()


def read_mooncake(path: Path, seed: int) -> Workload:
    """Read a trace; `seed` is for spreading arrivals that were rounded to ticks.

    Raises:
        WorkloadError: The file is malformed.
    """
    rows = []
    for line, row in decode_lines(path, MooncakeRow):
        num_blocks = -(-row.input_length // MOONCAKE_BLOCK_TOKENS)
        if len(row.hash_ids) > num_blocks:
            raise WorkloadError(
                f"{len(row.hash_ids)} blocks for a prompt of {row.input_length} tokens; a block "
                f"of this format has {MOONCAKE_BLOCK_TOKENS} tokens",
                path=str(path),
                line=line,
                field="hash_ids",
            )
        rows.append(row)
    if not rows:
        raise WorkloadError("holds no requests; check that it is complete", path=str(path))
    rows.sort(key=lambda row: row.timestamp)
    timestamps_ms = np.array([row.timestamp for row in rows])
    arrivals_ms = spread_over_ticks(timestamps_ms, random_generator(seed))
    requests = [
        TraceRequest(
            arrival_ms / 1000, row.input_length, num_asked(row.output_length), row.hash_ids
        )
        for row, arrival_ms in zip(rows, arrivals_ms.tolist(), strict=True)
    ]
    return Workload(path.stem, in_arrival_order(requests, path), MOONCAKE_BLOCK_TOKENS)


def spread_over_ticks(
    timestamps_ms: npt.NDArray[np.float64], random: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Spread sorted arrivals that were rounded to ticks over the interval after their tick.

    Requests keep their order. Timestamps (at least one) that were not rounded are unchanged.
    """
    ticks = find_ticks(timestamps_ms)
    if ticks is None:
        return timestamps_ms
    ordinals, tick_ms = ticks
    offsets = random.random(len(timestamps_ms))
    # Offsets are sorted within each tick: the n-th request of a tick gets its n-th arrival.
    offsets = offsets[np.lexsort((offsets, ordinals))]
    spread_ms: npt.NDArray[np.float64] = timestamps_ms[0] + (ordinals + offsets) * tick_ms
    return spread_ms


def find_ticks(
    timestamps_ms: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float64], float] | None:
    """Detect whether timestamps were rounded to ticks of a second or more.

    They were if all are within a few milliseconds of multiples of one tick, counted from the first
    (the conversation trace of FAST 2025 is up to 3 ms off its 3 s), and if several share a tick.
    Timestamps (at least one) are sorted.

    Returns:
        (number of each one's tick from 0, milliseconds of a tick), or None.
    """
    gaps_ms = np.diff(timestamps_ms, prepend=timestamps_ms[0])
    between_ticks_ms = gaps_ms[gaps_ms > TICK_TOLERANCE_MS]
    if not len(between_ticks_ms) or between_ticks_ms.min() < MIN_TICK_MS - TICK_TOLERANCE_MS:
        return None
    ordinals: npt.NDArray[np.float64] = np.cumsum(np.rint(gaps_ms / between_ticks_ms.min()))
    tick_ms = float(np.rint((timestamps_ms[-1] - timestamps_ms[0]) / ordinals[-1]))
    misses_ms = np.abs(timestamps_ms - timestamps_ms[0] - ordinals * tick_ms)
    is_shared = len(between_ticks_ms) + 1 < len(timestamps_ms)
    if not is_shared or misses_ms.max() > TICK_TOLERANCE_MS:
        return None
    return ordinals, tick_ms

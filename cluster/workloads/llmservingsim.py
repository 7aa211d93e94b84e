"""LLMServingSim workloads: one JSON object per line, with arrivals in nanoseconds.

Source: the workload files of casys-kaist/LLMServingSim, version 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cluster.workloads.request import TraceRequest, Workload
from cluster.workloads.rows import (
    OutputCount,
    Time,
    TokenCount,
    decode_lines,
    in_arrival_order,
    num_asked,
)

if TYPE_CHECKING:
    from pathlib import Path


class LLMServingSimRow(msgspec.Struct, frozen=True):
    """One line. Token ids, if the file has them, are not used."""

    input_toks: TokenCount
    output_toks: OutputCount
    arrival_time_ns: Time


def read_llmservingsim(path: Path) -> Workload:
    """Read a workload.

    Raises:
        WorkloadError: The file is malformed.
    """
    requests = [
        TraceRequest(row.arrival_time_ns / 1e9, row.input_toks, num_asked(row.output_toks))
        for _, row in decode_lines(path, LLMServingSimRow)
    ]
    return Workload(path.stem, in_arrival_order(requests, path))

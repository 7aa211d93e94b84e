"""AIBrix workloads: one JSON object per line, with the requests that arrive at one time.

Source: the workload files of vllm-project/aibrix, `benchmarks/scenarios`.
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


class AibrixRequest(msgspec.Struct, frozen=True):
    """One request. Its text (`Prompt`), if the file has it, is not used."""

    num_prompt_tokens: TokenCount = msgspec.field(name="Prompt Length")
    num_output_tokens: OutputCount = msgspec.field(name="Output Length")


class AibrixRow(msgspec.Struct, frozen=True):
    """One line: `timestamp` in milliseconds, and what arrives then."""

    timestamp: Time
    requests: tuple[AibrixRequest, ...]


def read_aibrix(path: Path) -> Workload:
    """Read a workload.

    Raises:
        WorkloadError: The file is malformed.
    """
    requests = [
        TraceRequest(
            row.timestamp / 1000, request.num_prompt_tokens, num_asked(request.num_output_tokens)
        )
        for _, row in decode_lines(path, AibrixRow)
        for request in row.requests
    ]
    return Workload(path.stem, in_arrival_order(requests, path))

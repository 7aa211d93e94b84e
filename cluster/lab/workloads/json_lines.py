"""Traces of one JSON object per line that have only times and lengths.

Sources: the workload files of vllm-project/aibrix, `benchmarks/scenarios`; those of
casys-kaist/LLMServingSim, version 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cluster.lab.workloads.request import TraceRequest, Workload
from cluster.lab.workloads.rows import (
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


class LLMServingSimRow(msgspec.Struct, frozen=True):
    """One line. Token ids, if the file has them, are not used."""

    input_toks: TokenCount
    output_toks: OutputCount
    arrival_time_ns: Time


def read_aibrix(path: Path) -> Workload:
    """Read an AIBrix workload.

    Raises:
        WorkloadError: The file is malformed.
    """
    requests = [
        TraceRequest(row.timestamp / 1000, r.num_prompt_tokens, num_asked(r.num_output_tokens))
        for _, row in decode_lines(path, AibrixRow)
        for r in row.requests
    ]
    return Workload(path.stem, in_arrival_order(requests, path))


def read_llmservingsim(path: Path) -> Workload:
    """Read an LLMServingSim workload.

    Raises:
        WorkloadError: The file is malformed.
    """
    requests = [
        TraceRequest(row.arrival_time_ns / 1e9, row.input_toks, num_asked(row.output_toks))
        for _, row in decode_lines(path, LLMServingSimRow)
    ]
    return Workload(path.stem, in_arrival_order(requests, path))

"""Azure's LLM inference traces: a CSV file of arrivals and lengths, without prompts.

Source: AzurePublicDataset, AzureLLMInferenceTrace 2023 (conversation and code), and 2024, which
adds a time zone to the timestamps.
"""

from __future__ import annotations

import csv
import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import msgspec

from cluster.lab.workloads.errors import WorkloadError
from cluster.lab.workloads.request import TraceRequest, Workload
from cluster.lab.workloads.rows import (
    OutputCount,
    TokenCount,
    convert_row,
    in_arrival_order,
    num_asked,
    read_lines,
)

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

# Seven decimals are more than `datetime` reads. Times are kept as whole nanoseconds.
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?")


class AzureRow(msgspec.Struct, frozen=True):
    """One line."""

    timestamp: str = msgspec.field(name="TIMESTAMP")
    num_prompt_tokens: TokenCount = msgspec.field(name="ContextTokens")
    num_output_tokens: OutputCount = msgspec.field(name="GeneratedTokens")


def read_azure(path: Path) -> Workload:
    """Read a trace; its first request arrives at 0.

    Raises:
        WorkloadError: The file is malformed.
    """
    lines = read_lines(path)
    header = next(csv.reader([text for _, text in [next(lines, (1, ""))]]), [])
    for column in COLUMNS:
        if column not in header:
            raise WorkloadError(
                f"the first line must name this column; it has {', '.join(header) or 'nothing'}",
                path=str(path),
                line=1,
                field=column,
            )
    arrivals_ns, rows = [], []
    for line, text in lines:
        values = dict(zip(header, next(csv.reader([text])), strict=False))
        row = convert_row(values, AzureRow, path, line)
        arrivals_ns.append(_unix_ns(row.timestamp, path, line))
        rows.append(row)
    start_ns = min(arrivals_ns, default=0)
    requests = [
        TraceRequest(
            (arrival_ns - start_ns) / 1e9, row.num_prompt_tokens, num_asked(row.num_output_tokens)
        )
        for row, arrival_ns in zip(rows, arrivals_ns, strict=True)
    ]
    return Workload(path.stem, in_arrival_order(requests, path))


def _unix_ns(timestamp: str, path: Path, line: int) -> int:
    """Parse a timestamp as exact nanoseconds since 1970."""
    match = _TIMESTAMP.fullmatch(timestamp)
    try:
        if match is None:
            raise ValueError(timestamp)
        day, time, fraction = match.groups(default="")
        whole = datetime.fromisoformat(f"{day}T{time}").replace(tzinfo=timezone.utc)
    except ValueError:
        raise WorkloadError(
            f"{timestamp!r} is not a time; write it as 2023-11-16 18:15:46.6805900",
            path=str(path),
            line=line,
            field="TIMESTAMP",
        ) from None
    return int(whole.timestamp()) * 10**9 + int(fraction.ljust(9, "0"))

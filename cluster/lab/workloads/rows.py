"""Reads the rows of a trace file line by line, checks them, and sorts them by arrival.

All formats' readers use it, so that errors of malformed files have one form: the file, the line,
the field, and what to do.
"""

from __future__ import annotations

import re
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import numpy as np

from cluster.lab.workloads.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from cluster.lab.workloads.request import TraceRequest

TokenCount = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
# Failed requests have no output in some traces. They are replayed with one output token.
OutputCount = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# The upper bound excludes infinity, which YAML can express.
Time = Annotated[float, msgspec.Meta(ge=0, le=1e18)]

T = TypeVar("T")

_FIELD = re.compile(r" - at `\$\.?(.*)`$")


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        WorkloadError: The file cannot be read, or is not text.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise WorkloadError(
            f"is not UTF-8 text ({error.reason}); unpack it if it is compressed", path=str(path)
        ) from None
    except OSError as error:
        raise WorkloadError(
            f"cannot be read: {error.strerror}; check the path", path=str(path)
        ) from None


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, each with its number, from 1.

    Raises:
        WorkloadError: The file cannot be read, or is not text.
    """
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if stripped := line.strip():
            yield number, stripped


def decode_lines(path: Path, row: type[T]) -> Iterator[tuple[int, T]]:
    """Yield one `row` per line of a JSON Lines file, with the line's number.

    Raises:
        WorkloadError: A line is not JSON, or not such a row.
    """
    decoder = msgspec.json.Decoder(row)
    number = 0
    try:
        for number, line in read_lines(path):
            yield number, decoder.decode(line)
    except msgspec.DecodeError as error:
        raise row_error(error, path, number) from None


def convert_row(values: object, row: type[T], path: Path, line: int | None = None) -> T:
    """Check plain values against a struct; text becomes numbers where the struct has numbers.

    Raises:
        WorkloadError: A value is missing or invalid.
    """
    try:
        return msgspec.convert(values, row, strict=line is None)
    except msgspec.ValidationError as error:
        raise row_error(error, path, line) from None


def row_error(error: Exception, path: Path, line: int | None) -> WorkloadError:
    """Convert a decoder's error to a `WorkloadError` with the field's name."""
    text = str(error)
    found = _FIELD.search(text)
    message = text[: found.start()] if found else text
    return WorkloadError(
        f"{message}; correct or remove it",
        path=str(path),
        line=line,
        field=found.group(1) if found else None,
    )


def num_asked(num_output_tokens: int) -> int:
    """Return the output tokens to ask for: those of the trace, at least one."""
    return max(1, num_output_tokens)


def in_arrival_order(requests: Iterable[TraceRequest], path: Path) -> tuple[TraceRequest, ...]:
    """Sort requests by arrival; simultaneous ones keep the order of the file.

    Raises:
        WorkloadError: There are no requests.
    """
    ordered = tuple(sorted(requests, key=attrgetter("arrival_s")))
    if not ordered:
        raise WorkloadError("holds no requests; check that it is complete", path=str(path))
    return ordered


def random_generator(*words: int) -> np.random.Generator:
    """Return a random generator seeded with non-negative words: a seed and a purpose.

    Different purposes have independent streams, so that one more draw of arrivals does not change
    the lengths.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))

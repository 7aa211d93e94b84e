"""ServeGen: a folder of clients, each with its rate, burstiness and lengths by time window.

The published data are statistics, not requests; `read_servegen` draws requests from them.

Source: "ServeGen: Workload Characterization and Generation of Large Language Model Serving in
Production", alibaba/ServeGen, folder `data`.
"""

from __future__ import annotations

import ast
import csv
import math
import re
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np

from cluster.lab.workloads.errors import WorkloadError
from cluster.lab.workloads.request import TraceRequest, Workload
from cluster.lab.workloads.rows import (
    Time,
    convert_row,
    in_arrival_order,
    random_generator,
    read_lines,
    read_text,
    row_error,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

TRACE_FILES = "chunk-*-trace.csv"
LONE_WINDOW_S = 600.0
"""Length of a client's only window: that of the published data."""

_CLIENT = re.compile(r"chunk-(\d+)-trace\.csv")
_COLUMNS = ("window_start_s", "rate_rps", "cv", "pattern", "shape", "scale")


class Window(msgspec.Struct, frozen=True):
    """One line of a client's trace file.

    Attributes:
        window_start_s: Its start, on the clock of the data.
        pattern: Distribution of the gaps between requests; empty without requests.
        shape: Shape parameter of that distribution. Its scale follows from the rate.
    """

    window_start_s: Time
    rate_rps: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    pattern: Literal["Gamma", "Weibull", ""]
    shape: Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class LengthHistograms(msgspec.Struct, frozen=True):
    """Prompt and answer lengths of one client from a start time on, as text of Python dicts."""

    input_tokens: str
    output_tokens: str


@dataclass(frozen=True, slots=True)
class Histogram:
    """Lengths in tokens, and the probability of each."""

    tokens: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Client:
    """One client of the data set.

    Attributes:
        number: The N in the names of its files.
        windows: Its windows, in order of time.
        window_s: Length of each window.
    """

    number: int
    path: Path
    windows: tuple[Window, ...]
    window_s: float


@dataclass(frozen=True, slots=True)
class _Draw:
    """A window to draw requests for, with its client and length histograms."""

    window: Window
    client: Client
    lengths: tuple[tuple[float, Histogram, Histogram], ...]


def read_servegen(folder: Path, seed: int, limit: int | None) -> Workload:
    """Draw requests; arrivals count from the first window of the data.

    Every (client, window) has random numbers of its own, so that those of the first windows are the
    same wherever one stops.

    Args:
        folder: Has `chunk-N-trace.csv` and `chunk-N-dataset.json` for each client N.
        seed: Of the random numbers.
        limit: Stop after so many requests; None draws all.

    Raises:
        WorkloadError: A file is missing or malformed, or nothing arrives.
    """
    clients = _read_clients(folder)
    first_s = min(client.windows[0].window_start_s for client in clients)
    draws = [
        _Draw(window, client, lengths)
        for client in clients
        for lengths in [_read_lengths(client)]
        for window in client.windows
        if window.rate_rps > 0
    ]
    draws.sort(key=attrgetter("window.window_start_s", "client.number"))
    parts = _draw_until(draws, seed, math.inf if limit is None else limit)
    requests = [
        TraceRequest(arrival_s - first_s, num_prompt_tokens, num_output_tokens)
        for columns in parts
        for arrival_s, num_prompt_tokens, num_output_tokens in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]
    return Workload(folder.name, in_arrival_order(requests, folder)[:limit])


def _draw_until(
    draws: list[_Draw], seed: int, limit: float
) -> Iterator[tuple[npt.NDArray[np.generic], ...]]:
    """Draw window after window, until no later one can be among the first `limit` requests."""
    num_drawn, latest_s = 0, 0.0
    for start_s, together in groupby(draws, key=attrgetter("window.window_start_s")):
        if num_drawn >= limit and latest_s <= start_s:
            return
        for draw in together:
            columns = _draw_window(draw, seed)
            num_drawn += len(columns[0])
            latest_s = max(latest_s, start_s + draw.client.window_s)
            yield columns


def _draw_window(
    draw: _Draw, seed: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Draw a window's arrivals (on the data's clock), prompt and answer lengths, each (n,)."""
    window, client = draw.window, draw.client
    random = random_generator(seed, client.number, int(window.window_start_s))
    # The rate is a count divided by the window. Round its fraction up or down at random.
    num_requests = math.floor(window.rate_rps * client.window_s + random.uniform(1e-6, 1 - 1e-6))
    arrivals_s = window.window_start_s + client.window_s * _arrivals(window, num_requests, random)
    start_s = window.window_start_s
    _, inputs, outputs = next(of for of in reversed(draw.lengths) if of[0] <= start_s)
    return (
        arrivals_s,
        random.choice(inputs.tokens, num_requests, p=inputs.probabilities),
        random.choice(outputs.tokens, num_requests, p=outputs.probabilities),
    )


def _arrivals(
    window: Window, num_requests: int, random: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Draw sorted positions in [0, 1): gaps of the client's pattern, stretched to the window.

    Stretching keeps the shape of the gaps and the exact number of requests; the fitted scale would
    miss the client's own rate by a factor of up to four.
    """
    if window.pattern == "Gamma":
        gaps = random.standard_gamma(window.shape, num_requests + 1)
    elif window.pattern == "Weibull":
        gaps = random.weibull(window.shape, num_requests + 1)
    else:
        gaps = random.standard_exponential(num_requests + 1)
    ends = np.cumsum(gaps)
    # With a shape near 0 all gaps may underflow; then draw uniform positions.
    if not 0 < ends[-1] < math.inf:
        return np.sort(random.random(num_requests))
    places: npt.NDArray[np.float64] = ends[:-1] / ends[-1]
    return np.minimum(places, np.nextafter(1.0, 0.0))


def _read_clients(folder: Path) -> list[Client]:
    """Read every client of the folder, in order of number."""
    paths = {int(m.group(1)): p for p in folder.glob(TRACE_FILES) if (m := _CLIENT.match(p.name))}
    if not paths:
        raise WorkloadError(f"holds no {TRACE_FILES}; name a ServeGen folder", path=str(folder))
    return [_read_client(number, path) for number, path in sorted(paths.items())]


def _read_client(number: int, path: Path) -> Client:
    windows = []
    for line, text in read_lines(path):
        values = dict(zip(_COLUMNS, next(csv.reader([text])), strict=False))
        window = convert_row(values, Window, path, line)
        if window.rate_rps > 0 and window.pattern and not window.shape:
            raise WorkloadError(
                "must be above 0 where there is a rate", path=str(path), line=line, field="shape"
            )
        windows.append(window)
    if not windows:
        raise WorkloadError("holds no windows; check that it is complete", path=str(path))
    windows.sort(key=attrgetter("window_start_s"))
    starts_s = [window.window_start_s for window in windows]
    gaps_s = [after - before for before, after in pairwise(starts_s)]
    window_s = min(gaps_s, default=LONE_WINDOW_S)
    if not window_s:
        raise WorkloadError("two windows begin at the same time; remove one", path=str(path))
    return Client(number, path, tuple(windows), window_s)


def _read_lengths(client: Client) -> tuple[tuple[float, Histogram, Histogram], ...]:
    """Read (start, prompt lengths, answer lengths), in order of time, without empty ones."""
    path = client.path.with_name(f"chunk-{client.number}-dataset.json")
    try:
        by_start = msgspec.json.decode(
            read_text(path), type=dict[float, LengthHistograms], strict=False
        )
    except msgspec.DecodeError as error:
        raise row_error(error, path, None) from None
    lengths = [
        (start_s, inputs, outputs)
        for start_s, raw in sorted(by_start.items())
        if (inputs := _parse_histogram(raw.input_tokens, path, f"{start_s:g}.input_tokens"))
        and (outputs := _parse_histogram(raw.output_tokens, path, f"{start_s:g}.output_tokens"))
    ]
    first_lengths_s = lengths[0][0] if lengths else math.inf
    busy_s = (w.window_start_s for w in client.windows if w.rate_rps > 0)
    first_busy_s = min(busy_s, default=math.inf)
    if first_busy_s < first_lengths_s:
        raise WorkloadError(
            f"has no lengths for the window at {first_busy_s:g} s; add a histogram at or before it",
            path=str(path),
        )
    return tuple(lengths)


def _parse_histogram(text: str, path: Path, field: str) -> Histogram | None:
    """Read "{tokens: probability, ...}"; None if it is empty."""
    try:
        raw = msgspec.convert(ast.literal_eval(text), dict[int, float])
    except (ValueError, SyntaxError, MemoryError, RecursionError, msgspec.ValidationError):
        raise WorkloadError(
            "is not a dict of tokens and probabilities; download the file again",
            path=str(path),
            field=field,
        ) from None
    if not raw:
        return None
    tokens = np.array(list(raw), dtype=np.int64)
    weights = np.array(list(raw.values()))
    if tokens.min() < 1 or not weights.min() >= 0 or not 0 < weights.sum() < math.inf:
        raise WorkloadError(
            "lengths must be 1 or more and probabilities 0 or more, not all of them 0",
            path=str(path),
            field=field,
        )
    return Histogram(tokens, weights / weights.sum())

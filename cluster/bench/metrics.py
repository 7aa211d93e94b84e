"""Figures of a serving benchmark from what each request met. Pure.

Names, definitions and keys are those of vLLM 0.32 `benchmarks/serve.py`: TTFT is the first chunk
with a choice, ITL the gap between two such chunks, TPOT the time after the first token over the
further tokens, and a latency ends with the last chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from cluster.bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": (
        "E2EL incl. Client Queue",
        "Queue-inclusive End-to-end Latency",
    ),
}
"""Abbreviation and heading of each metric, in the order of the table."""
OBJECTIVES = ("ttft", "tpot", "e2el")
"""Metrics that an objective of `--goodput` may name."""
DETAILED = (
    "input_lens",
    "output_lens",
    "start_times",
    "ttfts",
    "itls",
    "generated_texts",
    "errors",
)
"""Keys that are saved with `--save-detailed` alone."""
_WIDTH = 50


class RequestResult(msgspec.Struct):
    """One request as its client saw it; times are seconds of one monotonic clock.

    Attributes:
        prompt_len: Tokens of the prompt: the server's count, else the data set's.
        output_len: Output tokens that the server counted; 0 until it has.
        start_s: When the request was sent.
        queue_s: How long it waited for its turn before, with a bounded concurrency.
        ttft_s: Time to the first chunk.
        itls_s: Gaps between chunks.
        latency_s: Time to the last chunk.
        text: Generated text.
        error: Why the request failed; "" if it did not.
        is_lost: Whether it failed because the server could not be reached.
    """

    prompt_len: int
    output_len: int = 0
    start_s: float = 0.0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    itls_s: list[float] = []
    latency_s: float = 0.0
    text: str = ""
    error: str = ""
    is_lost: bool = False

    @property
    def tpot_s(self) -> float:
        """Return the mean time per token after the first; 0 with one token."""
        if self.output_len <= 1:
            return 0.0
        return (self.latency_s - self.ttft_s) / (self.output_len - 1)


class Wanted(msgspec.Struct, frozen=True):
    """Which figures to compute.

    Attributes:
        metrics: Keys of `TITLES`.
        percentiles: Each from 0 to 100.
        goodput_ms: Objectives in milliseconds, by metric; empty computes no goodput.

    Raises:
        BenchError: A name is unknown, or a number out of range.
    """

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percentiles: tuple[float, ...] = (99.0,)
    goodput_ms: dict[str, float] = {}

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in TITLES:
                raise BenchError(
                    f"--percentile-metrics has {name!r}; choose from {', '.join(TITLES)}"
                )
        for percentile in self.percentiles:
            if not 0 <= percentile <= 100:
                raise BenchError(
                    f"--metric-percentiles has {percentile}; give numbers from 0 to 100"
                )
        for name, value in self.goodput_ms.items():
            if name not in OBJECTIVES:
                raise BenchError(f"--goodput has {name!r}; choose from {', '.join(OBJECTIVES)}")
            if not value >= 0:
                raise BenchError(f"--goodput {name}:{value}: give milliseconds, 0 or more")


def summarize(
    results: Sequence[RequestResult], duration_s: float, wanted: Wanted
) -> dict[str, Any]:
    """Return vLLM's keys for a run; `DETAILED` ones have an entry for each of `results`.

    Args:
        results: What became of each request that was sent.
        duration_s: From the start of the run to its end, above 0.
        wanted: Figures to compute.
    """
    good = [result for result in results if not result.error]
    num_input = sum(result.prompt_len for result in good)
    num_output = sum(result.output_len for result in good)
    most_tokens, most_requests = _peaks(good)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": _num_within(good, wanted.goodput_ms) / duration_s
        if wanted.goodput_ms
        else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "input_lens": [result.prompt_len for result in results],
        "output_lens": [0 if result.error else result.output_len for result in results],
        "ttfts": [result.ttft_s for result in results],
        "itls": [result.itls_s for result in results],
        "latencies": [result.latency_s for result in results],
        "start_times": [result.start_s for result in results],
        "queue_times": [result.queue_s for result in results],
        "generated_texts": [result.text for result in results],
        "errors": [result.error for result in results],
        "max_output_tokens_per_s": most_tokens,
        "max_concurrent_requests": most_requests,
        "rtfx": 0.0,
    }
    for name in (name for name in TITLES if name in wanted.metrics):
        figures |= _statistics(name, _values_s(name, good), wanted.percentiles)
    return figures


def table(figures: Mapping[str, Any], wanted: Wanted) -> str:
    """Return the figures as vLLM prints them; `max_concurrency` and `request_rate` are optional."""
    lines = [
        " Serving Benchmark Result ".center(_WIDTH, "="),
        _line("Successful requests:", figures["completed"]),
        _line("Failed requests:", figures["failed"]),
    ]
    if figures.get("max_concurrency") is not None:
        lines.append(_line("Maximum request concurrency:", figures["max_concurrency"]))
    if figures.get("request_rate", "inf") != "inf":
        lines.append(_line("Request rate configured (RPS):", float(figures["request_rate"])))
    rows = {
        "duration": "Benchmark duration (s):",
        "total_input_tokens": "Total input tokens:",
        "total_output_tokens": "Total generated tokens:",
        "request_throughput": "Request throughput (req/s):",
        "request_goodput": "Request goodput (req/s):",
        "output_throughput": "Output token throughput (tok/s):",
        "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
        "max_concurrent_requests": "Peak concurrent requests:",
        "total_token_throughput": "Total token throughput (tok/s):",
    }
    lines += [_line(text, figures[key]) for key, text in rows.items() if figures[key] is not None]
    for name, (short, heading) in TITLES.items():
        if name not in wanted.metrics:
            continue
        lines.append(heading.center(_WIDTH, "-"))
        lines.append(_line(f"Mean {short} (ms):", figures[f"mean_{name}_ms"]))
        lines.append(_line(f"Median {short} (ms):", figures[f"median_{name}_ms"]))
        for percentile in wanted.percentiles:
            word = f"{percentile:g}"
            lines.append(_line(f"P{word} {short} (ms):", figures[f"p{word}_{name}_ms"]))
    return "\n".join([*lines, "=" * _WIDTH])


def _line(text: str, value: int | float) -> str:
    shown = str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{text:<40} {shown:<10}"


def _values_s(name: str, good: Sequence[RequestResult]) -> list[float]:
    if name == "ttft":
        return [result.ttft_s for result in good]
    if name == "tpot":
        return [result.tpot_s for result in good if result.output_len > 1]
    if name == "itl":
        return [gap for result in good for gap in result.itls_s]
    if name == "client_queue_time":
        return [result.queue_s for result in good]
    queue_s = [result.queue_s if name == "e2el_including_client_queue" else 0.0 for result in good]
    return [result.latency_s + wait_s for result, wait_s in zip(good, queue_s, strict=True)]


def _statistics(
    name: str, values_s: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float]:
    # Without values all figures are 0, as in vLLM.
    values_ms = np.array(values_s or [0.0]) * 1000.0
    found = {
        f"mean_{name}_ms": float(np.mean(values_ms)),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(np.std(values_ms)),
    }
    for percentile in percentiles:
        found[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values_ms, percentile))
    return found


def _num_within(good: Sequence[RequestResult], goodput_ms: Mapping[str, float]) -> int:
    def is_within(result: RequestResult) -> bool:
        met = {"ttft": result.ttft_s, "tpot": result.tpot_s, "e2el": result.latency_s}
        return all(met[name] * 1000.0 <= limit for name, limit in goodput_ms.items())

    return sum(map(is_within, good))


def _peaks(good: Sequence[RequestResult]) -> tuple[float, int]:
    """Return the most chunks and the most open requests of a second after the first request."""
    if not good:
        return 0.0, 0
    begin_s = min(result.start_s for result in good)
    end_s = max(result.start_s + result.latency_s for result in good)
    num_seconds = int(end_s - begin_s) + 2
    chunks, opened = np.zeros(num_seconds), np.zeros(num_seconds)
    for result in good:
        first_s = result.start_s - begin_s
        gaps = np.cumsum([result.ttft_s, *result.itls_s])
        np.add.at(chunks, (first_s + gaps).astype(int).clip(max=num_seconds - 1), 1)
        opened[int(first_s) : int(first_s + result.latency_s) + 1] += 1
    return float(chunks.max()), int(opened.max())

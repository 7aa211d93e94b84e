"""Figures of a serving benchmark, from requests whose times are known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.errors import BenchError
from cluster.bench.metrics import DETAILED, RequestResult, Wanted, summarize, table

ALL = ("ttft", "tpot", "itl", "e2el")


def result(start_s, ttft_s, itls_s, *, prompt_len=10, output_len=None, error=""):
    count = 1 + len(itls_s) if output_len is None else output_len
    return RequestResult(
        prompt_len, count, start_s, 0.0, ttft_s, list(itls_s), ttft_s + sum(itls_s), "x", error
    )


RUN = [
    result(100.0, 0.5, [0.25, 0.25]),
    result(100.5, 1.0, [0.5] * 4),
    result(101.0, 0.25, []),
    result(101.0, 0.1, [0.1], error="500 broken"),
]


def test_the_figures_of_a_run():
    wanted = Wanted(metrics=ALL, percentiles=(50, 99.9), goodput_ms={"ttft": 600, "tpot": 300})
    figures = summarize(RUN, 2.0, wanted)
    expected = {
        "duration": 2.0,
        "completed": 3,
        "failed": 1,
        "total_input_tokens": 30,
        "total_output_tokens": 9,
        "request_throughput": 1.5,
        # The second is too slow, the third has no further token to be slow with.
        "request_goodput": 1.0,
        "output_throughput": 4.5,
        "total_token_throughput": 19.5,
        "output_lens": [3, 5, 1, 0],
        "errors": ["", "", "", "500 broken"],
        # Chunks 1.0 s, 1.25 s and 1.5 s after the first request.
        "max_output_tokens_per_s": 3.0,
        "max_concurrent_requests": 3,
        "mean_ttft_ms": pytest.approx((500 + 1000 + 250) / 3),
        "median_ttft_ms": pytest.approx(500),
        "mean_tpot_ms": pytest.approx((250 + 500) / 2),
        "mean_itl_ms": pytest.approx((2 * 250 + 4 * 500) / 6),
        "mean_e2el_ms": pytest.approx((1000 + 3000 + 250) / 3),
        "p50_ttft_ms": pytest.approx(500),
        "p99.9_e2el_ms": pytest.approx(np.percentile([1000, 3000, 250], 99.9)),
        "std_ttft_ms": pytest.approx(np.std([500, 1000, 250])),
    }
    assert {key: figures[key] for key in expected} == expected
    assert set(DETAILED) <= figures.keys()


def test_the_table_of_a_run():
    wanted = Wanted(metrics=("tpot", "ttft"), goodput_ms={"e2el": 1000})
    figures = {"max_concurrency": 4, "request_rate": 2.0, **summarize(RUN, 2.0, wanted)}
    lines = [line.rstrip() for line in table(figures, wanted).splitlines()]
    assert lines == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     3",
        "Failed requests:                         1",
        "Maximum request concurrency:             4",
        "Request rate configured (RPS):           2.00",
        "Benchmark duration (s):                  2.00",
        "Total input tokens:                      30",
        "Total generated tokens:                  9",
        "Request throughput (req/s):              1.50",
        "Request goodput (req/s):                 1.00",
        "Output token throughput (tok/s):         4.50",
        "Peak output token throughput (tok/s):    3.00",
        "Peak concurrent requests:                3",
        "Total token throughput (tok/s):          19.50",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          583.33",
        "Median TTFT (ms):                        500.00",
        "P99 TTFT (ms):                           990.00",
        "-----Time per Output Token (excl. 1st token)------",
        "Mean TPOT (ms):                          375.00",
        "Median TPOT (ms):                        375.00",
        "P99 TPOT (ms):                           497.50",
        "==================================================",
    ]


def test_waits_in_the_client_count_on_request():
    results = [result(100.0, 0.5, []), result(100.0, 0.5, [0.5])]
    results[1].queue_s = 2.0
    names = ("client_queue_time", "e2el_including_client_queue", "e2el")
    figures = summarize(results, 1.0, Wanted(metrics=names))
    means = [figures[f"mean_{name}_ms"] for name in names]
    assert means == pytest.approx([1000, (500 + 3000) / 2, (500 + 1000) / 2])


def test_a_run_without_successes_has_figures():
    figures = summarize([RUN[-1]], 2.0, Wanted(metrics=ALL))
    assert (figures["completed"], figures["failed"]) == (0, 1)
    assert figures["p99_ttft_ms"] == figures["max_output_tokens_per_s"] == 0
    assert figures["request_goodput"] is None


times = st.floats(0, 3)


@given(st.lists(st.tuples(times, times, st.lists(times, max_size=5)), min_size=1, max_size=8))
def test_peaks_and_goodput_are_bounded(rows):
    results = [result(start, ttft, itls) for start, ttft, itls in rows]
    figures = summarize(results, 1.0, Wanted(metrics=ALL, goodput_ms={"ttft": 1e9}))
    chunks = sum(1 + len(itls) for _, _, itls in rows)
    seconds = max(r.start_s + r.latency_s for r in results) - min(r.start_s for r in results)
    assert chunks / (int(seconds) + 2) <= figures["max_output_tokens_per_s"] <= chunks
    assert 1 <= figures["max_concurrent_requests"] <= len(rows)
    assert figures["request_goodput"] == len(rows)


@pytest.mark.parametrize(
    "options",
    [
        {"metrics": ("speed",)},
        {"percentiles": (101.0,)},
        {"goodput_ms": {"itl": 5.0}},
        {"goodput_ms": {"ttft": -1.0}},
    ],
)
def test_figures_that_do_not_exist_are_refused(options):
    with pytest.raises(BenchError, match=r"choose from|give"):
        Wanted(**options)

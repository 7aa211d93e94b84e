"""Honest clients in a process of their own: streams and probes, repeated, each answer checked.

Reads lines from stdin: first a `Task` as JSON, then one for each `Report`, which it prints. At the
end of stdin it lets every request end, prints a last report, and ends.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tests.e2e import harness

if TYPE_CHECKING:
    from collections.abc import Callable


STREAM = "stream"


class Seen(NamedTuple):
    """An answer.

    Attributes:
        name: "stream", or the probe's.
        first_s: Seconds to its first token.
        answer: Its token ids, or text.
        pause_s: Before the next request.
    """

    name: str
    first_s: float
    answer: list[int] | str
    pause_s: float = 0.0


class Probe(msgspec.Struct):
    """A request without streaming that one client repeats.

    Attributes:
        name: Its name in reports.
        body: Of a completion; the answer's text must always be the same.
        pause_s: Between an answer and the next request.
    """

    name: str
    body: dict[str, Any]
    pause_s: float = 0.3


class Task(msgspec.Struct):
    """The requests to send.

    Attributes:
        url: Of the endpoint.
        model: Its name.
        prompts: Token ids, one list a stream.
        max_tokens: Of each stream.
        probes: Requested beside the streams.
    """

    url: str
    model: str
    prompts: list[list[int]]
    max_tokens: int
    probes: list[Probe] = []


class Report(msgspec.Struct):
    """Results of the honest clients.

    Attributes:
        num_done: Streams that ended with the right tokens.
        failures: The error of each other stream or probe.
        first_s: Since the last report, by "stream" or a probe's name, seconds to the first token
            of each request that ended well.
    """

    num_done: int
    failures: list[str]
    first_s: dict[str, list[float]]


class SteadyStreams:
    """A thread for each prompt and probe, which requests it, checks the answer, and repeats.

    Owner: `_lock` guards the report.
    """

    def __init__(self, task: Task) -> None:
        """Request everything once, without an attack under way: these answers are right."""
        self._task = task
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._report = Report(0, [], {})
        asks: list[Callable[[], Seen]] = [
            *(partial(self._stream, prompt) for prompt in task.prompts),
            *(partial(self._probe, probe) for probe in task.probes),
        ]
        with ThreadPoolExecutor(len(asks)) as threads:
            expected = threads.map(lambda ask: ask(), asks)
            self._threads = [
                threading.Thread(target=self._repeat, args=(n, ask, seen))
                for n, (ask, seen) in enumerate(zip(asks, expected, strict=True))
            ]
        for thread in self._threads:
            thread.start()

    def report(self) -> Report:
        """Return the results so far, and the times to a first token since the last report."""
        with self._lock:
            report = msgspec.structs.replace(self._report, failures=list(self._report.failures))
            self._report.first_s = {}
            return report

    def close(self) -> None:
        """Wait until every request has ended."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, n: int, ask: Callable[[], Seen], expected: Seen) -> None:
        while not self._is_over.is_set():
            started_s = time.monotonic()
            seen = None
            try:
                seen = ask()
                failure = "" if seen.answer == expected.answer else f"wrong: {seen.answer}"
            except (OSError, AssertionError, KeyError, ValueError, HTTPException) as error:
                failure = f"{error!r} after {time.monotonic() - started_s:.1f} s"
            with self._lock:
                if failure:
                    self._report.failures.append(f"{n}, {expected.name}: {failure}")
                elif seen is not None:
                    self._report.num_done += seen.name == STREAM
                    self._report.first_s.setdefault(seen.name, []).append(seen.first_s)
            self._is_over.wait(0.5 if failure else expected.pause_s)

    def _stream(self, prompt: list[int]) -> Seen:
        body = {
            "model": self._task.model, "prompt": prompt, "max_tokens": self._task.max_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        begun_s, first_s, events = time.monotonic(), 0.0, []
        for event in harness.stream_events(self._task.url, "/v1/completions", body, 120.0):
            first_s = first_s or time.monotonic() - begun_s
            events.append(event)
        assert events.pop() == "[DONE]", "cut off"
        chunks: list[dict[str, Any]] = [json.loads(event) for event in events]
        return Seen(
            STREAM, first_s, [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]]
        )

    def _probe(self, probe: Probe) -> Seen:
        begun_s = time.monotonic()
        status, answer = harness.post_json(f"{self._task.url}/v1/completions", probe.body, 120.0)
        assert status == 200, (status, answer)
        return Seen(
            probe.name, time.monotonic() - begun_s, answer["choices"][0]["text"], probe.pause_s
        )


def main() -> None:
    """Run until stdin ends."""
    streams = SteadyStreams(msgspec.json.decode(sys.stdin.readline(), type=Task))
    try:
        for _ in sys.stdin:
            _print(streams.report())
    finally:
        streams.close()
    _print(streams.report())


def _print(report: Report) -> None:
    print(msgspec.json.encode(report).decode(), flush=True)


if __name__ == "__main__":
    main()

"""Honest clients in a process of their own: streams that go on, each checked token by token.

Reads lines from stdin: first a `Task` as JSON, then one for each look at the `Report`, which it
prints. The end of stdin ends it once every stream has come to its end, with a last report.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import msgspec

from tests.e2e import harness


class Task(msgspec.Struct):
    """What to ask for.

    Attributes:
        url: Of the endpoint.
        model: Its name.
        prompts: Token ids, one list a stream.
        max_tokens: Of each answer.
    """

    url: str
    model: str
    prompts: list[list[int]]
    max_tokens: int


class Report(msgspec.Struct):
    """What has come.

    Attributes:
        num_done: Streams that ended with the right tokens.
        failures: What was wrong with each other one.
    """

    num_done: int
    failures: list[str]


class SteadyStreams:
    """As many threads as prompts; each asks, checks and asks again.

    Owner: `_lock` guards what the report says.
    """

    def __init__(self, task: Task) -> None:
        """Ask for everything once, with nobody's attack under way: that is what is right."""
        self._task = task
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._num_done = 0
        self._failures: list[str] = []
        self._expected = [self._stream(prompt) for prompt in task.prompts]
        numbers = range(len(task.prompts))
        self._threads = [threading.Thread(target=self._go_on, args=(n,)) for n in numbers]
        for thread in self._threads:
            thread.start()

    def report(self) -> Report:
        """What has come until now."""
        with self._lock:
            return Report(self._num_done, list(self._failures))

    def close(self) -> None:
        """Let every stream come to its end."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _go_on(self, n: int) -> None:
        while not self._is_over.is_set():
            started_s = time.monotonic()
            try:
                token_ids = self._stream(self._task.prompts[n])
                failure = "" if token_ids == self._expected[n] else f"wrong tokens: {token_ids}"
            except (OSError, AssertionError, KeyError, ValueError) as error:
                failure = f"{error!r} after {time.monotonic() - started_s:.1f} s"
                time.sleep(0.5)
            with self._lock:
                self._num_done += not failure
                self._failures += [f"stream {n}: {failure}"] if failure else []

    def _stream(self, prompt: list[int]) -> list[int]:
        body = {
            "model": self._task.model, "prompt": prompt, "max_tokens": self._task.max_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        *events, last = harness.stream_events(self._task.url, "/v1/completions", body, 120.0)
        assert last == "[DONE]", last
        chunks: list[dict[str, Any]] = [json.loads(event) for event in events]
        return [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]]


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

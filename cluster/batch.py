"""Client for files of requests: `ttserve run-batch` sends each line of a file to a running server.

Files have the format of OpenAI's batches, and the command replaces their API: no server has to keep
files. Source: OpenAI's batch input and output objects; vLLM 0.32 `entrypoints/openai/run_batch.py`.

    lines ─→ threads, each with one request at a time ─→ the caller's thread appends the answers

An answer is one line, written and flushed when it comes, in any order. A run that was stopped is
continued by running it again: requests that have a final answer are skipped.
"""

from __future__ import annotations

import contextlib
import email.message
import email.utils
import http.client
import queue
import random
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import orjson

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RETRIED_STATUSES = frozenset({408, 429, 502, 503, 504, 529})
"""Statuses of a server that is busy or starting; another try may succeed."""
_MENDABLE_STATUSES = frozenset({401, 403, 404})
"""Statuses that another key, server or model may mend; another run may succeed."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_PROGRESS_S = 5.0

Say: TypeAlias = Callable[[str], None]


class BatchError(Exception):
    """Files or options that cannot be used; the message says what to change."""


class BatchRequest(msgspec.Struct, frozen=True):
    """One line of an input file.

    Attributes:
        custom_id: The caller's name of the request, unique in the file.
        url: Path of the route, such as "/v1/chat/completions".
        body: The request's body.
        method: Always POST.
    """

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class BatchResponse(msgspec.Struct, frozen=True):
    """Answer of the server.

    Attributes:
        status_code: Its HTTP status.
        request_id: The server's id of the request, "" if it gave none.
        body: Its body: an object, or text if the body is no JSON.
    """

    status_code: int
    request_id: str
    body: Any


class BatchFailure(msgspec.Struct, frozen=True):
    """Why a request has no successful answer.

    Attributes:
        code: The code of the server's error, "connection_error", or "client_error" for an error of
            this program.
        message: What happened.
    """

    code: str
    message: str


class BatchAnswer(msgspec.Struct, frozen=True):
    """One line of an output file.

    Attributes:
        id: A new id.
        custom_id: That of the request.
        response: The server's last answer; None if there was none.
        error: None exactly if the status is 200.
    """

    id: str
    custom_id: str
    response: BatchResponse | None
    error: BatchFailure | None

    @property
    def is_final(self) -> bool:
        """Return whether another run would give the same answer."""
        if self.response is None or self.error is None:
            return self.response is not None
        status = self.response.status_code
        return 400 <= status < 500 and status not in RETRIED_STATUSES | _MENDABLE_STATUSES


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How a file is run.

    Attributes:
        url: Address of the server, without a path.
        concurrency: Most requests at a time.
        max_tries: Most tries of a request while the server is busy or cannot be reached.
        timeout_s: Longest wait for the server's next byte, in seconds.
        api_key: Key to send; "" sends none.

    Raises:
        BatchError: A header cannot hold the key.
    """

    url: str
    concurrency: int = 64
    max_tries: int = 10
    timeout_s: float = 3600.0
    api_key: str = ""

    def __post_init__(self) -> None:
        if not _is_visible(self.api_key.replace(" ", "")) or self.api_key != self.api_key.strip():
            raise BatchError(
                "the API key must have visible ASCII characters, and no space at its beginning or "
                "end"
            )


def read_requests(path: Path) -> list[BatchRequest]:
    """Return the requests of an input file, after checking every line.

    Raises:
        BatchError: The file cannot be read, or a line is wrong; the message names the line.
    """
    decoder = msgspec.json.Decoder(BatchRequest)
    found: dict[str, BatchRequest] = {}
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            request = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BatchError(f"{path}:{number}: {error}") from error
        problem = _problem(request)
        if request.custom_id in found:
            problem = f"custom_id {request.custom_id!r} is that of an earlier line"
        if problem:
            raise BatchError(f"{path}:{number}: {problem}")
        found[request.custom_id] = request
    if not found:
        raise BatchError(f"{path} holds no requests")
    return list(found.values())


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")
    except OSError as error:
        raise BatchError(f"cannot read {path}: {error.strerror}") from error


def _problem(request: BatchRequest) -> str:
    """Return why a request cannot be sent, or ""."""
    if request.method != "POST":
        return f"method must be POST, got {request.method!r}"
    if not request.url.startswith("/v1/") or not _is_visible(request.url):
        return f"url must be a path such as /v1/chat/completions, got {request.url!r}"
    if request.body.get("stream"):
        return "body.stream must be false or left out: an answer is one line"
    try:
        orjson.dumps(request.body)
    except orjson.JSONEncodeError as error:
        return f"body cannot be sent: {error}"
    return ""


def _is_visible(text: str) -> bool:
    """Return whether a text has only visible ASCII characters."""
    return all("!" <= x <= "~" for x in text)


def keep_final_answers(path: Path) -> dict[str, BatchFailure | None]:
    """Remove what is to be tried again from an output file.

    A last line that a stopped run has not completed is removed, too.

    Returns:
        The errors of the other answers, by their custom ids; None for successful ones.

    Raises:
        BatchError: The file cannot be read or written, or holds something else than answers.
    """
    if not path.exists():
        return {}
    kept, is_changed = [], False
    answered: dict[str, BatchFailure | None] = {}
    lines = _lines(path)
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            answer = msgspec.json.decode(line, type=BatchAnswer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if number == len(lines):  # without a line's end
                is_changed = True
                continue
            raise BatchError(f"{path}:{number} is no answer: {error}; name another file") from error
        if answer.is_final and number < len(lines):
            kept.append(line)
            answered[answer.custom_id] = answer.error
        else:
            is_changed = True
    if is_changed:
        beside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            beside.write_bytes(b"".join(line + b"\n" for line in kept))
            beside.replace(path)
        except OSError as error:
            raise BatchError(f"cannot write {path}: {error.strerror}") from error
    return answered


def run_batch(requests: list[BatchRequest], output: Path, options: BatchOptions, say: Say) -> int:
    """Send requests and append their answers to a file.

    Args:
        requests: Requests without a final answer.
        output: File to append to.
        options: How to send them.
        say: Called with a line about the progress now and then.

    Returns:
        The number of requests without a successful answer.

    Raises:
        BatchError: The file cannot be written.
    """
    num_failed = num_done = 0
    said_s = time.monotonic()
    try:
        with output.open("ab") as file:
            for answer in _answers(requests, options):
                file.write(msgspec.json.encode(answer) + b"\n")
                file.flush()
                num_done += 1
                num_failed += answer.error is not None
                now_s = time.monotonic()
                if now_s - said_s >= _PROGRESS_S or num_done == len(requests):
                    said_s = now_s
                    say(f"{num_done} of {len(requests)} requests done, {num_failed} failed")
    except OSError as error:
        raise BatchError(f"cannot write {output}: {error.strerror}") from error
    return num_failed


def _answers(requests: list[BatchRequest], options: BatchOptions) -> Iterator[BatchAnswer]:
    """Yield the answers as they come.

    The threads are daemons, so that Ctrl-C does not wait for answers.
    """
    waiting: queue.SimpleQueue[BatchRequest] = queue.SimpleQueue()
    for request in requests:
        waiting.put(request)
    # Bounded, so that answers do not pile up before a slow disk.
    done: queue.Queue[BatchAnswer] = queue.Queue(options.concurrency)

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                done.put(_Sending(waiting.get_nowait(), options).run())

    for _ in range(min(options.concurrency, len(requests))):
        threading.Thread(target=work, daemon=True).start()
    for _ in requests:
        yield done.get()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Gives a redirect as the answer: its target must not get the key of the server."""

    def redirect_request(self, *_args: object) -> None:
        """Refuse every redirect."""


_OPENER = urllib.request.build_opener(_NoRedirects)


class _Sending:
    """The tries of one request."""

    def __init__(self, request: BatchRequest, options: BatchOptions) -> None:
        self._request = request
        self._options = options
        headers = {"Content-Type": "application/json"}
        if options.api_key:
            headers["Authorization"] = f"Bearer {options.api_key}"
        self._http = urllib.request.Request(
            options.url + request.url, orjson.dumps(request.body), headers, method="POST"
        )

    def run(self) -> BatchAnswer:
        """Return the answer of the first try that is final, or of the last one."""
        for num_tries in range(1, self._options.max_tries + 1):
            answer, pause_s = self._try()
            if answer.error is None or pause_s is None or num_tries == self._options.max_tries:
                return answer
            # Tries of requests that were refused together are spread over twice the pause.
            growing_s = min(_FIRST_PAUSE_S * 2 ** (num_tries - 1), _LONGEST_PAUSE_S)
            time.sleep((pause_s or growing_s) * random.uniform(1.0, 2.0))
        raise AssertionError("there is at least one try")

    def _try(self) -> tuple[BatchAnswer, float | None]:
        """Return an answer, and the seconds before another try.

        They are 0 if the server has named none, and None if the answer is final.
        """
        try:
            with _OPENER.open(self._http, timeout=self._options.timeout_s) as reply:
                return self._answer(reply.status, reply.headers, reply.read()), None
        except urllib.error.HTTPError as refusal:
            with refusal:
                try:
                    body = refusal.read()
                except (OSError, http.client.HTTPException):
                    body = b""
            answer = self._answer(refusal.code, refusal.headers, body)
            is_retried = refusal.code in RETRIED_STATUSES
            return answer, _advised_s(refusal.headers) if is_retried else None
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            text = f"{self._options.url}: {reason or type(error).__name__}"
            failure = BatchFailure("connection_error", text)
            return self._line(None, failure), 0.0
        except Exception as error:  # noqa: BLE001 - each request needs an answer, or the run waits
            failure = BatchFailure("client_error", f"{type(error).__name__}: {error}")
            return self._line(None, failure), None

    def _answer(self, status: int, headers: email.message.Message, raw: bytes) -> BatchAnswer:
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            body = raw.decode(errors="replace")
        response = BatchResponse(status, headers.get("x-request-id", ""), body)
        return self._line(response, None if status == 200 else _failure(status, body))

    def _line(self, response: BatchResponse | None, error: BatchFailure | None) -> BatchAnswer:
        return BatchAnswer(
            f"batch_req_{uuid.uuid4().hex}", self._request.custom_id, response, error
        )


def _failure(status: int, body: Any) -> BatchFailure:  # noqa: ANN401 - any JSON value
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return BatchFailure(str(status), f"the server answered with status {status}")
    return BatchFailure(str(error.get("code") or status), str(error.get("message", "")))


def _advised_s(headers: email.message.Message) -> float:
    """Return the seconds of `Retry-After`, a number or a date, within bounds; 0 without it."""
    given = headers.get("Retry-After", "")
    try:
        seconds = float(given)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(given).timestamp() - time.time()
        except (TypeError, ValueError):
            return 0.0
    # Not a number fails both comparisons.
    return min(seconds, _LONGEST_PAUSE_S) if seconds > 0 else 0.0

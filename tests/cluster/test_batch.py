"""`ttserve run-batch` against servers in this process."""

import asyncio
import contextlib
import http.server
import json
import threading
import time
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cluster import batch, cli
from cluster.edge.openai import Usage
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.http_server import serving
from tests.cluster.edge.test_routes import make_app


@pytest.fixture
def run(tmp_path):
    """Runs the command on lines; returns the result, and the answers by custom id."""
    runner = CliRunner()

    def on(url, lines, *options):
        given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        text = "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines)
        given.write_text(text + "\n")
        files = ["-i", str(given), "-o", str(output)]
        result = runner.invoke(cli.app, ["run-batch", *files, "--url", url, *options])
        answers = (
            [json.loads(x) for x in output.read_text().splitlines()] if output.exists() else []
        )
        assert len({answer["custom_id"] for answer in answers}) == len(answers)
        return result, {answer["custom_id"]: answer for answer in answers}

    on.output = tmp_path / "out.jsonl"
    return on


def line(custom_id, url="/v1/completions", **body):
    body = {"prompt": "hi", "max_tokens": 2, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def nested(depth):
    """A list within so many others."""
    return [nested(depth - 1)] if depth else []


@contextlib.contextmanager
def scripted(*answers):
    """A server that gives these (status, headers) in turn, then 200; yields its url and its log."""
    left, seen = list(answers), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            seen.append((self.headers.get("authorization"), json.loads(body)))
            status, headers = left.pop(0) if left else (200, {})
            if status is None:
                return  # the connection ends without an answer
            raw = (
                b'{"ok": true}' if status == 200 else b'{"error": {"code": "busy", "message": "x"}}'
            )
            self.send_response(status)
            for name, value in {"content-length": str(len(raw)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between tries, none of which is waited for."""
    slept = []
    # Of this module alone: another thread may sleep, too.
    alone = SimpleNamespace(**{**vars(time), "sleep": slept.append})
    monkeypatch.setattr(batch, "time", alone)
    monkeypatch.setattr(batch.random, "uniform", lambda low, high: low)
    return slept


def test_every_request_is_answered_and_a_bad_one_alone_fails(run):
    chat = {"messages": [{"role": "user", "content": "hi"}], "prompt": None}
    lines = [
        line("a"),
        line("b", "/v1/chat/completions", **chat),
        line("c", max_tokens=-1),
        "",
        line("d", "/v1/nothing"),
    ]
    with serving(make_app(FakeBackend())) as port:
        result, answers = run(f"http://127.0.0.1:{port}/", lines)
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "ttserve: 4 of 4 requests done, 2 failed",
        "ttserve: 2 requests have failed; the output file has their errors. Run the same "
        "command again to send those that may succeed",
    ]
    assert answers["a"]["error"] is None
    response = answers["a"]["response"]
    assert response["status_code"] == 200
    assert response["body"]["choices"][0]["text"] == "hi"
    assert response["request_id"]
    assert answers["b"]["response"]["body"]["object"] == "chat.completion"
    assert answers["c"]["response"]["status_code"] == 400
    assert answers["c"]["response"]["body"]["error"]["param"] == "max_tokens"
    assert answers["c"]["error"]["code"] == "bad_request"
    assert answers["d"]["response"]["status_code"] == 404
    assert len({answer["id"] for answer in answers.values()}) == 4


def test_no_more_requests_run_at_a_time_than_asked(run):
    running, most, lock = 0, 0, threading.Lock()
    backend = FakeBackend()

    async def script(request, emit):
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.01)
        await emit(OutputDelta(0, "x", [1], "length"))
        with lock:
            running -= 1
        return Usage(1, 1)

    backend.script = script
    with serving(make_app(backend)) as port:
        lines = [line(f"r{i}") for i in range(12)]
        result, answers = run(f"http://127.0.0.1:{port}", lines, "--concurrency", "3")
    assert result.exit_code == 0
    assert len(answers) == 12
    assert 1 <= most <= 3


def test_a_busy_server_is_asked_again_when_it_says(run, pauses):
    busy = [(429, {"retry-after": "7"}), (503, {}), (529, {"retry-after": "1e9"}), (None, {})]
    with scripted(*busy) as (url, seen):
        result, answers = run(url, [line("a")], "--api-key", "secret")
    assert result.exit_code == 0
    assert answers["a"]["response"]["body"] == {"ok": True}
    assert pauses == [7.0, 2.0, 60.0, 8.0]
    assert {key for key, _ in seen} == {"Bearer secret"}
    assert "secret" not in run.output.read_text()


def test_a_server_that_stays_busy_or_away_fails_after_the_tries(run, pauses):
    with scripted(*[(503, {})] * 9) as (url, seen):
        result, answers = run(url, [line("a")], "--tries", "3")
        assert (result.exit_code, len(seen)) == (1, 3)
        assert answers["a"]["response"]["status_code"] == 503
        assert answers["a"]["error"] == {"code": "busy", "message": "x"}
    run.output.unlink()
    result, answers = run(url, [line("a")], "--tries", "2")
    assert result.exit_code == 1
    assert answers["a"]["response"] is None
    assert answers["a"]["error"]["code"] == "connection_error"
    assert url in answers["a"]["error"]["message"]


@pytest.mark.parametrize("key", ["ключ", "a\nb", " a-key"])
def test_a_key_that_no_header_can_hold_is_refused(run, key):
    result, _ = run("http://127.0.0.1:1", [line("a")], "--api-key", key)
    assert (result.exit_code, "visible ASCII characters" in result.stderr) == (2, True)
    assert key not in result.stderr


def test_the_newline_of_a_secrets_file_is_no_part_of_the_key(run):
    with scripted() as (url, seen):
        result, _ = run(url, [line("a")], "--api-key", "secret\n")
    assert (result.exit_code, seen[0][0]) == (0, "Bearer secret")


def test_any_error_of_a_try_is_the_requests_answer(run, monkeypatch):
    def broken(*arguments, **named):
        raise ZeroDivisionError("of a library")

    monkeypatch.setattr(batch._OPENER, "open", broken)
    result, answers = run("http://127.0.0.1:1", [line("a"), line("b")], "--concurrency", "1")
    assert result.exit_code == 1
    failure = {"code": "client_error", "message": "ZeroDivisionError: of a library"}
    assert [answers[name]["error"] for name in "ab"] == [failure] * 2


def test_a_stopped_run_goes_on_where_it_was(run, pauses):
    del pauses
    lines = [line("good"), line("bad"), line("busy"), line("torn"), line("new")]
    with scripted((200, {}), (400, {}), (503, {})) as (url, seen):
        result, _ = run(url, lines[:3], "--tries", "1", "--concurrency", "1")
        assert result.exit_code == 1
        # The run was stopped in the middle of a line.
        with run.output.open("a") as file:
            file.write('{"id": "x", "custom_id": "to')
        before = run.output.read_text().splitlines()[:2]
        result, answers = run(url, lines)
        assert result.exit_code == 1  # "bad" has failed for good
        assert "2 of 5 requests are answered already" in result.stderr
        assert set(answers) == {"good", "bad", "busy", "torn", "new"}
        assert run.output.read_text().splitlines()[:2] == before
        assert len(seen) == 6
        result, _ = run(url, lines)
        assert (result.exit_code, len(seen)) == (1, 6)


@pytest.mark.parametrize("status", [401, 403, 404, 529])
def test_what_another_key_server_or_time_may_mend_is_sent_again(run, pauses, status):
    del pauses
    with scripted((status, {})) as (url, seen):
        result, answers = run(url, [line("a")], "--tries", "1")
        assert (result.exit_code, answers["a"]["response"]["status_code"]) == (1, status)
        result, answers = run(url, [line("a")], "--tries", "1")
        assert (result.exit_code, answers["a"]["error"], len(seen)) == (0, None, 2)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "holds no requests"),
        (["{"], "in.jsonl:1: "),
        ([line("a"), '{"custom_id": "b"}'], "in.jsonl:2: Object missing required field"),
        ([line("a"), "", line("a")], "in.jsonl:3: custom_id 'a' is that of an earlier line"),
        ([{**line("a"), "method": "GET"}], "method must be POST"),
        ([line("a", "http://elsewhere/v1")], "url must be a path"),
        ([line("a", "/v1/x y")], "url must be a path"),
        ([line("a", stream=True)], "stream must be false"),
        (["[" * 10_000], "in.jsonl:1: "),
        ([line("a"), line("b", seed=2**70)], "in.jsonl:2: body cannot be sent: Integer exceeds"),
        ([line("a", "/v1/completions", x=nested(300))], "in.jsonl:1: body cannot be sent: "),
    ],
)
def test_a_bad_file_is_refused_before_anything_is_sent(run, lines, words):
    result, _ = run("http://127.0.0.1:1", lines)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not run.output.exists()


def test_bad_options_and_foreign_outputs_are_refused(run, tmp_path):
    result, _ = run("127.0.0.1:8000", [line("a")])
    assert (result.exit_code, "--url must begin with" in result.stderr) == (2, True)
    run.output.write_text("my thesis\n" * 3)
    assert run.output.read_text().count("thesis") == 3
    runner, given = CliRunner(), str(tmp_path / "in.jsonl")
    result = runner.invoke(cli.app, ["run-batch", "-i", given, "-o", str(run.output)])
    assert result.exit_code == 2
    assert "is no answer" in result.stderr
    assert run.output.read_text().count("thesis") == 3
    result = runner.invoke(cli.app, ["run-batch", "-i", "/nowhere", "-o", str(run.output)])
    assert (result.exit_code, "cannot read /nowhere" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("", 0.0), ("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("nan", 0.0), ("inf", 60.0), ("1e9", 60.0),
     ("Fri, 01 Jan 2999 00:00:00 GMT", 60.0), ("Fri, 01 Jan 1999 00:00:00 GMT", 0.0), ("x", 0.0)],
)  # fmt: skip
def test_the_time_of_another_try_is_bounded(given, seconds):
    headers = http.client.HTTPMessage()
    if given:
        headers["Retry-After"] = given
    assert batch._advised_s(headers) == seconds


@pytest.mark.parametrize("status", [301, 302, 303])
def test_a_redirect_does_not_get_the_key(run, status):
    with (
        scripted() as (other, seen),
        scripted((status, {"location": f"{other}/v1/completions"})) as (url, _),
    ):
        _, answers = run(url, [line("a")], "--api-key", "secret")
    assert seen == []
    assert answers["a"]["response"]["status_code"] == status

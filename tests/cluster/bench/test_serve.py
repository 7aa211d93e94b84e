"""`ttserve bench serve` against servers in this process."""

import asyncio
import http.server
import json
import os
import signal
import threading

import pytest
from typer.testing import CliRunner

from cluster import cli
from cluster.bench.metrics import DETAILED
from cluster.bench.samples import load_tokenizer
from cluster.edge.openai import Usage
from replicas.output_processor import OutputDelta
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.http_server import serving
from tests.cluster.edge.test_routes import make_app


class Backend(FakeBackend):
    """Has room for the prompts of a benchmark."""

    max_model_len = 4096


@pytest.fixture
def run(tmp_path):
    """Runs the command; returns its result, and the saved figures if there are any."""

    def on(url, *options):
        path = tmp_path / "result.json"
        saving = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", path.name]
        small = ["--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "6"]
        given = ["--base-url", url, "--tokenizer", "demo", "--disable-tqdm", *small]
        result = CliRunner().invoke(cli.app, ["bench", "serve", *given, *saving, *options])
        figures = json.loads(path.read_text()) if path.exists() else None
        return result, figures

    return on


@pytest.fixture
def served():
    backend = Backend()
    with serving(make_app(backend)) as port:
        yield backend, f"http://127.0.0.1:{port}"


@pytest.fixture
def served_demo():
    """A server with the vocabulary of the bundled model."""
    backend = Backend()
    backend.tokenizer = load_tokenizer("demo")
    with serving(make_app(backend)) as port:
        yield backend, f"http://127.0.0.1:{port}"


# Of vLLM 0.32's file without --save-detailed.
KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts",
    "request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed",
    "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput", "latencies", "queue_times",
    "max_output_tokens_per_s", "max_concurrent_requests", "rtfx",
    *(f"{statistic}_{metric}_ms" for metric in ("ttft", "tpot", "itl")
      for statistic in ("mean", "median", "std", "p99")),
}  # fmt: skip


def test_a_run_is_printed_and_saved_with_vllms_keys(run, served):
    backend, url = served
    result, figures = run(url)
    assert result.exit_code == 0, result.output
    assert figures.keys() == KEYS
    assert (figures["completed"], figures["failed"]) == (6, 0)
    assert figures["model_id"] == "demo"
    assert figures["request_rate"] == "inf"
    # The server counts: its tokens are bytes.
    assert figures["total_input_tokens"] == sum(len(r.prompt_token_ids) for r in backend.requests)
    assert figures["total_output_tokens"] == 6 * 4
    assert len(figures["latencies"]) == 6
    assert all(request.sampling.ignore_eos for request in backend.requests)
    assert "Successful requests:                     6" in result.output
    assert "P99 TTFT (ms):" in result.output


def test_details_and_metadata_are_saved_on_request(run, served):
    _, url = served
    options = "--save-detailed --metadata build=7 --percentile-metrics e2el,ttft"
    goodput = "--metric-percentiles 50,99.9 --goodput ttft:60000 e2el:60000 --burstiness 2"
    rate = "--request-rate 500 --label mine --num-warmups 1"
    result, figures = run(url, *options.split(), *goodput.split(), *rate.split())
    assert result.exit_code == 0, result.output
    assert set(DETAILED) <= figures.keys()
    assert figures["output_lens"] == [4] * 6
    assert all(len(gaps) <= 3 for gaps in figures["itls"])
    assert all(figures["generated_texts"])
    assert (figures["build"], figures["label"]) == ("7", "mine")
    assert (figures["request_rate"], figures["burstiness"]) == (500.0, 2.0)
    assert figures["request_goodput"] == pytest.approx(figures["request_throughput"])
    assert "p99.9_e2el_ms" in figures
    assert "mean_tpot_ms" not in figures


def test_a_chat_is_measured(run, served):
    backend, url = served
    result, figures = run(url, "--backend", "openai-chat", "--temperature", "0.5")
    assert result.exit_code == 0, result.output
    assert figures["completed"] == 6
    assert figures["total_output_tokens"] == 6 * 4
    assert {request.sampling.temperature for request in backend.requests} == {0.5}


def test_concurrency_is_bounded(run):
    backend, second = Backend(), asyncio.Event()

    async def script(request, emit):
        # The first one is answered when there is another one.
        if len(backend.requests) == 2:
            second.set()
        await second.wait()
        await emit(OutputDelta(0, "x", [1], "length"))
        return Usage(1, 1)

    backend.script = script
    with serving(make_app(backend)) as port:
        options = ["--max-concurrency", "2", "--save-detailed"]
        result, figures = run(f"http://127.0.0.1:{port}", *options)
    assert result.exit_code == 0, result.output
    assert figures["completed"] == 6
    assert figures["max_concurrency"] == 2
    starts, latencies = figures["start_times"], figures["latencies"]
    spans = [(s, s + latency) for s, latency in zip(starts, latencies, strict=True)]
    assert max(sum(b <= s <= e for b, e in spans) for s in starts) == 2


def test_requests_that_the_server_refuses_are_counted(run, served):
    _, url = served
    result, figures = run(url, "--extra-body", '{"temperature": -1}')
    assert result.exit_code == 1
    assert (figures["completed"], figures["failed"]) == (0, 6)
    assert "6 requests failed, the first with: 400" in result.output


def test_a_lost_server_leaves_what_came(run):
    """A server that answers two requests, breaks off the third, and is gone."""
    event = b'data: {"choices": [{"text": "x"}]}\n\n'
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 1, "prompt_tokens": 8}}\n\n'
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append(self.rfile.read(int(self.headers["content-length"])))
            body = event + usage + b"data: [DONE]\n\n" if len(seen) < 3 else event
            self.send_response(200)
            self.send_header("content-length", str(len(event + usage) + 14))
            if len(seen) == 3:
                # No connection is taken from here on.
                server.socket.close()
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    def serve():
        while len(seen) < 3:
            server.handle_request()

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serve)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    result, figures = run(url, "--model", "demo", "--max-concurrency", "1")
    thread.join()
    assert result.exit_code == 1
    assert "lost the server after" in result.output
    assert "of 6 requests 2 succeeded, 1 failed and 3 were not sent" in result.output
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert figures["total_output_tokens"] == 2


def test_ctrl_c_keeps_what_came(run):
    backend = Backend()

    async def script(request, emit):
        await emit(OutputDelta(0, "x", [1]))
        if len(backend.requests) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        if len(backend.requests) > 3:
            await asyncio.Event().wait()
        await emit(OutputDelta(0, "y", [1], "length"))
        return Usage(1, 2)

    backend.script = script
    with serving(make_app(backend)) as port:
        # The sixth request is sent when the client has three answers.
        result, figures = run(f"http://127.0.0.1:{port}", "--max-concurrency", "3")
    assert result.exit_code == 130
    assert figures["completed"] == 3
    assert figures["failed"] == 3
    assert "stopped after" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["--goodput", "ttft"], "--goodput has 'ttft'; write KEY:VALUE"),
        (["--goodput", "ttft:fast"], "--goodput: could not convert"),
        (["--dataset-name", "sharegpt"], "needs a --dataset-path"),
        (["--dataset-path", "x.json"], "needs no --dataset-path"),
        (["--self-timed"], "need --dataset-name timed_trace"),
        (["--num-prompts", "0"], "--num-prompts is 0; give 1 or more"),
        (["--tokenizer", "/nowhere"], "give --tokenizer FOLDER"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps"),
        (["--request-rate", "0"], "give a number above 0"),
        (["--base-url", "ftp://x"], "must begin with http://"),
        (["--extra-body", "[]"], "is no JSON object"),
        (["--extra-body", "{"], "invalid _json_object value"),
    ],
)
def test_bad_options_end_with_a_line_that_says_what_to_do(run, options, message):
    result, figures = run("http://127.0.0.1:9", "--model", "demo", *options)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert figures is None


def test_a_server_that_is_not_there_is_named(run):
    result, _ = run("http://127.0.0.1:9")
    assert result.exit_code == 2
    assert "http://127.0.0.1:9/v1/models: " in result.output
    assert "check --base-url" in result.output


def test_a_model_without_a_folder_here_is_counted_by_the_bundled_one_of_its_name(served_demo):
    _, url = served_demo
    given = ["--base-url", url, "--disable-tqdm", "--random-input-len", "8", "--num-prompts", "2"]
    result = CliRunner().invoke(cli.app, ["bench", "serve", *given])
    assert result.exit_code == 0, result.output


MOONCAKE = [
    {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]},
    {"timestamp": 30, "input_length": 700, "output_length": 2, "hash_ids": [1, 3]},
    {"timestamp": 110, "input_length": 20, "output_length": 0, "hash_ids": [4]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6800000,600,3
2023-11-16 18:15:46.7100000,700,2
2023-11-16 18:15:46.7900000,20,1
"""


@pytest.mark.parametrize(
    "text", ["\n".join(map(json.dumps, MOONCAKE)), AZURE], ids=["mooncake", "azure"]
)
def test_a_trace_is_sent_at_its_times(run, served_demo, tmp_path, text):
    backend, url = served_demo
    path = tmp_path / "trace"
    path.write_text(text)
    options = ["--dataset-name", "timed_trace", "--dataset-path", str(path), "--save-detailed"]
    result, figures = run(url, *options)
    assert result.exit_code == 0, result.output
    assert figures["input_lens"] == [600, 700, 20]
    assert figures["output_lens"] == [3, 2, 1]
    assert figures["duration"] >= 0.11
    prompts = [request.prompt_token_ids for request in backend.requests]
    assert (prompts[0][:512] == prompts[1][:512]) == (text is not AZURE)
    result, figures = run(url, *options, "--no-self-timed", "--output-len", "1")
    assert result.exit_code == 0, result.output
    assert figures["total_output_tokens"] == 3


def test_a_chat_of_token_ids_is_refused(run, served, tmp_path):
    _, url = served
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    options = ["--dataset-name", "timed_trace", "--dataset-path", str(path)]
    result, _ = run(url, *options, "--backend", "openai-chat")
    assert result.exit_code == 2
    assert "use --backend openai" in result.output


def test_options_may_have_underscores(run, served):
    _, url = served
    result, figures = run(url, "--num_prompts=2", "--random_output_len", "3")
    assert result.exit_code == 0, result.output
    assert figures["total_output_tokens"] == 6


def test_help_names_the_options():
    result = CliRunner().invoke(cli.app, ["bench", "serve", "--help"])
    assert result.exit_code == 0
    assert "--max-concurrency" in result.output

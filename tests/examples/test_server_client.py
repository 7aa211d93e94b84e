"""`examples/server_client.py` against the ingress, over a real socket."""

import json
import socket
import threading
import time

import pytest
import uvicorn

from cluster.config.schema import IngressConfig
from cluster.edge.routes import create_app
from examples.server_client import main
from tests.cluster.edge.fake_backend import FakeBackend


@pytest.fixture(scope="module")
def url():
    service = FakeBackend()
    service.max_model_len = 256
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        app = create_app(
            service, IngressConfig(max_body_bytes=2**20, request_timeout_s=60), version="0"
        )
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        end_s = time.monotonic() + 10
        while not server.started:
            assert time.monotonic() < end_s
            time.sleep(0.002)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_every_request_is_answered_and_counted(url, capsys):
    assert main(["--url", url, "--num-requests", "12", "--concurrency", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13
    assert lines[0].startswith("'Return a copy of the' -> '")
    figures = json.loads(lines[-1])
    assert (figures["num_requests"], figures["num_failed"]) == (12, 0)
    assert figures["output_tokens"] > 0
    assert figures["ttft_ms_p50"] <= figures["ttft_ms_p99"]


def test_a_request_that_fails_is_told_and_counted(url, capsys):
    assert main(["--url", url, "--num-requests", "2", "--max-tokens", "100000"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all("BadRequestError" in line for line in lines[:2])
    assert json.loads(lines[-1])["num_failed"] == 2


def test_no_server(capsys):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    assert main(["--url", f"http://127.0.0.1:{port}", "--num-requests", "1"]) == 1
    assert "is a server running there?" in capsys.readouterr().err


def test_absurd_arguments_are_refused(url, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["--url", url, "--concurrency", "0"])
    assert "must be at least 1" in capsys.readouterr().err
    (tmp_path / "prompts.json").write_text("{}")
    for name in ("missing.json", "prompts.json"):
        assert main(["--url", url, "--prompts", str(tmp_path / name)]) == 1
        assert name in capsys.readouterr().err

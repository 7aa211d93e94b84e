"""An engine's log is bounded, and the engine serves even if the log cannot be written."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

import pytest
import zmq

from replicas.client import SyncMPClient
from replicas.dealer import connect_dealers
from replicas.engine_process.logs import BURST, INTERVAL_S, MAX_LINE_BYTES, EngineLog, LineLimit
from replicas.messages import EngineRequest
from replicas.sampling_params import SamplingParams
from tests.engines import make_config
from tests.models import model_folder
from tests.replicas.engine.fakes import KEYS

NUM_JUNK = 3000
SHORT = SamplingParams(max_tokens=5, temperature=0.0, seed=0, ignore_eos=True)


def test_a_few_lines_of_a_kind_come_then_one_a_minute_that_counts_the_others():
    limit = LineLimit()
    assert [limit.admit("a", 0.0) for _ in range(BURST + 3)] == [0] * BURST + [None] * 3
    assert limit.admit("b", 0.0) == 0
    assert limit.admit("a", INTERVAL_S / 2) is None
    assert limit.admit("a", INTERVAL_S) == 4
    assert limit.admit("a", INTERVAL_S) is None


def test_a_kind_that_was_quiet_may_come_as_often_as_at_first():
    limit = LineLimit()
    for now_s in (0.0, 100 * INTERVAL_S):
        assert [limit.admit("a", now_s) for _ in range(BURST + 1)][BURST - 1 :] == [0, None]


@pytest.fixture
def pipe():
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    os.close(read_fd)
    os.close(write_fd)


def fill(write_fd):
    os.set_blocking(write_fd, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write_fd, b"x" * 4096)
    os.set_blocking(write_fd, True)


def record(text, line=1):
    return logging.LogRecord("x", logging.WARNING, "file.py", line, text, (), None)


def test_lines_that_a_full_pipe_cannot_take_are_lost_and_counted(pipe):
    read_fd, write_fd = pipe
    log = EngineLog(write_fd)
    fill(write_fd)
    log.handle(record("lost"))
    log.handle(record("lost too"))
    while len(os.read(read_fd, 1 << 16)) == 1 << 16 and log._poll.poll(0) == []:
        pass
    log.handle(record("seen"))
    written = os.read(read_fd, 1 << 16).lstrip(b"x")
    assert written.endswith(b"seen (2 lines before it could not be written)\n")
    assert b"lost" not in written
    assert log.num_lost == 0


def test_a_full_disk_costs_lines_and_nothing_else():
    with open("/dev/full", "wb", buffering=0) as full:
        log = EngineLog(full.fileno())
        for number in range(3):
            log.handle(record("no space", number))
        assert log.num_lost == 3


class Unspeakable:
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("text", "arguments"), [("%d", (1, 2)), ("%d", ("one",)), ("%s", (Unspeakable(),))]
)
def test_a_call_with_wrong_arguments_costs_its_line_and_nothing_else(pipe, text, arguments):
    read_fd, write_fd = pipe
    log = EngineLog(write_fd)
    log.handle(logging.LogRecord("x", logging.WARNING, "file.py", 1, text, arguments, None))
    log.handle(record("next"))
    assert os.read(read_fd, 1 << 16).endswith(b"next (1 lines before it could not be written)\n")


def test_a_long_line_keeps_its_beginning_and_its_end(pipe):
    read_fd, write_fd = pipe
    EngineLog(write_fd).handle(record("begin " + "é" * 9000 + " end"))
    written = os.read(read_fd, 1 << 16)
    assert len(written) == MAX_LINE_BYTES
    assert b"begin" in written
    assert written.endswith(b" end\n")


# --- a real engine -----------------------------------------------------------------------------


@contextlib.contextmanager
def standard_error(fd):
    """Let processes that start in this block have `fd` as their standard error."""
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(fd, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def serve_beside_junk(fd):
    """An engine that logs there gets frames that are no messages, then a request."""
    config = make_config(model_folder("llama-gqa"), keys=KEYS)
    with standard_error(fd):
        client = SyncMPClient(config)
    try:
        with zmq.Context() as context:
            to_engine, from_engine = connect_dealers(context, b"stranger", client.description, KEYS)
            for _ in range(NUM_JUNK):
                to_engine.send(b"no message")
            from_engine.close(linger=0)
            to_engine.close(linger=5000)
        client.add_request(EngineRequest("r", [5, 9, 3], SHORT))
        tokens = []
        while len(tokens) < 5:
            tokens += [t for output in client.get_outputs() for t in output.token_ids]
        return tokens
    finally:
        client.shutdown()


@pytest.mark.process
def test_a_flood_of_bad_frames_is_a_few_lines(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        serve_beside_junk(file.fileno())
    lines = (tmp_path / "log").read_text().splitlines()
    assert 0 < sum("dropped an unreadable message" in line for line in lines) <= BURST + 1


@pytest.mark.process
@pytest.mark.timeout(60)
def test_an_engine_whose_log_nobody_reads_serves_on(pipe):
    _, write_fd = pipe
    fill(write_fd)
    assert len(serve_beside_junk(write_fd)) == 5


@pytest.mark.process
def test_an_engine_whose_log_has_no_room_serves_on():
    with open("/dev/full", "wb", buffering=0) as full:
        assert len(serve_beside_junk(full.fileno())) == 5

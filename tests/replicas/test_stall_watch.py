"""An engine's parent logs a stall once, with stacks, and its end once."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas import client, launch
from replicas.client import SyncMPClient
from replicas.engine_process import process
from replicas.engine_process.parent import EngineReport
from replicas.messages import EngineRequest, TokenOutput
from replicas.sampling_params import SamplingParams
from replicas.stall_watch import DUMP_SIGNAL, StallReports, StallWatch, kernel_state
from replicas.watchdog import Watchdog
from tests.engines import make_config
from tests.models import model_folder

ENDING = """
import sys
from replicas.stall_watch import dump_stacks_to
dump_stacks_to(2)
print("ready", flush=True)
"""

SAMPLING = SamplingParams(max_tokens=12, temperature=0.0, seed=0, ignore_eos=True)
GIVE_UP_S = 60.0


@given(st.lists(st.lists(st.booleans(), max_size=3), max_size=60), st.integers(1, 5))
def test_every_stall_begins_and_ends_once_and_silence_is_one(says_of_looks, max_silent):
    watch = StallWatch(max_silent)
    turns, num_silent, expected = [], 0, False
    for says in says_of_looks:
        num_silent = 0 if says else num_silent + 1
        if says:
            expected = says[-1]
        elif num_silent >= max_silent:
            expected = True
        turn = watch.look(says)
        assert watch.is_stalled == expected
        if turn:
            turns.append(turn)
    assert turns == [("stalls", "moves")[i % 2] for i in range(len(turns))]
    assert (len(turns) % 2 == 1) == watch.is_stalled


def test_what_the_kernel_says_of_a_process():
    assert kernel_state(os.getpid())[0] in "RS"
    assert kernel_state(2**30) == ""


def test_a_stall_is_logged_once_with_the_engines_activity(caplog):
    asked = threading.Event()
    before = signal.signal(DUMP_SIGNAL, lambda *_: asked.set())
    process_fd, dump_fd = os.pidfd_open(os.getpid()), launch.new_dump_file()
    os.write(dump_fd, b"an earlier dump")
    reports = StallReports(os.getpid(), process_fd, dump_fd, 0.5, 5.0)
    try:
        with contextlib.closing(reports):
            for _ in range(3):
                reports.look([EngineReport(beat=3, doing="9 s in a turn")])
            assert asked.wait(GIVE_UP_S)
            reports.look([EngineReport(beat=4)])
            assert os.fstat(dump_fd).st_size == 0
    finally:
        signal.signal(DUMP_SIGNAL, before)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    assert "stalls" in told[0]
    assert "9 s in a turn" in told[0]
    assert "it did not answer" in told[1]  # this process has another handler
    assert "recovered from a stall of 1.5 s" in told[2]


def test_what_is_said_of_a_stall_fits_into_the_pipe_whatever_it_is_written_in():
    said = process._doing(9.0, Watchdog(), "ß" * 4000)
    assert said.startswith("9.0 s in a turn")
    assert len(said.encode()) <= 2000


def config(**changes):
    settings = {
        "max_model_len": 256, "max_batch_size": 4, "num_blocks": 40, "step_timeout_s": 300.0,
        **changes,
    }  # fmt: skip
    return make_config(model_folder("llama-gqa"), **settings)


@pytest.fixture
def engine_of(monkeypatch):
    """Start an engine whose client has long timeouts, and kill it at the end, as it may hang."""
    monkeypatch.setattr(client, "SILENCE_S", 300.0)
    with contextlib.ExitStack() as stack:

        def start(**changes):
            engine = SyncMPClient(config(**changes))
            stack.callback(engine.shutdown)
            stack.callback(os.kill, engine.description.pid, signal.SIGKILL)
            return engine

        yield start


def wait_told(caplog, text):
    end_s = time.monotonic() + GIVE_UP_S
    while not any(text in record.getMessage() for record in caplog.records):
        assert time.monotonic() < end_s, f"nobody tells that {text}"
        time.sleep(0.2)
    return next(r.getMessage() for r in caplog.records if text in r.getMessage())


@pytest.mark.process
@pytest.mark.parametrize("generator", [pytest.param("Waiting", marks=pytest.mark.slow), "Locked"])
def test_an_engine_that_hangs_in_a_call_says_where(generator, engine_of, caplog, monkeypatch):
    monkeypatch.setattr(launch, "STALL_S", 1.0)  # of silence; a step's own is the engine's
    caplog.set_level(logging.WARNING)
    engine = engine_of(generator=f"tests.replicas.slow_generators:{generator}")
    engine.add_request(EngineRequest("r", [5, 9, 3], SAMPLING))
    stacks = wait_told(caplog, "stacks of engine")
    assert "slow_generators.py" in stacks
    assert "in begin_step" in stacks
    if generator == "Waiting":
        assert "running=1" in wait_told(caplog, "in a turn of 1 tokens")


@pytest.mark.process
def test_a_late_step_is_logged_and_counted_and_completes(engine_of, caplog):
    engine = engine_of(generator="tests.replicas.slow_generators:Late")
    engine.add_request(EngineRequest("r", [5, 9, 3], SAMPLING))
    outputs = []
    while not (outputs and outputs[-1].finish_reason):
        outputs += [o for o in engine.get_outputs() if isinstance(o, TokenOutput)]
    wait_told(caplog, "recovered from a stall")
    assert "slow_generators.py" in wait_told(caplog, "stacks of engine")
    assert sum("stalls" in record.getMessage() for record in caplog.records) == 1
    assert engine.metrics().num_stalls == 1


@pytest.mark.process
def test_a_stopped_engine_is_logged_as_stalled_and_recovers(engine_of, caplog, monkeypatch):
    monkeypatch.setattr(launch, "STALL_S", 1.0)
    engine = engine_of()
    os.kill(engine.description.pid, signal.SIGSTOP)
    assert "T (stopped)" in wait_told(caplog, "stalls")
    os.kill(engine.description.pid, signal.SIGCONT)
    wait_told(caplog, "recovered from a stall")
    assert not any("stacks" in record.getMessage() for record in caplog.records)
    assert engine.metrics().num_stalls == 0


@pytest.mark.process
def test_an_engine_that_is_asked_for_stacks_while_it_ends_ends_by_itself():
    command = [sys.executable, "-c", ENDING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as engine:
        assert engine.stdout.readline() == b"ready\n"
        while engine.poll() is None:
            engine.send_signal(DUMP_SIGNAL)
    assert engine.returncode == 0

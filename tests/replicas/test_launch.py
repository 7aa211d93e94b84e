"""An engine that hangs is noticed from outside and killed; one that is slow or idle is not."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

import configs
from kv_transfer.keys import KeyRing
from replicas import launch
from replicas.async_llm import AsyncLLM
from replicas.client import SyncMPClient
from replicas.config import MOST_NICE, MeshConfig, SimulatedMeshConfig
from replicas.engine_process.parent import EngineArguments
from replicas.errors import EngineDeadError, EngineStartError
from replicas.launch import (
    LOOK_S,
    UNKNOWN_STEP_S,
    EngineHandle,
    HangWatch,
    child_environment,
    start_engine,
    step_timeout_s,
)
from replicas.messages import EngineRequest, TokenOutput
from replicas.sampling_params import SamplingParams
from replicas.tt.triage import COMMAND, TIMEOUT, timeout_variables
from replicas.watchdog import KNOWN_STEP_S
from tests.engines import make_config
from tests.models import model_folder
from tests.replicas.slow_generators import SLOW_STEP_S

DEMO_MODEL = str(Path(configs.__file__).parent / "demo-model")
TIMEOUT_S = 2.0
PROMPT = [5, 9, 3]
LONG = SamplingParams(max_tokens=240, temperature=0.0, seed=0, ignore_eos=True)


def config(**changes):
    settings = {
        "max_model_len": 256,
        "max_batch_size": 4,
        "num_blocks": 40,
        "step_timeout_s": TIMEOUT_S,
        **changes,
    }
    if "generator" in settings:
        settings["generator"] = f"tests.replicas.slow_generators:{settings['generator']}"
    model = settings.pop("model", None) or model_folder("llama-gqa")
    return make_config(model, **settings)


# --- the watch ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_looks", "beats", "verdicts"),
    [
        pytest.param(2, [[4, 4]] * 100, [None] * 100, id="idle"),
        pytest.param(3, [[7, 7]] * 4, [None] * 3 + ["step"], id="a step that does not end"),
        pytest.param(2, [[3], [3], [5], [5], [7], [7]], [None] * 6, id="each turn starts again"),
        pytest.param(2, [[3], [3], [4, 5], [5], [5]], [None] * 4 + ["step"], id="after a rest"),
        pytest.param(2, [[4], [], [4], [], []], [None] * 4 + ["frozen"], id="no beat"),
        pytest.param(1.2, [[], []], [None, "frozen"], id="a part of a look counts as one"),
        pytest.param(0.01, [[]], ["frozen"], id="at least one look"),
    ],
)
def test_a_watch_says_what_hangs(num_looks, beats, verdicts):
    watch = HangWatch(num_looks * LOOK_S)
    assert [watch.look(come) for come in beats] == verdicts


def test_a_step_that_waits_for_other_engines_may_take_twice_as_long_and_rest_for_ever():
    watch = HangWatch(2 * LOOK_S)
    seen = [watch.look([4], stalls=True) for _ in range(5)]
    assert seen == [None, None, None, None, "step"]
    assert [watch.look([6]) for _ in range(9)] == [None] * 9


@pytest.mark.parametrize(
    ("changes", "warm_up_s", "expected_s"),
    [
        ({"step_timeout_s": 7.0}, 1000.0, 7.0),
        ({}, 0.0, UNKNOWN_STEP_S),
        ({"mesh": MeshConfig(name="T3K")}, 20.0, KNOWN_STEP_S),
        ({"mesh": MeshConfig(name="T3K")}, 500.0, 500.0),
        ({"mesh": MeshConfig(name="T3K"), "generator": "Slow"}, 20.0, UNKNOWN_STEP_S),
        ({"simulated_mesh": SimulatedMeshConfig(model="m", board="n150")}, 1.0, KNOWN_STEP_S),
    ],
)
def test_a_step_may_take_as_long_as_the_warm_up_and_longer_where_that_has_not_run_it(
    changes, warm_up_s, expected_s
):
    settings = config(**{"step_timeout_s": None, **changes})
    assert step_timeout_s(settings, warm_up_s, 2048) == expected_s


def test_a_large_step_may_take_until_it_counts_as_stalled():
    settings = config(step_timeout_s=None, mesh=MeshConfig(name="T3K"))
    assert step_timeout_s(settings, 20.0, 102_400) == 400.0


# --- what an engine is started with ------------------------------------------------------------


@pytest.fixture
def of_meshes(tmp_path, monkeypatch):
    """The variables of every engine on a mesh, for a user whose home is a test folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OMPI_MCA_btl", raising=False)
    for name in ("TT_METAL_LOGS_PATH", "TT_METAL_HOME", TIMEOUT, COMMAND):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("replicas.mesh_environment.find_ttnn", lambda: None)
    logs = tmp_path / ".cache" / "ttserve" / "ttnn-logs"
    timeout_s = f"{TIMEOUT_S / 3:g}"
    return {"OMPI_MCA_btl": "self", "TT_METAL_LOGS_PATH": str(logs), TIMEOUT: timeout_s}


def test_an_engine_on_a_mesh_leaves_no_files_about(of_meshes):
    assert child_environment(config(), {}) == {}
    on_mesh = config(mesh=MeshConfig(name="T3K"))
    assert child_environment(on_mesh, {}) == of_meshes


def test_ttnns_own_settings_stay_as_the_environment_has_them(of_meshes):
    theirs = {"OMPI_MCA_btl": "tcp,self", "TT_METAL_LOGS_PATH": "/logs", TIMEOUT: "0"}
    assert child_environment(config(mesh=MeshConfig(name="T3K")), theirs) == theirs


def test_a_mesh_that_names_its_boards_is_bound_to_them(of_meshes, monkeypatch):
    mesh = MeshConfig(name="T3K", visible_devices=(2, 0))
    bound = config(mesh=mesh)
    assert child_environment(bound, {"A": "b", "TT_VISIBLE_DEVICES": "1"}) == {
        "A": "b",
        "TT_VISIBLE_DEVICES": "2,0",
        **of_meshes,
    }
    monkeypatch.setenv("OF_THIS_PROCESS", "1")
    inherited = child_environment(bound)
    assert inherited["TT_VISIBLE_DEVICES"] == "2,0"
    assert inherited["OF_THIS_PROCESS"] == "1"
    assert "TT_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize("mesh", [None, MeshConfig(name="T3K")])
def test_any_other_engine_keeps_the_boards_that_it_was_given(of_meshes, mesh):
    given, more = {"TT_VISIBLE_DEVICES": "1"}, of_meshes if mesh is not None else {}
    assert child_environment(config(mesh=mesh), given) == given | more
    assert child_environment(config(mesh=mesh)) == dict(os.environ) | more


# --- processes ---------------------------------------------------------------------------------


@contextlib.contextmanager
def running(**changes):
    handle = start_engine(config(**changes))
    try:
        yield handle
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(handle.description.pid, signal.SIGKILL)
        handle.stop()


def test_kernel_settings_yield_to_the_parents_environment(monkeypatch):
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    with running() as handle:
        told = Path(f"/proc/{handle.description.pid}/environ").read_bytes().split(b"\0")
    assert {b"GOMP_SPINCOUNT=1000", b"LRU_CACHE_CAPACITY=7"} <= set(told)


def test_an_engine_in_this_process_has_the_same_settings_and_the_user_the_last_word():
    code = "import os; from replicas import LLM; print(*map(os.environ.get, %r))"
    names = ("GOMP_SPINCOUNT", "LRU_CACHE_CAPACITY")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    found = subprocess.run(
        [sys.executable, "-c", code % (names,)],
        env={**environment, "LRU_CACHE_CAPACITY": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["1000", "7"]


def wait_killed(handle):
    """Exit code, from the callback that a replica uses too."""
    ended, codes = threading.Event(), []
    handle.call_at_exit(lambda code: (codes.append(code), ended.set()))
    assert ended.wait(60.0), "nobody killed it"
    return codes[0]


def drain(engine):
    """Read more often than there can be steps."""
    for _ in range(1000):
        engine.get_outputs()


async def freeze_at_first_token(llm):
    async for _ in llm.generate(PROMPT, LONG):
        os.kill(llm._handle.description.pid, signal.SIGSTOP)


@pytest.mark.process
def test_all_threads_of_an_engine_get_its_niceness():
    with running(niceness=3) as handle:
        threads = Path(f"/proc/{handle.description.pid}/task").iterdir()
        found = {os.getpriority(os.PRIO_PROCESS, int(thread.name)) for thread in threads}
    assert found == {min(os.getpriority(os.PRIO_PROCESS, 0) + 3, MOST_NICE)}


@pytest.mark.process
def test_a_frozen_idle_engine_is_killed():
    with running() as handle:
        os.kill(handle.description.pid, signal.SIGSTOP)
        assert wait_killed(handle) == -signal.SIGKILL
        assert not handle.is_alive
        assert "its process sent no beat within 2 s" in str(handle.failure)


@pytest.mark.process
@pytest.mark.parametrize("generator", ["Waiting", "Holding"])
def test_a_hanging_device_ends_a_synchronous_client_with_the_reason(generator):
    engine = SyncMPClient(config(generator=generator))
    try:
        engine.add_request(EngineRequest("r", PROMPT, LONG))
        with pytest.raises(EngineDeadError, match=r"the engine hung .* 2 s \(step_timeout_s\)"):
            drain(engine)
        with pytest.raises(EngineDeadError, match="the engine hung"):
            engine.metrics()
    finally:
        engine.shutdown()


@pytest.mark.process
def test_an_engine_frozen_in_a_request_ends_an_asynchronous_llm_with_the_reason():
    async def run():
        llm = await AsyncLLM.start(config(model=DEMO_MODEL))
        try:
            with pytest.raises(EngineDeadError, match="the engine hung"):
                await freeze_at_first_token(llm)
        finally:
            await llm.shutdown()

    asyncio.run(run())


@pytest.mark.process
def test_a_slow_engine_is_left_alone():
    num_steps = 3 * int(TIMEOUT_S / SLOW_STEP_S)
    engine = SyncMPClient(config(generator="Slow", step_timeout_s=3 * TIMEOUT_S))
    try:
        sampling = SamplingParams(max_tokens=num_steps + 10, temperature=0.0, ignore_eos=True)
        engine.add_request(EngineRequest("r", PROMPT, sampling))
        tokens, is_finished = 0, False
        while not is_finished:
            outputs = [o for o in engine.get_outputs() if isinstance(o, TokenOutput)]
            tokens += sum(len(o.token_ids) for o in outputs)
            is_finished = any(o.finish_reason is not None for o in outputs)
        assert tokens == num_steps + 10
    finally:
        engine.shutdown()


@pytest.mark.process
def test_a_start_that_gets_nowhere_fails():
    gets_nowhere = config(generator="HangsInStart", start_timeout_s=4.0)
    with pytest.raises(
        EngineStartError,
        match=r"hung at its start \(.*\): no progress within 4 s \(start_timeout_s\)",
    ):
        start_engine(gets_nowhere)


TRIAGE = """
import os, sys
print(sys.argv[1:], "core 1-2 waits", os.environ["IN_ENGINE"])
"""


@pytest.mark.process
@pytest.mark.parametrize("generator", ["TimesOut", "TimesOutInStart"])
def test_the_error_of_a_device_that_timed_out_names_its_triage_report(tmp_path, generator):
    script = tmp_path / "triage.py"
    script.write_text(TRIAGE)
    variables = {"HOME": str(tmp_path / "home"), "IN_ENGINE": "of this engine"}
    env = {**os.environ, **timeout_variables(script, 60.0), **variables}
    if generator == "TimesOutInStart":
        with pytest.raises(EngineStartError) as caught:
            start_engine(config(generator=generator, step_timeout_s=60.0), env=env)
        reason = str(caught.value)
    else:
        engine = SyncMPClient(config(generator=generator, step_timeout_s=60.0), env)
        try:
            engine.add_request(EngineRequest("r", PROMPT, LONG))
            with pytest.raises(EngineDeadError):
                drain(engine)
            wait_killed(engine._handle)
        finally:
            engine.shutdown()
        reason = str(engine._handle.failure)
        assert "an operation of its device timed out" in reason
    [report] = (tmp_path / "home" / ".cache" / "ttserve" / "triage").iterdir()
    assert f"tt-triage's report is in {report}" in reason
    assert report.read_text() == (
        "['--disable-progress', '--skip-version-check'] core 1-2 waits of this engine\n"
    )


def test_reports_come_through_a_descriptor_of_any_number():
    read_fd, write_fd = os.pipe()
    high_fd = fcntl.fcntl(read_fd, fcntl.F_DUPFD, 1500)
    os.close(read_fd)
    with launch._Reports(high_fd) as reports:
        assert reports.read(0.0) == []
        os.write(write_fd, b'{"beat":3}\n')
        [report] = reports.read(60.0)
        assert report.beat == 3
        os.close(write_fd)
        assert reports.read(60.0) is None


def test_last_reports_are_read_before_exit_callbacks_run():
    read_fd, write_fd = os.pipe()
    say = 'import os, sys; os.write(int(sys.argv[1]), b\'{"failed":"why"}\\n\')'
    process = launch.subprocess.Popen(
        [sys.executable, "-c", say, str(write_fd)], pass_fds=(write_fd,)
    )
    os.close(write_fd)
    handle = EngineHandle(process, None, KeyRing())
    handle.watch(launch._Reports(read_fd), os.pidfd_open(process.pid), launch.new_dump_file(), 60.0)
    assert wait_killed(handle) == 0
    assert str(handle.failure) == "why"


class Stuck:
    """A process that even SIGKILL does not end, as in a call of a driver."""

    stdin = None
    pid = 2**30
    kills = 0

    def poll(self):
        return None

    def kill(self):
        self.kills += 1

    def wait(self, timeout=None):
        raise launch.subprocess.TimeoutExpired("engine", timeout)


def test_an_unkillable_process_counts_as_dead_and_blocks_no_caller():
    process = Stuck()
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    handle = EngineHandle(process, None, KeyRing())
    dump_fd = launch.new_dump_file()
    process_fd = os.pidfd_open(os.getpid())
    reports = launch._Reports(read_fd)
    launch._watch_for_hang(handle, process, reports, process_fd, dump_fd, LOOK_S)
    assert process.kills == 1
    assert not handle.is_alive
    handle.stop()
    assert process.kills == 2
    for fd in (read_fd, process_fd, dump_fd):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_user_without_a_home_can_start_engines():
    """Containers may run under a user id that is missing in their passwd file."""
    code = (
        "import os, pwd\n"
        "def none(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = none\n"
        "from pathlib import Path\n"
        "try: Path.home()\n"
        "except RuntimeError: print('homeless')\n"
        "import replicas.launch\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.stderr, ran.returncode) == ("homeless\n", "", 0)


def test_an_engine_whose_parent_is_gone_before_it_runs_says_so_in_one_line():
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    arguments = EngineArguments(
        config=msgspec.structs.replace(config(), keys=KeyRing((bytes(32),))),
        incarnation="0" * 16, host="127.0.0.1", ready_fd=write_fd, dump_fd=write_fd,
        stop_timeout_s=60.0,
    )  # fmt: skip
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "replicas.engine_process.process"],
            input=msgspec.json.encode(arguments) + b"\n", capture_output=True, check=False,
            pass_fds=(write_fd,),
        )  # fmt: skip
    finally:
        os.close(write_fd)
    assert ended.returncode == 1
    assert b"Traceback" not in ended.stderr
    assert ended.stderr.count(b"is gone") == 1

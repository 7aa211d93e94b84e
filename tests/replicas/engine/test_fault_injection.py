"""Fault plans in real engines on a simulated mesh: clients' results, and recovery."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq

from replicas.async_client import AsyncMPClient
from replicas.codec import decode_engine_frame, encode
from replicas.config import EngineConfig, SimulatedMeshConfig
from replicas.engine.fault_injection import (
    ClientLinks,
    EngineFaults,
    HearingSocket,
    SpeakingSocket,
    engine_faults,
    schedule_signals,
)
from replicas.engine.inbox import Inbox
from replicas.engine.pulse import Pulse
from replicas.engine.sockets import Receiver, Sender
from replicas.errors import EngineDeadError
from replicas.faults import Fault, PlanClock, ReplicaFaults
from replicas.generators.simulated.profiles import engine_timing
from replicas.generators.simulated.tokens import expected_tokens
from replicas.launch import start_engine
from replicas.messages import (
    MAX_REQUEST_ID_CHARS,
    Abort,
    AddRequest,
    EngineFrame,
    EngineRequest,
    TokenOutput,
)
from replicas.sampling_params import SamplingParams
from tests.models import model_folder
from tests.replicas.engine.fakes import KEYS
from tests.replicas.engine.pair import Pair

PROMPT = list(range(20, 90))
NUM_BEHIND = 2560
SHORT = SamplingParams(max_tokens=4, temperature=0.0, seed=0)
ENDLESS = SamplingParams(max_tokens=4000, temperature=0.0, seed=0)
DEADLINE_S = 240.0
"""Timeout of every awaited event; nothing is measured by it."""
STOP, CONTINUE, KILL = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL

pytestmark = pytest.mark.silence


def fault(at_s, kind, **fields):
    return Fault(at_s=at_s, target="decode/0", kind=kind, **fields)


def config(*faults, epoch_unix_s=0.0, **changes):
    mesh = SimulatedMeshConfig(
        model="Llama-3.1-8B", board="n150", faults=faults, fault_epoch_unix_s=epoch_unix_s
    )
    settings = {"max_model_len": 8192, "max_batch_size": 4, "block_size": 64, "num_blocks": 600}
    return EngineConfig(
        model=str(model_folder("llama-gqa")), simulated_mesh=mesh, **{**settings, **changes}
    )


# --- clocks and signals ------------------------------------------------------------------------


def faults_at(plan_s, *faults):
    """Faults of an engine whose monotonic clock reads 100 at `plan_s`."""
    return EngineFaults(ReplicaFaults(faults), PlanClock.since(0.0, unix_s=plan_s, now_s=100.0))


def test_an_engines_answers_are_the_plans_at_its_own_clock():
    faults = faults_at(
        30.0,
        fault(31, "partition", duration_s=2), fault(32, "corrupt", duration_s=2),
        fault(31.5, "drop_link"), fault(20, "drop_link"), fault(5, "partition", duration_s=1),
    )  # fmt: skip
    seen = [
        (faults.is_cut(t), faults.corrupts(t), faults.num_breaks(t), faults.num_heals(t))
        for t in (100.0, 101.0, 101.5, 102.0, 103.0, 104.0)
    ]
    assert seen == [
        (False, False, 1, 1),
        (True, False, 1, 1),
        (True, False, 2, 1),
        (True, True, 2, 1),
        (False, True, 2, 2),
        (False, False, 2, 2),
    ]
    assert faults.next_change_s(100.0) == 101.0
    assert faults.next_change_s(104.0) is None


@pytest.mark.parametrize(
    ("faults", "signals"),
    [
        ([], []),
        ([fault(29, "kill")], []),
        ([fault(30, "kill")], []),
        ([fault(31, "kill"), fault(30.5, "kill")], [(100.5, KILL), (101.0, KILL)]),
        ([fault(31, "freeze", duration_s=2)], [(101.0, STOP), (103.0, CONTINUE)]),
        ([fault(29, "freeze", duration_s=2)], [(100.0, STOP), (101.0, CONTINUE)]),
        ([fault(28, "freeze", duration_s=2)], []),
        ([fault(31, "freeze")], [(101.0, STOP)]),
        ([fault(1, "freeze")], [(100.0, STOP)]),
        (
            [fault(31, "freeze", duration_s=2), fault(32, "kill")],
            [(101.0, STOP), (102.0, KILL), (103.0, CONTINUE)],
        ),
        (
            [fault(31, "freeze", duration_s=2), fault(33, "freeze")],
            [(101.0, STOP), (103.0, CONTINUE), (103.0, STOP)],
        ),
        ([fault(31, "slow", factor=2.0), fault(31, "partition"), fault(31, "drop_link")], []),
    ],
)
def test_signals_are_those_of_kills_and_freezes_that_are_not_past(faults, signals):
    assert schedule_signals(faults_at(30.0, *faults), 100.0) == signals


def test_an_engine_without_a_simulated_mesh_has_no_faults():
    assert not engine_faults(EngineConfig(model="/somewhere")).faults


def test_plan_seconds_of_an_engine_count_from_the_epoch_of_its_configuration():
    epoch_unix_s = time.time() - 500.0
    faults = engine_faults(config(fault(0, "kill"), epoch_unix_s=epoch_unix_s))
    plan_s = time.time() - epoch_unix_s
    assert faults.clock.plan_s(time.monotonic()) == pytest.approx(plan_s, abs=60.0)
    assert faults.faults.kills() == (0.0,)


@contextlib.contextmanager
def connections():
    """A listening socket's endpoint and the two ends of a connection that it has accepted."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as dialled,
        listener.accept()[0] as accepted,
    ):
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", dialled, accepted


class CountingClock:
    """A plan's clock, which advances with each reading and when a test advances it."""

    def __init__(self, now_s):
        self.now_s = now_s

    def plan_s(self, _now_s):
        self.now_s += 0.01
        return self.now_s


def test_connections_that_lived_through_a_partition_break_before_anything_passes():
    clock = CountingClock(5.0)
    partition = fault(0, "partition", duration_s=6.0)
    links = ClientLinks(EngineFaults(ReplicaFaults([partition]), clock))
    with connections() as (endpoint, dialled, _):
        links.add(endpoint)
        assert not links.hears()
        assert not links.speaks()
        dialled.setblocking(False)
        with pytest.raises(BlockingIOError):
            dialled.recv(1)
        while not links.speaks():
            pass
        assert clock.now_s >= 6.0
        dialled.setblocking(True)
        assert dialled.recv(1) == b"", "broken by then"
    with connections() as (endpoint, dialled, accepted):
        links.add(endpoint)
        assert links.hears()
        assert links.speaks()
        accepted.sendall(b"x")
        assert dialled.recv(1) == b"x", "once only"


class ScriptedLinks:
    """Links that are open or not, message by message."""

    def __init__(self, *answers):
        self._answers = list(answers)

    def add(self, endpoint):
        pass

    def hears(self):
        return self._answers.pop(0)

    speaks = hears


@pytest.mark.parametrize(
    ("kind", "answers"),
    [("deaf", (False, True)), ("mute", (True, False)), ("backpressure", (True, True))],
)
def test_a_link_may_be_cut_one_way(kind, answers):
    clock = CountingClock(5.0)
    window = fault(0, kind, duration_s=5.5)
    links = ClientLinks(EngineFaults(ReplicaFaults([window]), clock))
    with connections() as (endpoint, dialled, accepted):
        links.add(endpoint)
        assert (links.hears(), links.speaks()) == answers
        assert (clock.now_s >= 5.5) is (kind == "backpressure"), "only that is waited for"
        clock.now_s = 5.6
        assert (links.hears(), links.speaks()) == (True, True)
        if kind == "backpressure":
            accepted.sendall(b"x")
            assert dialled.recv(1) == b"x", "nothing was lost"
        else:
            assert dialled.recv(1) == b"", "what was lost is told by a break"


def test_a_wall_clock_is_wrong_for_as_long_as_the_plan_says():
    now_s = time.monotonic()
    windows = (
        fault(now_s - 5.0, "clock", duration_s=1000.0, shift_s=-180.0),
        fault(now_s - 50.0, "clock", duration_s=10.0, shift_s=3600.0),
    )
    faults = EngineFaults(ReplicaFaults(windows), PlanClock())
    assert faults.unix_now_s() - time.time() == pytest.approx(-180.0, abs=60.0)
    healed = EngineFaults(ReplicaFaults(windows[1:]), PlanClock())
    assert healed.unix_now_s() == pytest.approx(time.time(), abs=60.0)


def plain_router(context):
    router = context.socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:*")
    return router


def plain_dealer(context, endpoint):
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.ROUTING_ID, b"client")
    dealer.set(zmq.LINGER, 0)
    dealer.connect(endpoint)
    return dealer


def test_messages_of_a_partition_never_arrive():
    inbox = Inbox()
    context = zmq.Context()
    receiver = Receiver(
        HearingSocket(plain_router(context), ScriptedLinks(True, False, True)), inbox
    )
    receiver.start()
    with plain_dealer(context, receiver.endpoint) as dealer:
        for request_id in ("before", "during", "after"):
            dealer.send(encode(Abort([request_id])))
        received = [inbox.get(timeout=DEADLINE_S)[1].request_ids for _ in range(2)]
    context.term()
    receiver.join()
    assert received == [["before"], ["after"]]


def test_frames_of_a_partition_never_arrive():
    context = zmq.Context()
    socket = SpeakingSocket(plain_router(context), ScriptedLinks(True, False, True))
    sender = Sender(socket, "first", Inbox(), Pulse())
    monitor = sender._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    with plain_dealer(context, sender.endpoint) as dealer:
        assert monitor.poll(1000 * DEADLINE_S), "the client is connected"
        sender._socket.disable_monitor()
        monitor.close()
        for name in ("before", "during", "after"):
            sender.send(b"client", EngineFrame(name))
        sender.stop()
        sender.run()
        received = []
        while len(received) < 2:
            assert dealer.poll(1000 * DEADLINE_S)
            received.append(decode_engine_frame(dealer.recv()).incarnation)
    context.term()
    assert received == ["before", "after"]


# --- engines -----------------------------------------------------------------------------------


class Starter:
    """Starts engines that are ready well before their plans begin, on a machine of any speed.

    Owner: for any thread, of how long a start has taken at most.

    Attributes:
        turn: Held during a start: two at a time, as more would delay each other.
    """

    def __init__(self):
        self._longest_s = 0.0
        self.turn = threading.Semaphore(2)
        self.start(config()).stop()

    def start(self, settings):
        began_s = time.monotonic()
        handle = start_engine(settings)
        self._longest_s = max(self._longest_s, time.monotonic() - began_s)
        return handle

    def epoch(self):
        """Return when a plan may begin, so that its engine has started and has a client."""
        return time.time() + 3 * self._longest_s + 6

    @contextlib.contextmanager
    def engine(self, *faults, **changes):
        """An engine that was ready before its plan began, and when that is."""
        for _ in range(5):
            with self.turn:
                epoch_unix_s = self.epoch()
                handle = self.start(config(*faults, epoch_unix_s=epoch_unix_s, **changes))
            try:
                if time.time() < epoch_unix_s - 4:
                    yield handle, epoch_unix_s
                    return
            finally:
                handle.stop()
        pytest.fail("it was never ready in time")


SCENARIOS = {}


def scenario(run):
    """Makes a function of a starter a case of `test_an_engine_with_a_plan`."""
    SCENARIOS[run.__name__] = run
    return run


@pytest.fixture(scope="module")
def outcomes():
    """Every scenario at once, each with an engine of its own: they wait for most of their time."""
    starter = Starter()
    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        yield {name: pool.submit(run, starter) for name, run in SCENARIOS.items()}


def drive(coroutine):
    """Run a client; a wait that does not end is a failure, not a hang."""
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


@contextlib.asynccontextmanager
async def connected(handle, **callbacks):
    client = AsyncMPClient(handle.keys, **callbacks)
    try:
        await connect(client, handle)
        yield client
    finally:
        await client.close()


async def connect(client, handle):
    """Connect, as often as it takes: discovery does the same."""
    while handle.description.incarnation not in client.incarnations:
        with contextlib.suppress(EngineDeadError):
            await client.connect(handle.description)


def open_stream(client, handle, request_id, sampling=SHORT):
    message = AddRequest(EngineRequest(request_id, PROMPT, sampling))
    return client.open_stream(handle.description.incarnation, request_id, message)


async def read(stream, into=None):
    """Every token until the end; `into` has those that came although the stream broke."""
    tokens = [] if into is None else into
    while True:
        event = await stream.get()
        if isinstance(event, TokenOutput):
            assert event.index == len(tokens)
            tokens += event.token_ids
            if event.finish_reason is not None:
                stream.close(abort=False)
                return tokens


def right_tokens(handle, num_tokens):
    described = handle.description
    return expected_tokens(PROMPT, num_tokens, described.vocab_size, described.eos_token_ids)


async def assert_serves(handle, client, request_id="check"):
    assert await read(open_stream(client, handle, request_id)) == right_tokens(handle, 4)


async def assert_idle(handle, client):
    """Check that all resources of earlier clients are free."""
    end_s = time.monotonic() + DEADLINE_S
    while True:
        groups = (await client.metrics(handle.description.incarnation)).groups
        if all(
            (g.num_empty_slots, g.num_free_blocks) == (g.num_slots, g.num_blocks) for g in groups
        ):
            return
        assert time.monotonic() < end_s
        await asyncio.sleep(0.02)


def children(pid):
    """Process ids of the children of a process."""
    return [
        int(entry.name)
        for entry in os.scandir("/proc")
        if entry.name.isdigit() and status(int(entry.name))[1:] == (pid,)
    ]


def status(pid):
    """(state letter, parent) of a process; () if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ()
    return fields[0], int(fields[1])


def wait_for(predicate, what):
    end_s = time.monotonic() + DEADLINE_S
    while not predicate():
        assert time.monotonic() < end_s, f"not in {DEADLINE_S} s: {what}"
        time.sleep(0.02)


def wait_gone(pids):
    wait_for(lambda: all(status(p)[:1] in {(), ("Z",)} for p in pids), f"{pids} have ended")


@scenario
def a_killed_engine_dies_once_and_not_again_after_its_restart(starter):
    async def run(handle):
        async with connected(handle) as client:
            await assert_serves(handle, client)
            tokens = []
            with pytest.raises(EngineDeadError):
                await read(open_stream(client, handle, "r", ENDLESS), tokens)
            assert tokens == right_tokens(handle, len(tokens))

    with starter.engine(fault(0.5, "kill")) as (handle, epoch_unix_s):
        helpers = children(handle.description.pid)
        assert len(helpers) == 1
        drive(run(handle))
        assert handle.wait() == -signal.SIGKILL
        assert time.time() >= epoch_unix_s + 0.5
    wait_gone(helpers)

    async def run_again(handle):
        async with connected(handle) as client:
            await assert_serves(handle, client)

    handle = start_engine(config(fault(0.5, "kill"), epoch_unix_s=epoch_unix_s))
    try:
        assert children(handle.description.pid) == []
        drive(run_again(handle))
    finally:
        handle.stop()


@pytest.mark.process
def test_an_engine_that_ignores_sigterm_is_killed():
    handle = start_engine(config(fault(0, "ignore_sigterm"), epoch_unix_s=time.time()))
    os.kill(handle.description.pid, signal.SIGTERM)
    handle.stop()
    assert handle.wait() == -signal.SIGKILL


@scenario
def a_hung_device_is_told_of_while_it_hangs_and_costs_no_token(starter):
    moves = []
    hang = fault(0.5, "hang", duration_s=16.0)

    async def run(handle, epoch_unix_s):
        def note(_incarnation, does):
            moves.append(does)

        async with connected(handle, on_moves=note) as client:
            for number in itertools.count():
                await assert_serves(handle, client, f"r{number}")
                if time.time() > epoch_unix_s + 16.5 and moves[-1:] != [False]:
                    break
            assert False in moves
            await assert_idle(handle, client)

    with starter.engine(hang) as (handle, epoch_unix_s):
        drive(run(handle, epoch_unix_s))
        assert handle.is_alive


@scenario
def messages_wait_before_a_full_inbox_and_none_is_lost(starter):
    waits = []

    async def run(handle, epoch_unix_s):
        async with connected(handle, on_dead=lambda *args: pytest.fail(str(args))) as client:
            for number in itertools.count():
                began_s = time.time() - epoch_unix_s
                await assert_serves(handle, client, f"r{number}")
                waits.append((began_s, time.time() - epoch_unix_s))
                if began_s > 4.0:
                    break
            await assert_idle(handle, client)

    with starter.engine(fault(0.0, "backpressure", duration_s=4.0)) as (handle, epoch_unix_s):
        drive(run(handle, epoch_unix_s))
    assert all(end_s > 3.9 for began_s, end_s in waits if began_s > 0.1), "none is heard before"
    assert max(end_s - began_s for began_s, end_s in waits) > 2.0, "it did wait"


@scenario
def a_connection_that_is_not_read_for_long_stays_and_brings_everything(starter):
    long = Abort(["x" * MAX_REQUEST_ID_CHARS] * 128)
    lost = []

    async def run(handle, blocked_s):
        async with connected(handle, on_dead=lambda *args: lost.append(args)) as client:
            await asyncio.sleep(max(blocked_s + 0.5 - time.time(), 0.0))
            streams = []
            for number in range(64):
                streams.append(open_stream(client, handle, f"r{number}"))
                for _ in range(NUM_BEHIND // 64):
                    client.send(handle.description.incarnation, long)
            for stream in streams:
                assert await read(stream) == right_tokens(handle, 4)
            assert time.time() > blocked_s + 9.0, "they did wait"
            await assert_idle(handle, client)

    with starter.engine(fault(0.0, "backpressure", duration_s=9.0)) as (handle, blocked_s):
        drive(run(handle, blocked_s))
    assert not lost
    assert NUM_BEHIND * len(encode(long)) > 64 << 20, "more than queues and the kernel take"


@scenario
def a_deaf_engine_breaks_and_leaves_nothing(starter):
    a_cut_of_one_way_ends_in_a_break_and_leaves_nothing(starter, "deaf")


@scenario
def a_mute_engine_breaks_and_leaves_nothing(starter):
    a_cut_of_one_way_ends_in_a_break_and_leaves_nothing(starter, "mute")


def a_cut_of_one_way_ends_in_a_break_and_leaves_nothing(starter, kind):
    lost = asyncio.Event()

    async def run(handle):
        async with connected(handle, on_dead=lambda *_: lost.set()) as client:
            stream = open_stream(client, handle, "cut", ENDLESS)
            with pytest.raises(EngineDeadError):
                await read(stream)
            assert lost.is_set()
            await connect(client, handle)
            await assert_serves(handle, client)
            await assert_idle(handle, client)

    with starter.engine(fault(0.5, kind, duration_s=3.0)) as (handle, _):
        drive(run(handle))


@scenario
def a_frozen_engine_is_lost_after_its_silence_and_found_again_when_it_thaws(starter):
    short, long = fault(0, "freeze", duration_s=0.5), fault(1.5, "freeze", duration_s=11.0)

    async def run(handle):
        lost = []
        async with connected(handle, on_dead=lambda *args: lost.append(args[1])) as client:
            stream = open_stream(client, handle, "r", ENDLESS)
            tokens = []
            with pytest.raises(EngineDeadError):
                await read(stream, tokens)
            assert "sent nothing" in lost[0]
            assert status(handle.description.pid)[0] == "T"
            assert tokens == right_tokens(handle, len(tokens)), "the short one lost no token"
            await connect(client, handle)
            await assert_idle(handle, client)
            await assert_serves(handle, client)

    with starter.engine(short, long) as (handle, _):
        helpers = children(handle.description.pid)
        drive(run(handle))
    assert len(helpers) == 1
    wait_gone(helpers)


@pytest.mark.process
def test_nothing_is_left_of_an_engine_that_dies_before_its_faults():
    handle = start_engine(config(fault(0, "kill"), epoch_unix_s=time.time() + 1000.0))
    helpers = children(handle.description.pid)
    assert len(helpers) == 1
    os.kill(handle.description.pid, signal.SIGKILL)
    wait_gone(helpers)
    handle.stop()


@scenario
def an_engine_that_is_frozen_for_ever_can_be_stopped(starter):
    with starter.engine(fault(0, "freeze")) as (handle, _):
        handle._stop_s = DEADLINE_S
        pid = handle.description.pid
        helpers = children(pid)
        wait_for(lambda: status(pid)[0] == "T", "frozen")
        handle.stop()
        assert handle.wait() == 0, "it ended by itself, was not killed"
    wait_gone(helpers)


@scenario
def an_engine_that_is_frozen_for_ever_does_not_outlive_its_parent(starter):
    code = (
        "import sys, msgspec\n"
        "from replicas.config import EngineConfig\n"
        "from replicas.launch import start_engine\n"
        "handle = start_engine(msgspec.json.decode(sys.argv[1], type=EngineConfig))\n"
        "print(handle.description.pid, flush=True)\n"
        "handle.wait()\n"
    )
    with starter.turn:
        frozen = config(fault(0, "freeze"), epoch_unix_s=starter.epoch())
        parent = subprocess.Popen(
            [sys.executable, "-c", code, msgspec.json.encode(frozen).decode()],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started = parent.stdout.readline()
    try:
        pid = int(started)
        family = [pid, *children(pid)]
        assert len(family) == 2
        wait_for(lambda: status(pid)[0] == "T", "frozen")
        parent.kill()
        wait_gone(family)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


@scenario
def a_partitioned_engine_is_lost_after_its_silence_and_found_again_when_it_heals(starter):
    async def run(handle):
        lost = []
        async with connected(handle, on_dead=lambda *args: lost.append(args[1])) as client:
            tokens = []
            with pytest.raises(EngineDeadError):
                await read(open_stream(client, handle, "r", ENDLESS), tokens)
            assert "sent nothing" in lost[0]
            assert tokens == right_tokens(handle, len(tokens))
            assert handle.is_alive
            await connect(client, handle)
            await assert_idle(handle, client)
            await assert_serves(handle, client)

    with starter.engine(fault(0, "partition", duration_s=11.0)) as (handle, _):
        drive(run(handle))


@scenario
def a_partition_shorter_than_the_silence_breaks_connections_and_loses_no_token_quietly(starter):
    async def run(handle):
        lost = []
        async with connected(handle, on_dead=lambda *args: lost.append(args[1])) as client:
            tokens = []
            with pytest.raises(EngineDeadError):
                await read(open_stream(client, handle, "r", ENDLESS), tokens)
            assert lost == ["its connection broke"]
            assert tokens == right_tokens(handle, len(tokens))
            await connect(client, handle)
            await assert_idle(handle, client)
            await assert_serves(handle, client)

    with starter.engine(fault(0, "partition", duration_s=1.0)) as (handle, _):
        drive(run(handle))


@pytest.mark.process
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_engine_with_a_plan(outcomes, name):
    outcomes[name].result()


@pytest.mark.process
def test_a_slow_engine_takes_at_least_its_factor_longer():
    slow = config(fault(0, "slow", factor=8.0))
    timing = engine_timing(slow, slow.simulated_mesh, 0.0)
    device_s = timing.prefill_s([(0, 0, len(PROMPT))]) + 3 * timing.decode_s([(0, len(PROMPT))])

    async def run(handle):
        async with connected(handle) as client:
            before_s = time.monotonic()
            await assert_serves(handle, client)
            return time.monotonic() - before_s

    handle = start_engine(slow)
    try:
        assert drive(run(handle)) >= 8.0 * device_s
    finally:
        handle.stop()


# --- KV transfer -------------------------------------------------------------------------------


def kv_config(*faults, epoch_unix_s=0.0):
    return config(
        *faults,
        epoch_unix_s=epoch_unix_s,
        kv_connector="p2p",
        keys=KEYS,
        max_num_batched_tokens=128,
    )


def assert_right(pair, prompt, tokens):
    described = pair.decode.core.facts
    assert tokens == expected_tokens(
        prompt, len(tokens), described.vocab_size, described.eos_token_ids
    )


@pytest.mark.parametrize("end", ["prefill", "decode"])
def test_corrupted_kv_is_noticed_and_the_tokens_are_right(end):
    lasting = kv_config(fault(0, "corrupt"))
    configs = {"prefill": kv_config(), "decode": kv_config(), end: lasting}
    pair = Pair(configs["prefill"], configs["decode"])
    try:
        (tokens,) = pair.generate([PROMPT], [SHORT])
        assert len(tokens) == 4
        assert_right(pair, PROMPT, tokens)
        assert pair.failures == ({"r0": "checksum"} if end == "prefill" else {})
    finally:
        pair.close()


@pytest.mark.parametrize("end", ["prefill", "decode"])
def test_a_dropped_link_fails_its_transfer_and_the_tokens_are_right(end):
    # The prompt takes three steps of 0.1 s; the link drops again and again while they last.
    prompt = [20 + i % 100 for i in range(3 * 128)]
    dropping = kv_config(
        *(fault(n / 20, "drop_link") for n in range(1200)), epoch_unix_s=time.time()
    )
    configs = {"prefill": kv_config(), "decode": kv_config(), end: dropping}
    pair = Pair(configs["prefill"], configs["decode"])
    try:
        (tokens,) = pair.generate([prompt], [SHORT])
        assert_right(pair, prompt, tokens)
        assert pair.failures == {"r0": "peer_dead"}
    finally:
        pair.close()

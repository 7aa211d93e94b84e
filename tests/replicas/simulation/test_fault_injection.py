"""Fault plans in real engines on a simulated mesh: clients' results, and recovery."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import zmq

from replicas.codec import decode_engine_frame, encode
from replicas.config import EngineConfig, SimulatedMeshConfig
from replicas.engine_process.parent import Inbox
from replicas.engine_process.sockets import Receiver, Sender
from replicas.errors import EngineDeadError, EngineStartError
from replicas.faults import Fault, PlanClock, ReplicaFaults
from replicas.generators.simulated.profiles import engine_timing
from replicas.generators.simulated.tokens import expected_tokens
from replicas.launch import start_engine
from replicas.messages import (
    MAX_REQUEST_ID_CHARS,
    Abort,
    EngineFrame,
)
from replicas.sampling_params import SamplingParams
from replicas.simulation.fault_injection import (
    ClientLinks,
    EngineFaults,
    HearingSocket,
    SpeakingSocket,
    engine_faults,
    schedule_signals,
)
from replicas.watchdog import Watchdog
from tests.models import model_folder
from tests.replicas.engine.fakes import KEYS
from tests.replicas.engine.pair import Pair
from tests.replicas.engine_process import engine_client
from tests.replicas.engine_process.engine_client import (
    DEADLINE_S,
    connect,
    connected,
    is_idle,
    parent_of_engine,
    read,
    status,
    until,
    wait_for,
    wait_gone,
)

PROMPT = list(range(20, 90))
NUM_BEHIND = 2560
SHORT = SamplingParams(max_tokens=4, temperature=0.0, seed=0)
ENDLESS = SamplingParams(max_tokens=4000, temperature=0.0, seed=0)
STOP, CONTINUE, KILL = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL

pytestmark = pytest.mark.silence


def fault(at_s, kind, **fields):
    return Fault(at_s=at_s, target="decode/0", kind=kind, **fields)


def config(*faults, epoch_unix_s=0.0, **changes):
    mesh = SimulatedMeshConfig(
        model="Llama-3.1-8B", board="n150", faults=faults, fault_epoch_unix_s=epoch_unix_s
    )
    settings = {"max_model_len": 8192, "max_batch_size": 4, "block_size": 64, "num_blocks": 600}
    settings["start_timeout_s"] = 60.0  # A plan may freeze an engine before it is ready.
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
    sender = Sender(socket, "first", Inbox(), Watchdog())
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

    Owner: for any thread, of how long a start has taken at most, and of how often that was too
    little.

    Attributes:
        turn: Held during a start: two at a time, as more would delay each other.
    """

    def __init__(self):
        self._longest_s = 0.0
        self._num_late = 0
        self.turn = threading.Semaphore(2)
        self.start(config()).stop()

    def start(self, settings):
        began_s = time.monotonic()
        handle = start_engine(settings)
        self._longest_s = max(self._longest_s, time.monotonic() - began_s)
        return handle

    def epoch(self):
        """Return when a plan may begin, so that its engine has started and has a client."""
        return time.time() + (3 * self._longest_s + 6) * 2**self._num_late

    def was_late(self):
        """The plan began before its engine was ready: the next ones wait for twice as long."""
        self._num_late += 1

    @contextlib.contextmanager
    def engine(self, *faults, **changes):
        """An engine that was ready before its plan began, and when that is."""
        for _ in range(5):
            with self.turn:
                epoch_unix_s = self.epoch()
                try:
                    handle = self.start(config(*faults, epoch_unix_s=epoch_unix_s, **changes))
                except EngineStartError:
                    self.was_late()
                    continue
            try:
                if time.time() < epoch_unix_s - 4:
                    yield handle, epoch_unix_s
                    return
                self.was_late()
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


def open_stream(client, handle, request_id, sampling=SHORT):
    return engine_client.open_stream(client, handle, request_id, sampling, PROMPT)


def right_tokens(handle, num_tokens):
    described = handle.description
    return expected_tokens(PROMPT, num_tokens, described.vocab_size, described.eos_token_ids)


async def assert_serves(handle, client, request_id="check"):
    assert await read(open_stream(client, handle, request_id)) == right_tokens(handle, 4)


async def assert_idle(handle, client):
    """Check that all resources of earlier clients are free."""
    await until(lambda: is_idle(client, handle), "slots and blocks free", DEADLINE_S)


def children(pid):
    """Process ids of the children of a process."""
    return [
        int(entry.name)
        for entry in os.scandir("/proc")
        if entry.name.isdigit() and status(int(entry.name))[1:] == (pid,)
    ]


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
                assert time.time() > blocked_s + 9.0, "none is heard before"
            await assert_idle(handle, client)

    with starter.engine(fault(0.0, "backpressure", duration_s=9.0)) as (handle, blocked_s):
        drive(run(handle, blocked_s))
    assert not lost
    assert NUM_BEHIND * len(encode(long)) > 64 << 20, "more than queues and the kernel take"


BREAKS = {
    "deaf": ([fault(0.5, "deaf", duration_s=3.0)], ""),
    "mute": ([fault(0.5, "mute", duration_s=3.0)], ""),
    # The short freeze loses no token.
    "frozen": (
        [fault(0, "freeze", duration_s=0.5), fault(1.5, "freeze", duration_s=11.0)],
        "sent nothing",
    ),
    "partitioned": ([fault(0, "partition", duration_s=11.0)], "sent nothing"),
    "partitioned shorter than the silence": (
        [fault(0, "partition", duration_s=1.0)],
        "its connection broke",
    ),
}
"""Faults that break every stream, and what the client says of the loss."""


def a_broken_engine_loses_no_token_quietly_and_is_found_again(starter, name):
    faults, reason = BREAKS[name]

    async def run(handle):
        lost, tokens = [], []
        async with connected(handle, on_dead=lambda *args: lost.append(args[1])) as client:
            with pytest.raises(EngineDeadError):
                await read(open_stream(client, handle, "r", ENDLESS), tokens)
            assert reason in lost[0]
            assert tokens == right_tokens(handle, len(tokens))
            assert (status(handle.description.pid)[0] == "T") == (name == "frozen")
            await connect(client, handle)
            await assert_idle(handle, client)
            await assert_serves(handle, client)

    with starter.engine(*faults) as (handle, _):
        drive(run(handle))


SCENARIOS |= {
    name: partial(a_broken_engine_loses_no_token_quietly_and_is_found_again, name=name)
    for name in BREAKS
}


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
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            with starter.turn:
                frozen = config(fault(0, "freeze"), epoch_unix_s=starter.epoch())
                parent, started = stack.enter_context(parent_of_engine(frozen))
            if started:
                break
            starter.was_late()
        pid = int(started)
        family = [pid, *children(pid)]
        assert len(family) == 2
        wait_for(lambda: status(pid)[0] == "T", "frozen")
        parent.kill()
        wait_gone(family)


@pytest.mark.process
@pytest.mark.timeout(900)  # Of all scenarios together, on a machine that is slow at their starts.
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


@contextlib.contextmanager
def pair_with(end, *faults, epoch_unix_s=0.0):
    """A pair of which one end has these faults, and a check of its tokens."""
    settings = {"kv_connector": "p2p", "keys": KEYS, "max_num_batched_tokens": 128}
    plain, faulty = config(**settings), config(*faults, epoch_unix_s=epoch_unix_s, **settings)
    pair = Pair(*((faulty, plain) if end == "prefill" else (plain, faulty)))
    try:
        yield pair
    finally:
        pair.close()


def generates_right(pair, prompt):
    (tokens,) = pair.generate([prompt], [SHORT])
    facts = pair.decode.core.facts
    return tokens == expected_tokens(prompt, 4, facts.vocab_size, facts.eos_token_ids)


@pytest.mark.parametrize("end", ["prefill", "decode"])
def test_corrupted_kv_is_noticed_and_the_tokens_are_right(end):
    with pair_with(end, fault(0, "corrupt")) as pair:
        assert generates_right(pair, PROMPT)
        assert pair.failures == ({"r0": "checksum"} if end == "prefill" else {})


@pytest.mark.parametrize("end", ["prefill", "decode"])
def test_a_dropped_link_fails_its_transfer_and_the_tokens_are_right(end):
    # The prompt takes three steps of 0.1 s; the link drops again and again while they last.
    prompt = [20 + i % 100 for i in range(3 * 128)]
    drops = (fault(n / 20, "drop_link") for n in range(1200))
    with pair_with(end, *drops, epoch_unix_s=time.time()) as pair:
        assert generates_right(pair, prompt)
        assert pair.failures == {"r0": "peer_dead"}

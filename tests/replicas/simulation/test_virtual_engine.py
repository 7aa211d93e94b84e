"""A virtual engine's turns: the times of its messages, in virtual time."""

from __future__ import annotations

import msgspec
import pytest

from kv_transfer.ticket import Ticket
from replicas.faults import NO_FAULTS
from replicas.generators.simulated.profiles import engine_timing
from replicas.messages import (
    PROTOCOL_VERSION,
    AddRequest,
    EngineRequest,
    Hello,
    KVLoaded,
    LoadKV,
    TokenOutput,
)
from replicas.sampling_params import SamplingParams
from replicas.simulation.virtual_engine import VirtualDevice, VirtualEngine, simulated_facts
from replicas.watchdog import STALL_S
from tests.kv_transfer.virtual_wire import Net, Wire
from tests.replicas.engine.fakes import FOREVER_MS, KEYS
from tests.replicas.generators.simulated.engines import FOUR_CHIPS, simulated_config

CLIENT = b"client"
PROMPT = list(range(20, 90))
SAMPLING = SamplingParams(max_tokens=4, temperature=0.0, seed=0, ignore_eos=True)


def make_engine(net, name, **changes):
    config = simulated_config(kv_connector="p2p", keys=KEYS, **changes)
    device = VirtualDevice(
        timing=engine_timing(config, FOUR_CHIPS, 0.0),
        facts=simulated_facts(config),
        faults=NO_FAULTS,
        models_kv=True,
        run_ahead=True,
    )
    engine = VirtualEngine(config, device, name, Wire(net, name).make, lambda: None, lambda: 0.0)
    engine.handle_message(CLIENT, Hello(PROTOCOL_VERSION), 0.0)
    engine.end_turn(engine.begin_turn(0.0), 0, 0.0)
    return engine, device.timing


def ticket(prefill):
    description = prefill.description
    return KEYS.seal(
        Ticket(
            transfer_id=bytes(16),
            request_id="r",
            epoch=0,
            producer_endpoints=description.kv_endpoints,
            producer_incarnation="prefill",
            consumer="decode",
            num_tokens=len(PROMPT),
            layout_hash=description.kv_layout_hash,
            expires_ms=FOREVER_MS,
        )
    )


def tokens(frames):
    return [e for _, frame in frames for e in frame.events if isinstance(e, TokenOutput)]


def whole_turn(engine, now_s):
    """A turn at an instant, as far as it goes there."""
    turn = engine.begin_turn(now_s)
    assert not turn.is_half
    return engine.end_turn(turn, len(turn.end_times_s), now_s)


def waiting_pair(net):
    """An engine that waits for a prompt's KV, the one that will compute it, and its timing."""
    (decode, _), (prefill, timing) = (make_engine(net, name) for name in ("decode", "prefill"))
    request, sealed = EngineRequest("r", PROMPT, SAMPLING), ticket(prefill)
    decode.handle_message(CLIENT, AddRequest(request, "decode"), 0.0)
    decode.handle_message(CLIENT, LoadKV("r", sealed, 0), 0.0)
    whole_turn(decode, 0.0)
    prefill.handle_message(CLIENT, AddRequest(request, "prefill", ticket=sealed), 0.0)
    net.run()
    return decode, prefill, timing


def test_tokens_leave_before_the_copy_of_kv_that_another_engine_waits_for():
    net = Net()
    _, prefill, timing = waiting_pair(net)
    first = prefill.begin_turn(0.0)
    forward_s = timing.prefill_s([(0, 0, len(PROMPT))]) + timing.host_s + timing.host_row_s
    assert first.end_times_s == [pytest.approx(forward_s)]
    assert first.is_half
    net.run(first.end_times_s[0])
    second, frames = prefill.continue_turn(first, net.now_s)
    assert [(output.index, output.finish_reason) for output in tokens(frames)] == [(0, None)]
    copy_s = timing.link.transfer_s(3 * 32 * timing.bytes_per_token)
    assert second.end_times_s == [pytest.approx(forward_s + copy_s)]
    assert not second.is_half
    assert tokens(prefill.end_turn(second, 1, second.end_times_s[0])) == []


def test_a_turn_of_transfers_alone_takes_their_time_and_no_more():
    net = Net()
    decode, prefill, timing = waiting_pair(net)
    half = prefill.begin_turn(0.0)
    net.run(half.end_times_s[0])
    prefill.continue_turn(half, net.now_s)
    net.run()
    turn = decode.begin_turn(net.now_s)
    copy_s = timing.link.transfer_s(3 * 32 * timing.bytes_per_token)
    assert turn.end_times_s[0] - net.now_s == pytest.approx(copy_s + timing.host_s)
    loaded = []
    if turn.is_half:
        turn, frames = decode.continue_turn(turn, turn.end_times_s[0])
        loaded += frames
    loaded += decode.end_turn(turn, 1, turn.end_times_s[0])
    assert [e for _, f in loaded for e in f.events] == [KVLoaded("r", 0, None)]


def test_a_turn_that_does_not_end_is_a_stall_in_the_engines_heartbeats():
    engine, _ = make_engine(Net(), "engine")
    assert engine.stalls_at_s() is None
    engine.handle_message(CLIENT, AddRequest(EngineRequest("r", PROMPT, SAMPLING)), 10.0)
    turn = engine.begin_turn(10.0)
    at_s = engine.stalls_at_s()
    assert at_s >= 10.0 + STALL_S
    assert engine.heartbeat(at_s).stalled_s == 0
    assert engine.heartbeat(at_s + 1).stalled_s == at_s + 1 - 10.0
    engine.end_turn(turn, 1, at_s + 2)
    assert engine.heartbeat(at_s + 3).stalled_s == 0


def test_a_step_of_several_passes_is_one_turn():
    ends_s = {}
    for num_passes in (1, 3):
        engine, timing = make_engine(Net(), "e", num_scheduler_steps=num_passes, steps_in_flight=1)
        sampling = msgspec.structs.replace(SAMPLING, max_tokens=7)
        engine.handle_message(CLIENT, AddRequest(EngineRequest("r", PROMPT, sampling)), 0.0)
        now_s, turns = 0.0, []
        while engine.num_live:
            turn = engine.begin_turn(now_s)
            now_s = turn.end_times_s[-1]
            engine.end_turn(turn, len(turn.end_times_s), now_s)
            turns.append(len(turn.end_times_s))
        ends_s[num_passes] = now_s
        if num_passes > 1:
            # The prompt with the first token, then twice three tokens.
            assert turns == [1, 1, 1]
    # The host works once for the passes of a step.
    saved_s = 4 * (timing.host_s + timing.host_row_s)
    assert ends_s[3] == pytest.approx(ends_s[1] - saved_s)

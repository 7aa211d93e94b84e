"""Traces: their recording and replay. ttnn's mock device cannot record one.

So ttnn's trace calls are a double here, on golden chips. Recording runs the call as usual. A replay
is only noted, and the tensors stay as the recording left them.
"""

from __future__ import annotations

import contextlib

import msgspec
import pytest

from replicas.generators.model_config import load_hf_config
from replicas.generators.ttnn import lanes as lanes_module
from replicas.generators.ttnn import trace as trace_module
from replicas.generators.ttnn.trace import NoTrace, TtnnTracer
from tests.tt.calls import Calls, note_runs
from tests.tt.golden.lanes import golden_mesh, model_folder
from tests.tt.golden.rows import params


class TraceCalls:
    """ttnn's trace calls; `events` lists them in order."""

    def __init__(self):
        self.events = []
        self.open = None
        self.recorded = []

    def begin_trace_capture(self, device, *, cq_id):
        assert self.open is None, "a capture is open"
        self.open = (device, len(self.recorded))
        self.recorded.append(self.open)
        self.events.append(("begin", *self.open, cq_id))
        return self.open[1]

    def end_trace_capture(self, device, trace_id, *, cq_id):
        assert self.open == (device, trace_id)
        self.open = None
        self.events.append(("end", device, trace_id, cq_id))

    def execute_trace(self, device, trace_id, *, cq_id, blocking):
        assert self.open is None, "a capture is open"
        assert (device, trace_id) in self.recorded
        self.events.append(("execute", device, trace_id, cq_id, blocking))

    def release_trace(self, device, trace_id):
        self.recorded.remove((device, trace_id))
        self.events.append(("release", device, trace_id))


@pytest.fixture
def double(monkeypatch):
    found = TraceCalls()
    monkeypatch.setattr(trace_module, "ttnn", found)
    return found


# ---- the seam


def test_a_capture_records_and_a_replay_does_not_wait(double):
    tracer = TtnnTracer()

    def call():
        double.events.append("call")
        return "outputs"

    replay = tracer.capture("chip", call)
    assert double.events == [("begin", "chip", 0, 0), "call", ("end", "chip", 0, 0)]
    double.events.clear()
    assert [replay(), replay()] == ["outputs"] * 2
    assert double.events == [("execute", "chip", 0, 0, False)] * 2
    other = tracer.capture("chip 2", call)
    double.events.clear()
    other()
    tracer.release()
    tracer.release()
    assert double.events == [
        ("execute", "chip 2", 1, 0, False),
        ("release", "chip 2", 1),
        ("release", "chip", 0),
    ]


def test_a_call_that_fails_leaves_no_capture_open(double):
    tracer = TtnnTracer()

    def call():
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        tracer.capture("chip", call)
    assert double.open is None
    tracer.release()
    assert not double.recorded


def test_without_traces_a_replay_is_the_call(double):
    tracer = NoTrace()
    calls = []
    replay = tracer.capture("chip", lambda: calls.append(1))
    assert not calls
    replay()
    tracer.release()
    assert calls == [1]
    assert not double.events


# ---- the generator


@contextlib.contextmanager
def traced_calls(monkeypatch, trace="all", **sizes):
    """A generator of two lanes on golden chips whose traces are a double's: (calls, double)."""
    with golden_mesh(2) as (mesh, library):
        double = TraceCalls()
        monkeypatch.setattr(trace_module, "ttnn", double)
        mesh.settings = msgspec.structs.replace(mesh.settings, trace=trace)
        calls = Calls(load_hf_config(model_folder("llama-32")), mesh, num_lanes=2, **sizes)
        calls.library = library
        yield calls, double


def names(double):
    return [event[0] for event in double.events]


def warmed_up(calls, **settings):
    calls.warm_up(**settings)
    calls.warm_up(**settings, enable_trace=True)


# Both kinds of chunk in two buckets; a decode for logits, and one that draws.
NUM_CHUNKS = 4


@pytest.mark.parametrize(
    ("trace", "samples", "per_lane"),
    [
        ("all", True, NUM_CHUNKS + 2),
        ("all", False, NUM_CHUNKS + 1),
        ("decode_only", True, 2),
        ("none", True, 0),
    ],
)
def test_what_is_recorded(monkeypatch, trace, samples, per_lane):
    with traced_calls(monkeypatch, trace) as (calls, double):
        calls.warm_up(samples=samples)
        assert not double.events
        calls.warm_up(samples=samples, enable_trace=True)
        assert names(double) == ["begin", "end"] * 2 * per_lane
        on = [event[1] for event in double.events if event[0] == "begin"]
        lanes = [lane.device for lane in calls.generator._batch.lanes]
        assert sorted(map(lanes.index, on)) == [0] * per_lane + [1] * per_lane


def test_chunks_of_more_than_1024_tokens_are_compiled_and_not_recorded(monkeypatch):
    with traced_calls(monkeypatch, max_seq_len=1200) as (calls, double):
        warmed_up(calls)
        assert names(double) == ["begin", "end"] * 2 * (NUM_CHUNKS + 2)
        double.events.clear()
        devices = [lane.device for lane in calls.generator._batch.lanes]
        before = [set(device.programs) for device in devices]
        for end, replays in ((1000, 1), (1150, 0)):
            calls.prefill([0], ends=[end])
            assert names(double) == ["execute"] * replays
            double.events.clear()
        assert [set(device.programs) for device in devices] == before


def test_everything_is_compiled_and_allocated_before_the_first_capture(monkeypatch):
    with traced_calls(monkeypatch) as (calls, double):
        calls.warm_up()
        devices = [lane.device for lane in calls.generator._batch.lanes]
        before = [set(device.programs) for device in devices]

        def refuse(*arguments, **settings):
            raise AssertionError("allocated on the device")

        monkeypatch.setattr(lanes_module, "to_device", refuse)
        calls.library.calls.clear()
        calls.warm_up(enable_trace=True)
        # Nothing is written to, or read from, the device while a capture is open.
        sent = {call.name for call in calls.library.calls}
        assert not sent & {"from_torch", "to_device", "copy_host_to_device_tensor", "from_device"}
        double.events.clear()
        use_everything(calls)
        assert names(double).count("execute") > 10
        assert not {"begin", "end", "release"} & set(names(double))
        assert [set(device.programs) for device in devices] == before
        placed = [call for call in calls.library.calls if call.name == "to_device"]
        assert not placed


def use_everything(calls):
    slots = list(range(calls.batch))
    for end in (1, 128, 129, 300):
        calls.prefill([0], ends=[end])
        calls.prefill([0, 5], [end // 2] * 2, [end] * 2)
    drawing = params(calls.batch, temperature=1.0, top_k=7)
    calls.prefill(slots, sampling_params=drawing)
    calls.decode()
    calls.decode(sampling_params=drawing, reload_sampling_params=True)
    calls.decode(sampling_params=drawing, reload_inputs=False)


def test_a_capture_needs_a_whole_warm_up(monkeypatch):
    with traced_calls(monkeypatch) as (calls, double):
        with pytest.raises(ValueError, match="first warm up"):
            calls.warm_up_decode(enable_trace=True)
        calls.warm_up_decode()
        # Prefill would be compiled after decode was captured.
        with pytest.raises(ValueError, match="first warm up"):
            calls.warm_up_decode(enable_trace=True)
        calls.warm_up_prefill(samples=False)
        with pytest.raises(ValueError, match="first warm up"):
            calls.warm_up_prefill(enable_trace=True)
        assert not double.events
        calls.warm_up_prefill(enable_trace=True, samples=False)
        calls.warm_up_decode(enable_trace=True)
        assert double.events
        # Another cache has other addresses: its traces must be recorded again.
        calls.cache = calls.allocate()
        assert not double.recorded
        with pytest.raises(ValueError, match="first warm up"):
            calls.warm_up_decode(enable_trace=True)


def test_a_replay_takes_the_place_of_the_model(monkeypatch):
    with traced_calls(monkeypatch) as (calls, double):
        warmed_up(calls)
        runs = []
        note_runs(monkeypatch, calls.generator, runs)
        double.events.clear()
        calls.library.calls.clear()
        calls.prefill([1, 6])
        calls.decode()
        greedy = params(calls.batch)
        calls.decode(sampling_params=greedy, reload_sampling_params=True)
        calls.decode(sampling_params=greedy, reload_inputs=False)
        assert not runs
        devices = [lane.device for lane in calls.generator._batch.lanes]
        assert [devices.index(event[1]) for event in double.events] == [0, 1] * 4
        # The inputs were refreshed in place, and what a first chunk reads was sent to it.
        copies = [c for c in calls.library.calls if c.name == "copy_host_to_device_tensor"]
        assert [c.operands[0][0] for c in copies[:7]] == [
            (1, 128), (1, 128), (1, 16), (1, 2), (4,), (4,), (1, 32),
        ]  # fmt: skip
        # A trace for another kind of decode.
        assert double.events[2][2] != double.events[4][2] == double.events[6][2]
        double.events.clear()
        calls.prefill([1, 6], enable_trace=False)
        calls.decode(enable_trace=False)
        assert runs == [0, 1, 0, 1]
        assert not double.events


def test_close_releases_every_trace_once(monkeypatch):
    with traced_calls(monkeypatch) as (calls, double):
        warmed_up(calls)
        num_traces = len(double.recorded)
        assert num_traces == 2 * (NUM_CHUNKS + 2)
        double.events.clear()
        calls.generator.close()
        calls.generator.close()
        assert names(double) == ["release"] * num_traces
        with pytest.raises(TypeError, match="latest result of allocate_kv_cache"):
            calls.decode()

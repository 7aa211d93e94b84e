"""Who draws a step's tokens, and what a generator of decode contract 1 is told to reload."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from replicas.config import EngineConfig, MeshConfig
from replicas.engine.runner import ModelRunner
from replicas.engine.step import NewSequence, ScheduledBatch
from replicas.philox import mint_seed

VOCAB = 50
PADDING = (0.0, 1, 1.0, None)


class Device:
    """A generator that draws; its tokens are 1, 2, 3, ... and every call is kept.

    Attributes:
        calls: (method, keyword arguments) in order.
        events: ("given" or "waited", event) in order; every output has one of each of two lanes.
    """

    model_capabilities: ClassVar[dict[str, object]] = {
        "supports_sample_on_device": True,
        "supports_async_decode": True,
        "max_device_top_k": 32,
    }

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, object]]] = []
        self.events: list[tuple[str, object]] = []
        self._token = 0

    def warmup_model_prefill(self, **kwargs):
        self.calls.append(("warm prefill", kwargs))

    def warmup_model_decode(self, **kwargs):
        self.calls.append(("warm decode", kwargs))

    def prefill_forward(self, **kwargs):
        self.calls.append(("prefill", kwargs))
        return self._output(len(kwargs["tokens"]), kwargs["sampling_params"])

    def decode_forward(self, **kwargs):
        self.calls.append(("decode", kwargs))
        output = self._output(len(kwargs["tokens"]), kwargs["sampling_params"])
        return output if kwargs["read_from_device"] else ("on device", output)

    def read_decode_output(self, tt_out, async_read=True):
        assert async_read
        assert tt_out[0] == "on device"
        events = [f"event {self._token} of lane {lane}" for lane in range(2)]
        self.events.extend(("given", event) for event in events)
        return tt_out[1], events

    def process_decode_output_host(self, tt_out, is_tokens=False):
        given, waited = (
            [event for what, event in self.events if what == kind] for kind in ("given", "waited")
        )
        assert waited == given, "the output was read before its events"
        assert is_tokens == (tt_out.ndim < 3)
        return tt_out

    def wait(self, event):
        self.events.append(("waited", event))

    def _output(self, num_rows, sampling_params):
        if sampling_params is None:
            logits = torch.zeros(num_rows, 1, VOCAB)
            logits[:, :, 7] = 1.0
            return logits
        assert len(sampling_params.temperature) == num_rows
        self._token += 1
        return torch.full((num_rows, 1), self._token, dtype=torch.int32)


class Blocking(Device):
    """It can draw, and neither run ahead nor read out later."""

    model_capabilities: ClassVar[dict[str, object]] = {"supports_sample_on_device": True}


def make_runner(device: Device, **mesh: object) -> ModelRunner:
    settings = {"name": "N150", "sample_on_device": "all", "trace": "all", **mesh}
    config = EngineConfig(
        model="/none", max_batch_size=4, block_size=32, mesh=MeshConfig(**settings)
    )
    config.validate()
    return ModelRunner(device, "cache", config, 128, device.wait)


def new(slot, num_tokens=3, *, temperature=0.0, top_k=0, top_p=1.0, computed=0, prompt=None):
    return NewSequence(
        slot=slot, dp_group=0, token_ids=list(range(1, num_tokens + 1)),
        num_prompt_tokens=prompt or num_tokens, num_computed_tokens=computed, block_ids=[slot + 1],
        temperature=temperature, top_k=top_k, top_p=top_p, seed=100 + slot,
    )  # fmt: skip


def run(runner, kind, work, new_sequences=(), appended=()):
    """Token ids of a step of {slot: count}."""
    batch = ScheduledBatch(
        kind, list(work), list(work.values()), list(new_sequences), list(appended)
    )
    return runner.run(batch).token_ids


def commands(device):
    """inputs, page table, parameters, state of the last call."""
    name, kwargs = device.calls[-1]
    assert name == "decode"
    return tuple(
        kwargs[key]
        for key in (
            "reload_inputs", "reload_page_table", "reload_sampling_params", "reset_sampling_state"
        )
    )  # fmt: skip


AFRESH, STEADY, PAGES = (True, False, True, True), (False,) * 4, (False, True, False, False)
INPUTS = (True, False, False, False)


def started(device, **mesh):
    """A runner whose slots 0 and 2 have been prefilled, and decoded twice."""
    runner = make_runner(device, **mesh)
    run(runner, "prefill", {0: 3, 2: 3}, [new(0), new(2)])
    run(runner, "decode", {0: 1, 2: 1})
    assert commands(device) == AFRESH
    run(runner, "decode", {0: 1, 2: 1})
    return runner


def test_steady_steps_reload_nothing():
    device = Device()
    started(device)
    assert commands(device) == STEADY


def test_a_new_block_reloads_the_page_table_alone():
    device = Device()
    runner = started(device)
    run(runner, "decode", {0: 1, 2: 1}, appended=[(2, [9])])
    assert commands(device) == PAGES
    assert device.calls[-1][1]["page_table"][2, :2].tolist() == [3, 9]
    run(runner, "decode", {0: 1, 2: 1})
    assert commands(device) == STEADY


def test_whatever_changes_the_rows_starts_afresh():
    device = Device()
    runner = started(device)
    run(runner, "prefill", {1: 2}, [new(1, 5)])  # a chunk that does not reach its end
    run(runner, "decode", {0: 1, 2: 1})
    assert commands(device) == AFRESH, "after prefill"
    run(runner, "prefill", {1: 3})
    run(runner, "decode", {0: 1, 1: 1, 2: 1})
    assert commands(device) == AFRESH, "one row more"
    run(runner, "decode", {0: 1, 1: 1, 2: 1})
    assert commands(device) == STEADY
    run(runner, "decode", {0: 1, 1: 1})
    assert commands(device) == AFRESH, "one row less"
    run(runner, "decode", {0: 1, 1: 1}, [new(1, 9, computed=8, prompt=4)])
    assert commands(device) == AFRESH, "another sequence in the same row"
    run(runner, "decode", {0: 1, 1: 1})
    assert commands(device) == STEADY


def test_a_step_that_the_host_draws_for_reloads_inputs_and_the_next_everything():
    device = Device()
    runner = started(device)
    run(runner, "prefill", {1: 3}, [new(1, temperature=1.0, top_k=33)])
    assert device.calls[-1][1]["sampling_params"] is None
    run(runner, "decode", {0: 1, 1: 1, 2: 1})
    assert commands(device) == INPUTS
    assert device.calls[-1][1]["sampling_params"] is None
    run(runner, "decode", {0: 1, 1: 1, 2: 1})
    assert commands(device) == INPUTS
    run(runner, "decode", {0: 1, 2: 1})
    assert commands(device) == AFRESH


@pytest.mark.parametrize(("device", "mesh"), [(Blocking(), {}), (Device(), {"trace": "none"})])
def test_without_a_trace_or_the_ability_inputs_are_reloaded_every_time(device, mesh):
    runner = started(device, **mesh)
    assert commands(device) == INPUTS
    run(runner, "decode", {0: 1, 2: 1}, appended=[(2, [9])])
    assert commands(device) == INPUTS
    run(runner, "decode", {0: 1})
    assert commands(device) == AFRESH


@pytest.mark.parametrize(
    ("mode", "drawn"),
    [("none", []), ("decode_only", ["decode"]), ("all", ["prefill", "decode"])],
)
def test_the_mode_says_which_calls_draw(mode, drawn):
    device = Device()
    runner = make_runner(device, sample_on_device=mode)
    runner.compile()
    warmed = [name for name, kwargs in device.calls if kwargs["can_sample_on_device"]]
    assert warmed == [f"warm {name}" for name in drawn]
    device.calls.clear()
    first = run(runner, "prefill", {0: 3}, [new(0)])
    second = run(runner, "decode", {0: 1})
    assert [name for name, kwargs in device.calls if kwargs["sampling_params"]] == drawn
    host, tokens = 7, iter([1, 2])
    assert first == [next(tokens) if "prefill" in drawn else host]
    assert second == [next(tokens) if "decode" in drawn else host]


@pytest.mark.parametrize(
    ("sampling", "on_device"),
    [
        ({}, True),
        ({"temperature": 1e-6, "top_k": 0}, True),
        ({"temperature": 0.5, "top_k": 1}, True),
        ({"temperature": 0.5, "top_k": 32, "top_p": 0.5}, True),
        ({"temperature": 0.5, "top_k": 33}, False),
        ({"temperature": 0.5, "top_k": 0}, False),
        ({"temperature": 0.5, "top_k": -1}, False),
    ],
)
def test_one_request_that_the_device_cannot_draw_for_brings_the_batch_to_the_host(
    sampling, on_device
):
    device = Device()
    run(make_runner(device), "prefill", {0: 3, 1: 3}, [new(0), new(1, **sampling)])
    assert (device.calls[-1][1]["sampling_params"] is not None) == on_device


def test_a_call_with_a_row_that_wants_no_token_is_not_drawn_on_the_device():
    """A device may count what it drew for a seed: a chunk that ends early must not count."""
    device = Device()
    work = [new(0, 9, temperature=0.5, top_k=4), new(1, temperature=0.5, top_k=4)]
    tokens = run(make_runner(device), "prefill", {0: 4, 1: 3}, work)
    assert device.calls[-1][1]["sampling_params"] is None
    assert (tokens[0], tokens[1] >= 0) == (-1, True)


def test_a_row_that_wants_no_token_holds_nobody_up_where_draws_keep_no_state():
    device = Device()
    device.model_capabilities = {**device.model_capabilities, "device_draws_keep_no_state": True}
    work = [new(0, 9, temperature=1.0, top_k=99), new(1, temperature=0.5, top_k=4, top_p=0.25)]
    assert run(make_runner(device), "prefill", {0: 4, 1: 3}, work) == [-1, 1]
    params = device.calls[-1][1]["sampling_params"]
    rows = list(zip(params.temperature, params.top_k, params.top_p, params.seed, strict=True))
    assert rows[0] == PADDING
    assert rows[1] == (0.5, 4, 0.25, 101)


def seeds_of_each_start(device, steps=6):
    """(call, seed of slot 0) of each call that starts streams afresh, while others come and go."""
    runner = make_runner(device)
    found = []
    run(runner, "prefill", {0: 3}, [new(0, temperature=0.5, top_k=4)])
    for step in range(steps):
        run(runner, "decode", {0: 1})
        run(runner, "decode", {0: 1})
        run(runner, "prefill", {1: 3}, [new(1, 3 + step)])
    # Preempted, and back with what it had.
    length = 3 + 1 + 2 * steps
    again = new(0, length, temperature=0.5, top_k=4, prompt=3)
    run(runner, "prefill", {0: length}, [again])
    run(runner, "decode", {0: 1})
    for name, kwargs in device.calls:
        slots = kwargs.get("empty_slots", [0])
        if slots == [0] and kwargs.get("reset_sampling_state", True):
            found.append((name, kwargs["sampling_params"].seed[0]))
    assert [name for name, _ in found] == ["prefill", *["decode"] * steps, "prefill", "decode"]
    return [seed for _, seed in found]


def test_a_stream_that_starts_afresh_never_draws_the_same_numbers_again():
    """A class that keeps streams rebuilds them from the seeds, whenever another request comes."""
    seeds = seeds_of_each_start(Device())
    assert len(set(seeds)) == len(seeds)
    assert seeds == [mint_seed(100, index) >> 10 for index in (0, 1, 3, 5, 7, 9, 11, 13, 14)]


def test_a_seed_is_sent_as_it_is_where_draws_keep_no_state():
    device = Device()
    device.model_capabilities = {**device.model_capabilities, "device_draws_keep_no_state": True}
    assert set(seeds_of_each_start(device)) == {100}


def test_a_class_without_a_limit_of_its_own_draws_for_everybody():
    device = Blocking()
    run(make_runner(device), "prefill", {0: 3}, [new(0, temperature=1.0)])
    assert device.calls[-1][1]["sampling_params"].top_k == [0]


def test_rows_that_do_not_decode_are_padded_as_documented():
    device = Device()
    runner = make_runner(device)
    run(runner, "prefill", {3: 3}, [new(3, temperature=0.5, top_k=4, top_p=0.5)])
    run(runner, "decode", {3: 1})
    params = device.calls[-1][1]["sampling_params"]
    rows = list(zip(params.temperature, params.top_k, params.top_p, params.seed, strict=True))
    assert rows[:3] == [PADDING] * 3
    assert rows[3] == (0.5, 4, 0.5, mint_seed(103, 1) >> 10)
    assert params.repetition_penalty == [1.0] * 4
    assert params.presence_penalty == params.frequency_penalty == [0.0] * 4
    assert params.num_logprobs == [-2] * 4
    assert params.enable_log_probs == [False] * 4


def test_steady_steps_use_the_same_parameters_and_page_table():
    device = Device()
    runner = started(device)
    before = device.calls[-1][1]
    run(runner, "decode", {0: 1, 2: 1})
    after = device.calls[-1][1]
    assert after["sampling_params"] is before["sampling_params"]
    assert after["page_table"].data_ptr() == before["page_table"].data_ptr()


def test_all_lanes_of_every_output_are_waited_for_before_it_is_read():
    device = Device()
    started(device)
    kinds = [kind for kind, _ in device.events]
    assert kinds == ["given", "given", "waited", "waited"] * 2
    assert len({event for _, event in device.events}) == 4
    assert not device.calls[-1][1]["read_from_device"]


def test_one_that_does_not_run_ahead_reads_at_once():
    device = Blocking()
    started(device)
    assert device.events == []
    assert device.calls[-1][1]["read_from_device"]


@pytest.mark.parametrize(
    ("trace", "warm_ups", "traced"),
    [
        ("none", ["prefill 0", "decode 0"], (False, False)),
        ("decode_only", ["prefill 0", "decode 0", "decode 1"], (False, True)),
        ("all", ["prefill 0", "decode 0", "prefill 1", "decode 1"], (True, True)),
    ],
)
def test_what_is_captured_is_compiled_first_and_replayed_later(trace, warm_ups, traced):
    device = Device()
    runner = make_runner(device, trace=trace)
    runner.compile()
    runner.capture()
    found = [f"{n.removeprefix('warm ')} {int(k['enable_trace'])}" for n, k in device.calls]
    assert found == warm_ups
    run(runner, "prefill", {0: 3}, [new(0)])
    run(runner, "decode", {0: 1})
    assert tuple(kwargs["enable_trace"] for _, kwargs in device.calls[-2:]) == traced

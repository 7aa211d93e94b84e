"""Sampling on host or device, and the reload commands of decode contract 1."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replicas.config import EngineConfig, MeshConfig
from replicas.engine.device_batch import DeviceDraws
from replicas.engine.model_runner import ModelRunner
from replicas.engine.step import NewRow, ScheduledBatch
from replicas.philox import mint_seed
from replicas.sampling.logprobs import Logprobs
from replicas.sampling.order import row_processors
from replicas.sampling.processor import DeviceAbilities, RowProcessors
from replicas.sampling_params import SamplingParams
from tests.kv_groups import one_kv_group

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
        return (tt_out[1], events), events

    def process_decode_output_host(self, tt_out, is_tokens=False):
        output, events = tt_out
        for event in events:
            assert ("waited", event) in self.events, "the output was read before its events"
        tokens = output[0] if isinstance(output, tuple) else output
        assert is_tokens == (tokens.ndim < 3)
        return output

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
    """A generator that draws, but neither runs ahead nor reads out later."""

    model_capabilities: ClassVar[dict[str, object]] = {"supports_sample_on_device": True}


def make_runner(device: Device, **mesh: object) -> ModelRunner:
    settings = {"name": "N150", "sample_on_device": "all", "trace": "all", **mesh}
    config = EngineConfig(
        model="/none", max_batch_size=4, block_size=32, mesh=MeshConfig(**settings)
    )
    config.validate()
    return ModelRunner(
        device, "cache", config, one_kv_group(9, config.block_size), 128, device.wait
    )


def new(slot, num_tokens=3, *, temperature=0.0, computed=0, prompt=None, **sampling):
    return NewRow(
        slot=slot,
        dp_group=0,
        token_ids=list(range(1, num_tokens + 1)),
        num_prompt_tokens=prompt or num_tokens,
        num_computed_tokens=computed,
        block_ids=[[slot + 1]],
        sampling=SamplingParams(temperature=temperature, seed=100 + slot, **sampling),
    )


def step(kind, work, new_sequences=(), appended=()):
    """A step of {slot: count}."""
    return ScheduledBatch(
        kind, list(work), list(work.values()), list(new_sequences), list(appended)
    )


def run(runner, *work):
    """Return the token of each row of a step, None where its prompt is not complete."""
    result = runner.run(step(*work))
    counts = result.counts or [1] * len(result.token_ids)
    token_ids = iter(result.token_ids)
    return [next(token_ids) if count else None for count in counts]


def drawn_rows(device):
    """Temperature, top-k, top-p and seed of each row of the last call."""
    params = device.calls[-1][1]["sampling_params"]
    return list(zip(params.temperature, params.top_k, params.top_p, params.seed, strict=True))


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


def test_a_new_block_reloads_the_page_table_alone():
    device = Device()
    runner = started(device)
    run(runner, "decode", {0: 1, 2: 1}, [], [(2, [[9]])])
    assert commands(device) == PAGES
    assert device.calls[-1][1]["page_table"][2, :2].tolist() == [3, 9]
    run(runner, "decode", {0: 1, 2: 1})
    assert commands(device) == STEADY


def submit(runner, work):
    return runner.submit(step("decode", work))


class KeepsNothing(Device):
    """A generator whose draws depend only on seed and position."""

    model_capabilities: ClassVar[dict[str, object]] = {
        **Device.model_capabilities,
        "device_draws_keep_no_state": True,
    }


def test_rows_that_leave_while_a_step_is_under_way_lose_their_blocks_and_nothing_is_waited_for():
    device = KeepsNothing()
    runner = started(device)
    first = submit(runner, {0: 1, 2: 1})
    waited = [e for e in device.events if e[0] == "waited"]
    second = submit(runner, {2: 1})
    assert commands(device) == PAGES
    table = device.calls[-1][1]["page_table"]
    assert not table[0].any()
    assert table[2, 0] == 3
    third = submit(runner, {2: 1})
    assert commands(device) == STEADY
    assert [e for e in device.events if e[0] == "waited"] == waited
    found = [runner.collect(step).token_ids for step in (first, second, third)]
    # Prefill drew the first token, two steps the next two.
    assert found == [[4, 4], [5], [6]]
    run(runner, "decode", {0: 1, 2: 1})
    assert commands(device) == AFRESH, "a row comes back"
    assert table[0, 0] == 1


def test_a_row_that_has_left_does_not_run_past_its_page_table():
    device = KeepsNothing()
    runner = make_runner(device)
    run(runner, "prefill", {0: 120, 2: 3}, [new(0, 120), new(2)])
    steps = [submit(runner, {0: 1, 2: 1}), submit(runner, {2: 1})]
    for _ in range(8):
        steps.append(submit(runner, {2: 1}))
        runner.collect(steps.pop(0))
    # The row computed 120 first: the eighth call is its last within 128.
    reloads = [kwargs["reload_inputs"] for name, kwargs in device.calls if name == "decode"]
    assert reloads == [True, *[False] * 7, True, False]
    tokens = [kwargs["tokens"] for name, kwargs in device.calls if name == "decode"]
    assert tokens[8][2] == 9, "whoever reloads has waited for the token before"


def test_a_device_whose_draws_start_again_with_the_rows_is_waited_for():
    device = Device()
    runner = started(device)
    first = submit(runner, {0: 1, 2: 1})
    second = submit(runner, {2: 1})
    assert commands(device) == AFRESH
    assert first.result is not None
    assert runner.collect(first).token_ids == [4, 4]
    assert runner.collect(second).token_ids == [5]


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
    for _ in range(2):
        run(runner, "decode", {1: 1})
        assert commands(device) == INPUTS
        assert device.calls[-1][1]["sampling_params"] is None
    run(runner, "decode", {0: 1, 2: 1})
    assert commands(device) == AFRESH


@pytest.mark.parametrize(("device", "mesh"), [(Blocking(), {}), (Device(), {"trace": "none"})])
def test_without_a_trace_or_the_ability_inputs_are_reloaded_every_time(device, mesh):
    runner = started(device, **mesh)
    assert commands(device) == INPUTS
    run(runner, "decode", {0: 1, 2: 1}, [], [(2, [[9]])])
    assert commands(device) == INPUTS
    run(runner, "decode", {0: 1})
    assert commands(device) == AFRESH


@pytest.mark.parametrize(
    ("mode", "can", "drawn"),
    [
        ("none", {"supports_sample_in_prefill": True}, []),
        ("decode_only", {"supports_sample_in_prefill": True}, ["decode"]),
        ("all", {}, ["prefill", "decode"]),
        (None, {"supports_sample_on_device": False}, []),
        (None, {}, ["decode"]),
        (None, {"supports_sample_in_prefill": True}, ["prefill", "decode"]),
    ],
)
def test_the_mode_says_which_calls_draw_and_without_one_what_the_device_can(mode, can, drawn):
    device = Device()
    device.model_capabilities = {**device.model_capabilities, **can}
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


SMALL, WIDE = {"temperature": 0.5, "top_k": 4}, {"temperature": 0.5, "top_k": 33}


def decoding(device, *samplings):
    """A runner that has prefilled these requests, and the calls of its next step."""
    runner = make_runner(device)
    sequences = [new(slot, **sampling) for slot, sampling in enumerate(samplings)]
    run(runner, "prefill", dict.fromkeys(range(len(samplings)), 3), sequences)
    device.calls.clear()
    tokens = run(runner, "decode", dict.fromkeys(range(len(samplings)), 1))
    return runner, tokens


def live(kwargs):
    return [slot for slot, position in enumerate(kwargs["start_pos"].tolist()) if position >= 0]


def test_a_step_with_rows_of_both_kinds_takes_a_call_for_each():
    device = Device()
    runner, tokens = decoding(device, SMALL, WIDE, {}, SMALL)
    drawn = device._token
    calls = [(live(kw), kw["sampling_params"] is not None) for _, kw in device.calls]
    assert calls == [([1], False), ([0, 2, 3], True)]
    assert commands(device) == AFRESH
    assert [tokens[slot] for slot in (0, 2, 3)] == [drawn] * 3
    assert (
        device.calls[0][1]["page_table"].data_ptr() == device.calls[1][1]["page_table"].data_ptr()
    )
    # The device has these rows: it continues with them once the other row has left.
    run(runner, "decode", {0: 1, 2: 1, 3: 1})
    assert commands(device) == STEADY


class Generous(Device):
    """A generator that gives logits beside tokens; each row's logits encode its slot."""

    model_capabilities: ClassVar[dict[str, object]] = {
        **Device.model_capabilities,
        "device_draws_keep_no_state": True,
        "gives_logits_beside_tokens": True,
    }

    def decode_forward(self, *, logits_rows=None, **kwargs):
        handle, tokens = super().decode_forward(**kwargs)
        self.calls[-1][1]["logits_rows"] = logits_rows
        if logits_rows is None:
            return handle, tokens
        logits = torch.full((len(logits_rows), VOCAB), -torch.inf)
        logits[range(len(logits_rows)), [40 + slot for slot in logits_rows]] = 0.0
        return handle, (tokens, logits)


def test_one_that_gives_logits_beside_tokens_is_called_once():
    device = Generous()
    runner, tokens = decoding(device, SMALL, WIDE, {}, WIDE)
    drawn = device._token
    [(_, kwargs)] = device.calls
    assert (live(kwargs), kwargs["logits_rows"]) == ([0, 1, 2, 3], [1, 3])
    assert tokens == [drawn, 41, drawn, 43]
    assert drawn_rows(device) == [(0.5, 4, 1.0, 100), PADDING, PADDING, PADDING]
    # The device does not know what the host has drawn, and nothing else is new.
    run(runner, "decode", dict.fromkeys(range(4), 1))
    assert commands(device) == INPUTS
    assert device.calls[-1][1]["tokens"][:, 0].tolist() == tokens
    run(runner, "decode", {0: 1, 2: 1})
    assert (commands(device), device.calls[-1][1]["logits_rows"]) == (AFRESH, None)
    run(runner, "decode", {0: 1, 2: 1})
    assert commands(device) == STEADY


@pytest.mark.parametrize("device", [Generous(), Device()], ids=["one call", "two calls"])
def test_the_device_continues_without_the_rows_of_the_host(device):
    runner = make_runner(device)
    rows = [new(slot, **sampling) for slot, sampling in enumerate((SMALL, WIDE, {}, {}))]
    all_rows, others = dict.fromkeys(range(4), 1), {0: 1, 2: 1, 3: 1}
    assert runner.run(step("prefill", dict.fromkeys(range(4), 3), rows)).on_host == [1]
    steps = [submit(runner, all_rows), submit(runner, others)]
    assert [step.result for step in steps] == [None, None], "no step waits"
    assert commands(device) == (PAGES if isinstance(device, Generous) else STEADY)
    assert not device.calls[-1][1]["page_table"][1].any()
    results = [runner.collect(step) for step in steps]
    assert [len(result.token_ids) for result in results] == [4, 3]
    assert [result.on_host for result in results] == [[], []]
    by_host = results[0].token_ids[1]
    submit(runner, all_rows)
    found = next(kw for _, kw in reversed(device.calls) if 1 in live(kw))
    assert found["reload_inputs"]
    assert found["tokens"][1, 0] == by_host
    assert found["start_pos"][1] == 4
    assert device.calls[-1][1]["start_pos"].tolist()[2:] == [5, 5]


ON_DEVICE = [
    {}, {"temperature": 1e-6}, {"temperature": 1.0, "top_k": 1}, SMALL,
    {"temperature": 0.5, "top_k": 32, "top_p": 0.5},
]  # fmt: skip
MIN_P = {**SMALL, "min_p": 0.1}
ON_HOST = [WIDE, MIN_P, *({"temperature": 1.0, "top_k": top_k} for top_k in (0, -1))]


CHANGES = {
    "none": {},
    "bias": {"logit_bias": {3: 1.0}},
    "penalty": {"presence_penalty": 0.5},
    "one logprob": {"logprobs": 0},
    "logprobs": {"logprobs": 2},
    "both": {"presence_penalty": 0.5, "logprobs": 0},
}


@given(
    company=st.lists(
        st.tuples(st.sampled_from(ON_DEVICE + ON_HOST), st.sampled_from([*CHANGES]), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    kind=st.sampled_from(["prefill", "decode"]),
    keeps_state=st.booleans(),
    gives_both=st.booleans(),
    max_top_k=st.sampled_from([32, None]),
    penalties=st.booleans(),
    max_logprobs=st.sampled_from([None, 0, 2]),
)
def test_who_draws_a_token_depends_on_its_request_alone(
    company, kind, keeps_state, gives_both, max_top_k, penalties, max_logprobs
):
    samples = np.array([kind == "decode" or wants for _, _, wants in company])
    draws = DeviceDraws(
        4, frozenset({"prefill", "decode"}),
        can=DeviceAbilities(max_top_k, penalties, max_logprobs),
        keeps_state=keeps_state, gives_both=gives_both and not keeps_state,
    )  # fmt: skip
    processors = RowProcessors(row_processors((), logprobs=Logprobs("raw_logprobs")), 4)
    for slot, (sampling, change, _) in enumerate(company):
        row = new(slot, **sampling, **CHANGES[change])
        draws.add(row, processors.add(row))
    calls = draws.divide(kind, np.arange(len(company), dtype=np.int32), samples)
    assert sorted(e for call in calls for e in call.entries.tolist()) == [*range(len(company))]
    drawn = {int(call.entries[i]) for call in calls for i in call.drawn}
    sampled = {int(call.entries[i]) for call in calls for i in call.sampled}
    assert sorted([*drawn, *sampled]) == np.flatnonzero(samples).tolist()
    on_device = {
        "none": True,
        "bias": False,
        "penalty": penalties and kind == "decode",
        "one logprob": max_logprobs is not None and kind == "decode",
        "logprobs": max_logprobs == 2 and kind == "decode",
        "both": False,
    }
    for entry, (sampling, change, _) in enumerate(company):
        is_hosts = sampling in ON_HOST and (max_top_k is not None or sampling is MIN_P)
        is_hosts = is_hosts or not on_device[change]
        assert entry not in (drawn if is_hosts else sampled)
    for call in calls:
        if len(call.drawn) and keeps_state:
            assert samples[call.entries].all(), "a row that wants no token would count as drawn"
        if len(call.drawn) and len(call.sampled):
            assert (kind, gives_both) == ("decode", True)
    assert len(calls) <= 2


def test_a_row_that_wants_no_token_is_not_in_a_call_that_draws():
    """A device may count the draws of a seed: a chunk that ends early must not count."""
    device = Device()
    work = [new(0, 9, temperature=0.5, top_k=4), new(1, temperature=0.5, top_k=4)]
    tokens = run(make_runner(device), "prefill", {0: 4, 1: 3}, work)
    found = [(kw["empty_slots"], kw["sampling_params"] is not None) for _, kw in device.calls]
    assert found == [([0], False), ([1], True)]
    assert tokens == [None, 1]


def test_a_row_that_wants_no_token_holds_nobody_up_where_draws_keep_no_state():
    device = KeepsNothing()
    work = [new(0, 9, temperature=1.0, top_k=99), new(1, temperature=0.5, top_k=4, top_p=0.25)]
    assert run(make_runner(device), "prefill", {0: 4, 1: 3}, work) == [None, 1]
    assert len(device.calls) == 1
    assert drawn_rows(device) == [PADDING, (0.5, 4, 0.25, 101)]


def seeds_of_each_start(device, steps=6):
    """(call, seed of slot 0) of each call that starts streams afresh, while others come and go."""
    runner = make_runner(device)
    found = []
    run(runner, "prefill", {0: 3}, [new(0, temperature=0.5, top_k=4)])
    for step in range(steps):
        run(runner, "decode", {0: 1})
        run(runner, "decode", {0: 1})
        run(runner, "prefill", {1: 3}, [new(1, 3 + step)])
    # Preempted, and resumed with its tokens.
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
    device = KeepsNothing()
    assert set(seeds_of_each_start(device)) == {100}


def test_rows_that_do_not_decode_are_padded_as_documented():
    device = Device()
    runner = make_runner(device)
    run(runner, "prefill", {3: 3}, [new(3, temperature=0.5, top_k=4, top_p=0.5)])
    run(runner, "decode", {3: 1})
    assert drawn_rows(device) == [*[PADDING] * 3, (0.5, 4, 0.5, mint_seed(103, 1) >> 10)]
    params = device.calls[-1][1]["sampling_params"]
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

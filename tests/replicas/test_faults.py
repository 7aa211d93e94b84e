"""Fault plans: refusals, and a replica's faults at each moment."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.errors import ConfigError, FaultPlanError
from replicas.faults import (
    KINDS,
    Fault,
    FaultPlan,
    FaultWindow,
    PlanClock,
    ReplicaFaults,
)

INSTANTS = {"kill", "drop_link", "replace", "flip"}
MISSING = object()


def entry(**changes):
    """A plain entry that works."""
    fields = {"at_s": 5.0, "target": "decode/0", "kind": "freeze", "duration_s": 2.0, **changes}
    return {key: value for key, value in fields.items() if value is not MISSING}


def kill(**changes):
    return entry(**{"kind": "kill", "duration_s": MISSING, **changes})


def replica(*entries):
    return FaultPlan.parse(list(entries)).for_target("decode/0")


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "explode"}, ["[1].kind", "'explode'", "partition"]),
        ({"kind": ["kill"]}, ["[1].kind", "['kill']"]),
        ({"kind": MISSING}, ["[1]", "kind is missing"]),
        ({"at_s": MISSING}, ["[1]", "at_s is missing"]),
        ({"target": MISSING}, ["[1]", "target is missing"]),
        ({"at_s": -0.5}, ["[1].at_s", "0 or more", "-0.5"]),
        ({"at_s": math.nan}, ["[1].at_s", "nan"]),
        ({"at_s": math.inf}, ["[1].at_s", "inf"]),
        ({"at_s": "soon"}, ["[1].at_s", "float"]),
        ({"at_s": True}, ["[1].at_s", "bool"]),
        ({"target": "decode"}, ["[1].target", "'decode'", "pool/rank"]),
        ({"target": "decode/-1"}, ["[1].target", "pool/rank"]),
        ({"target": "decode/01"}, ["[1].target", "pool/rank"]),
        ({"target": "decode/1/2"}, ["[1].target", "pool/rank"]),
        ({"target": "ingress/0"}, ["[1].target", "prefill, decode or both"]),
        ({"target": 3}, ["[1].target", "str"]),
        ({"kind": "kill"}, ["[1].duration_s", "kill", "remove duration_s"]),
        ({"kind": "drop_link"}, ["[1].duration_s", "drop_link", "remove duration_s"]),
        ({"duration_s": 0}, ["[1].duration_s", "positive"]),
        ({"duration_s": -1}, ["[1].duration_s", "positive"]),
        ({"duration_s": math.inf}, ["[1].duration_s", "leave it out"]),
        ({"kind": "slow"}, ["[1].factor", "slow needs a factor above 1"]),
        ({"kind": "slow", "factor": 0.5}, ["[1].factor", "0.5"]),
        ({"kind": "slow", "factor": math.inf}, ["[1].factor", "inf"]),
        ({"kind": "slow", "factor": math.nan}, ["[1].factor", "nan"]),
        ({"kind": "slow", "target": "ingress/0", "factor": 2.0}, ["[1].target", "kill and clock"]),
        ({"kind": "clock"}, ["[1].shift_s", "clock needs the seconds"]),
        ({"kind": "clock", "shift_s": math.inf}, ["[1].shift_s", "inf"]),
        ({"shift_s": 5.0}, ["[1].shift_s", "freeze takes no shift_s", "remove it"]),
        ({"kind": "replace"}, ["[1].duration_s", "replace", "remove duration_s"]),
        ({"factor": 2.0}, ["[1].factor", "freeze takes no factor", "remove it"]),
        ({"for_s": 2.0}, ["[1]", "'for_s'", "duration_s"]),
        ({"at_s": 21.0}, ["[1]", "freeze of decode/0", "overlaps entry [0]"]),
        ({"at_s": 19.0}, ["[1]", "overlaps entry [0]"]),
        ({"at_s": 1.0, "duration_s": None}, ["[1]", "overlaps entry [0]"]),
    ],
)
def test_an_entry_that_cannot_work_is_named_with_what_to_do(changes, words):
    with pytest.raises(FaultPlanError) as caught:
        FaultPlan.parse([entry(at_s=20.0), entry(**changes)])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("raw", [None, {"faults": []}, "kill", 3])
def test_a_plan_is_a_list(raw):
    with pytest.raises(ConfigError, match="a fault plan is a list of entries with at_s"):
        FaultPlan.parse(raw)


@pytest.mark.parametrize("raw", [None, "kill decode/0", [5.0, "decode/0", "kill"]])
def test_an_entry_is_a_mapping(raw):
    with pytest.raises(FaultPlanError, match=r"\[0\]: an entry is a mapping with at_s"):
        FaultPlan.parse([raw])


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [entry(), entry(at_s=7.0)],
        [entry(), entry(target="decode/1")],
        [entry(), entry(kind="partition")],
        [entry(at_s=0), entry(kind="slow", factor=1.5, duration_s=None)],
        [kill(), kill(at_s=5.5), kill(kind="drop_link"), entry(duration_s=None)],
    ],
)
def test_a_plan_that_works_is_read_as_it_stands(entries):
    plan = FaultPlan.parse(entries)
    assert [(f.at_s, f.target, f.kind, f.duration_s) for f in plan.faults] == [
        (e["at_s"], e["target"], e["kind"], e.get("duration_s")) for e in entries
    ]
    assert FaultPlan.parse(msgspec.to_builtins(plan.faults)) == plan


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("both/0", ["[1].target", "no pool 'both'", "decode, prefill"]),
        ("decode/2", ["[1].target", "'decode' has 2", "decode/0 to decode/1"]),
        ("prefill/1", ["[1].target", "'prefill' has 1"]),
    ],
)
def test_a_target_that_does_not_exist_is_named(target, words):
    plan = FaultPlan.parse([entry(target="decode/1"), entry(target=target)])
    with pytest.raises(FaultPlanError) as caught:
        plan.check_targets({"prefill": 1, "decode": 2})
    for word in words:
        assert word in str(caught.value)


def test_targets_that_exist_are_accepted():
    plan = FaultPlan.parse([entry(target="decode/1"), entry(target="prefill/0")])
    plan.check_targets({"prefill": 1, "decode": 2})


@pytest.mark.parametrize(
    "fields",
    [{"target": "ingress/0"}, {"kind": "replace"}, {"kind": "flip"}],
    ids=["ingress", "replace", "flip"],
)
def test_what_happens_in_the_simulator_alone_is_refused_to_real_replicas(fields):
    plan = FaultPlan.parse([entry(), kill(**fields)])
    with pytest.raises(FaultPlanError, match=r"\[1\]: .* only in the simulator"):
        plan.check_real()
    FaultPlan.parse([entry()]).check_real()


# --- faults over time --------------------------------------------------------------------------


def test_a_window_without_a_duration_never_ends():
    faults = replica(entry(kind="partition", duration_s=None))
    assert faults.is_partitioned(1e12)
    assert not faults.is_partitioned(4.99)
    assert faults.silences() == (FaultWindow(5.0, math.inf),)
    assert faults.next_change_s(0.0) == 5.0
    assert faults.next_change_s(5.0) is None


def test_instants_and_windows_are_returned_in_order():
    faults = replica(
        kill(at_s=9.0), kill(at_s=3.0), kill(kind="drop_link", at_s=8.0),
        kill(kind="drop_link", at_s=1.0), entry(at_s=6.0), entry(at_s=2.0),
    )  # fmt: skip
    assert faults.kills() == (3.0, 9.0)
    assert faults.link_drops() == (1.0, 8.0)
    assert faults.freezes() == (FaultWindow(2.0, 4.0), FaultWindow(6.0, 8.0))
    assert faults.silences() == ()


seconds = st.integers(0, 400).map(lambda n: n / 8)


@st.composite
def plans(draw):
    """Plans about two replicas without overlaps: windows of a kind take turns on a grid."""
    entries = []
    for target in ("decode/0", "decode/1"):
        for kind in KINDS:
            edges = sorted(draw(st.sets(seconds, max_size=6)))
            for start_s, end_s in zip(edges[::2], edges[1::2], strict=False):
                fields = {"at_s": start_s, "target": target, "kind": kind}
                if kind not in INSTANTS:
                    fields["duration_s"] = end_s - start_s
                if kind == "slow":
                    fields["factor"] = draw(st.sampled_from([1.5, 4.0]))
                if kind == "clock":
                    fields["shift_s"] = draw(st.sampled_from([-180.0, 3600.0]))
                entries.append(fields)
    return FaultPlan.parse(draw(st.permutations(entries)))


def state(faults, now_s):
    """Return all answers of a replica's faults for a moment, with instants counted."""
    return (
        faults.slow_factor(now_s),
        faults.corrupts(now_s),
        faults.is_partitioned(now_s),
        faults.is_frozen(now_s),
        faults.is_deaf(now_s),
        faults.is_mute(now_s),
        faults.is_backpressured(now_s),
        faults.ignores_sigterm(now_s),
        faults.hang_left_s(now_s) > 0,
        faults.clock_shift_s(now_s),
        sum(at_s <= now_s for at_s in faults.kills()),
        sum(at_s <= now_s for at_s in faults.link_drops()),
        sum(at_s <= now_s for at_s in faults.replacements()),
        sum(at_s <= now_s for at_s in faults.flips()),
    )


@given(plans(), seconds)
def test_answers_are_those_of_the_entries_themselves(plan, now_s):
    faults = plan.for_target("decode/0")
    mine = [f for f in plan.faults if f.target == "decode/0"]
    ends_s = {f: f.at_s + f.duration_s for f in mine if f.duration_s is not None}
    held = {f.kind: f for f in mine if f.at_s <= now_s < ends_s.get(f, f.at_s)}
    past = [f.kind for f in mine if f.at_s <= now_s]
    assert bool(faults) == bool(mine)
    assert state(faults, now_s) == (
        held["slow"].factor if "slow" in held else 1.0,
        "corrupt" in held,
        "partition" in held,
        "freeze" in held,
        bool({"deaf", "partition"} & set(held)),
        bool({"mute", "partition"} & set(held)),
        "backpressure" in held,
        "ignore_sigterm" in held,
        "hang" in held,
        held["clock"].shift_s if "clock" in held else 0.0,
        past.count("kill"),
        past.count("drop_link"),
        past.count("replace"),
        past.count("flip"),
    )


@given(plans(), seconds, st.floats(0, 1))
def test_nothing_changes_before_the_next_change(plan, now_s, share):
    faults = plan.for_target("decode/0")
    change_s = faults.next_change_s(now_s)
    if change_s is None:
        later_s = now_s + 1000 * share
    else:
        assert change_s > now_s
        later_s = min(now_s + share * (change_s - now_s), math.nextafter(change_s, 0.0))
    assert state(faults, later_s) == state(faults, now_s)


@given(plans())
def test_every_change_is_found_by_walking_from_one_to_the_next(plan):
    faults = plan.for_target("decode/0")
    moments_s, now_s = [], -1.0
    while (now_s := faults.next_change_s(now_s)) is not None:
        moments_s.append(now_s)
    edges_s = {edge_s for f in plan.faults if f.target == "decode/0" for edge_s in f.window}
    assert moments_s == sorted(edges_s)
    assert all(f.at_s in moments_s for f in plan.entries_for("decode/0"))


@given(plans())
def test_a_plan_is_the_same_whatever_the_order_of_its_entries(plan):
    again = ReplicaFaults(reversed(plan.entries_for("decode/0")))
    edges_s = {edge_s for fault in plan.faults for edge_s in fault.window}
    for now_s in {0.0, *edges_s}:
        assert state(again, now_s) == state(plan.for_target("decode/0"), now_s)


# --- clocks ------------------------------------------------------------------------------------


def test_plan_seconds_count_from_the_epoch_on_any_clock():
    clock = PlanClock.since(1000.0, unix_s=1030.0, now_s=7.0)
    assert clock.plan_s(7.0) == 30.0
    assert clock.plan_s(8.5) == 31.5
    assert clock.clock_s(31.5) == 8.5
    assert PlanClock().plan_s(3.0) == 3.0


def test_a_fault_crosses_a_process_boundary_as_json():
    fault = Fault(at_s=1.0, target="decode/0", kind="slow", duration_s=2.0, factor=3.0)
    assert msgspec.json.decode(msgspec.json.encode(fault), type=Fault) == fault

"""A simulated device takes the requested time, independent of its own arithmetic."""

import math

import pytest

from replicas.faults import Fault, PlanClock, ReplicaFaults
from replicas.generators.simulated import device
from replicas.generators.simulated.device import DeviceTimeline, SimulatedMesh, WallClock, busy
from tests.replicas.generators.simulated.clocks import FakeClock


def test_work_is_part_of_the_time_and_not_on_top():
    clock = FakeClock()
    with busy(clock, 0.5):
        clock.time_s += 0.2
    assert clock.spent == [pytest.approx(0.3)]
    assert clock.now_s() == pytest.approx(0.5)


def test_work_that_took_longer_leaves_nothing_to_spend():
    clock = FakeClock()
    with busy(clock, 0.5):
        clock.time_s += 0.7
    assert clock.now_s() == pytest.approx(0.7)


def test_a_slow_device_takes_a_factor_longer_while_it_is_slow():
    clock = FakeClock(now_s=1000.0)
    slow = Fault(at_s=10.0, target="both/0", kind="slow", duration_s=5.0, factor=3.0)
    spent = []
    for now_s in (1009.9, 1010.0, 1014.9, 1015.0):
        timeline = DeviceTimeline(ReplicaFaults([slow]), PlanClock(-1000.0))
        mesh = SimulatedMesh(None, clock, timeline)
        clock.time_s = now_s
        with mesh.busy(1.0):
            pass
        spent.append(clock.time_s - now_s)
    assert spent == [pytest.approx(x) for x in (1.0, 3.0, 3.0, 1.0)]


def test_one_thing_after_another_beside_the_host():
    clock = FakeClock(now_s=5.0)
    mesh = SimulatedMesh(None, clock)
    first, second = mesh.submit(1.0), mesh.submit(2.0)
    assert (first, second, clock.spent) == (6.0, 8.0, [])
    clock.time_s = 5.5  # what the host does meanwhile
    mesh.wait(first)
    assert clock.time_s == 6.0
    with mesh.busy(0.25):
        assert clock.time_s == 6.0, "the host goes on, the device is busy"
    assert clock.time_s == 8.25
    clock.time_s = 9.0
    mesh.wait(second)
    assert clock.time_s == 9.0, "long over"
    assert mesh.submit(1.0) == 10.0, "it has been idle"
    assert (mesh.timeline.busy_s, mesh.timeline.free_s) == (4.25, 10.0)


def test_what_is_wrong_with_a_device_counts_when_a_step_starts_and_not_when_it_is_given():
    entries = [
        Fault(at_s=1.0, target="both/0", kind="slow", duration_s=0.5, factor=4.0),
        Fault(at_s=7.0, target="both/0", kind="hang", duration_s=3.0),
    ]
    timeline = DeviceTimeline(ReplicaFaults(entries))
    assert [timeline.submit(0.0, 1.0) for _ in range(4)] == [1.0, 5.0, 6.0, 7.0]
    assert timeline.submit(0.0, 1.0) == 10.0, "it hangs"
    assert timeline.submit(0.0, 1.0) == 11.0


def test_steps_that_are_taken_back_have_not_been():
    timeline = DeviceTimeline()
    timeline.submit(1.0, 2.0)
    before = timeline.free_s, timeline.busy_s
    timeline.submit(1.0, 2.0)
    timeline.rewind(*before)
    assert timeline.submit(1.0, 0.5) == 3.5
    assert timeline.busy_s == 2.5


def test_jitter_is_lognormal_and_the_same_for_the_same_seed():
    def logs(seed):
        clock = FakeClock()
        mesh = SimulatedMesh(None, clock, DeviceTimeline(jitter=0.02, seed=seed))
        for _ in range(2000):
            with mesh.busy(1.0):
                pass
        return [math.log(seconds) for seconds in clock.spent]

    found = logs("a")
    assert found == logs("a") != logs("b")
    assert sum(found) / 2000 == pytest.approx(0.0, abs=0.002)
    assert math.sqrt(sum(x * x for x in found) / 2000) == pytest.approx(0.02, rel=0.1)


def test_the_wall_clock_sleeps_and_then_looks(monkeypatch):
    now, slept, looks = [100.0], [], []

    class Time:
        @staticmethod
        def monotonic():
            looks.append(now[0])
            now[0] += 1e-5
            return now[0]

        @staticmethod
        def sleep(seconds):
            slept.append(seconds)
            now[0] += seconds

    monkeypatch.setattr(device, "time", Time)
    clock = WallClock()
    started_s = now[0]
    clock.spend(0.25)
    assert now[0] - started_s == pytest.approx(0.25, abs=5e-5)
    assert slept == [pytest.approx(0.25, abs=1e-4)]
    assert len(looks) < 20  # the rest is at most some 100 microseconds of looking
    slept.clear()
    clock.spend(-0.1)
    clock.spend(0.0)
    assert slept == []

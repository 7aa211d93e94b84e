"""Calls that never return, return late or raise cost their caller one deadline, not the process."""

import threading
import time

import pytest

from kv_transfer.store import StoreCounters
from kv_transfer.stores import backoff
from kv_transfer.stores.backoff import COPY_BYTES_PER_S, BackOff, CallThread
from tests.kv_transfer.stores.shm_servers import eventually


class Counted:
    def __init__(self, timeout_s: float = 5.0) -> None:
        self.counters = StoreCounters()
        self.thread = CallThread("test", timeout_s, self.counters)


def raise_error(_: float) -> int:
    raise RuntimeError("no such luck")


def test_a_call_gets_its_deadline_and_its_result_comes_back() -> None:
    counted = Counted()
    before_s = time.monotonic()
    deadline_s = counted.thread.call(lambda end_s: end_s, 0.0)
    assert before_s + 5.0 <= deadline_s <= time.monotonic() + 5.0
    assert counted.thread.call(lambda _: threading.current_thread().name, "") == "test"
    counted.thread.close(lambda: None)
    assert counted.counters.errors == 0


def test_after_an_error_there_is_none_for_a_while() -> None:
    counted = Counted()
    calls: list[int] = []
    assert counted.thread.call(raise_error, 7) == 7
    for _ in range(100):
        counted.thread.call(lambda _: calls.append(1), None)
    assert counted.counters.errors == 1
    assert len(calls) < 100
    eventually(lambda: counted.thread.call(lambda _: True, default=False))
    counted.thread.close(lambda: None)


def test_a_call_that_hangs_is_waited_for_once_and_no_other_starts() -> None:
    counted = Counted(timeout_s=0.05)
    release = threading.Event()
    calls: list[int] = []
    assert counted.thread.call(lambda _: release.wait(30), default=False) is False
    eventually(lambda: counted.thread._back_off.is_due(time.monotonic()))
    for _ in range(1000):
        counted.thread.call(lambda _: calls.append(1), None)
    assert calls == []
    assert counted.counters.errors == 1
    release.set()
    eventually(lambda: counted.thread.call(lambda _: True, default=False))
    counted.thread.close(lambda: None)


def test_copying_comes_on_top_of_the_time_of_a_put() -> None:
    counted = Counted(timeout_s=0.05)
    # Ten seconds for copying, of which it takes so much that a call would be late.
    num_bytes = int(10 * COPY_BYTES_PER_S)
    before_s = time.monotonic()
    deadline_s = counted.thread.put(lambda end_s: time.sleep(0.1) or end_s, 0.0, num_bytes)
    assert before_s + 10.05 <= deadline_s <= time.monotonic() + 10.05
    assert counted.counters.errors == 0
    counted.thread.close(lambda: None)


def test_after_a_put_that_failed_there_are_no_puts_for_a_while_but_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backoff, "_FIRST_S", 600.0)
    counted = Counted(timeout_s=0.05)
    release = threading.Event()
    assert counted.thread.put(lambda _: release.wait(30), False, 0) is False
    release.set()
    assert counted.thread._last is not None
    counted.thread._last.result(10)
    counted.thread._timeout_s = 10.0
    assert counted.thread.call(lambda _: True, default=False)
    assert not counted.thread.put(lambda _: True, False, 0)
    assert counted.counters.errors == 1
    counted.thread.close(lambda: None)


def test_after_a_call_that_failed_there_are_no_puts_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backoff, "_FIRST_S", 600.0)
    counted = Counted()
    counted.thread.call(raise_error, 0)
    assert not counted.thread.put(lambda _: True, False, 0)
    counted.thread.close(lambda: None)


def test_close_calls_a_last_function_once_and_nothing_after_it() -> None:
    counted = Counted()
    names: list[str] = []
    counted.thread.close(lambda: names.append(threading.current_thread().name))
    counted.thread.close(lambda: names.append("again"))
    assert counted.thread.call(lambda _: names.append("late"), None) is None
    assert names == ["test"]
    counted.thread._thread.join(10)
    assert not counted.thread._thread.is_alive()


def test_close_does_not_wait_for_a_call_that_hangs() -> None:
    counted = Counted(timeout_s=0.05)
    release = threading.Event()
    counted.thread.call(lambda _: release.wait(30), default=False)
    closed: list[int] = []
    counted.thread.close(lambda: closed.append(1))
    assert closed == []
    release.set()
    counted.thread._thread.join(10)
    assert closed == [1]


def test_a_last_function_that_fails_is_no_error() -> None:
    Counted().thread.close(lambda: raise_error(0.0) and None)


def test_waits_double_up_to_a_limit_and_reset_after_a_success() -> None:
    back_off = BackOff()
    waits = []
    for _ in range(10):
        back_off.fail(100.0)
        waits.append(min(w for w in (0.05 * 2**n for n in range(12)) if back_off.is_due(100.0 + w)))
        assert not back_off.is_due(100.0)
    assert waits[:5] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8])
    assert waits[-1] <= 6.4
    assert back_off.is_due(105.0)
    back_off.succeed()
    back_off.fail(200.0)
    assert back_off.is_due(200.06)

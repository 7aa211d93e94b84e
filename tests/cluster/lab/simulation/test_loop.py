"""The virtual loop: asyncio as it is, on a clock that nobody waits for."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lab.simulation.loop import VirtualLoop


def run(main, start_s=0.0):
    return VirtualLoop(start_s).run(main)


# --- order ----------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([0.0, 0.5, 0.5, 1.0, 3.25]), max_size=12))
def test_callbacks_run_by_time_and_equal_times_in_the_order_of_asking(delays_s):
    calls = []

    async def main():
        loop = asyncio.get_running_loop()
        for i, delay_s in enumerate(delays_s):
            loop.call_later(delay_s, lambda i=i: calls.append((loop.time(), i)))
        await asyncio.sleep(10.0)

    run(main())
    assert calls == sorted((delay_s, i) for i, delay_s in enumerate(delays_s))


def test_what_is_ready_runs_before_time_goes_on_and_before_timers_of_the_same_time():
    calls = []

    async def main():
        loop = asyncio.get_running_loop()

        def first():
            calls.append("first")
            loop.call_soon(calls.append, "soon")

        loop.call_later(1.0, first)
        loop.call_later(1.0, calls.append, "second")
        await asyncio.sleep(2.0)

    run(main())
    assert calls == ["first", "soon", "second"]


def test_a_time_that_has_passed_means_now():
    async def main():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(5.0)
        past = loop.create_future()
        loop.call_at(1.0, lambda: past.set_result(loop.time()))
        return await past, loop.time()

    assert run(main()) == (5.0, 5.0)


def test_time_starts_at_the_given_value():
    async def main():
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        await asyncio.sleep(1.5)
        return before_s, loop.time()

    assert run(main(), start_s=-1.0) == (-1.0, 0.5)


def test_a_cancelled_callback_does_not_run_and_does_not_move_time():
    calls = []

    async def main():
        loop = asyncio.get_running_loop()
        soon = loop.call_soon(calls.append, "soon")
        later = loop.call_later(1.0, calls.append, "later")
        kept = loop.call_soon(calls.append, "kept")
        soon.cancel()
        later.cancel()
        assert not kept.cancelled()
        await asyncio.sleep(0.25)
        last = loop.call_later(100.0, calls.append, "never")
        last.cancel()
        await asyncio.sleep(0.25)
        return loop.time()

    assert run(main()) == 0.5
    assert calls == ["kept"]


def test_a_cancelled_timer_is_no_event():
    loop = VirtualLoop()

    async def main():
        loop.call_later(100.0, print).cancel()
        await loop.create_future()

    with pytest.raises(RuntimeError, match=r"at 0\.000000 s"):
        loop.run(main())
    assert loop.num_events == 1


def test_a_callback_may_cancel_the_next_one_of_the_same_time():
    calls = []

    async def main():
        loop = asyncio.get_running_loop()
        handles = []
        loop.call_later(1.0, lambda: [handle.cancel() for handle in handles])
        handles.append(loop.call_later(1.0, calls.append, "second"))
        await asyncio.sleep(2.0)

    run(main())
    assert calls == []


# --- ends -----------------------------------------------------------------------------------------


def test_nothing_due_is_an_error_that_says_when():
    async def main():
        await asyncio.sleep(2.0)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match=r"nothing is due any more at 2\.000000 s"):
        run(main())


def test_what_is_still_due_at_the_end_never_happens():
    calls = []

    async def main():
        asyncio.get_running_loop().call_later(5.0, calls.append, "late")
        await asyncio.sleep(1.0)
        return "done"

    assert run(main()) == "done"
    assert calls == []


def test_an_exception_of_the_main_coroutine_is_raised():
    async def main():
        await asyncio.sleep(1.0)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(main())


def test_an_exception_in_a_callback_ends_the_run_there_and_then():
    calls = []

    async def main():
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, {}.__getitem__, "gone")
        loop.call_later(1.0, calls.append, "after")
        await asyncio.sleep(5.0)

    with pytest.raises(KeyError, match="gone"):
        run(main())
    assert calls == []


def test_an_exception_of_a_task_that_nobody_awaits_ends_the_run():
    async def fail():
        await asyncio.sleep(1.0)
        raise ValueError("alone")

    async def main():
        loop = asyncio.get_running_loop()
        loop.create_task(fail())  # noqa: RUF006 - nobody keeps it, so nobody can await it
        await asyncio.sleep(5.0)

    with pytest.raises(ValueError, match="alone"):
        run(main())


def test_the_loop_is_the_running_one_only_while_it_runs():
    loop = VirtualLoop()

    async def main():
        assert asyncio.get_running_loop() is loop

    loop.run(main())
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()


def test_a_run_may_be_nested_in_another_loop():
    async def outer():
        loop = asyncio.get_running_loop()
        assert run(asyncio.sleep(3600.0, "inner")) == "inner"
        assert asyncio.get_running_loop() is loop

    asyncio.run(outer())


# --- events ---------------------------------------------------------------------------------------


def test_every_callback_counts_and_is_followed_by_the_check():
    loop = VirtualLoop()
    checked = []
    loop.after_event = lambda: checked.append(loop.num_events)

    async def main():
        for _ in range(3):
            await asyncio.sleep(1.0)

    loop.run(main())
    assert loop.num_events > 3
    assert checked == list(range(1, loop.num_events + 1))


def test_a_check_that_fails_ends_the_run():
    loop = VirtualLoop()

    def check():
        assert loop.time() < 2.0, "broken"

    loop.after_event = check
    with pytest.raises(AssertionError, match="broken"):
        loop.run(_three_sleeps())
    assert loop.time() == 2.0


async def _three_sleeps():
    for _ in range(3):
        await asyncio.sleep(1.0)


# --- asyncio on it --------------------------------------------------------------------------------


def test_a_year_passes_in_no_time():
    """It would not end if anything waited."""
    loop = VirtualLoop()
    loop.run(asyncio.sleep(365 * 86_400.0))
    assert loop.time() == 365 * 86_400.0


def test_wait_for_times_out_at_its_time_and_cancels():
    async def main():
        loop = asyncio.get_running_loop()
        cancelled_s = []

        async def forever():
            try:
                await asyncio.sleep(1e9)
            except asyncio.CancelledError:
                cancelled_s.append(loop.time())
                raise

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(forever(), 1.5)
        assert (cancelled_s, loop.time()) == ([1.5], 1.5)
        assert await asyncio.wait_for(asyncio.sleep(0.5, "in time"), 1.0) == "in time"
        assert loop.time() == 2.0

    run(main())

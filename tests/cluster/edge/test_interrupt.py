"""Ending what a task does from outside."""

import asyncio
import contextlib
import sys

import pytest

from cluster.edge.interrupt import Interrupt


class EndedError(Exception):
    pass


async def test_the_body_is_cancelled_where_it_waits_and_the_first_error_raised():
    seen = []

    async def work():
        with Interrupt() as interrupt:
            loop = asyncio.get_running_loop()
            loop.call_soon(interrupt.trigger, EndedError("first"))
            loop.call_soon(interrupt.trigger, EndedError("second"))
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

    with pytest.raises(EndedError, match="first"):
        await work()
    # Nothing is left of it: the task can wait again.
    await asyncio.wait_for(asyncio.sleep(0), 1.0)
    assert seen == ["cancelled"]


async def test_a_trigger_after_the_block_has_no_effect():
    with Interrupt() as interrupt:
        pass
    interrupt.trigger(EndedError())
    await asyncio.sleep(0)
    result = "on it goes"
    assert result == "on it goes"


async def test_an_error_of_the_block_itself_is_kept():
    interrupts = []

    async def work():
        with Interrupt() as interrupt:
            interrupts.append(interrupt)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ValueError("own") from None

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    interrupts[0].trigger(EndedError())
    with pytest.raises(ValueError, match="own"):
        await task


async def test_a_foreign_cancellation_stays_a_cancellation():
    async def work():
        with Interrupt():
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    result = task.cancelled()
    assert result


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the first Python that can tell them apart")
async def test_a_foreign_cancellation_at_the_same_moment_stays_one():
    interrupts = []

    async def work():
        with Interrupt() as interrupt:
            interrupts.append(interrupt)
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    interrupts[0].trigger(EndedError())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    result = task.cancelled()
    assert result


async def test_a_cancellation_swallowed_earlier_is_not_counted_again():
    async def work():
        asyncio.current_task().cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        with Interrupt() as interrupt:
            asyncio.get_running_loop().call_soon(interrupt.trigger, EndedError("ours"))
            await asyncio.Event().wait()

    with pytest.raises(EndedError, match="ours"):
        await asyncio.create_task(work())

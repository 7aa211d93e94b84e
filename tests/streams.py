"""What a coroutine gives to a sink, one at a time: it goes on when the next one is asked for."""

import asyncio
import contextlib


async def pulled(work, keeps_going=True):
    """Yield what `work(emit)` emits.

    Args:
        work: Makes the coroutine from its sink; it ends with this generator, however that ends.
        keeps_going: What the sink answers.
    """
    outputs = asyncio.Queue()
    asked = asyncio.Semaphore(0)
    end = object()

    async def emit(output):
        outputs.put_nowait(output)
        await asked.acquire()
        return keeps_going

    async def run():
        try:
            await work(emit)
        finally:
            outputs.put_nowait(end)

    task = asyncio.ensure_future(run())
    try:
        while (output := await outputs.get()) is not end:
            yield output
            asked.release()
        await task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task

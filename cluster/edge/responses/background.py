"""A response that is made without a connection: its client asks for it later.

Owner: a `BackgroundResponse` runs its request, and ends it on every path: completion, error,
timeout, and cancellation.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.edge.openai import BackgroundWork
    from cluster.edge.responses.answers import ResponseBuilder
    from replicas.output_processor import OutputDelta

Body = dict[str, Any]


class BackgroundResponse:
    """A running response; it starts at once.

    Args:
        builder: Builds the response.
        work: Runs its request.
        on_end: Called once with the finished response, whatever its status is; not after `abandon`.

    Attributes:
        status: "queued" or "in_progress".
        token_ids: Its output so far.
    """

    def __init__(
        self, builder: ResponseBuilder, work: BackgroundWork, on_end: Callable[[Body], None]
    ) -> None:
        self._builder = builder
        self._work = work
        self._on_end = on_end
        self.status = "queued"
        self._is_abandoned = False
        self._has_changed = asyncio.Event()
        self._has_ended = False
        self._most_shown: int | None = None
        self.token_ids: list[int] = []
        self._task = asyncio.create_task(self._run())
        # A task that is cancelled before its first step never runs a `finally` of its own.
        self._task.add_done_callback(self._end)

    def body(self) -> Body:
        """Return the response as it is now, with the items that have ended."""
        response = self._builder.response(self.status)
        response["output"] = [item for item in response["output"] if not _is_open(item)]
        return response

    def head(self) -> Body:
        """Return the response as it is now, without its output."""
        return {**self._builder.response(self.status), "output": []}

    def recording(self, begin: int = 0) -> bytes:
        """Return the recording of its output so far, from a byte on."""
        return bytes(self._builder.recording[begin : self._most_shown])

    def show_up_to(self, size: int | None) -> None:
        """Show no more of the recording than so many bytes; None shows all of it."""
        self._most_shown = size
        self._notify()

    async def wait_for_more(self, size: int) -> None:
        """Wait until `recording` has more bytes than `size`, or the response has ended here."""
        while len(self._builder.recording[: self._most_shown]) <= size and not self._has_ended:
            await self._has_changed.wait()

    async def cancel(self) -> None:
        """End the request in the backend; return when `on_end` has been called."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def abandon(self) -> None:
        """End the request in the backend, because another ingress continues it."""
        self._is_abandoned = True
        await self.cancel()

    async def _run(self) -> Body:
        try:
            _, response = self._builder.finish(await self._work.run(self._emit))
        except Exception as error:  # noqa: BLE001 - its client reads it later
            return self._builder.fail(self._work.to_serving_error(error))
        return response

    async def _emit(self, delta: OutputDelta) -> None:
        if self.status == "queued":
            self.status = "in_progress"
            self._builder.begin()
        self.token_ids += delta.token_ids
        self._builder.add(delta)
        self._notify()

    def _notify(self) -> None:
        self._has_changed.set()
        self._has_changed = asyncio.Event()

    def _end(self, task: asyncio.Task[Body]) -> None:
        self._work.release()
        self._has_ended = True
        self._notify()
        if self._is_abandoned:
            return
        self._on_end(self._builder.cancel() if task.cancelled() else task.result())


def _is_open(item: dict[str, Any]) -> bool:
    is_open: bool = item["status"] == "in_progress"  # its text comes when it is closed
    return is_open

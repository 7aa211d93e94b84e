"""The end of an ingress: its responses move to another one, and open requests run on for a time.

Owner: one ingress's event loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from cluster.errors import IngressLeavingError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cluster.edge.interrupt import Interrupt
    from cluster.edge.responses.archive import ResponseArchive

_PERIOD_S = 0.5
"""Time between two offers of responses: another ingress may have to start first."""
_RETRY_AFTER_S = 1


class Departure:
    """The end of one ingress.

    Args:
        drain_s: Seconds that open requests have to end.

    Attributes:
        open_requests: Requests that are ended when the drain time is over.
    """

    def __init__(self, drain_s: float = 0.0) -> None:
        self._drain_s = drain_s
        self._deadline_s: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_finishing = False
        self.open_requests: set[Interrupt] = set()

    def begin(self, archive: ResponseArchive) -> None:
        """Begin to leave: hand responses over, and end what is open when the drain time is over.

        Idempotent; call it in the event loop.
        """
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._drain_s
            self._task = asyncio.create_task(self._drain(archive, self._deadline_s))

    async def finish(
        self, archive: ResponseArchive, has_successor: Callable[[], Awaitable[bool]]
    ) -> None:
        """Hand over the rest, once no request is open.

        Args:
            archive: Responses of this ingress.
            has_successor: Returns whether another ingress runs or starts.
        """
        self.begin(archive)
        assert self._task is not None
        assert self._deadline_s is not None
        # An offer under way must end: the other ingress may have taken it already.
        self._is_finishing = True
        await asyncio.wait({self._task})
        # Without a successor an offer would only delay the end of the application.
        while not archive.is_empty and time.monotonic() < self._deadline_s:
            if not await has_successor() or await archive.hand_over():
                return
            await asyncio.sleep(_PERIOD_S)

    async def _drain(self, archive: ResponseArchive, deadline_s: float) -> None:
        while not self._is_finishing:
            # Also those that were made since: a request that still comes is served.
            await archive.hand_over()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self.end_requests()
                # Responses that these requests have left.
                await asyncio.sleep(0)
                await archive.hand_over()
                return
            await asyncio.sleep(min(_PERIOD_S, left_s))

    def end_requests(self) -> None:
        """End every open request with an `IngressLeavingError`."""
        for interrupt in list(self.open_requests):
            error = IngressLeavingError(
                "this ingress ends, and the request was not done within its drain time: "
                "send it again",
                retry_after_s=_RETRY_AFTER_S,
            )
            interrupt.trigger(error)

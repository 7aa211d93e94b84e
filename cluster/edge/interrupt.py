"""Interrupts a block of a task from outside, with an error of one's choice.

It saves a second task for work that may have to be interrupted; every request would have several.
Owner: the task that enters it.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class Interrupt:
    """Context manager whose block can be interrupted: the task is cancelled and raises the error.

    Any other cancellation stays a cancellation. Python 3.10 cannot distinguish the two if both come
    before the task runs again; then the error is raised.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "only a task can be cancelled"
        self._task = task
        self._error: Exception | None = None
        self._is_over = False
        # The task may have swallowed earlier cancellations without calling uncancel().
        self._num_cancelled = task.cancelling() if sys.version_info >= (3, 11) else 0

    def __enter__(self) -> Interrupt:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._is_over = True
        if self._error is None:
            return
        # uncancel() hides our cancellation from the rest of the task.
        is_ours_alone = sys.version_info < (3, 11) or self._task.uncancel() <= self._num_cancelled
        if is_ours_alone and isinstance(error, asyncio.CancelledError):
            raise self._error from None

    def trigger(self, error: Exception) -> None:
        """Interrupt the block with an error; only the first call within the block has an effect."""
        if self._error is None and not self._is_over:
            self._error = error
            self._task.cancel()

"""Ends what a task does, from outside, with an error of one's own.

Why not a task of its own for what may have to end: every request would have several, and waits on
them. Owner: the task that enters it.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class Interrupt:
    """Lets others end its body: the task is cancelled there, and the error raised instead.

    A cancellation by anybody else stays one. Python 3.10 cannot tell it from ours if both come
    before the task goes on: then the error it is.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "only a task can be cancelled"
        self._task = task
        self._error: Exception | None = None
        self._is_over = False
        # Somebody may have been cancelled before, and gone on without a word.
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
        # Whoever may come after in this task is to know nothing of it.
        is_ours_alone = sys.version_info < (3, 11) or self._task.uncancel() <= self._num_cancelled
        if is_ours_alone and isinstance(error, asyncio.CancelledError):
            raise self._error from None

    def trigger(self, error: Exception) -> None:
        """End the body with an error; the first one counts, and none does once it is over."""
        if self._error is None and not self._is_over:
            self._error = error
            self._task.cancel()

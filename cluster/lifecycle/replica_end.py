"""Lets a replica know when Ray Serve begins to end it.

Serve calls a replica's `__del__` only when its last request has ended, and kills the replica if
that takes too long. It has no call for the begin of that time (Ray 2.60,
`serve/_private/replica.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.serve._private import replica

if TYPE_CHECKING:
    from collections.abc import Callable


def call_at_end(begin: Callable[[], object]) -> None:
    """Have a function called, in Serve's event loop, when Serve begins to end this replica.

    Args:
        begin: The function. It may be called from another thread than the application's, and again
            if Serve's controller restarts.

    Raises:
        AttributeError: Serve has no function of this name any more, so the replica must not start.
    """
    end = replica.Replica.perform_graceful_shutdown

    async def begin_and_end(of_serve: replica.Replica) -> None:
        begin()
        await end(of_serve)  # type: ignore[no-untyped-call]

    replica.Replica.perform_graceful_shutdown = begin_and_end  # type: ignore[method-assign]

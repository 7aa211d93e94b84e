"""Asks an engine to take no more requests, and waits until those that it has are done."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from replicas.async_client import AsyncMPClient
from replicas.errors import EngineDeadError
from replicas.messages import Drain

if TYPE_CHECKING:
    from replicas.messages import EngineDescription, EngineSnapshot


async def drain_engine(description: EngineDescription, timeout_s: float) -> bool:
    """Drain an engine.

    Args:
        description: The engine.
        timeout_s: How long to wait for its requests.

    Returns:
        Whether it is idle now; False if the time was too short or the engine is gone.
    """
    idle = asyncio.Event()
    gone = asyncio.Event()

    def on_snapshot(_incarnation: str, snapshot: EngineSnapshot) -> None:
        if snapshot.draining and is_idle(snapshot, description.blocks_per_group):
            idle.set()

    client = AsyncMPClient(on_snapshot, lambda _incarnation, _reason: gone.set())
    waits = [asyncio.ensure_future(event.wait()) for event in (idle, gone)]
    try:
        await client.connect(description)
        client.send(description.incarnation, Drain())
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    except EngineDeadError:
        return False
    finally:
        for wait in waits:
            wait.cancel()
        await client.close()
    return idle.is_set()


def is_idle(snapshot: EngineSnapshot, blocks_per_group: int) -> bool:
    """Whether nothing runs, waits or is reserved, and no block is lent to a transfer."""
    return snapshot.num_waiting == 0 and all(
        group.num_running == 0
        and group.num_reserved == 0
        and group.num_free_blocks == blocks_per_group
        for group in snapshot.groups
    )

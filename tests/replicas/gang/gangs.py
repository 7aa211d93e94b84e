"""Gangs of real engine processes, and a hub in this one."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from kv_transfer.keys import KeyRing
from replicas.config import GangConfig
from replicas.gang.hub import GangHub
from replicas.launch import start_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replicas.config import EngineConfig
    from replicas.launch import EngineHandle


@contextlib.contextmanager
def gang(config: EngineConfig, size: int) -> Iterator[tuple[GangHub, list[EngineHandle]]]:
    """Start engines that step together, and end all of them afterwards."""
    keys = KeyRing((secrets.token_bytes(32),))
    name = secrets.token_hex(4)
    hub = GangHub(name, size, keys)
    handles: list[EngineHandle] = []

    def start(rank: int) -> EngineHandle:
        place = GangConfig(name=name, rank=rank, size=size, hub=hub.address)
        return start_engine(msgspec.structs.replace(config, keys=keys, gang=place))

    try:
        with ThreadPoolExecutor(size) as pool:
            handles += pool.map(start, range(size))
        yield hub, handles
    finally:
        hub.close()
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                os.kill(handle.description.pid, signal.SIGKILL)
            handle.stop()

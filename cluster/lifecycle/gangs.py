"""Connects a replica's engine to the other engines of its gang.

Serve starts, restarts and ends the replicas of a gang together and assigns their ranks. Rank 0 runs
the gang's hub. The other ranks read the hub's address from the key-value store of Ray's GCS. A
restarted gang has a new name, so no rank can join a gang that has ended.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from replicas.config import GangConfig
from replicas.errors import EngineStartError
from replicas.gang.hub import GangHub

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ray.serve.gang import GangContext

    from kv_transfer.keys import KeyRing

HUB_S = 300.0
"""Seconds that rank 0 has to publish the hub's address."""
_LOOK_S = 0.5
_NAMESPACE = b"ttserve"


@contextlib.contextmanager
def find_gang(
    context: GangContext | None, keys: KeyRing, host: str
) -> Iterator[tuple[GangConfig | None, GangHub | None]]:
    """Yield a replica's place in its gang, and on rank 0 the gang's hub.

    Leave the context once the engine has started, which all ranks do together, or has failed. The
    hub's address is then withdrawn, and after a failure the hub is closed.

    Args:
        context: Serve's description of the gang; None without a gang.
        keys: The deployment's secrets.
        host: Address of this host for the other ranks.

    Raises:
        EngineStartError: Rank 0 did not publish the hub's address within `HUB_S`.
    """
    if context is None:
        yield None, None
        return
    key = f"hub of gang {context.gang_id}".encode()
    hub = None
    if context.rank == 0:
        hub = GangHub(context.gang_id, context.world_size, keys, host)
        _internal_kv_put(key, hub.address.encode(), overwrite=True, namespace=_NAMESPACE)
    try:
        place = GangConfig(
            name=context.gang_id, rank=context.rank, size=context.world_size, hub=_address(key)
        )
        yield place, hub
    except BaseException:
        if hub is not None:
            hub.close()
        raise
    finally:
        if hub is not None:
            _internal_kv_del(key, namespace=_NAMESPACE)


def _address(key: bytes) -> str:
    """Wait for the hub's address and return it."""
    deadline_s = time.monotonic() + HUB_S
    while time.monotonic() < deadline_s:
        found: bytes | None = _internal_kv_get(key, namespace=_NAMESPACE)
        if found is not None:
            return found.decode()
        time.sleep(_LOOK_S)
    raise EngineStartError(f"no {key.decode()} within {HUB_S:g} s: see the log of its rank 0")

"""Where a replica's engine finds those that it steps with.

Serve starts, restarts and ends the replicas of a gang together and says who they are. The replica
of rank 0 has the gang's hub; the others read in the key-value store of Ray's GCS where that is. A
gang that starts again has another name, so that nobody can join one that has ended.
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
"""How long the replica of rank 0 may take to be there."""
_LOOK_S = 0.5
_NAMESPACE = b"ttserve"


@contextlib.contextmanager
def find_gang(
    context: GangContext | None, keys: KeyRing, host: str
) -> Iterator[tuple[GangConfig | None, GangHub | None]]:
    """A replica's place in its gang, and the gang's hub if this is where it is.

    To be left once the engine has started, which all ranks do together, or has failed to: then
    nobody looks for the hub any more. Of a start that failed no hub is left.

    Args:
        context: What Serve says of the gang; None if there is none.
        keys: The deployment's secrets.
        host: Address of this host for the other ranks.

    Raises:
        EngineStartError: The replica of rank 0 does not come.
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
    """Where the hub is, once it is somewhere."""
    deadline_s = time.monotonic() + HUB_S
    while time.monotonic() < deadline_s:
        found: bytes | None = _internal_kv_get(key, namespace=_NAMESPACE)
        if found is not None:
            return found.decode()
        time.sleep(_LOOK_S)
    raise EngineStartError(f"no {key.decode()} within {HUB_S:g} s: the log of its rank 0 says why")

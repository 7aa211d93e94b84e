"""The secret of a cluster that was given none: made once per Ray cluster and application.

It lives in the key-value store of Ray's GCS, where each replica reads it for itself: no
configuration, init args or logs ever hold it, a deployment's code version does not change with it,
and the replicas of two versions of an application, during a rolling update, understand each other.
Whoever can connect to the Ray cluster can read it, and it stays what it is as long as that cluster
lives: nothing but a `key_file` replaces it. On a cluster that others use too, give
`key_file`: then each process reads the secrets from its own host, and Ray never has them.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from cluster.lifecycle.key_file import key_ring
from kv_transfer.keys import NEW_KEY_BYTES, KeyRing

if TYPE_CHECKING:
    from cluster.config.resolve import ClusterConfig

_NAMESPACE = b"ttserve"


def deployment_keys(config: ClusterConfig, application: str) -> KeyRing:
    """The secrets of this process: those of the file if there is one, else the application's.

    Args:
        config: The cluster's configuration.
        application: Serve's name of the application.

    Raises:
        ClusterConfigError: The file cannot be used.
    """
    if config.key_file is not None:
        return key_ring(config.key_file)
    return KeyRing((application_secret(application),))


def application_secret(application: str) -> bytes:
    """The secret of an application of the connected Ray cluster; made if nobody did before.

    Args:
        application: Serve's name of it.
    """
    key = f"secret of application {application}".encode()
    # Of several that make one at the same time the first wins, and all of them read that.
    _internal_kv_put(key, secrets.token_bytes(NEW_KEY_BYTES), overwrite=False, namespace=_NAMESPACE)
    found: bytes = _internal_kv_get(key, namespace=_NAMESPACE)
    return found

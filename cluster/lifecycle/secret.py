"""The secret of a cluster without a `key_file`: created once per Ray cluster and application.

It is in the key-value store of Ray's GCS, from which each replica reads it. So it is in no
configuration, init args or logs, a deployment's code version does not depend on it, and replicas of
two versions share it during a rolling update.

Every process that can connect to the Ray cluster can read it, and it never changes while that
cluster runs. On a shared cluster, set `key_file`: each process then reads the secrets from its own
host, and Ray never has them.
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
    """Return the secrets of this process: those of `key_file` if set, else the application's.

    Args:
        config: The cluster's configuration.
        application: The application's name in Serve.

    Raises:
        ClusterConfigError: `key_file` cannot be used.
    """
    if config.key_file is not None:
        return key_ring(config.key_file)
    return KeyRing((application_secret(application),))


def application_secret(application: str) -> bytes:
    """Return the secret of an application of the connected Ray cluster; create it if missing.

    Args:
        application: The application's name in Serve.
    """
    key = f"secret of application {application}".encode()
    # If several processes create one at the same time, the first wins and all read that one.
    _internal_kv_put(key, secrets.token_bytes(NEW_KEY_BYTES), overwrite=False, namespace=_NAMESPACE)
    found: bytes = _internal_kv_get(key, namespace=_NAMESPACE)
    return found

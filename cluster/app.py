"""The application that a Ray Serve config file names: `import_path: cluster.app:build`.

It refuses every configuration that is known not to work, so that `serve status` shows the reason
seconds after `serve deploy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.config.resolve import resolve
from cluster.lifecycle.application import bind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ray.serve import Application


def build(args: Mapping[str, Any]) -> Application:
    """Build the Serve application.

    Args:
        args: The application's `args`, fields of `cluster.config.schema.ClusterArgs`.

    Returns:
        The ingress bound to one deployment per pool, each named after its first role.

    Raises:
        ClusterConfigError: The args are not valid; the message names the keys.
    """
    return bind(args, resolve(args))

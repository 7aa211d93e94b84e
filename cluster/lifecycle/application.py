"""The Serve application of a configuration: one deployment per pool, the ingress in front of them.

Serve pickles and checkpoints the bound arguments, and compares them when an application is deployed
again. Therefore they hold no secret; see `cluster.lifecycle.secret`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from cluster.lifecycle.admin import admin_deployment
from cluster.lifecycle.deployments import ingress_deployment, pool_deployment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ray.serve import Application

    from cluster.config.resolve import ClusterConfig


def bind(args: Mapping[str, Any], config: ClusterConfig) -> Application:
    """Build the application of args that have been resolved.

    Args:
        args: The application's `args`.
        config: The resolved configuration.

    Returns:
        The ingress bound to one deployment per pool, each named after its first role, and to the
        admin server if one is configured.

    Raises:
        FaultPlanError: The fault plan has entries that only the simulator can act on.
    """
    config.fault_plan.check_real()
    # Deployments get the plain mapping and resolve it: no class of ours is pickled into them.
    plain = dict(args)
    if config.fault_plan.faults:
        # Set here and not in a replica: a restarted replica must not repeat its faults.
        plain["fault_epoch_unix_s"] = time.time()
    pools = {role: pool_deployment(config, role).bind(plain, role) for role in config.pools}
    if config.admin is not None:
        return ingress_deployment(config).bind(
            plain, admin_deployment().bind(plain, **pools), **pools
        )
    return ingress_deployment(config).bind(plain, **pools)

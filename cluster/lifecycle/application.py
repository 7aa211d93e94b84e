"""The Serve application of a configuration: one deployment per pool, the ingress in front of them.

What is bound here Serve pickles and checkpoints, and compares when an application is deployed
again: so it holds no secret, see `cluster.lifecycle.secret`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from cluster.lifecycle.deployments import ingress_deployment, pool_deployment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ray.serve import Application

    from cluster.config.resolve import ClusterConfig


def bind(args: Mapping[str, Any], config: ClusterConfig) -> Application:
    """Build the application of args that have been resolved.

    Args:
        args: The application's `args`.
        config: What they come to.

    Returns:
        The ingress bound to one deployment per pool, each named after its first role.

    Raises:
        FaultPlanError: The fault plan has entries that only the simulator can act on.
    """
    config.fault_plan.check_real()
    # Deployments get the plain mapping and resolve it: no class of ours is pickled into them.
    plain = dict(args)
    if config.fault_plan.faults:
        # Here and not in a replica: one that is started again must not live its faults again.
        plain["fault_epoch_unix_s"] = time.time()
    pools = {role: pool_deployment(config, role).bind(plain, role) for role in config.pools}
    return ingress_deployment(config).bind(plain, **pools)

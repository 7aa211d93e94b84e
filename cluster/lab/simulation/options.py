"""What a run of the simulator is told: its pools, and all that is not cluster or workload."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cluster.config.schema import RouterConfig
from cluster.lab.simulation.network import NetworkConfig
from kv_transfer.config import TransferConfig
from replicas.faults import FaultPlan
from replicas.launch import step_timeout_s

if TYPE_CHECKING:
    from replicas.config import EngineConfig, Role
    from replicas.generators.simulated.timing import StepTiming
    from replicas.virtual_engine import ModelFacts


class PoolSpec(NamedTuple):
    """Equal replicas of one role.

    Attributes:
        timing: What their steps cost.
        facts: What the modelled device and the served model are.
        transfer: Deadlines and sizes of its KV transfers.
        drain_timeout_s: How long requests may go on in a replica that is to be replaced.
    """

    role: Role
    replicas: int
    engine: EngineConfig
    timing: StepTiming
    facts: ModelFacts
    transfer: TransferConfig = TransferConfig()
    drain_timeout_s: float = 600.0

    @property
    def step_timeout_s(self) -> float:
        """How long a step may take before its parent ends a replica."""
        return step_timeout_s(self.engine, self.timing.warm_up_s())


class SimulationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is told besides its cluster and its workload.

    Attributes:
        ingresses: How many there are; request i goes to number i modulo this.
        faults: What goes wrong, in virtual seconds.
        restart_s: From the death of a replica to the start of its successor's warm-up.
        models_kv: Whether KV is written, moved and read, so that every token proves it.
        run_ahead: Whether stretches of plain decode steps are passed over at once; the results are
            the same, but for how many tokens an aborted request had seen. Never with faults or
            jitter.
        checks: Whether everything is checked: the cores after every event, what is left over at
            the end, and what every request came to. See `cluster.lab.simulation.invariants`.
        deadline_s: With checks: a request that lasts longer than this hangs.
        keeps_events: Whether the result has an event log.
        aborts: For requests (by number) whose client leaves: after how many seconds.
    """

    seed: int = 0
    router: RouterConfig = RouterConfig()
    ingresses: int = 1
    network: NetworkConfig = NetworkConfig()
    faults: FaultPlan = FaultPlan()
    restart_s: float = 3.0
    models_kv: bool = False
    run_ahead: bool = True
    checks: bool = False
    deadline_s: float = 600.0
    keeps_events: bool = False
    aborts: dict[int, float] = {}

"""The options of a run of the simulator: its pools, and settings besides cluster and workload."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cluster.config.schema import RouterConfig
from cluster.lab.simulation.network import NetworkConfig
from kv_transfer.config import TransferConfig
from replicas.faults import FaultPlan
from replicas.launch import step_timeout_s
from replicas.messages import PauseMode
from replicas.simulation.virtual_engine import Chances

if TYPE_CHECKING:
    from replicas.config import EngineConfig, Role
    from replicas.generators.simulated.timing import StepTiming
    from replicas.simulation.virtual_engine import ModelFacts


class PoolSpec(NamedTuple):
    """Equal replicas of one role.

    Attributes:
        timing: Durations of their steps.
        facts: Properties of the modelled device and the served model.
        transfer: Deadlines and sizes of its KV transfers.
        drain_timeout_s: How long the requests of a draining replica may take.
        chances: Probabilities of right drafts, of grammars that are late or fail, of failed rows.
    """

    role: Role
    replicas: int
    engine: EngineConfig
    timing: StepTiming
    facts: ModelFacts
    transfer: TransferConfig = TransferConfig()
    drain_timeout_s: float = 600.0
    chances: Chances = Chances()

    @property
    def step_timeout_s(self) -> float:
        """Seconds of a step after which a replica's parent ends it."""
        engine, facts = self.engine, self.facts
        if engine.enable_chunked_prefill is None:
            engine = msgspec.structs.replace(
                engine, enable_chunked_prefill=facts.supports_chunked_prefill
            )
        budget = engine.token_budget(engine.max_model_len or facts.max_position_embeddings)
        return step_timeout_s(engine, self.timing.warm_up_s(), budget)


class RequestVariant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request asks for besides its tokens.

    Attributes:
        num_choices: Answers to generate.
        grammar: Number of the grammar that they follow; None is any text.
        stop_at: Tokens of one choice after which a stop string ends it; None is never.
        stopped_choice: That choice.
        stop_token_ids: Tokens that end a choice.
        priority: Lower ones run first where pools schedule by priority.
    """

    num_choices: int = 1
    grammar: int | None = None
    stop_at: int | None = None
    stopped_choice: int = 0
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0


PLAIN = RequestVariant()
"""A request for one answer of any text."""


class PlannedPause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pause of one engine, which an operator begins and ends through ingresses.

    Attributes:
        at_s: When it begins.
        target: Pool and rank of the replica, as in a fault plan.
        mode: What running requests do, see `replicas.engine.pause`.
        duration_s: After this the operator resumes the engine, again and again until it is.
    """

    at_s: float
    target: str
    mode: PauseMode
    duration_s: float


class SimulationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a run besides its cluster and its workload.

    Attributes:
        ingresses: Number of ingresses; request i goes to number i modulo this.
        faults: The fault plan, in virtual seconds.
        restart_s: From the death of a replica to the start of its successor's warm-up.
        models_kv: Whether KV is written, moved and read, so that wrong KV gives wrong tokens.
        run_ahead: Whether several plain decode steps are simulated as one event. Results are the
            same, except for the tokens that an aborted request had received. Off with faults or
            jitter.
        checks: Whether to check the cores after every event, and at the end the resources and every
            request's outcome. See `cluster.lab.simulation.invariants`.
        deadline_s: With checks, a request that lasts longer than this fails the run.
        keeps_events: Whether the result has an event log.
        aborts: Seconds after which clients leave, by number of the request.
        variants: By number of the request; those that are left out are `PLAIN`.
        pauses: Pauses of engines.
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
    variants: dict[int, RequestVariant] = {}
    pauses: tuple[PlannedPause, ...] = ()

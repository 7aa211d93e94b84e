"""A request as admission control sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.routing.demand import Demand
    from cluster.routing.placement import Placement


@dataclass(slots=True, eq=False)
class AdmissionEntry:
    """A request from its arrival to its end. Owner: the `Admission` that made it; all else read it.

    Attributes:
        arrived_s: Time of arrival.
        ttft_s: Objective for its time to first token; infinite without one.
        tpot_s: Objective for its time per output token; infinite without one.
        key: Order among its tenant's requests: priority, deadline, arrival.
        latest_s: Time at which it has waited too long.
        predicted_s: Predicted time to first token, without the margin.
        passed_s: Time of admission; None while it is queued.
        cost_s: Slot-seconds that its tenant was charged for it.
        engine: The engine that was asked to compute its prompt, if any.
        is_spilled: Whether it would be late on the prefill engines, so that a decode engine is to
            compute its prompt.
        helper: DP group of that decode engine, once the request is admitted.
        first_s: Time of its first token.
        load: Number of admitted requests when its first token came.
    """

    demand: Demand
    arrived_s: float
    ttft_s: float
    tpot_s: float
    key: tuple[float, ...]
    latest_s: float = math.inf
    predicted_s: float = 0.0
    passed_s: float | None = None
    cost_s: float = 0.0
    engine: str | None = None
    is_spilled: bool = False
    helper: Placement | None = None
    first_s: float | None = None
    load: float = 0.0

    @property
    def tenant(self) -> str:
        """The tenant whose account it runs on."""
        return self.demand.tenant

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens."""
        return self.demand.num_prompt_tokens

"""A request at the door, as those see it who decide about it. A value with one owner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.routing.demand import Demand
    from cluster.routing.placement import Placement


@dataclass(slots=True, eq=False)
class AdmissionEntry:
    """A request from its arrival to its end. Owner: the admission that made it; all else read.

    Attributes:
        arrived_s: When it came.
        ttft_s: What its first token may take; infinite without an objective.
        tpot_s: What each further token may take, likewise.
        key: Its place among its tenant's: priority, deadline, arrival.
        latest_s: When it has waited too long.
        predicted_s: What its first token was predicted to take, without the margin.
        passed_s: When it was let go on; None as long as it waits.
        cost_s: Slot-seconds that its tenant was charged for it.
        engine: Who computes its prompt, once somebody does.
        is_spilled: Whether it would be late on the engines that prompts are for, and a decode
            engine is to compute its prompt.
        helper: The DP group that does, once it was let go on.
        first_s: When its first token came.
        load: How many requests were let in when its first token came.
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
        """On whose account it runs."""
        return self.demand.tenant

    @property
    def num_tokens(self) -> int:
        """Tokens of its prompt."""
        return self.demand.num_prompt_tokens

"""Costs of steps: one fit for each pool, and factors for replicas out of the ordinary. Pure.

The replicas of a pool are alike, so a pool has one fit of what steps cost (`step_time`). A
replica's pace is the ratio of its own steps' time to their cost by that fit.

An error that all replicas share is no replica's own: a fit can be wrong for all, after slow first
steps or on a busy host, also for replicas that have computed nothing since. So each pool has a
level, the median of its recent paces, which applies to every replica that is not out of the
ordinary. A pace without new steps fades towards that level: otherwise a replica that was slow once
would never get requests again.
"""

from __future__ import annotations

import math
import statistics
from operator import mul
from typing import TYPE_CHECKING

import msgspec

from cluster.routing.step_time import LONGEST, StepCosts, StepTimeModel, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from replicas.messages import StepWork

FIRST_STEPS = 64
ONE_IN = 8
"""After `FIRST_STEPS` steps of a replica, of either kind, one step in this many is fitted."""
MAX_STEPS_APART = 64
"""Costs are updated at the latest after this many fitted steps."""
KEPT = 0.95
"""Factor on a step's weight in a replica's pace with each later step."""
MIN_STEPS = 20
ORDINARY = 1.25
"""A replica has a pace of its own from `MIN_STEPS` steps on, if beyond this factor either way."""
HALF_LIFE = 256
"""Steps per replica of the pool after which a pace without new steps counts half."""
_FRESH, _FADED = 0.9, 0.5
_DECODES, _PROMPTS = 0, 1


class Pace:
    """Recent time and work of a replica's steps of one kind, with forgetting.

    Owner: nothing else keeps it. It does not depend on the fit: a later fit gets another pace from
    it.

    Attributes:
        num_steps: Number of steps that it has seen.
        last: Time of the last one, on the clock of its pool.
    """

    __slots__ = ("_took_s", "_work", "last", "num_steps")

    def __init__(self) -> None:
        self.num_steps = 0
        self.last = 0.0
        self._took_s = 0.0
        self._work: list[float] = [0.0] * len(StepCosts())

    def __repr__(self) -> str:
        return f"Pace({self.num_steps} steps, {self._took_s:.3g} s recently)"

    def see(self, work: StepWork, costs: StepCosts) -> bool:
        """Add a step; return False if it is unusable because it took no time or cost nothing."""
        parts = parts_of(work)
        usual_s = sum(map(mul, parts, costs))
        if usual_s <= 0.0 or not 0.0 < work.device_s < math.inf:
            return False
        expected_s = usual_s * (self._against(costs) or 1.0)
        self.num_steps += 1
        self._took_s = KEPT * self._took_s + min(work.device_s, LONGEST * expected_s)
        self._work = [KEPT * before + part for before, part in zip(self._work, parts, strict=True)]
        return True

    def against(self, costs: StepCosts) -> float | None:
        """Return the ratio of its steps' time to these costs; None after too few steps."""
        return self._against(costs) if self.num_steps >= MIN_STEPS else None

    def _against(self, costs: StepCosts) -> float | None:
        usual_s = sum(map(mul, self._work, costs))
        return self._took_s / usual_s if usual_s > 0.0 else None


class _ReplicaPaces:
    """A replica's paces, of decodes and of steps with prompts, and the costs that follow."""

    __slots__ = ("costs", "num_steps", "paces")

    def __init__(self) -> None:
        self.paces = (Pace(), Pace())
        # By kind: if the kinds alternate, one in N of all steps could be of one kind only.
        self.num_steps = [0, 0]
        self.costs = StepCosts()


class PoolCosts:
    """Costs of steps of one pool. Owner: its fit, and its replicas' paces.

    Attributes:
        model: Learns the usual costs of steps.
    """

    def __init__(self) -> None:
        self.model = StepTimeModel()
        self._usual = StepCosts()
        self._next_step = 1
        self._replicas: dict[str, _ReplicaPaces] = {}
        # For each kind, steps per replica so far, and the median of the paces.
        self._clocks = [0.0, 0.0]
        self._levels = [1.0, 1.0]

    def __repr__(self) -> str:
        return f"PoolCosts({self.model!r}, levels {self._levels}, {len(self._replicas)} replicas)"

    def forget(self, incarnation: str) -> None:
        """Forget a replica that is gone."""
        self._replicas.pop(incarnation, None)

    @property
    def ordinary(self) -> StepCosts:
        """Costs of the parts of steps for a replica like most others."""
        return self._times(1.0, 1.0)

    def learn(
        self, incarnation: str, steps: Iterable[StepWork], all_pools: StepTimeModel
    ) -> dict[str, StepCosts]:
        """Learn from steps that a replica reports; return the new costs of affected replicas."""
        is_looked_at = incarnation not in self._replicas
        replica = self._replicas.setdefault(incarnation, _ReplicaPaces())
        for step in steps:
            kind = _kind(step)
            pace = replica.paces[kind]
            if pace.see(step, self._usual):
                # A pace that had faded counts in full again.
                is_looked_at |= self._freshness(pace, kind) < _FRESH
                self._clocks[kind] += 1.0 / len(self._replicas)
                pace.last = self._clocks[kind]
            replica.num_steps[kind] += 1
            if replica.num_steps[kind] <= FIRST_STEPS or not replica.num_steps[kind] % ONE_IN:
                is_looked_at = True
                usual = self.model.plausible(self._as_usual(replica, step))
                self.model.learn(usual)
                all_pools.learn(usual)
        # Update all at once: with two states of the fit, equal replicas would not be equal.
        changed = self._replicas
        if not self.model.num_steps:
            self._usual = all_pools.known_costs
        elif self.model.num_steps >= self._next_step:
            self._take_over(all_pools)
        elif is_looked_at:
            changed = {incarnation: replica}
        else:
            return {}
        return {name: self._cost(each) for name, each in changed.items()}

    def _take_over(self, all_pools: StepTimeModel) -> None:
        self._usual = self.model.costs(all_pools)
        num_steps = self.model.num_steps
        self._next_step = num_steps + min(1 + num_steps // 4, MAX_STEPS_APART)
        for kind in (_DECODES, _PROMPTS):
            self._levels[kind] = self._level(kind)

    def _level(self, kind: int) -> float:
        """Return the median of the paces that have not faded; of two unlike ones the faster."""
        found = [
            (factor, self._freshness(replica.paces[kind], kind) > _FADED)
            for replica in self._replicas.values()
            if (factor := replica.paces[kind].against(self._usual)) is not None
        ]
        factors = [factor for factor, is_fresh in found if is_fresh] or [f for f, _ in found]
        if not factors:
            return 1.0
        low, high = statistics.median_low(factors), statistics.median_high(factors)
        return math.sqrt(low * high) if high <= ORDINARY * low else low

    def _freshness(self, pace: Pace, kind: int) -> float:
        return float(0.5 ** ((self._clocks[kind] - pace.last) / HALF_LIFE))

    def _own(self, replica: _ReplicaPaces, kind: int) -> float:
        """Return a replica's step time relative to the pool's; 1 unless out of the ordinary."""
        pace = replica.paces[kind]
        factor = pace.against(self._usual)
        if factor is None:
            return 1.0
        own = (factor / self._levels[kind]) ** self._freshness(pace, kind)
        return 1.0 if 1.0 / ORDINARY <= own <= ORDINARY else own

    def _as_usual(self, replica: _ReplicaPaces, work: StepWork) -> StepWork:
        """Return a step with the time that it would have taken an ordinary replica."""
        own = self._own(replica, _kind(work))
        return work if own == 1.0 else msgspec.structs.replace(work, device_s=work.device_s / own)

    def _cost(self, replica: _ReplicaPaces) -> StepCosts:
        """Return the costs of the parts of a replica's steps."""
        costs = self._times(self._own(replica, _DECODES), self._own(replica, _PROMPTS))
        if costs != replica.costs:
            replica.costs = costs
        return replica.costs

    def _times(self, decodes: float, prompts: float) -> StepCosts:
        """Return the costs of a replica whose steps take these factors of the pool's time."""
        decodes, prompts = decodes * self._levels[_DECODES], prompts * self._levels[_PROMPTS]
        usual = self._usual
        return StepCosts(*(decodes * s for s in usual[:4]), *(prompts * s for s in usual[4:]))


class LearnedCosts:
    """Costs of steps of every pool. Owner: the pools' fits, and one of all steps.

    Costs that a pool's steps have not shown are taken from the fit of all.
    """

    def __init__(self) -> None:
        self._pools: dict[str, PoolCosts] = {}
        self._all_pools = StepTimeModel()

    def __repr__(self) -> str:
        return f"LearnedCosts({self._pools})"

    def learn(
        self, pool: str, incarnation: str, steps: Sequence[StepWork]
    ) -> Mapping[str, StepCosts]:
        """Learn from a replica's new steps; return the new costs of affected replicas."""
        costs = self._pools.setdefault(pool, PoolCosts())
        return costs.learn(incarnation, steps, self._all_pools)

    def forget(self, pool: str, incarnation: str) -> None:
        """Forget a replica that is gone; its pool keeps the costs learned from it."""
        if pool in self._pools:
            self._pools[pool].forget(incarnation)

    def of_pool(self, pool: str) -> StepCosts:
        """Return the costs of the parts of a pool's steps; those of all pools if it is unknown."""
        costs = self._pools.get(pool)
        return self._all_pools.known_costs if costs is None else costs.ordinary

    @property
    def num_steps(self) -> int:
        """Number of steps that were learned."""
        return self._all_pools.num_steps

    @property
    def num_pools_that_know_prompts(self) -> int:
        """Number of pools for which `knows_prompts` is true."""
        return sum(costs.model.knows_prompts for costs in self._pools.values())

    def knows_prompts(self, pool: str) -> bool:
        """Return whether a pool's replicas have shown the cost of prompts."""
        return pool in self._pools and self._pools[pool].model.knows_prompts


def _kind(work: StepWork) -> int:
    return _PROMPTS if work.num_prompts else _DECODES

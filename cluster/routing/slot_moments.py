"""Decides when a request whose prompt is computed elsewhere wants its decode slot. Pure.

Owner: one ingress's event loop; of which prefill engine computes which prompt. The slot should be
reserved when the engine begins the step with the prompt. From then on KV can be sent as it is
computed, and no slot is held while the prompt is queued. If the slot comes later, its KV waits for
another step of the prefill engine.

Prompt times are learned from this ingress's own prompts (`Forecast`). Before the first one a slot
is wanted at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cluster.routing.backlog import Backlog
from cluster.routing.forecast import Forecast
from cluster.routing.views import Column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.routing.demand import Demand
    from cluster.routing.pools import PoolState
    from cluster.routing.slot_queue import Waiter

ROUND_TRIP_STEPS = 2
"""Decode steps of a round trip: an engine answers after one, and asks for KV after the next."""

SOON_S = 0.01
"""A request that is due within this time is due now. Behind a late engine the expected times keep
moving with the clock, and would never come."""


class SlotMoments:
    """Due times of requests whose prompts are under way.

    Args:
        pools: This ingress's view of the engines.
    """

    def __init__(self, pools: PoolState) -> None:
        self._pools = pools
        self._forecast = Forecast()
        self._backlog = Backlog(self._forecast)
        self._engines: dict[str, str] = {}
        # Inputs of the last answer of `due`, and its time of the next request.
        self._num_changes = 0
        self._looked_at = -1, 0, 0.0
        self._next_s = -math.inf

    def __repr__(self) -> str:
        return f"SlotMoments({self._backlog!r})"

    # --- events ---------------------------------------------------------------------------------

    def asked(self, demand: Demand, engine: str, now_s: float) -> None:
        """Record that this engine, and no other any more, was asked for the prompt.

        Its view counts the prompt already.
        """
        self.dropped(demand.request_id)
        self._num_changes += 1
        self._engines[demand.request_id] = engine
        self._backlog.keep(self._pools.prefill_views().engines)
        self._backlog.ask(
            engine,
            demand.request_id,
            demand.num_prompt_tokens,
            now_s,
            self._num_queued_tokens(engine),
        )

    def computed(self, request_id: str, now_s: float) -> None:
        """Record that the first token was delivered. Idempotent."""
        engine = self._engines.pop(request_id, None)
        if engine is not None:
            self._num_changes += 1
            self._backlog.done(engine, request_id, now_s)

    def dropped(self, request_id: str) -> None:
        """Record that no engine computes the prompt any more. Idempotent."""
        engine = self._engines.pop(request_id, None)
        if engine is not None:
            self._num_changes += 1
            self._backlog.forget(engine, request_id)

    def saw_slot(self, seconds: float, num_tokens: int) -> None:
        """Learn how long a slot was held for an answer of this many tokens."""
        self._forecast.saw_slot(seconds, num_tokens)

    # --- decisions ------------------------------------------------------------------------------

    def due(self, waiters: Sequence[Waiter], now_s: float) -> tuple[list[Waiter], float]:
        """Return the queued requests that are not due yet and should want a slot now.

        Args:
            waiters: All queued requests in order.
            now_s: The time.

        Returns:
            These requests, and the time at which to ask again if nothing changes before.
        """
        due: list[Waiter] = []
        next_s = math.inf
        if all(waiter.is_due for waiter in waiters):
            return due, next_s
        each_s, num_free = self._slot_s_and_free(waiters)
        looked_at = self._num_changes, len(waiters), num_free
        if looked_at == self._looked_at and now_s < self._next_s:
            return due, self._next_s  # Called with every snapshot, and few of them change anything.
        begins_s = self._begins_s(now_s)
        num_before = 0
        for waiter in waiters:
            num_before += waiter.demand.num_choices
            if waiter.is_due:
                continue
            # Assumes that slots become free at a constant rate.
            wait_s = max(num_before - num_free, 0.0) * each_s
            moment_s = begins_s.get(waiter.demand.request_id, now_s) - wait_s
            if moment_s <= now_s + SOON_S:
                due.append(waiter)
            else:
                next_s = min(next_s, moment_s)
        self._looked_at, self._next_s = looked_at, next_s
        return due, next_s

    def check_empty(self) -> None:
        """Assert that no prompt is under way."""
        assert not self._engines, f"{self._engines}"
        self._backlog.check_empty()

    def _begins_s(self, now_s: float) -> dict[str, float]:
        """Return, by request, when to ask for a slot that is free, for prompts under way."""
        views = self._pools.decode_views()
        steps_s = [views.summaries[index].step_s for index in views.engines.values()]
        round_trip_s = ROUND_TRIP_STEPS * max(steps_s, default=0.0)
        begins_s: dict[str, float] = {}
        for engine in {*self._engines.values()}:
            ours_s = self._backlog.begins_s(engine, self._num_queued_tokens(engine), now_s)
            member = self._pools.member(engine)
            step_tokens = 0 if member is None else member.description.max_num_batched_tokens
            # The prompts of one step complete together, whatever their order in it.
            early_s = step_tokens * self._forecast.token_s + round_trip_s
            begins_s |= {request_id: at_s - early_s for request_id, at_s in ours_s.items()}
        return begins_s

    def _slot_s_and_free(self, waiters: Sequence[Waiter]) -> tuple[float, float]:
        """Return the seconds between two slots that become free, and the number of free slots."""
        views = self._pools.decode_views()
        num_free = float(views.column(Column.EMPTY_SLOTS).sum())
        num_slots = num_free + float(views.column(Column.ACTIVE).sum())
        if any(waiter.is_due and not waiter.has_stream for waiter in waiters):
            num_free = 0.0  # Requests that are due would have taken any free slot.
        return self._forecast.slot_s / max(num_slots, 1.0), num_free

    def _num_queued_tokens(self, engine: str) -> int:
        views = self._pools.prefill_views()
        index = views.engines.get(engine)
        return 0 if index is None else int(views.column(Column.QUEUED_TOKENS)[index])

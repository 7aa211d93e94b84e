"""When a request should want its decode slot, if its prompt is computed elsewhere. Pure.

Owner: one ingress's event loop; of which prefill engine computes whose prompt. The slot is to be
there when the engine begins the step that has the prompt: from then on KV flows as it is computed,
and no slot is held through the queue before it. KV that is asked for later waits for another step
of the prefill engine, which is another prompt's.

What prompts take is learned from those of this ingress (`Forecast`). Before there are any, nothing
is known, and a slot is wanted at once.
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
"""A decode engine answers after one of its steps, and asks for KV after the next."""

SOON_S = 0.01
"""Who is due so soon is due: the moments behind an engine that is late move on with the time."""


class SlotMoments:
    """See the module docstring.

    Args:
        pools: What is known of the engines.
    """

    def __init__(self, pools: PoolState) -> None:
        self._pools = pools
        self._forecast = Forecast()
        self._backlog = Backlog(self._forecast)
        self._engines: dict[str, str] = {}
        # What the last answer of `due` was made of, and its second part.
        self._num_changes = 0
        self._looked_at = -1, 0, 0.0
        self._next_s = -math.inf

    def __repr__(self) -> str:
        return f"SlotMoments({self._backlog!r})"

    # --- what is learned ------------------------------------------------------------------------

    def asked(self, demand: Demand, engine: str, now_s: float) -> None:
        """An engine was asked for a prompt, and no other any more; its view counts it."""
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
        """Its first token has come. Idempotent."""
        engine = self._engines.pop(request_id, None)
        if engine is not None:
            self._num_changes += 1
            self._backlog.done(engine, request_id, now_s)

    def dropped(self, request_id: str) -> None:
        """Nobody computes its prompt any more. Idempotent."""
        engine = self._engines.pop(request_id, None)
        if engine is not None:
            self._num_changes += 1
            self._backlog.forget(engine, request_id)

    def saw_slot(self, seconds: float, num_tokens: int) -> None:
        """A slot was held for so long, for an answer of so many tokens."""
        self._forecast.saw_slot(seconds, num_tokens)

    # --- what follows from it -------------------------------------------------------------------

    def due(self, waiters: Sequence[Waiter], now_s: float) -> tuple[list[Waiter], float]:
        """Who of those who only keep their place should want a slot now.

        Args:
            waiters: Everybody who waits, in order.
            now_s: The time.

        Returns:
            These, and when that has to be asked anew though nothing has changed.
        """
        due: list[Waiter] = []
        next_s = math.inf
        if all(waiter.is_due for waiter in waiters):
            return due, next_s
        each_s, num_free = self._slot_s_and_free(waiters)
        looked_at = self._num_changes, len(waiters), num_free
        if looked_at == self._looked_at and now_s < self._next_s:
            return due, self._next_s  # It is asked with every snapshot, and few change anything.
        begins_s = self._begins_s(now_s)
        num_before = 0
        for waiter in waiters:
            num_before += waiter.demand.num_choices
            if waiter.is_due:
                continue
            # A slot becomes free every so many seconds.
            wait_s = max(num_before - num_free, 0.0) * each_s
            moment_s = begins_s.get(waiter.demand.request_id, now_s) - wait_s
            if moment_s <= now_s + SOON_S:
                due.append(waiter)
            else:
                next_s = min(next_s, moment_s)
        self._looked_at, self._next_s = looked_at, next_s
        return due, next_s

    def check_empty(self) -> None:
        """Nobody computes a prompt."""
        assert not self._engines, f"{self._engines}"
        self._backlog.check_empty()

    def _begins_s(self, now_s: float) -> dict[str, float]:
        """By request, when a slot is to be asked for that is free, if its prompt is under way."""
        views = self._pools.decode_views()
        steps_s = [views.told[index].step_s for index in views.engines.values()]
        round_trip_s = ROUND_TRIP_STEPS * max(steps_s, default=0.0)
        begins_s: dict[str, float] = {}
        for engine in {*self._engines.values()}:
            ours_s = self._backlog.begins_s(engine, self._num_queued_tokens(engine), now_s)
            member = self._pools.member(engine)
            step_tokens = 0 if member is None else member.description.max_num_batched_tokens
            # Prompts of one step come out of it together, whichever of them it begins with.
            early_s = step_tokens * self._forecast.token_s + round_trip_s
            begins_s |= {request_id: at_s - early_s for request_id, at_s in ours_s.items()}
        return begins_s

    def _slot_s_and_free(self, waiters: Sequence[Waiter]) -> tuple[float, float]:
        """Seconds from one slot that becomes free to the next, and how many are."""
        views = self._pools.decode_views()
        num_free = float(views.column(Column.EMPTY_SLOTS).sum())
        num_slots = num_free + float(views.column(Column.ACTIVE).sum())
        if any(waiter.is_due and not waiter.has_stream for waiter in waiters):
            num_free = 0.0  # Or these would have them.
        return self._forecast.slot_s / max(num_slots, 1.0), num_free

    def _num_queued_tokens(self, engine: str) -> int:
        views = self._pools.prefill_views()
        index = views.engines.get(engine)
        return 0 if index is None else int(views.column(Column.QUEUED_TOKENS)[index])

"""Admission control: which requests may start, and when. Pure.

Owner: one ingress's event loop. A new request is refused at once, or queued here until `assign`
admits it. It is refused if its predicted first token would miss its objective, so no work is wasted
on it.

Queued requests are admitted in fair order between tenants, and by deadline within a tenant. A
request is admitted when an engine has almost nothing before its prompt and a decode slot will be
free for it. So nothing waits inside an engine, where it could not be taken back, and no slot is
held while its prompt is queued.

Predictions may be wrong: the engines stay the authority, and a request may still wait there.
"""

from __future__ import annotations

import itertools
import math
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from cluster.errors import OverloadedError, SaturatedError
from cluster.routing.backlog import Backlog, level
from cluster.routing.bounds import Bounds, num_waiting_tokens, whole_seconds
from cluster.routing.entry import AdmissionEntry
from cluster.routing.forecast import Forecast
from cluster.routing.helpers import Helpers
from cluster.routing.tenants import FairLine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.config.schema import AdmissionConfig
    from cluster.routing.backlog import PromptEngine
    from cluster.routing.demand import Demand
    from cluster.routing.helpers import Helper


class Supply(NamedTuple):
    """The capacity of the pools at one moment.

    Attributes:
        prompts: Engines that compute prompts, by incarnation.
        num_slots: Decode slots of all engines that decode.
        num_empty_slots: Decode slots that are free.
        helpers: Decode engines that could compute prompts as well, by incarnation.
    """

    prompts: Mapping[str, PromptEngine]
    num_slots: int
    num_empty_slots: int
    helpers: Mapping[str, Helper] = MappingProxyType({})


class Admission:
    """The queue of one ingress for requests that have not started.

    Args:
        config: Objectives and tenants.
        max_queued_requests: Limit of queued requests.
        timeout_s: Time after which a queued request without an objective expires.

    Attributes:
        forecast: Predicts times from those of earlier requests.
        helpers: Plans prompts on decode engines.
    """

    def __init__(self, config: AdmissionConfig, max_queued_requests: int, timeout_s: float) -> None:
        self._config = config
        self._bounds = Bounds(config, max_queued_requests)
        self._timeout_s = timeout_s
        self._line: FairLine[AdmissionEntry] = FairLine(
            lambda name: self._bounds.tenant(name).weight
        )
        self._passed: dict[AdmissionEntry, None] = {}
        # Admitted requests whose slot the pools do not count yet, and those whose prompt no engine
        # has been asked for.
        self._unplaced: dict[AdmissionEntry, None] = {}
        self._unasked: dict[AdmissionEntry, None] = {}
        self._orders = itertools.count()
        self.forecast = Forecast()
        self._backlog = Backlog(self.forecast)
        self.helpers = Helpers(self.forecast)

    def __len__(self) -> int:
        return len(self._line)

    def __repr__(self) -> str:
        return f"Admission({len(self._line)} queued, {len(self._passed)} admitted)"

    @property
    def num_let_in(self) -> int:
        """Number of admitted requests that have not ended."""
        return len(self._passed)

    # --- life of a request ------------------------------------------------------------------------

    def arrive(self, demand: Demand, now_s: float, supply: Supply) -> AdmissionEntry:
        """Queue a new request, or refuse it; `assign` admits it later.

        Raises:
            SaturatedError: The queue is full, by requests or by tokens.
            OverloadedError: The request is predicted to miss its objective.
        """
        ttft_s = _objective(demand.ttft_s, self._config.ttft_s)
        priority = demand.priority + self._bounds.tenant(demand.tenant).priority
        entry = AdmissionEntry(
            demand,
            now_s,
            ttft_s,
            _objective(demand.tpot_s, self._config.tpot_s),
            (priority, now_s + ttft_s, next(self._orders)),
        )
        if self._bounds.is_too_many(entry, self._line):
            raise self.saturated(now_s, supply)
        wait_s = self._wait_s(entry, now_s, supply)
        prompt_s = self._prompt_s(entry)
        # Without a prefill engine there is nothing to predict from, or to judge a prediction by.
        entry.predicted_s = wait_s + prompt_s if supply.prompts else 0.0
        spare_s = ttft_s - prompt_s - self.forecast.margin_of(entry.ttft_s)
        if math.isinf(ttft_s):
            entry.latest_s = now_s + self._timeout_s
        elif wait_s <= spare_s:
            entry.latest_s = now_s + spare_s
        elif self._spills(entry, now_s, supply):
            entry.latest_s = now_s + ttft_s
        elif spare_s >= 0.0 or self._idle_s(now_s, supply) > 0.0:
            raise self.refusal(entry, now_s, supply)
        else:
            # The engines are idle and it will still be late. Serve it when there is nothing else to
            # do: otherwise the forecast would never learn that engines have become faster.
            entry.latest_s = now_s + ttft_s
        if entry.demand.deadline_s is not None:
            entry.latest_s = min(entry.latest_s, entry.demand.deadline_s)
        self._line.enter(entry)
        return entry

    def assign(self, now_s: float, supply: Supply) -> list[AdmissionEntry]:
        """Admit queued requests as far as there is capacity, and return them in order.

        Call it whenever the pools have changed, a first token has been delivered or a request has
        ended.
        """
        self._backlog.keep(supply.prompts)
        passed = []
        while entry := self._next():
            if not self._may_pass(entry, now_s, supply):
                break
            self._let_in(entry, now_s)
            self._unasked[entry] = None
            passed.append(entry)
        for entry, helper in self.helpers.due(self._line, supply.helpers, now_s):
            if self._num_free_slots(entry, supply) < 1:
                break
            self._let_in(entry, now_s)
            entry.helper, entry.predicted_s = helper, 0.0
            self.asked(entry, helper.incarnation, now_s)
            passed.append(entry)
        return passed

    def begin_s(self, now_s: float, supply: Supply) -> float:
        """Return the time at which `assign` must be called even if nothing has changed."""
        plan = self.helpers.plan(self._line, supply.helpers, now_s)
        return min((batch.begin_s for batch in plan), default=math.inf)

    def expire(self, now_s: float) -> list[AdmissionEntry]:
        """Remove and return the queued requests that have waited too long."""
        late = [entry for entry in self._line if entry.latest_s <= now_s]
        for entry in late:
            self.end(entry, now_s)
        return late

    def overflow(self, now_s: float) -> list[AdmissionEntry]:
        """Remove and return requests beyond the limits, each from the tenant with most waiting."""
        over = []
        while len(self._line) > 1 and self._bounds.is_over(self._line):
            over.append(self._line.last())
            self.end(over[-1], now_s)
        return over

    def saturated(self, now_s: float, supply: Supply) -> SaturatedError:
        """Return the error for a request that finds the queue full."""
        return SaturatedError(
            f"{len(self._line)} requests with {num_waiting_tokens(self._line)} prompt tokens are "
            "already queued; retry later",
            retry_after_s=whole_seconds(self._idle_s(now_s, supply)),
        )

    def clear(self, now_s: float) -> list[AdmissionEntry]:
        """Remove and return all queued requests."""
        entries = list(self._line)
        for entry in entries:
            self.end(entry, now_s)
        return entries

    def placed(self, entry: AdmissionEntry) -> None:
        """Record that the pools hold the request's slot and count it from now on."""
        self._unplaced.pop(entry, None)

    def asked(self, entry: AdmissionEntry, engine: str, now_s: float) -> None:
        """Record that this engine, and no other any more, was asked to compute the prompt."""
        if entry.first_s is None and engine != entry.engine:
            self._forget_prompt(entry)
            self._unasked.pop(entry, None)
            if entry.helper is not None and engine != entry.helper.incarnation:
                entry.helper = None
            entry.engine = engine
            self._asks_of(entry).ask(engine, entry.demand.request_id, entry.num_tokens, now_s)

    def first_token(self, entry: AdmissionEntry, now_s: float) -> None:
        """Record that the first token was delivered. Idempotent."""
        if entry.first_s is not None:
            return
        entry.first_s = now_s
        self._unasked.pop(entry, None)
        entry.load = self.num_let_in
        if entry.engine is not None:
            self._asks_of(entry).done(entry.engine, entry.demand.request_id, now_s)
            entry.engine = None
        if entry.predicted_s:
            self.forecast.saw_first_token(entry.predicted_s, now_s - entry.arrived_s)

    def end(self, entry: AdmissionEntry, now_s: float, num_tokens: int = 0) -> None:
        """Forget a request that has ended, queued or admitted, and learn from it. Idempotent.

        Args:
            entry: The request.
            now_s: The time.
            num_tokens: Output tokens of each choice; 0 if the request did not finish normally.
        """
        self._forget_prompt(entry)
        if self._line.leave(entry):
            self._line.release(entry.tenant)
        elif entry in self._passed:
            assert entry.passed_s is not None
            held_s = max(now_s - entry.passed_s, 0.0)
            self._line.charge(entry.tenant, held_s * entry.demand.num_choices - entry.cost_s)
            if num_tokens:
                self.forecast.saw_slot(held_s, num_tokens)
            if num_tokens > 1 and entry.first_s is not None:
                load = (entry.load + self.num_let_in) / 2
                self.forecast.saw_tokens(load, now_s - entry.first_s, num_tokens - 1)
            for entries in (self._passed, self._unplaced, self._unasked):
                entries.pop(entry, None)
            self._line.release(entry.tenant)

    def refusal(self, entry: AdmissionEntry, now_s: float, supply: Supply) -> OverloadedError:
        """Return the error for a request that would miss its objective, with the time to retry."""
        wait_s, prompt_s = self._wait_s(entry, now_s, supply), self._prompt_s(entry)
        spare_s = entry.ttft_s - prompt_s - self.forecast.margin_of(entry.ttft_s)
        # Requests that are queued now are admitted before one that retries.
        busy_s = max(wait_s, self._idle_s(now_s, supply) if self._line else 0.0)
        if spare_s < 0.0:
            busy_s, spare_s = max(busy_s, self._idle_s(now_s, supply)), 0.0
        return OverloadedError(
            f"the first token is expected after {wait_s + prompt_s:.2f} s, later than the "
            f"objective of {entry.ttft_s:g} s; retry later",
            retry_after_s=whole_seconds(busy_s - spare_s),
        )

    # --- predictions ------------------------------------------------------------------------------

    def _wait_s(self, entry: AdmissionEntry, now_s: float, supply: Supply) -> float:
        """Predict how long a request that arrives now waits until its prompt is started."""
        ahead_s = self._line.before(entry, lambda e: 0.0 if e.is_spilled else self._prompt_s(e))
        ahead_s += sum(map(self._prompt_s, self._unasked))
        free_s = self._backlog.free_s(supply.prompts, now_s)
        wait_s = level(free_s, ahead_s) - now_s if free_s else 0.0
        return max(wait_s, self._slot_wait_s(entry, supply))

    def _slot_wait_s(self, entry: AdmissionEntry, supply: Supply) -> float:
        if not supply.num_slots:
            return 0.0
        ahead = self._line.before(entry, lambda e: float(e.demand.num_choices))
        short = ahead + entry.demand.num_choices - self._num_free_slots(entry, supply)
        num_used = max(min(supply.num_slots, self.forecast.largest_load(entry.tpot_s)), 1.0)
        return max(short, 0.0) * self.forecast.slot_s / num_used

    def _idle_s(self, now_s: float, supply: Supply) -> float:
        """Predict the seconds until all queued and asked prompts are computed."""
        ahead_s = sum(map(self._prompt_s, (*self._line, *self._unasked)))
        free_s = self._backlog.free_s(supply.prompts, now_s)
        if not free_s:
            return ahead_s
        return max(level(free_s, ahead_s), *free_s, now_s) - now_s

    def _prompt_s(self, entry: AdmissionEntry) -> float:
        return self.forecast.prompt_s(entry.num_tokens)

    # --- decisions --------------------------------------------------------------------------------

    def _may_pass(self, entry: AdmissionEntry, now_s: float, supply: Supply) -> bool:
        """Return whether an engine is almost free for its prompt and a slot will be free."""
        if self._num_free_slots(entry, supply) < entry.demand.num_choices:
            return False
        num_free = self._backlog.num_nearly_free(supply.prompts, entry.num_tokens, now_s)
        return num_free > len(self._unasked)

    def _next(self) -> AdmissionEntry | None:
        """Return the next request for a prefill engine, or None.

        Requests that a decode engine is planned to help with come after all others.
        """
        first = self._line.first(lambda e: not e.is_spilled and self._keeps_pace(e))
        return first or self._line.first(self._keeps_pace)

    def _let_in(self, entry: AdmissionEntry, now_s: float) -> None:
        entry.cost_s = self.forecast.slot_s * entry.demand.num_choices
        self._line.serve(entry, entry.cost_s)
        self._passed[entry] = self._unplaced[entry] = None
        entry.passed_s = now_s

    def _spills(self, entry: AdmissionEntry, now_s: float, supply: Supply) -> bool:
        """Mark a request as spilled if a decode engine can compute its prompt in time.

        Returns:
            Whether it was marked.
        """
        if not supply.helpers or self._num_free_slots(entry, supply) < 1:
            return False
        entry.is_spilled = True
        plan = self.helpers.plan((*self._line, entry), supply.helpers, now_s)
        entry.is_spilled = any(entry in batch.entries for batch in plan)
        return entry.is_spilled

    def _asks_of(self, entry: AdmissionEntry) -> Backlog | Helpers:
        return self._backlog if entry.helper is None else self.helpers

    def _keeps_pace(self, entry: AdmissionEntry) -> bool:
        """Return whether a request would keep its own objective per token, if it has one.

        A request that would not keep it lets later ones pass.
        """
        return entry.demand.tpot_s is None or self._room(entry) >= entry.demand.num_choices

    def _room(self, entry: AdmissionEntry) -> float:
        """Return how many more requests may decode beside this one before it misses its objective.

        Unlimited if no other request is admitted: then a late request harms no other.
        """
        most = self.forecast.largest_load(entry.tpot_s) if self._passed else math.inf
        return most - self.num_let_in

    def _num_free_slots(self, entry: AdmissionEntry, supply: Supply) -> float:
        """Return the free slots that are not promised, at most those that keep the objective."""
        promised = sum(e.demand.num_choices for e in self._unplaced)
        return min(supply.num_empty_slots - promised, self._room(entry))

    def check_empty(self) -> None:
        """Assert that no request is left in any book."""
        assert not [*self._line, *self._passed, *self._unplaced, *self._unasked], f"{self}"
        self._backlog.check_empty()
        self.helpers.check_empty()

    def check_invariants(self) -> None:
        """Assert that each request is in exactly one place and is counted for its tenant."""
        assert all(entry.passed_s is None for entry in self._line), "a queued request was admitted"
        unasked = {e for e in self._passed if e.engine is None and e.first_s is None}
        assert unasked == {*self._unasked}, f"{unasked}"
        entries = [*self._line, *self._passed]
        for tenant in {entry.tenant for entry in entries}:
            count = sum(entry.tenant == tenant for entry in entries)
            assert self._line.num_requests(tenant) == count, f"{tenant=} {count=}"

    def _forget_prompt(self, entry: AdmissionEntry) -> None:
        """Drop the prompt from the backlog of its engine."""
        if entry.engine is not None:
            self._asks_of(entry).forget(entry.engine, entry.demand.request_id)
            entry.engine = None


def _objective(asked_s: float | None, default_s: float | None) -> float:
    if asked_s is not None:
        return asked_s
    return math.inf if default_s is None else default_s

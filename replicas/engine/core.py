"""Engine core: one step is schedule → run → update → transfer.

If the generator can run ahead, the next decode step is submitted before the current one is read, so
that the device never waits for the host. That requires steps that do not depend on the tokens
(`Scheduler.schedule_ahead`), and no transfer at stake.

Owner: the engine's core thread (or the caller's, in process). Holds the scheduler and the scheduler
side of the KV connector, uses the device only through the executor, and reads no socket. Outputs
are collected per client until `take_events`.

A step's tokens are available after `collect_step`, before `end_step` copies KV for other engines,
so that no client waits for an unrelated copy. Blocks freed in `collect_step` are reused by the next
step's schedule at the earliest; blocks that a transfer still reads are reused only after the
connector has released them.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple, cast

from replicas.engine.outputs import ClientEvents
from replicas.engine.pause import Call
from replicas.engine.probes import Probes, probe_batch
from replicas.engine.requests import RequestHandler
from replicas.engine.role_state import RoleState
from replicas.engine.start import (
    closing_if_it_fails,
    make_checks,
    make_connector,
    make_scheduler,
    start_executor,
)
from replicas.engine.step_timer import StepTimer
from replicas.engine.transfers import Transfers
from replicas.messages import (
    LAPSED,
    PAUSE_MODES,
    Abort,
    Activate,
    AddRequest,
    EngineMetrics,
    EngineSnapshot,
    KVTransfers,
    LendKV,
    LoadKV,
    Utility,
    UtilityResult,
)
from replicas.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.connector import ConnectorMeta
    from replicas.config import EngineConfig
    from replicas.engine.executor import Executor
    from replicas.engine.kv_events import PrefixFeed
    from replicas.engine.step import ScheduledBatch, StepKind, StepResult
    from replicas.messages import PauseMode, WireEvent

logger = logging.getLogger(__name__)

WORKER_METHODS = ("describe",)
"""Methods of a worker that clients may call: they take no arguments and change nothing."""

CoreMessage = AddRequest | LoadKV | LendKV | Activate | Abort | Utility


class StepUnderWay(NamedTuple):
    """A step that has begun.

    Attributes:
        batch: The batch to compute, if any.
        meta: The connector's part, if it has one.
        has_lapsed: Whether reservations have lapsed in this step.
    """

    batch: ScheduledBatch | None
    meta: ConnectorMeta | None
    has_lapsed: bool

    @property
    def brings_tokens_alone(self) -> bool:
        """Return whether the step serves no transfers and no reservation has lapsed in it."""
        return self.meta is None and not self.has_lapsed


class EngineCore:
    """Scheduler, connector and workers of one engine, driven by messages and steps.

    Args:
        config: The engine's configuration, validated here.
        executor: Access to the workers, which are set up here.
        incarnation: Random id of this start.
        unix_now_s: Wall clock, by which tickets expire.
        watchdog: Record of the core's progress; None makes one.
        max_passes: The most forward passes of one step. The passes of a step are those of as many
            steps of one pass between which nothing has to be decided. With
            `config.num_scheduler_steps` above 1, that many instead.

    Attributes:
        watchdog: As given. The caller records turns in it, the core the tokens that each computes.
        role_state: The role, and changes of it.
        probes: Unanswered probes.
        timer: Time and counters of all steps; the caller times its frames with it.
        warm_up_s: Seconds of the warm-up.
        runs_ahead: Whether the next step may be submitted before the one under way is read.

    Raises:
        ConfigError: The configuration and the model do not fit; gives the numbers.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        incarnation: str = "local",
        unix_now_s: Callable[[], float] = time.time,
        watchdog: Watchdog | None = None,
        max_passes: int = 1,
    ) -> None:
        config.validate()
        self.watchdog = Watchdog() if watchdog is None else watchdog
        self.timer = StepTimer()
        self._executor = executor
        self._events = ClientEvents()
        # The step submitted ahead, to be collected next.
        self._ahead: ScheduledBatch | None = None
        # Calls to preempt all sequences, which is not possible while a step is under way.
        self._resets: list[Call] = []
        self.probes = Probes()
        with closing_if_it_fails(executor):
            started = start_executor(executor, config)
            self.config, self.facts = started.config, started.facts
            self.max_model_len, self.warm_up_s = started.max_model_len, started.warm_up_s
            self.kv_endpoints, self.kv_layouts = started.kv_endpoints, started.kv_layouts
            connector = make_connector(started, incarnation, unix_now_s)
            self._scheduler = make_scheduler(started, connector)
        self._transfers = Transfers(connector, executor, self._scheduler, self._events)
        self.role_state = RoleState(self.config.role)
        checks = make_checks(started, connector)
        self._requests = RequestHandler(self._scheduler, checks, self._events, self.role_state)
        self._has_long_steps = self.config.num_scheduler_steps > 1
        self._max_passes = self.config.num_scheduler_steps if self._has_long_steps else max_passes
        # Steps of several passes do not follow each other unread: two passes of one step do.
        self.runs_ahead = (
            self.facts.supports_async_decode
            and self.config.steps_in_flight > 1
            and not self._has_long_steps
        )

    def __repr__(self) -> str:
        return f"EngineCore({self._scheduler!r}, {self._transfers.connector!r})"

    # --- messages ------------------------------------------------------------------------------

    def handle(self, client: bytes, message: CoreMessage, now_s: float) -> None:
        """Handle one client message; answers appear in `take_events`.

        No message of a client raises an exception here. A message about another client's request
        is ignored.
        """
        if isinstance(message, Utility) and message.method == "probe":
            self.probes.ask(client, message.call_id)
        elif isinstance(message, Utility) and message.method == "pause":
            self._pause(client, message)
        elif isinstance(message, Utility) and _preempts_all(message):
            self._resets.append(Call(client, message.call_id))
            self._stand_still()
        elif isinstance(message, Utility):
            self._events[client].append(_call_utility(self, message, now_s))
        else:
            self._requests.handle(client, message, now_s)

    def resume(self) -> None:
        """End a pause; without one nothing changes."""
        for client, call_id in self._scheduler.pause.end():
            self._events[client].append(UtilityResult(call_id, error="the pause was ended"))

    @property
    def is_paused(self) -> bool:
        """Return whether no queued request is admitted until `resume`."""
        return self._scheduler.pause.is_active

    def _pause(self, client: bytes, message: Utility) -> None:
        """Pause; the call is answered once nothing runs."""
        mode, error = message.args[0] if message.args else "abort", None
        if mode not in PAUSE_MODES:
            error = f"no mode {str(mode)[:64]!r} of a pause, only {', '.join(PAUSE_MODES)}"
        elif self.role_state.is_draining:
            error = "the engine drains, and ends its requests first"
        if error is not None:
            self._events[client].append(UtilityResult(message.call_id, error=error))
            return
        self._scheduler.pause.begin(cast("PauseMode", mode), Call(client, message.call_id))
        if mode == "abort":
            for seq in self._scheduler.abort_all():
                self._events.abort(seq)
        self._stand_still()

    def _stand_still(self) -> None:
        """Make and answer the calls that must wait for the end of the step under way.

        An engine that drains ends a pause, in which none of its requests would end.
        """
        if self.role_state.is_draining:
            self.resume()
        if self._ahead is not None:
            return
        resets, self._resets = self._resets, []
        for client, call_id in resets:
            done = self.reset_prefix_cache(preempt_running=True)
            self._events[client].append(UtilityResult(call_id, done))
        for client, call_id in self._scheduler.pause.settle(len(self._scheduler.table.rows)):
            self._events[client].append(UtilityResult(call_id, True))

    def client_gone(self, client: bytes) -> int:
        """Drop all requests of a client and return their number."""
        num_dropped = self._scheduler.abort_client(client)
        self._requests.client_gone(client)
        self.probes.client_gone(client)
        self._scheduler.pause.client_gone(client)
        self._resets = [call for call in self._resets if call.client != client]
        self._events.pop(client, None)
        return num_dropped

    def take_events(self) -> dict[bytes, list[WireEvent]]:
        """Return all events since the last call per client, in order; `ColumnReader` reads them."""
        return self._events.take()

    # --- one step ------------------------------------------------------------------------------

    def step(self, now_s: float) -> bool:
        """Schedule, run, update, transfer.

        Args:
            now_s: Monotonic clock.

        Returns:
            Whether anything ran, or a transfer ended after which something may run. After False
            only a message, `notify` or a deadline (`next_deadline_s`) can make a step run anything.
        """
        step = self.begin_step(now_s)
        self.collect_step(step)
        return self.end_step(step, now_s)

    def begin_step(self, now_s: float) -> StepUnderWay:
        """Schedule and submit a step; `collect_step` and then `end_step` must follow.

        Between the three only `take_events` and views may be called. The simulator passes the time
        of the forward pass there, and servers send the tokens of `collect_step` before `end_step`.
        """
        with self.timer.schedule:
            has_lapsed = bool(self._scheduler.loads.not_activated) and self._expire(now_s)
            if self._resets or self._scheduler.pause.is_active:
                self._stand_still()
            if self.role_state.next_role is not None:
                self.role_state.settle(self.num_live)
            if self._scheduler.preparations.is_active:
                self._prepare_grammars(now_s)
            (batch, meta), self._ahead = (self._ahead, None), None
            is_begun = batch is not None
            if not is_begun:
                batch = self._scheduler.schedule()
                meta = None if self._transfers.connector is None else self._transfers.meta(batch)
                if meta is None and batch is not None and self._max_passes > 1:
                    batch = self._extend(batch)
        # A turn of the simulator may end after any pass, so that it is judged by one.
        num_passes = batch.num_passes if batch is not None and self._has_long_steps else 1
        self.watchdog.compute(0 if batch is None else num_passes * sum(batch.num_scheduled_tokens))
        if batch is None:
            if meta is not None:
                with self.timer.transfer:
                    self._executor.collective_rpc("submit_step", None, meta, now_s)
            if self.probes.are_due:
                self._take_probe_step(now_s, is_idle=meta is None and not self.num_live)
        elif not is_begun:
            self.timer.begin(batch, self._scheduler.work)
            self._executor.collective_rpc("submit_step", batch, meta, now_s)
        return StepUnderWay(batch, meta, has_lapsed)

    def _expire(self, now_s: float) -> bool:
        """End the reservations that have lapsed; return whether there are any."""
        lapsed = self._scheduler.expire(now_s)
        for seq in lapsed:
            self._events.fail(seq, LAPSED)
        return bool(lapsed)

    def _prepare_grammars(self, now_s: float) -> None:
        """Send orders for grammars to the worker, and apply what has ended."""
        orders = self._scheduler.preparations.take_orders(now_s)
        results = self._executor.collective_rpc("prepare", orders)[0]
        for seq, error in self._scheduler.end_preparations(results, now_s):
            self._events.fail(seq, error)

    def _extend(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Return the step with as many passes as it may make before the next decision or event."""
        if self._transfers.are_at_stake:
            return batch
        return self._scheduler.extend(batch, self._max_passes, with_blocks=self._has_long_steps)

    def _take_probe_step(self, now_s: float, *, is_idle: bool) -> None:
        # A drained engine computes no more, because ranks of its gang may be gone. With reserved or
        # lent sequences the probe's row might be in use.
        if is_idle and not self.role_state.is_draining:
            kind: StepKind = "mixed" if self.config.mixed_batches else "prefill"
            batch = probe_batch(kind, len(self.facts.kv_groups))
            self.watchdog.compute(sum(batch.num_scheduled_tokens))
            self._executor.collective_rpc("submit_step", batch, None, now_s)
            self._executor.collective_rpc("collect_step")
        self.probes.answer(self._events)

    def collect_step(self, step: StepUnderWay, num_passes: int | None = None) -> None:
        """Wait for the forward passes; their tokens are among the next `take_events`.

        Args:
            step: The step that has begun and is not collected.
            num_passes: The passes that the worker does make, if they are fewer than submitted.
        """
        batch = step.batch
        if batch is None:
            return
        if num_passes is not None:
            self._scheduler.shorten(batch, num_passes)
        must_wait = self._resets or self._scheduler.pause.is_frozen
        if self.runs_ahead and not (must_wait or self._transfers.are_at_stake):
            self._submit_ahead()
        result: StepResult = self._executor.collective_rpc("collect_step")[0]
        with self.timer.update:
            self.timer.end(batch, result)
            self._events.add_step(self._scheduler.update(batch, result))
            if self.probes.are_due:
                self.probes.answer(self._events)

    def _submit_ahead(self) -> None:
        """Submit the next step before the one under way is read, if it can be planned now."""
        with self.timer.schedule:
            ahead = self._scheduler.schedule_ahead()
            if ahead is not None and self._max_passes > 1:
                ahead = self._scheduler.extend(ahead, self._max_passes)
        self._ahead = ahead
        if ahead is not None:
            self.timer.begin(ahead, self._scheduler.work)
            self._executor.collective_rpc("submit_step", ahead, None, 0.0)

    def end_step(self, step: StepUnderWay, now_s: float) -> bool:
        """Serve transfers and apply those that ended; return the same as `step`."""
        if step.meta is None:
            return step.batch is not None or step.has_lapsed
        with self.timer.transfer:
            has_news = self._transfers.end_step(step.meta, now_s)
            self._requests.add_successors(now_s)
        return step.batch is not None or has_news

    def next_deadline_s(self) -> float | None:
        """Return when a step is due even if no message arrives; None if never."""
        return self._scheduler.next_deadline_s()

    # --- views ---------------------------------------------------------------------------------

    @property
    def clients(self) -> set[bytes]:
        """Return the clients with running, queued or reserved requests."""
        return self._scheduler.table.clients

    def choices(self, client: bytes, request_id: str) -> list[int]:
        """Return the choices of a client's request that have not ended."""
        sequences = self._scheduler.table.choices(request_id)
        return [seq.choice for seq in sequences if seq.client == client]

    @property
    def num_live(self) -> int:
        """Return the number of requests that run, wait, or still have blocks lent."""
        return self._scheduler.table.num_live

    def snapshot(self, seq: int) -> EngineSnapshot:
        """Return the role, the free slots and blocks, and the load, as of now."""
        return EngineSnapshot(
            seq,
            self.role_state.is_draining or self.is_paused,
            len(self._scheduler.table.queue),
            self._scheduler.table.queue.num_tokens,
            self.timer.num_steps,
            self._scheduler.group_snapshots(),
            self.role_state.role,
            self.timer.step_s,
            self.timer.last_decode,
            self.timer.last_prompt,
            self.role_state.hands_over,
            self.role_state.epoch,
            self.is_paused,
        )

    def state(self) -> tuple[tuple[object, ...], list[list[int]]]:
        """Return what needs a new snapshot at once when it changes, and the free blocks.

        A change of free blocks alone may wait, see `EngineServer`.
        """
        rooms = self._scheduler.group_rooms()
        slots = [(r.num_empty_slots, r.num_running, r.num_reserved, r.num_waiting) for r in rooms]
        at_once = (
            self.role_state.is_draining or self._scheduler.pause.is_active,
            self.role_state.hands_over,
            self.role_state.epoch,
            len(self._scheduler.table.queue),
            self._scheduler.table.queue.num_tokens,
            slots,
            self.timer.last_prompt,
        )
        return at_once, [room.num_free_blocks for room in rooms]

    def metrics(self, now_s: float) -> EngineMetrics:
        """Return every counter, taken between two steps."""
        return EngineMetrics(
            num_waiting=len(self._scheduler.table.queue),
            num_steps=self.timer.num_steps,
            scheduled_tokens=self.timer.num_tokens,
            device_seconds=self.timer.device_s,
            host_seconds=self.timer.host_seconds(),
            groups=self._scheduler.group_counters(),
            transfer=self._transfers.stats(now_s),
            kv_recompute_tokens=self._scheduler.loads.num_recompute_tokens,
            num_stalls=self.watchdog.num_stalls,
            drafts=self._scheduler.draft_counters,
            experts=self._executor.collective_rpc("expert_counters")[0],
        )

    def kv_transfers(self, now_s: float) -> KVTransfers:
        """Return the KV transfers under way, and the blocks that they hold."""
        return self._transfers.view(now_s, has_store=self.config.kv_store is not None)

    @property
    def prefix_feed(self) -> PrefixFeed:
        """Return the events of the prefix caches."""
        return self._scheduler.prefix_feed

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget every cached block; see `Scheduler.reset_prefix_cache`."""
        return self._scheduler.reset_prefix_cache(preempt_running=preempt_running)

    def call_workers(self, method: str) -> list[object]:
        """Return the results of one of `WORKER_METHODS`, of every worker in the order of ranks."""
        return self._executor.collective_rpc(method)

    def check_invariants(self) -> None:
        """Assert the scheduler's invariants."""
        self._scheduler.check_invariants()

    def shutdown(self) -> None:
        """Close the device and the connector."""
        self._executor.collective_rpc("shutdown")


def _call_workers(core: EngineCore, message: Utility) -> UtilityResult:
    method = message.args[0] if message.args else None
    if method not in WORKER_METHODS:
        allowed = ", ".join(WORKER_METHODS)
        error = f"no method {str(method)[:64]!r} of workers may be called, only {allowed}"
        return UtilityResult(message.call_id, error=error)
    return UtilityResult(message.call_id, core.call_workers(str(method)))


def _preempts_all(message: Utility) -> bool:
    """Return whether a call resets the prefix cache and all running sequences with it."""
    return message.method == "reset_prefix_cache" and bool(message.args and message.args[0])


def _call_utility(core: EngineCore, message: Utility, now_s: float) -> UtilityResult:
    result: object = True
    match message.method:
        case "metrics":
            result = core.metrics(now_s)
        case "kv_transfers":
            result = core.kv_transfers(now_s)
        case "reset_prefix_cache":
            result = core.reset_prefix_cache()
        case "resume":
            core.resume()
        case "is_paused":
            result = core.is_paused
        case "collective_rpc":
            return _call_workers(core, message)
        case unknown:
            return UtilityResult(message.call_id, error=f"no utility method {unknown[:64]!r}")
    return UtilityResult(message.call_id, result)

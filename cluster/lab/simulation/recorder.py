"""Records a run: the results of each request, and optionally every event.

Owns the entries of active requests. An entry becomes a record when its request ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cluster.lab.simulation.records import NO_TIMES, EventRecord, ReplicaRecord, RequestRecord
from replicas.messages import (
    Abort,
    Accepted,
    Activate,
    AddRequest,
    KVLoaded,
    LendKV,
    LoadKV,
    Refused,
    TokenOutput,
)

if TYPE_CHECKING:
    from cluster.lab.simulation.host import VirtualHost
    from cluster.lab.simulation.loop import VirtualLoop
    from cluster.lab.simulation.options import RequestVariant
    from cluster.lab.workloads.request import TraceRequest
    from replicas.messages import ClientMessage, EngineEvent, EngineSnapshot


@dataclass(slots=True, eq=False)
class ActiveChoice:
    """One choice of a request under way: its tokens, when each came, and whether it has ended."""

    times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    is_over: bool = False


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request under way."""

    request_id: str
    arrival_s: float
    asked: TraceRequest
    variant: RequestVariant
    choices: list[ActiveChoice]
    cached: int = 0
    replica: str | None = None
    prefill: str | None = None
    queued_s: float = 0.0
    transfer_s: float | None = None
    num_sent: int = 0

    @property
    def times_s(self) -> list[float]:
        """When the tokens of all choices came, in order."""
        if len(self.choices) == 1:
            return self.choices[0].times_s
        return sorted(at_s for choice in self.choices for at_s in choice.times_s)


class Recorder:
    """The recorder of one run; an observer of the messages between ingresses and engines.

    Attributes:
        outputs: Token ids of every request that ended: by request id those of each choice.
        cut: Requests of which an engine has dropped a choice, in a pause.
    """

    def __init__(self, loop: VirtualLoop, *, keeps_events: bool) -> None:
        self.events: list[EventRecord] = []
        self.outputs: dict[str, list[list[int]]] = {}
        self.cut: set[str] = set()
        self._loop = loop
        self._keeps_events = keeps_events
        self._entries: dict[str, ActiveRequest] = {}
        self._order: list[str] = []
        self._records: dict[str, RequestRecord] = {}

    def stop(self) -> None:
        """Stop keeping events."""
        self._keeps_events = False

    # --- requests ------------------------------------------------------------------------------

    def arrive(self, number: int, asked: TraceRequest, variant: RequestVariant) -> ActiveRequest:
        """Record the arrival of a request."""
        choices = [ActiveChoice() for _ in range(variant.num_choices)]
        entry = ActiveRequest(f"r{number}", self._loop.time(), asked, variant, choices)
        self._entries[entry.request_id] = entry
        self._order.append(entry.request_id)
        self.event("arrive", entry.request_id, asked.num_prompt_tokens, asked.num_output_tokens)
        return entry

    def tokens(
        self,
        entry: ActiveRequest,
        output: TokenOutput,
        step_times_s: list[float] | None,
        latency_s: float,
    ) -> bool:
        """Record tokens that the client gets; of several steps, each at the time of its step.

        Returns:
            Whether the client wants more of the choice, see `Router.run`.
        """
        choice = entry.choices[output.choice]
        if choice.is_over:
            # An engine may give tokens of a choice before it learns that it was ended elsewhere.
            return False
        num_tokens = len(choice.times_s)
        # A reserved sequence that a pause ends while its activation is under way knows none of the
        # tokens of the prefill engine.
        is_cut = output.finish_reason == "abort" and not output.token_ids
        assert output.index == num_tokens or is_cut, f"{entry.request_id}: {output}"
        if step_times_s is None:
            choice.times_s.extend([self._loop.time()] * len(output.token_ids))
        else:
            choice.times_s.extend([at_s + latency_s for at_s in step_times_s])
        choice.token_ids.extend(output.token_ids)
        if not num_tokens and output.choice == 0:
            entry.cached = output.num_cached_tokens
        choice.is_over = output.finish_reason is not None
        if is_cut:
            self.cut.add(entry.request_id)
        variant = entry.variant
        stop_at = variant.stop_at if output.choice == variant.stopped_choice else None
        if choice.is_over or stop_at is None or len(choice.token_ids) < stop_at:
            return True
        choice.is_over = True
        self.event("stop", entry.request_id, output.choice)
        return False

    def end(self, entry: ActiveRequest, outcome: str) -> None:
        """Record the end of a request, which happens once."""
        del self._entries[entry.request_id]
        self.outputs[entry.request_id] = [choice.token_ids for choice in entry.choices]
        times_s = entry.times_s
        self._records[entry.request_id] = RequestRecord(
            request_id=entry.request_id,
            arrival_s=entry.arrival_s,
            num_prompt_tokens=entry.asked.num_prompt_tokens,
            num_output_tokens_asked=entry.asked.num_output_tokens,
            outcome=outcome,
            finished_s=self._loop.time(),
            num_cached_tokens=entry.cached,
            token_times_s=np.array(times_s) if times_s else NO_TIMES,
            replica=entry.replica,
            prefill_replica=entry.prefill,
            queued_s=entry.queued_s,
            transfer_s=entry.transfer_s,
            num_retries=max(entry.num_sent - 1, 0),
        )
        self.event("end", entry.request_id, outcome, len(times_s))

    def records(self) -> list[RequestRecord]:
        """Return the record of each request, in order of arrival."""
        assert not self._entries, f"not ended: {list(self._entries)}"
        return [self._records[request_id] for request_id in self._order]

    # --- messages ------------------------------------------------------------------------------

    def sent(self, host: VirtualHost, message: ClientMessage, *, is_stalled: bool) -> None:
        """Record a message to an engine; `is_stalled` is the ingress's view of the engine."""
        del is_stalled
        if isinstance(message, AddRequest):
            entry = self._entries.get(message.request.request_id)
            if entry is None:
                return
            if message.mode == "prefill":
                entry.prefill = host.name
            else:
                entry.replica = host.name
                if not any(message.token_ids):
                    entry.queued_s = self._loop.time() - entry.arrival_s
                entry.num_sent += 1
            self.event("place", entry.request_id, message.mode, host.name, message.dp_group)
        elif isinstance(message, LendKV):
            self.event("lend", message.request_id, host.name, message.epoch)
        elif isinstance(message, LoadKV):
            self.event("load", message.request_id, host.name, message.epoch)
        elif isinstance(message, Activate):
            self.event("activate", message.request_id, host.name, sum(map(len, message.token_ids)))
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self.event("abort", request_id, host.name, *message.choices)

    def arrived(self, host: VirtualHost, event: EngineEvent) -> None:
        """Record an event that arrived at an ingress."""
        if isinstance(event, KVLoaded):
            entry = self._entries.get(event.request_id)
            is_first = entry is not None and entry.transfer_s is None
            if entry is not None and is_first and event.failure is None:
                first_s = min(entry.times_s, default=self._loop.time())
                entry.transfer_s = self._loop.time() - first_s
            self.event("kv_loaded", event.request_id, host.name, event.failure or "ok")
        elif not self._keeps_events:
            return
        elif isinstance(event, Accepted):
            self.event("accept", event.request_id, host.name, event.dp_group, event.slot)
        elif isinstance(event, Refused):
            self.event("refuse", event.request_id, host.name, event.reason)
        elif isinstance(event, TokenOutput):
            self.event(
                "tokens", event.request_id, host.name, event.index, len(event.token_ids),
                event.finish_reason or "", *([event.choice] if event.choice else ()),
            )  # fmt: skip

    def snapshot_received(self, host: VirtualHost, snapshot: EngineSnapshot) -> None:
        """Do nothing: snapshots are not recorded."""

    def became_unresponsive(self, host: VirtualHost) -> None:
        """Record that an engine has sent nothing for `QUIET_S`."""
        self.event("quiet", host.name)

    def event(self, kind: str, subject: str, *detail: str | float) -> None:
        """Add an event to the log, if there is one."""
        if self._keeps_events:
            self.events.append(EventRecord(self._loop.time(), kind, subject, detail))

    # --- replicas ------------------------------------------------------------------------------

    def replica_record(self, host: VirtualHost) -> ReplicaRecord:
        """Return the record of a host."""
        description = host.engine.description
        groups = host.engine.metrics(self._loop.time()).groups
        return ReplicaRecord(
            name=host.name,
            role=host.role,
            num_slots=description.dp_groups * description.slots_per_group,
            busy_s=host.core.busy_s,
            num_steps=host.core.num_turns,
            slot_busy_s=host.slot_busy_s,
            # With KV from another replica, cache hits are counted but prompt tokens are not.
            num_prompt_tokens=sum(max(g.prompt_tokens - g.prefix_cache_hits, 0) for g in groups),
            num_output_tokens=sum(g.generation_tokens for g in groups),
            num_preemptions=sum(g.num_preemptions for g in groups),
            started_s=host.started_s,
            stopped_s=host.stopped_s,
        )

"""The records of a simulation: facts per request, replica and event. Pure.

A run creates them; they are never changed. Every time is in seconds of virtual time since the
simulation's start. Derived values are in `summary`. Records are small, because a run may have a
million requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

OK: Final = "ok"
"""The outcome of a request that got all of its tokens."""
ABORTED: Final = "aborted"
"""The outcome of a request whose client went away."""
INGRESS_LOST: Final = "ingress_lost"
"""The outcome of a request whose ingress died: its client saw the connection break."""
NO_INGRESS: Final = "no_ingress"
"""The outcome of a request that arrived while no ingress was alive."""

NO_TIMES: Final = np.empty(0, dtype=np.float64)
"""Token times of a request that got no token. Shared: never write to it."""
NO_TIMES.flags.writeable = False


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One request of the workload, from its arrival to its end.

    Attributes:
        arrival_s: Scheduled time of arrival, independent of when the router handled it.
        num_output_tokens_asked: Output tokens of each choice.
        num_cached_tokens: Prompt tokens from the prefix cache, which prefill did not compute.
        token_times_s: When the client got each output token, of all choices; shape [tokens],
            float64, ascending. Empty if there was none.
        outcome: `OK`, `ABORTED`, or the class name of the error that ended it.
        finished_s: When it ended; for `OK`, when its client got the last token.
        replica: The replica that decoded it last; None if it reached none.
        prefill_replica: The replica that prefilled it last, if that is another one.
        queued_s: Seconds from arrival until a decode engine was last asked for it while it had no
            token. With the order `predicted` this includes most of the wait for a prefill engine.
        transfer_s: Seconds from its first token until all of its KV was at the decode engine: the
            part of the transfer that prefill did not hide. None without a transfer.
        num_retries: Number of restarts after a refusal or a lost replica.
    """

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens_asked: int
    outcome: str
    finished_s: float
    num_cached_tokens: int = 0
    token_times_s: NDArray[np.float64] = NO_TIMES
    replica: str | None = None
    prefill_replica: str | None = None
    queued_s: float = 0.0
    transfer_s: float | None = None
    num_retries: int = 0


class ReplicaRecord(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One start of a replica, until its end. A restarted replica has a record for each start.

    Attributes:
        name: Pool and rank, as in a fault plan: "decode/1". Restarts keep it.
        num_slots: Decode slots over all of its DP groups; 0 for a role without.
        busy_s: Seconds that its device spent in steps.
        slot_busy_s: Slot-seconds: for each slot, the seconds in which a request held it, summed.
        num_prompt_tokens: Prompt tokens that its steps computed; cached ones are not among them.
        num_output_tokens: Output tokens that its steps produced.
        num_preemptions: Requests that lost their blocks and had to be computed again.
        stopped_s: When it stopped or died; None if it ran until the end.
    """

    name: str
    role: str
    num_slots: int
    busy_s: float = 0.0
    num_steps: int = 0
    slot_busy_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    started_s: float = 0.0
    stopped_s: float | None = None


class EventRecord(msgspec.Struct, frozen=True, gc=False):
    """One event of the log.

    Attributes:
        kind: Kind of event: "arrive", "place", "step", "kill".
        subject: Name of a request, a replica or a link.
        detail: Further values; their meaning depends on the kind.
    """

    at_s: float
    kind: str
    subject: str
    detail: tuple[str | int | float, ...] = ()


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The result of one run.

    Attributes:
        policy: The placement policy: "least_loaded", "round_robin".
        duration_s: Virtual seconds from the start to the end of the last request.
        num_replicas: Number of replicas at the end.
        replica_seconds: Machine seconds of all replicas, including their starts and drains.
        replicas: One record for each start of a replica, in order.
        events: The event log; empty if it was not kept.
        num_events: Number of events that the loop handled, kept or not.
        wall_s: Real seconds that the run took; the only number that differs between equal runs.
        speed_up: Factor by which arrivals were faster than in the workload.
        config: Further facts of the configuration, for titles and files: {"board": "n150"}.
    """

    workload: str
    policy: str
    num_replicas: int
    seed: int
    duration_s: float
    records: Sequence[RequestRecord]
    replicas: Sequence[ReplicaRecord]
    events: Sequence[EventRecord] = ()
    num_events: int = 0
    wall_s: float = 0.0
    replica_seconds: float = 0.0
    speed_up: float = 1.0
    config: Mapping[str, str | int | float | bool] = msgspec.field(default_factory=dict)

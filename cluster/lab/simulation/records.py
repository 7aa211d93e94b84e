"""What a simulation leaves behind: plain facts per request, replica and event. Pure.

Owner: the run that writes them. Nobody changes a record after that. Every time is in seconds of
virtual time since the simulation's start; nothing here is derived, `summary` does that. Records are
lean, because a run may have a million requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

OK: Final = "ok"
"""The outcome of a request that got every token it asked for."""
ABORTED: Final = "aborted"
"""The outcome of a request whose client went away."""
INGRESS_LOST: Final = "ingress_lost"
"""The outcome of a request whose ingress died: its client saw the connection break."""
NO_INGRESS: Final = "no_ingress"
"""The outcome of a request that came when no ingress was there."""

NO_TIMES: Final = np.empty(0, dtype=np.float64)
"""Token times of a request that got no token. Shared: never write to it."""
NO_TIMES.flags.writeable = False


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One request of the workload, from its arrival to its one end.

    Attributes:
        arrival_s: When the workload sent it, as scheduled: not when the router got round to it.
        num_cached_tokens: Prompt tokens that the prefix cache gave, and prefill did not compute.
        token_times_s: When the client got each output token; shape [tokens], float64, ascending.
            Empty when there was none.
        outcome: `OK`, `ABORTED`, or the class name of the error that ended it.
        finished_s: When it ended; for `OK`, when its client got the last token.
        replica: The replica that decoded it last; None when it reached none.
        prefill_replica: The replica that prefilled it last, when that is another one.
        queued_s: Seconds from arrival until a decode engine was asked last, for a stream that has
            no token yet. With the order `predicted`, waiting for a prefill engine is mostly in it.
        transfer_s: Seconds from its first token until all of its KV was where it decodes: what the
            transfer adds before the second token, and prefill did not hide. None without one.
        num_retries: How often it started again after a refusal or a lost replica.
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
    """One replica's life. A replica that died and came back has a record for each life.

    Attributes:
        name: Pool and rank, as in a fault plan: "decode/1". Restarts keep it.
        num_slots: Decode positions over all of its DP groups; 0 where a role has none.
        busy_s: Seconds that its device spent in steps.
        slot_busy_s: Slot-seconds: for each slot, the seconds in which a request held it, summed.
        num_prompt_tokens: Prompt tokens that its steps computed; cached ones are not among them.
        num_output_tokens: Output tokens that its steps produced.
        num_preemptions: Requests that lost their blocks and had to be computed again.
        stopped_s: When it stopped or died; None when it lived until the end of the run.
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
    """One thing that happened, in the order in which it did.

    Attributes:
        kind: What, in a word: "arrive", "place", "step", "kill".
        subject: To whom: a request, a replica, a link.
        detail: What else there is to say; the kind decides what each place means.
    """

    at_s: float
    kind: str
    subject: str
    detail: tuple[str | int | float, ...] = ()


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Everything that one run leaves.

    Attributes:
        policy: How requests were placed: "least_loaded", "round_robin".
        duration_s: Virtual seconds from the start to the end of the last request.
        num_replicas: At the end.
        replica_seconds: Of all replicas, from being wanted to being given back.
        replicas: One for each life of a replica, in the order of their start.
        events: What happened, if the run kept it; else empty.
        num_events: Events that the loop handled, kept or not.
        wall_s: Real seconds that the run took. The only number here that two runs do not share.
        speed_up: Arrivals came this many times faster than the workload has them.
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

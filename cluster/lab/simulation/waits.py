"""How long a request waits at most, and a watcher that holds every request to it.

`longest_waits` is the one place that says it, as a function of the configuration: whatever a
request waits for has a deadline in production, and a request that waits longer waits for nothing.
An engine that works has as long as its work takes; that is no wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cluster.lab.simulation.client import SILENCE_S
from replicas.launch import LOOK_S

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from cluster.config.schema import RouterConfig
    from cluster.lab.simulation.loop import VirtualLoop
    from kv_transfer.config import TransferConfig
    from replicas.config import EngineConfig

_TINY_S = 1e-6


class Waits(NamedTuple):
    """Seconds that a request waits at most, each time that it waits.

    Attributes:
        slot_s: For a decode slot, before an engine is asked.
        answer_s: For an engine that was asked to say yes or no.
        first_token_s: For a prefill engine that said yes.
        hand_over_s: For KV that is computed to be where it is decoded from, or given up.
        num_attempts: Engines that are tried for each step of a request, and how often it begins
            again.
    """

    slot_s: float
    answer_s: float
    first_token_s: float
    hand_over_s: float
    num_attempts: int

    @property
    def until_first_token_s(self) -> float:
        """From the arrival of a request until its client has a token, or knows that none comes."""
        n = self.num_attempts
        reserve_s = self.slot_s + n * self.answer_s
        prefill_s = n * (self.answer_s + self.first_token_s)
        return n * (reserve_s + prefill_s + self.hand_over_s)


def longest_waits(
    router: RouterConfig, engines: Iterable[EngineConfig], transfer: TransferConfig
) -> Waits:
    """What a configuration promises to every request.

    Args:
        router: How requests are placed.
        engines: Of every pool.
        transfer: Deadlines of hand-overs, the longest of any pool.
    """
    # One that falls silent is given up; one that hangs is ended by its parent, who looks now and
    # then and needs a look to see a hang begin.
    stuck_s = max(SILENCE_S, *(engine.step_timeout_s + 2 * LOOK_S for engine in engines))
    return Waits(
        slot_s=router.queue_timeout_s,
        answer_s=stuck_s,
        first_token_s=stuck_s,
        hand_over_s=stuck_s
        + transfer.rendezvous_s
        + transfer.no_progress_s
        + transfer.no_data_s
        + transfer.closing_s,
        num_attempts=router.max_attempts,
    )

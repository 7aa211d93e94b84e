"""Probes of idle engines: real steps that no request asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.engine.block_pool import NULL_BLOCK
from replicas.engine.step import NewRow, ScheduledBatch, StepKind
from replicas.messages import UtilityResult
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from replicas.engine.outputs import ClientEvents


class Probes:
    """Unanswered probes of whether an engine still computes, by one real step. Pure.

    A probe is answered when the next step ends. An idle engine runs a step for it: one token of no
    request, whose KV goes to the null block, by the same calls as any other. It uses no scheduler,
    slot or block, and is not counted; a request that arrives meanwhile waits for the time of one
    token.

    Attributes:
        are_due: Whether a probe waits for the end of a step.
    """

    def __init__(self) -> None:
        self._asked: list[tuple[bytes, int]] = []
        self.are_due = False

    def ask(self, client: bytes, call_id: int) -> None:
        """Add a client's probe."""
        self._asked.append((client, call_id))
        self.are_due = True

    def ask_silently(self) -> None:
        """Add a probe that needs no answer, because the caller watches the engine's progress."""
        self.are_due = True

    def client_gone(self, client: bytes) -> None:
        """Drop a client's probes."""
        self._asked = [asked for asked in self._asked if asked[0] != client]

    def answer(self, events: ClientEvents) -> None:
        """Answer all probes after the end of a step."""
        asked, self._asked, self.are_due = self._asked, [], False
        for client, call_id in asked:
            events[client].append(UtilityResult(call_id, result=True))


def probe_batch(kind: StepKind, num_kv_groups: int) -> ScheduledBatch:
    """Return a step of one token, for an engine whose rows are all free."""
    row = NewRow(
        slot=0,
        dp_group=0,
        token_ids=[0],
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=[[NULL_BLOCK]] * num_kv_groups,
        sampling=SamplingParams(temperature=0.0),
    )
    return ScheduledBatch(kind, [0], [1], [row], [])

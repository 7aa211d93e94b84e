"""Records of the work and duration of steps, for fitting a model of step times. Pure.

Owner: the engine core. Similar consecutive steps are recorded once: a decode step differs from its
predecessor if its batch has changed by a row. Of steps in which rows only get blocks, some are
recorded as contexts grow: the cost of examining every row is spread over as many blocks.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from replicas.engine.step import ScheduledBatch
    from replicas.messages import StepWork


ROWS_PER_BLOCK = 8
"""A step is recorded once its rows are at most this many times the blocks added since the last."""


class StepNotes:
    """The latest recorded steps of an engine.

    Attributes:
        decode: The latest recorded step without prompts, if any.
        prompt: The latest recorded step with prompts, if any.
    """

    def __init__(self) -> None:
        self.decode: StepWork | None = None
        self.prompt: StepWork | None = None
        self._latest: ScheduledBatch | None = None
        # Blocks added to rows since the last recorded step.
        self._num_blocks = 0
        # Recorded steps under way, oldest first.
        self._begun: deque[tuple[ScheduledBatch, StepWork]] = deque()

    def is_new(self, batch: ScheduledBatch) -> bool:
        """Return whether a beginning step must be recorded; if so, `begin` must follow."""
        before, self._latest = self._latest, batch
        if batch is before:
            return False
        self._num_blocks += len(batch.appended_blocks)
        is_new = (
            before is None
            or bool(batch.new)
            or self._num_blocks * ROWS_PER_BLOCK >= max(len(batch.slots), 1)
            or batch.slots != before.slots
            or not (_is_of_decodes(batch) and _is_of_decodes(before))
        )
        if is_new:
            self._num_blocks = 0
        return is_new

    def begin(self, batch: ScheduledBatch, work: StepWork) -> None:
        """Record the beginning of a step."""
        self._begun.append((batch, work))

    def end(self, batch: ScheduledBatch, device_s: float) -> None:
        """Record the end of a step, if its beginning was recorded."""
        if not self._begun or self._begun[0][0] is not batch:
            return
        _, work = self._begun.popleft()
        note = msgspec.structs.replace(work, device_s=device_s)
        if note.num_prompts:
            self.prompt = note
        else:
            self.decode = note


class StepTotals:
    """Counters of an engine's steps.

    Attributes:
        num_steps: Steps so far.
        num_tokens: Tokens that they computed.
        device_s: Seconds that the host has waited for the device.
        step_s: Seconds of that wait in the latest step that was not all prefill.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tokens = 0
        self.device_s = 0.0
        self.step_s = 0.0

    def count(self, batch: ScheduledBatch, waits_s: list[float]) -> None:
        """Count the passes of a step, of which each has a wait, as a step each."""
        self.num_steps += len(waits_s)
        self.num_tokens += len(waits_s) * batch.num_tokens
        self.device_s += sum(waits_s)
        if batch.kind != "prefill":
            self.step_s = waits_s[-1]


def _is_of_decodes(batch: ScheduledBatch) -> bool:
    return batch.kind != "prefill" and batch.num_tokens == len(batch.slots)

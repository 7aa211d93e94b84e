"""Time and work of an engine's steps: the one book of a core's time.

Owner: the engine core. Similar consecutive steps are recorded once, for fitting a model of step
times: a decode step differs from its predecessor if its batch has changed by a row. Of steps in
which rows only get blocks, some are recorded as contexts grow: the cost of examining every row is
spread over as many blocks.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from replicas.messages import HostSeconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from replicas.engine.step import ScheduledBatch, StepResult
    from replicas.messages import StepWork

ROWS_PER_BLOCK = 8
"""A step is recorded once its rows are at most this many times the blocks added since the last."""


class TimedPhase:
    """An activity of the core thread: `with phase:` adds the time of its body. Not reentrant.

    Attributes:
        seconds: Total so far.
    """

    __slots__ = ("_started_s", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started_s = 0.0

    def __enter__(self) -> None:
        self._started_s = time.perf_counter()

    def __exit__(self, *_error: object) -> None:
        self.seconds += time.perf_counter() - self._started_s


class StepTimer:
    """Time and counters of an engine's steps, and its latest recorded ones.

    No phase is open within another, so that each second counts once.

    Attributes:
        schedule: See `HostSeconds`, as for the other phases.
        update: As there.
        transfer: As there.
        frames: As there; of the engine's process.
        encode: As there; of the engine's process.
        num_steps: Passes so far.
        num_tokens: Tokens that they computed.
        device_s: Seconds that the host has waited for the device.
        step_s: Seconds of that wait in the latest step that was not all prefill.
        last_decode: The latest recorded step without prompts, if any.
        last_prompt: The latest recorded step with prompts, if any.
    """

    def __init__(self) -> None:
        self.schedule = TimedPhase()
        self.update = TimedPhase()
        self.transfer = TimedPhase()
        self.frames = TimedPhase()
        self.encode = TimedPhase()
        self.num_steps = 0
        self.num_tokens = 0
        self.device_s = 0.0
        self.step_s = 0.0
        self.last_decode: StepWork | None = None
        self.last_prompt: StepWork | None = None
        # Measured by the worker.
        self._prepare_s = self._sample_s = 0.0
        self._latest: ScheduledBatch | None = None
        # Blocks added to rows since the last recorded step.
        self._num_blocks = 0
        # Recorded steps under way, oldest first.
        self._begun: deque[tuple[ScheduledBatch, StepWork]] = deque()

    def begin(
        self, batch: ScheduledBatch, work: Callable[[ScheduledBatch], StepWork | None]
    ) -> None:
        """Note a step that begins.

        Args:
            batch: The step.
            work: Returns its work, or None if the step must not be recorded. Called for steps that
                differ from the last recorded one.
        """
        before, self._latest = self._latest, batch
        if batch is before:
            return
        self._num_blocks += len(batch.appended_blocks)
        if not (
            before is None
            or batch.new
            or self._num_blocks * ROWS_PER_BLOCK >= max(len(batch.slots), 1)
            or batch.slots != before.slots
            or not (_is_of_decodes(batch) and _is_of_decodes(before))
        ):
            return
        self._num_blocks = 0
        begun = work(batch)
        if begun is not None:
            self._begun.append((batch, begun))

    def end(self, batch: ScheduledBatch, result: StepResult) -> None:
        """Count the passes of a step as a step each, and complete its record, if it has one."""
        passes_s = result.passes_s
        self.num_steps += len(passes_s)
        self.num_tokens += len(passes_s) * sum(batch.num_scheduled_tokens)
        self.device_s += sum(passes_s)
        self._prepare_s += result.prepare_s
        self._sample_s += result.sample_s
        if batch.kind != "prefill":
            self.step_s = passes_s[-1]
        if self._begun and self._begun[0][0] is batch:
            _, work = self._begun.popleft()
            work = msgspec.structs.replace(work, device_s=passes_s[0])
            if work.num_prompts:
                self.last_prompt = work
            else:
                self.last_decode = work

    def host_seconds(self) -> HostSeconds:
        """Return the host time of all steps so far."""
        return HostSeconds(
            schedule=self.schedule.seconds,
            prepare=self._prepare_s,
            sample=self._sample_s,
            update=self.update.seconds,
            transfer=self.transfer.seconds,
            frames=self.frames.seconds,
            encode=self.encode.seconds,
        )


def _is_of_decodes(batch: ScheduledBatch) -> bool:
    return batch.kind != "prefill" and sum(batch.num_scheduled_tokens) == len(batch.slots)

"""Row processors: the parts of sampling that change a row's logits or read them.

Owner: the model runner, on the worker's thread. Each processor keeps what it needs per slot, and
rebuilds that from a `SampledRow` alone: a row that was preempted, has moved here, or continues
after a prefill elsewhere arrives as one. Temperature, min-p, top-k and top-p are no processors:
they are columns of `replicas.sampling.sampler`.

Only rows that a processor touches pass through the list, a few at a time, in the buffer from which
the sampler then draws. All others keep the plain path, so a parameter costs its own row alone.

Dimensions: B slots; S rows of logits, of which a row with k drafts has k + 1; n of them that are
changed together; V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from replicas.sampling_params import GREEDY_EPS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt
    import torch

    from replicas.sampling.row import SampledRow
    from replicas.sampling_params import SamplingParams

    IntArray = npt.NDArray[np.integer[Any]]
    Int64Array = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]


State = TypeVar("State")


@dataclass(frozen=True, slots=True, eq=False)
class LogitRows:
    """Rows of logits of one step that processors work on, in the order of the step.

    Attributes:
        slots: (S,) slot of each; the rows of one slot are neighbours.
        steps: (S,) output index of the token that each gives.
        drafts: (S,) drafts of its slot before it within the step; empty if no row has any.
    """

    slots: IntArray
    steps: IntArray
    drafts: Sequence[Sequence[int]] = ()


class DeviceAbilities(NamedTuple):
    """Parameters of a draw that a device supports.

    Attributes:
        max_top_k: Most candidates that it can choose from; None for any number.
        penalties: Whether it applies penalties in decode calls.
        max_logprobs: Most likeliest tokens whose log probabilities decode calls return beside that
            of the drawn token; None: they return none at all.
    """

    max_top_k: int | None = None
    penalties: bool = False
    max_logprobs: int | None = None


class RowProcessor(Protocol):
    """One concern of sampling, with its state of every slot."""

    def add(self, row: SampledRow) -> bool:
        """Take over a row, replacing the state of its slot; return whether it is touched."""

    def remove(self, slot: int) -> None:
        """Drop the state of a slot, if there is any."""

    def needs_host(self, sampling: SamplingParams, can: DeviceAbilities) -> bool:
        """Return whether a touched row must be drawn on the host, also in decode steps.

        Args:
            sampling: The row's parameters.
            can: What the device does in place of this processor.
        """

    def prepare(self, rows: LogitRows) -> None:
        """Begin what needs no logits; the device may still compute them.

        Args:
            rows: All rows of the step that `apply` gets next, in one or more calls.
        """

    def apply(self, logits: torch.Tensor, rows: LogitRows, indices: Int64Array) -> None:
        """Change logits in place.

        Args:
            logits: float32 (n, V), contiguous; a copy.
            rows: The rows that `prepare` got. Some, perhaps all, are other processors'.
            indices: (n,) which of them these are, in their order.
        """

    def note_drawn(self, token_ids: Sequence[int]) -> None:
        """Read the tokens (n,) drawn from the rows of the last `apply`; negative: there is none.

        A token behind a wrong draft is none of the output, see `accept`.
        """

    def accept(self, slot: int, token_ids: Sequence[int]) -> None:
        """Note the tokens that a row has got: one, or more if drafts were accepted.

        A row may have ended within them. Its state is then not used again.
        """


class SlotProcessor(ABC, Generic[State]):
    """A processor with one value of state for each slot that it touches."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    @abstractmethod
    def state_of(self, row: SampledRow) -> State | None:
        """Return the state of a row from its parameters and tokens; None if it is not touched."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: LogitRows, indices: Int64Array) -> None:
        """Change float32 (n, V) in place; see `RowProcessor`."""

    def add(self, row: SampledRow) -> bool:
        """Take over a row, replacing the state of its slot; return whether it is touched."""
        state = self.state_of(row)
        if state is None:
            self.remove(row.slot)
            return False
        self._states[row.slot] = state
        return True

    def remove(self, slot: int) -> None:
        """Drop the state of a slot, if there is any."""
        self._states.pop(slot, None)

    def needs_host(self, sampling: SamplingParams, can: DeviceAbilities) -> bool:
        """Return True: no device does this."""
        return True

    def prepare(self, rows: LogitRows) -> None:
        """Do nothing: `apply` needs no preparation."""

    def note_drawn(self, token_ids: Sequence[int]) -> None:
        """Do nothing: only accepted tokens matter."""

    def accept(self, slot: int, token_ids: Sequence[int]) -> None:
        """Do nothing: the state does not depend on tokens."""

    def _touched(self, rows: LogitRows, indices: Int64Array) -> Iterator[tuple[int, int, State]]:
        """Yield place, index and state of each of these rows that this processor touches."""
        slots = rows.slots[indices].tolist()
        for place, (index, slot) in enumerate(zip(indices.tolist(), slots, strict=True)):
            state = self._states.get(slot)
            if state is not None:
                yield place, index, state


class RowProcessors:
    """Processors in the order in which they are applied, and the slots that any of them touches.

    Args:
        processors: The processors.
        max_batch_size: B.

    Attributes:
        touched: (B,) whether a processor touches a slot.
        num_touched: How many there are.
    """

    def __init__(self, processors: Sequence[RowProcessor], max_batch_size: int) -> None:
        self._processors = tuple(processors)
        self._of_slot: dict[int, list[RowProcessor]] = {}
        # By processor: how many slots it touches.
        self._num_slots = dict.fromkeys(self._processors, 0)
        self.touched: BoolArray = np.zeros(max_batch_size, dtype=np.bool_)
        self.num_touched = 0

    def add(self, row: SampledRow) -> Sequence[RowProcessor]:
        """Take over a row, replacing the state of its slot; return what touches it."""
        self.remove((row.slot,))
        found = [processor for processor in self._processors if processor.add(row)]
        if found:
            self._of_slot[row.slot] = found
            self.touched[row.slot] = True
            self.num_touched += 1
            for processor in found:
                self._num_slots[processor] += 1
        return found

    def remove(self, slots: Iterable[int]) -> None:
        """Drop the state of slots, as far as there is any."""
        for slot in slots:
            found = self._of_slot.pop(slot, None)
            if found is None:
                continue
            self.touched[slot] = False
            self.num_touched -= 1
            for processor in found:
                self._num_slots[processor] -= 1
                processor.remove(slot)

    def prepare(self, rows: LogitRows) -> RowChanges:
        """Begin what needs no logits; return what changes the logits of these rows."""
        in_use = [processor for processor in self._processors if self._num_slots[processor]]
        for processor in in_use:
            processor.prepare(rows)
        return RowChanges(in_use, rows)

    def accept(self, slot: int, token_ids: Sequence[int]) -> None:
        """Note the tokens that a touched row has got."""
        for processor in self._of_slot[slot]:
            processor.accept(slot, token_ids)


class RowChanges:
    """Changes of a step's touched rows, as the sampler asks for them.

    Args:
        processors: The processors in use, in their order.
        rows: The rows.
    """

    def __init__(self, processors: Sequence[RowProcessor], rows: LogitRows) -> None:
        self._processors = processors
        self._rows = rows

    def apply(self, logits: torch.Tensor, indices: Int64Array) -> None:
        """Change float32 logits (n, V) of the rows of these indices (n,) in place."""
        for processor in self._processors:
            processor.apply(logits, self._rows, indices)

    def note(self, token_ids: Int64Array) -> None:
        """Hand over the tokens (n,) drawn from the rows of the last `apply`."""
        drawn = token_ids.tolist()
        for processor in self._processors:
            processor.note_drawn(drawn)


def drawn_on_host(
    sampling: SamplingParams, can: DeviceAbilities, processors: Iterable[RowProcessor]
) -> bool:
    """Return whether a decoding row is drawn on the host, where the device could draw others.

    Device and host draw different tokens for one seed, so the request alone decides.

    Args:
        sampling: The row's parameters.
        can: What the device supports.
        processors: Those that touch the row.
    """
    if any(processor.needs_host(sampling, can) for processor in processors):
        return True
    if sampling.temperature < GREEDY_EPS:
        return False
    if sampling.min_p > 0.0:
        return True
    return can.max_top_k is not None and not 0 < sampling.top_k <= can.max_top_k

"""What sampling reads of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from replicas.sampling_params import SamplingParams


class SampledRow(Protocol):
    """A row that enters the batch, or returns to it; `replicas.engine.step.NewRow` is one."""

    @property
    def slot(self) -> int:
        """Return its row of the persistent batch."""

    @property
    def token_ids(self) -> list[int]:
        """Return prompt and output so far."""

    @property
    def num_prompt_tokens(self) -> int:
        """Return how many of the tokens are the prompt."""

    @property
    def sampling(self) -> SamplingParams:
        """Return its parameters."""

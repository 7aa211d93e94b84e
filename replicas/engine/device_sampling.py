"""When tokens are drawn on the device, with which parameters, and what a decode call must reload.

Owner: the model runner holds the one `DecodeCommands`. Pure numpy; rows are slots of the
persistent batch, `replicas.engine.batch`.
Source of the commands: vllm-tt-plugin docs/DECODE_RELOAD_CONTRACT.md (decode contract 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from replicas.generators.protocol import NO_LOG_PROBS, DeviceSamplingParams
from replicas.philox import uniform
from replicas.sampling_params import GREEDY_EPS

if TYPE_CHECKING:
    import numpy.typing as npt

    from replicas.engine.batch import PersistentBatch


@dataclass(frozen=True, slots=True)
class DecodeReload:
    """The four commands of one decode call; see `TextDecoder.decode_forward`.

    Attributes:
        inputs: Tokens, positions and page table are to be taken from the call.
        page_table: The page table alone is.
        sampling_params: The sampling parameters are new.
        sampling_state: Seeds of the rows start afresh.
    """

    inputs: bool
    page_table: bool = False
    sampling_params: bool = False
    sampling_state: bool = False


HOST_SAMPLED = DecodeReload(inputs=True)
"""Of every decode call whose logits come back: the host knows the next tokens, the device not."""


class DecodeCommands:
    """Knows what the device still holds of the last decode call.

    Args:
        runs_ahead: Whether the generator may go on from what it sampled itself: it says so, and its
            decode calls are traced.
    """

    def __init__(self, *, runs_ahead: bool) -> None:
        self._runs_ahead = runs_ahead
        self._rows: npt.NDArray[np.int32] | None = None

    def forget(self) -> None:
        """Another call than a decode that sampled on the device has been made, or will be."""
        self._rows = None

    def next_call(
        self, slots: npt.NDArray[np.int32], *, has_new: bool, has_new_blocks: bool
    ) -> DecodeReload:
        """The commands of a decode call that samples on the device.

        Args:
            slots: (R,) rows that run.
            has_new: One of them is another sequence than before, or starts again.
            has_new_blocks: The block table of one of them has grown.
        """
        goes_on = not has_new and self._rows is not None and np.array_equal(self._rows, slots)
        self._rows = slots
        if not goes_on:
            return DecodeReload(inputs=True, sampling_params=True, sampling_state=True)
        if not self._runs_ahead:
            return DecodeReload(inputs=True)
        return DecodeReload(inputs=False, page_table=has_new_blocks)


def can_draw(batch: PersistentBatch, rows: npt.NDArray[np.int32], max_top_k: int | None) -> bool:
    """Whether the device can draw for each of these rows.

    Args:
        batch: The persistent batch.
        rows: (S,) rows that sample.
        max_top_k: Most candidates that it can choose from; None for any number.
    """
    if max_top_k is None:
        return True
    top_k = batch.top_k[rows]
    possible = (batch.temperature[rows] < GREEDY_EPS) | ((top_k > 0) & (top_k <= max_top_k))
    return bool(possible.all())


def prefill_params(
    batch: PersistentBatch,
    slots: npt.NDArray[np.int32],
    samples: npt.NDArray[np.bool_],
    *,
    keeps_state: bool,
) -> DeviceSamplingParams:
    """Sampling parameters of a prefill call, one entry per row of the call.

    Args:
        batch: The persistent batch.
        slots: (R,) its rows.
        samples: (R,) whether each of them samples; the others get what padding rows get.
        keeps_state: See `_params`.
    """
    return _params(
        batch, slots[samples], np.flatnonzero(samples), len(slots), keeps_state=keeps_state
    )


def decode_params(
    batch: PersistentBatch, slots: npt.NDArray[np.int32], *, keeps_state: bool
) -> DeviceSamplingParams:
    """Sampling parameters of a decode call, one entry per slot.

    Args:
        batch: The persistent batch.
        slots: (R,) rows that run; the others get what padding rows get.
        keeps_state: See `_params`.
    """
    return _params(batch, slots, slots, len(batch.num_tokens), keeps_state=keeps_state)


def _params(
    batch: PersistentBatch,
    slots: npt.NDArray[np.int32],
    entries: npt.NDArray[np.integer],
    num_entries: int,
    *,
    keeps_state: bool,
) -> DeviceSamplingParams:
    """Parameters of `slots` at `entries`, and padding everywhere else.

    With `keeps_state` the device draws each row's numbers from a stream that begins at its seed,
    and begins it anew whenever it is told to: after every prefill, and whenever a row comes or
    goes. The same seed would then draw the same numbers again. So its seed is minted from the
    request's and the index of the token that is drawn next, which no two beginnings share. Without
    a seed, as the plug-in sends for requests that bring none, a device draws from a state of its
    own; but an engine does not know which seeds were minted, and a request that brought one would
    still repeat itself. The price: a seed gives the same tokens again only where streams begin at
    the same tokens, for one when the request runs alone.
    """
    temperature, top_k = np.zeros(num_entries), np.ones(num_entries, dtype=np.int64)
    top_p = np.ones(num_entries)
    seed: list[int | None] = [None] * num_entries
    is_random = batch.temperature[slots] >= GREEDY_EPS
    drawn, at = slots[is_random], entries[is_random]
    temperature[at], top_k[at] = batch.temperature[drawn], batch.top_k[drawn]
    top_p[at] = batch.top_p[drawn]
    seeds = batch.seed[drawn]
    if keeps_state:
        indices = (batch.num_tokens[drawn] - batch.num_prompt_tokens[drawn]).astype(np.int64)
        seeds = (uniform(seeds, indices) * 2.0**53).astype(np.int64)
    for entry, value in zip(at.tolist(), seeds.tolist(), strict=True):
        seed[entry] = value
    return DeviceSamplingParams(
        temperature=temperature.tolist(),
        top_k=top_k.tolist(),
        top_p=top_p.tolist(),
        presence_penalty=[0.0] * num_entries,
        frequency_penalty=[0.0] * num_entries,
        repetition_penalty=[1.0] * num_entries,
        seed=seed,
        num_logprobs=[NO_LOG_PROBS] * num_entries,
        enable_log_probs=[False] * num_entries,
    )

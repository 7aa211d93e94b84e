"""Sampling settings in the form of plug-in classes: nine fields, each a list."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from replicas.generators.protocol import PADDING_ROW

if TYPE_CHECKING:
    from replicas.generators.protocol import DeviceSamplingParams

_NO_SEED = -1


@dataclass(frozen=True)
class TTSamplingParams:
    """Sampling settings with one entry per row; see `DeviceSamplingParams`.

    A plain frozen dataclass of lists, without slots: classes use `dataclasses.replace`, ``fields``
    and ``vars`` on it, and check whether a field is a list. Source: vllm-tt-plugin
    ``model_input.py``.

    Attributes:
        temperature: 0.0 is greedy.
        top_k: Candidates kept.
        top_p: Cumulative probability kept.
        presence_penalty: Added once per token already produced.
        frequency_penalty: Added per occurrence.
        repetition_penalty: 1.0 is off.
        seed: None lets the model draw its own.
        num_logprobs: -2 is none, 0 the sampled token only.
        enable_log_probs: Whether any log-probabilities are requested.
    """

    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    presence_penalty: list[float]
    frequency_penalty: list[float]
    repetition_penalty: list[float]
    seed: list[int | None]
    num_logprobs: list[int]
    enable_log_probs: list[bool]

    @property
    def wants_log_probs(self) -> bool:
        """Whether the model returns a pair (tokens, log-probabilities)."""
        return any(self.enable_log_probs)


_FIELDS = tuple(field.name for field in fields(TTSamplingParams))


def to_tt_sampling_params(params: DeviceSamplingParams, num_rows: int) -> TTSamplingParams:
    """Convert our settings, padded or cut to the rows of the call.

    Args:
        params: Our settings; seed -1 means none.
        num_rows: Rows of the call.
    """
    columns: dict[str, list[object]] = {}
    for name in _FIELDS:
        given = list(getattr(params, name))[:num_rows]
        columns[name] = given + [PADDING_ROW[name]] * (num_rows - len(given))
    columns["seed"] = [None if seed == _NO_SEED else seed for seed in columns["seed"]]
    return TTSamplingParams(**columns)  # type: ignore[arg-type]  # of each field's own type


def warmup_sampling_params(
    num_rows: int, *, can_sample_on_device: bool
) -> list[TTSamplingParams | None]:
    """Return the list of settings for older warm-up methods: each kind of sampling, then None.

    Args:
        num_rows: Entries of every field.
        can_sample_on_device: Without it the list is [None]: logits for the host.
    """
    if not can_sample_on_device:
        return [None]

    def rows(**changes: float) -> TTSamplingParams:
        settings = {**PADDING_ROW, **changes}
        columns = {name: [value] * num_rows for name, value in settings.items()}
        return TTSamplingParams(**columns)  # type: ignore[arg-type]  # of each field's own type

    return [rows(), rows(temperature=1.0, top_k=32, top_p=0.9), None]

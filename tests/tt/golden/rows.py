"""Sampling settings of the rows of a call."""

from __future__ import annotations

from replicas.generators.protocol import DeviceSamplingParams


def params(rows, **fields):
    """Greedy rows, but for the given fields."""
    values = {
        "temperature": 0.0,
        "top_k": 1,
        "top_p": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "num_logprobs": -2,
        "enable_log_probs": False,
    }
    wanted = {**values, **fields}
    return DeviceSamplingParams(
        **{
            name: value if isinstance(value, list) else [value] * rows
            for name, value in wanted.items()
        }
    )

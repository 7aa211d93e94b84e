"""Conversion of the results of plug-in classes to the form of our protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from replicas.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.generators.protocol import DeviceLogProbs, ForwardOutput


def is_on_host(output: ForwardOutput) -> bool:
    """Return whether an output is a host tensor, or a tuple of such outputs and None."""
    if isinstance(output, tuple):
        return all(part is None or is_on_host(part) for part in output)
    return isinstance(output, torch.Tensor)


def host_output(
    output: Any,  # noqa: ANN401 - whatever the class has answered
    num_rows: int,
    vocab_size: int,
    *,
    is_tokens: bool,
    wants_log_probs: bool,
    most_tokens: int = 1,
) -> ForwardOutput:
    """Convert a result on the host to the protocol's shape.

    Args:
        output: Logits (rows, V) or (rows, 1, V); tokens (rows,), (rows, n) or (rows, 1, n); or a
            pair of either and log-probabilities or None. There may be extra rows, and V may be
            padded.
        num_rows: Rows of the call.
        vocab_size: Real size of the vocabulary.
        is_tokens: Whether the output is tokens sampled on the device.
        wants_log_probs: Whether log-probabilities were requested.
        most_tokens: Most tokens of a row, the largest n.

    Returns:
        Logits (rows, 1, V), or int tokens (rows, n), or with `wants_log_probs` a pair (tokens,
        `DeviceLogProbs`).

    Raises:
        DeviceError: The output has another form; gives its shape.
    """
    rest: Any = None
    if isinstance(output, (tuple, list)):
        if len(output) != 2:
            raise DeviceError(f"the generator returned {len(output)} values, not one or two")
        output, rest = output
    if not isinstance(output, torch.Tensor):
        raise DeviceError(f"the generator returned {type(output).__name__}, not a host tensor")
    if is_tokens:
        tokens = _tokens(output, num_rows, most_tokens)
        return (tokens, _log_probs(rest, num_rows)) if wants_log_probs else tokens
    return _logits(output, num_rows, vocab_size)


def padded(output: ForwardOutput, num_rows: int) -> ForwardOutput:
    """Return the result of `host_output` with rows of zeros up to `num_rows`."""
    if isinstance(output, tuple):
        return tuple(padded(part, num_rows) for part in output)
    num_missing = num_rows - len(output)
    if num_missing == 0:
        return output
    return torch.cat([output, output.new_zeros((num_missing, *output.shape[1:]))])


def joined(outputs: Sequence[ForwardOutput]) -> ForwardOutput:
    """Concatenate the results of calls for some of the rows each, in order.

    Args:
        outputs: Results of `host_output`, all of one form.
    """
    if not isinstance(outputs[0], tuple):
        return torch.cat(list(outputs))
    tokens, log_probs = zip(*outputs, strict=True)
    return torch.cat(tokens), torch.cat(log_probs)


def _tokens(output: torch.Tensor, num_rows: int, most_tokens: int) -> torch.Tensor:
    width = output.shape[-1] if output.ndim > 1 else 1
    has_rows = output.ndim >= 1 and output.numel() == len(output) * width
    is_wide = not 1 <= width <= most_tokens
    if output.is_floating_point() or not has_rows or is_wide or len(output) < num_rows:
        wanted = "a token" if most_tokens == 1 else f"1 to {most_tokens} tokens"
        raise DeviceError(
            f"sampling on the device gave {output.dtype} {tuple(output.shape)}, not {wanted} for "
            f"each of {num_rows} rows"
        )
    return output.reshape(-1, width)[:num_rows]


def _log_probs(output: object, num_rows: int) -> DeviceLogProbs:
    if isinstance(output, torch.Tensor) and output.numel() == len(output) >= num_rows:
        return output.reshape(-1)[:num_rows].float()
    match output:
        case (torch.Tensor() as values, torch.Tensor() as token_ids) if (
            values.shape == token_ids.shape and values.ndim == 2 and len(values) >= num_rows
        ):
            return values[:num_rows].float(), token_ids[:num_rows].long()
    parts = output if isinstance(output, tuple) else (output,)
    found = [tuple(part.shape) if isinstance(part, torch.Tensor) else part for part in parts]
    raise DeviceError(
        f"sampling on the device gave log probabilities {found}, neither one for each of "
        f"{num_rows} rows nor the likeliest and their tokens"
    )


def _logits(output: torch.Tensor, num_rows: int, vocab_size: int) -> torch.Tensor:
    rows = output if output.ndim == 2 else output[:, -1] if output.ndim == 3 else None
    if rows is None or len(rows) < num_rows or rows.shape[-1] < vocab_size:
        raise DeviceError(
            f"the generator gave logits {tuple(output.shape)} for {num_rows} rows of a vocabulary "
            f"of {vocab_size}"
        )
    return rows[:num_rows, None, :vocab_size]

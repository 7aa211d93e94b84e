"""Parts of sampling in C; `replicas/generators/torch/csrc/sampling.c`.

Dimensions: n rows; V vocabulary; E entries of all rows.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from replicas.generators.torch import native
from replicas.generators.torch.native import LogprobsCall, Tasks, address, require

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from replicas.generators.torch.native import KernelSet

    Int64Array = npt.NDArray[np.int64]
    Float32Array = npt.NDArray[np.float32]
    Float64Array = npt.NDArray[np.float64]

logger = logging.getLogger(__name__)


class Entries(NamedTuple):
    """Logits of tokens of rows.

    Attributes:
        token_ids: (E,) the tokens of the first row, then those of the next ones.
        values: (E,) their logits.
        ranks: (E,) how many tokens are at least as likely; of likeliest tokens their places.
        log_sums: (n,) what to subtract from a row's logits for log probabilities.
    """

    token_ids: Int64Array
    values: Float32Array
    ranks: Int64Array
    log_sums: Float64Array


def find_kernels() -> KernelSet | None:
    """Return the kernels of this host; None if it has none, so that PyTorch computes instead."""
    try:
        return native.kernel_set()
    except native.NativeError as error:
        logger.info("log probabilities are computed without C kernels: %s", error)
        return None


def read_entries(
    kernels: KernelSet,
    logits: torch.Tensor,
    places: Int64Array,
    given: list[list[int]],
    num_likeliest: list[int],
) -> Entries:
    """Return for each row its given tokens, then its likeliest ones, the lower token if equal.

    Args:
        kernels: See `find_kernels`.
        logits: float32 or bfloat16 (N, V).
        places: (n,) which of the N rows.
        given: (n,) tokens of each row.
        num_likeliest: (n,) number of likeliest tokens of each row, at most V.

    Raises:
        ValueError: A row or token is outside of the logits, or a number larger.
    """
    num_given = np.array([len(tokens) for tokens in given], dtype=np.int64)
    firsts = np.zeros(len(given) + 1, dtype=np.int64)
    np.cumsum(num_given + num_likeliest, out=firsts[1:])
    token_ids = np.empty(firsts[-1], dtype=np.int64)
    for first, tokens in zip(firsts.tolist(), given, strict=False):
        token_ids[first : first + len(tokens)] = tokens
    values = np.empty(len(token_ids), dtype=np.float32)
    ranks = np.empty(len(token_ids), dtype=np.int64)
    log_sums = np.empty(len(given), dtype=np.float64)
    call = LogprobsCall(
        Tasks(0, len(given)),
        native.DTYPES[logits.dtype],
        address(logits, logits.dtype),
        len(logits),
        logits.shape[-1],
        native.array_address(places),
        firsts.ctypes.data,
        num_given.ctypes.data,
        token_ids.ctypes.data,
        values.ctypes.data,
        ranks.ctypes.data,
        log_sums.ctypes.data,
    )
    require(kernels.library.check_logprobs(ctypes.byref(call)), "a row with log probabilities")
    kernels.logprobs(call)
    return Entries(token_ids, values, ranks, log_sums)

"""A workload: the arrivals and lengths of requests, and the common prefixes of their prompts.

Pure. A workload has no text. Its prompts are token ids that depend on the workload alone, so a
simulator and a real cluster get the same prompts.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from cluster.lab.workloads.errors import WorkloadError

if TYPE_CHECKING:
    import numpy.typing as npt

FIRST_PROMPT_TOKEN = 16
"""Lowest token id of a prompt: the special tokens of the models here are below."""

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of one prefix block of a Mooncake trace."""

_U64 = np.uint64
_GOLDEN = _U64(0x9E3779B97F4A7C15)
# Keeps the prompts of requests without blocks away from those of blocks with the same number.
_OWN_TOKENS = 0xD6E8FEB86659FD93


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a workload.

    Attributes:
        arrival_s: Seconds after the start of the workload.
        num_prompt_tokens: Length of the prompt, at least 1.
        block_ids: The first blocks of the prompt, of the workload's `block_tokens` tokens each:
            equal ids at equal positions are equal tokens. The last block may be cut off by the end
            of the prompt. Tokens after the last block are the request's own; with `()` all are.
        tenant: The tenant that it belongs to.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    tenant: str = ""


class Workload(msgspec.Struct, frozen=True):
    """Requests in order of arrival.

    Attributes:
        name: Name for reports and files.
        block_tokens: Tokens of each block in `TraceRequest.block_ids`.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def speed_up(self, ratio: float) -> Workload:
        """Return the same requests, arriving `ratio` times as fast.

        Raises:
            WorkloadError: The ratio is not a positive number.
        """
        if not 0 < ratio < math.inf:
            raise WorkloadError(f"a speed-up of {ratio} is not possible; give a number above 0")
        faster = tuple(
            msgspec.structs.replace(r, arrival_s=r.arrival_s / ratio) for r in self.requests
        )
        return msgspec.structs.replace(self, requests=faster)

    def head(self, n: int) -> Workload:
        """Return the first `n` requests, with unchanged prompts.

        Raises:
            WorkloadError: `n` is negative.
        """
        if n < 0:
            raise WorkloadError(f"the first {n} requests do not exist; give a number from 0 on")
        return msgspec.structs.replace(self, requests=self.requests[:n])

    def prompt(self, i: int, vocab_size: int) -> list[int]:
        """Return the token ids of request `i`: the same in every process, in [16, vocab_size).

        The integers are shared between all prompts, so that a prompt costs 8 bytes per token.
        """
        request = self.requests[i]
        num_blocks = min(len(request.block_ids), -(-request.num_prompt_tokens // self.block_tokens))
        num_own = max(0, request.num_prompt_tokens - num_blocks * self.block_tokens)
        blocks = _mixed_words(request.block_ids[:num_blocks], self.block_tokens)
        own = _mixed_words((i ^ _OWN_TOKENS,), num_own)
        words = np.concatenate((blocks, own))[: request.num_prompt_tokens]
        # Scale the high half instead of a remainder: negligible bias, and no slow division.
        words >>= _U64(32)
        words *= _U64(vocab_size - FIRST_PROMPT_TOKEN)
        words >>= _U64(32)
        tokens: list[int] = _token_objects(vocab_size)[words.view(np.int64)].tolist()
        return tokens


def _mixed_words(seeds: tuple[int, ...], num_positions: int) -> npt.NDArray[np.uint64]:
    """Return one random word per (seed, position): uint64 (seeds x positions,), seed by seed."""
    # Two rounds, one per argument, so that no seed's row is another one's row, shifted.
    rows = _mix64(np.array(seeds, dtype=_U64))
    return _mix64(np.add.outer(rows, np.arange(num_positions, dtype=_U64) * _GOLDEN).ravel())


def _mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Map 64-bit words one to one to scattered 64-bit words.

    Source: the finaliser of SplitMix64, Steele et al., OOPSLA 2014.
    """
    mixed = values ^ (values >> _U64(30))
    mixed *= _U64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> _U64(27)
    mixed *= _U64(0x94D049BB133111EB)
    mixed ^= mixed >> _U64(31)
    return mixed


@lru_cache(maxsize=4)
def _token_objects(vocab_size: int) -> npt.NDArray[Any]:
    """Return the token ids of prompts, as Python integers that all prompts share."""
    assert vocab_size > FIRST_PROMPT_TOKEN, f"{vocab_size=}"
    return np.array(range(FIRST_PROMPT_TOKEN, vocab_size), dtype=object)

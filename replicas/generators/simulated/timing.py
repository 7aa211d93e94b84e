"""Model of the time of steps on a mesh, in seconds; has no clock.

Pure and stateless. The engine's generator waits for the computed time, and the simulator advances
its clock by it. Times are device times; the host's time around a step is `host_s` and `host_row_s`.

Model of time (one lane is one DP group; lanes of a mesh step together):

- prefill: the prompts of a lane one after another, each padded to a bucket of n tokens after p
  cached ones: ``n * token_s + n * (p + n / 2) * token_pair_s``; lanes side by side, so the longest
  lane counts.
- decode: the padded batch costs the same however many slots are used; on top each live row reads
  its context from DRAM: ``decode_s + sum of contexts * context_token_s``; the longest lane counts.
- further lanes cost host dispatch: ``prefill_lanes_s``, ``decode_lanes_s``.

Source of the terms: Tenstorrent's published rates (see `meshes`); prompts one after another and
linear growth with their length as in tt-inference-server's reference targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SMALLEST_BUCKETS = (128, 1024)
"""Prompts are padded to one of these, or above them to a power of two.
Source: `get_padded_prefill_len` of tt-metal's models/tt_transformers/tt/common.py."""


class StepTiming(Protocol):
    """Seconds of each kind of step of one engine.

    Attributes:
        host_s: Nominal host time of a step outside the device; an engine that runs spends its own.
        host_row_s: The same per row (sequence) of the step, on top.
        bytes_per_token: KV bytes of a token, K and V over all layers, of the model that is timed.
        link: Timing of KV transfers of one engine.
    """

    @property
    def host_s(self) -> float: ...  # noqa: D102 - documented above

    @property
    def host_row_s(self) -> float: ...  # noqa: D102

    @property
    def bytes_per_token(self) -> int: ...  # noqa: D102

    @property
    def link(self) -> LinkTiming: ...  # noqa: D102

    def prefill_s(self, chunks: Sequence[tuple[int, int, int]]) -> float:
        """Return seconds of one prefill call.

        Args:
            chunks: (lane, start, end) of every row: positions start..end - 1 are computed.
        """
        ...

    def decode_s(self, rows: Sequence[tuple[int, int]]) -> float:
        """Return seconds of one decode call.

        Args:
            rows: (lane, context tokens) of every live row, the token to decode included.
        """
        ...

    def decode_run_s(self, rows: Sequence[tuple[int, int]], num_steps: int) -> list[float]:
        """Return seconds of each of `num_steps` decode calls; contexts grow by a token each.

        Args:
            rows: As `decode_s` of the first of them takes it.
            num_steps: How many.
        """
        ...

    def mixed_s(
        self, chunks: Sequence[tuple[int, int, int]], rows: Sequence[tuple[int, int]]
    ) -> float:
        """Seconds of one pass over prefill chunks and decode rows, for back ends that can mix."""
        ...

    def warm_up_s(self) -> float:
        """Return seconds of compiling and trace capture before the engine is ready."""
        ...


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """One engine's side of a KV transfer: device, PCIe and wire in one.

    Attributes:
        setup_s: Seconds per message of blocks, however small.
        bytes_per_s: Bandwidth.
    """

    setup_s: float
    bytes_per_s: float

    def transfer_s(self, num_bytes: int) -> float:
        """Return seconds to move `num_bytes` in one direction; nothing for nothing."""
        return self.setup_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshTiming:
    """`StepTiming` of one model on one board; made by `MeshProfile.timing`.

    Attributes:
        block_size: Tokens per KV block; contexts are read in whole blocks.
        prefill_token_s: Seconds per padded token of a prompt, as a share of the whole forward.
        prefill_token_pair_s: Seconds per (token, token that it attends to).
        decode_base_s: Seconds of the padded decode batch with empty contexts.
        context_token_s: Seconds to read one token's KV.
        prefill_lanes_s: Added to a prefill call for the lanes beside the first.
        decode_lanes_s: Added to a decode call likewise.
        compile_s: See `warm_up_s`.
        host_s: See `StepTiming`.
        host_row_s: See `StepTiming`.
        bytes_per_token: See `StepTiming`.
        link: See `StepTiming`.
    """

    block_size: int
    prefill_token_s: float
    prefill_token_pair_s: float
    decode_base_s: float
    context_token_s: float
    prefill_lanes_s: float
    decode_lanes_s: float
    compile_s: float
    host_s: float
    host_row_s: float
    bytes_per_token: int
    link: LinkTiming

    def prefill_s(self, chunks: Sequence[tuple[int, int, int]]) -> float:
        """Return seconds of one prefill call; 0.0 without chunks."""
        if not chunks:
            return 0.0
        longest_s = _longest_lane_s(
            (lane, self._chunk_s(start, end)) for lane, start, end in chunks
        )
        return longest_s + self.prefill_lanes_s

    def decode_s(self, rows: Sequence[tuple[int, int]]) -> float:
        """Return seconds of one decode call; 0.0 without rows."""
        if not rows:
            return 0.0
        read_s = self.context_token_s
        longest_s = _longest_lane_s((lane, self._padded(n) * read_s) for lane, n in rows)
        return self.decode_base_s + longest_s + self.decode_lanes_s

    def decode_run_s(self, rows: Sequence[tuple[int, int]], num_steps: int) -> list[float]:
        """Return seconds of each of `num_steps` decode calls; contexts grow by a token each."""
        if all(self._padded(n) == self._padded(n + num_steps - 1) for _, n in rows):
            return [self.decode_s(rows)] * num_steps
        return [self.decode_s([(lane, n + i) for lane, n in rows]) for i in range(num_steps)]

    def mixed_s(
        self, chunks: Sequence[tuple[int, int, int]], rows: Sequence[tuple[int, int]]
    ) -> float:
        """Return the seconds of both calls in turn; a TT mesh cannot mix them in one pass."""
        return self.prefill_s(chunks) + self.decode_s(rows)

    def warm_up_s(self) -> float:
        """Return seconds of compiling and trace capture before the engine is ready."""
        return self.compile_s

    def _chunk_s(self, start: int, end: int) -> float:
        num_tokens = padded_prefill_len(end - start)
        pairs = num_tokens * (self._padded(start) + num_tokens / 2)
        return num_tokens * self.prefill_token_s + pairs * self.prefill_token_pair_s

    def _padded(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) * self.block_size


def padded_prefill_len(num_tokens: int) -> int:
    """Return the padded length of a prompt or its uncached part; see `SMALLEST_BUCKETS`."""
    for bucket in SMALLEST_BUCKETS:
        if num_tokens <= bucket:
            return bucket
    return 1 << (num_tokens - 1).bit_length()


def _longest_lane_s(work: Iterable[tuple[int, float]]) -> float:
    """Sum the seconds of each lane; the longest lane's."""
    per_lane: dict[int, float] = {}
    for lane, seconds in work:
        per_lane[lane] = per_lane.get(lane, 0.0) + seconds
    return max(per_lane.values())

"""Sampling on the device: greedy, and top-k with top-p, over a vocabulary split between chips.

Each chip takes the 32 best of its slice, the candidates of all chips are gathered, and the chips
draw alike from the best k of them, so that every chip has the next token without the host. What
holds of the result:

- Greedy is exact: the most likely token, of equals the lowest id, as far as ttnn's stable top-k is
  stable. It is found by comparison, not by a draw.
- Order of a draw: top-k, temperature, top-p, as the host's sampler, but in bfloat16: 1 / T, p and
  the probabilities have 8 significant bits, and p >= 0.998 is 1.
- A draw depends on (seed, position of the row's last token) and the logits alone: not on the slot,
  the lane, the other rows, or whether prefill or decode made it. It is not the host's draw, which
  requests get that ask for what the device cannot do.

Limits: k is 1 to 32; without top-k (0) only greedy, or a vocabulary of at most 32; no penalties, no
log-probabilities, no grammar.
Source of the pipeline: tt-metal models/common/sampling/tt_sampling.py.

Dimensions: B rows of a lane; C candidates: 32 for each piece of each chip's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import ttnn

from replicas.generators.protocol import NO_LOG_PROBS
from replicas.generators.ttnn.buckets import TILE
from replicas.sampling_params import GREEDY_EPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from replicas.generators.protocol import DeviceSamplingParams
    from replicas.generators.ttnn.collectives import Collectives

    IntArray = npt.NDArray[np.integer[Any]]

MAX_TOP_K = 32
"""Candidates per draw, fixed by ttnn.sampling."""

_PIECE = 32768
"""Widest input that ttnn.topk distributes over cores; must be a power of two."""
_MIN_WIDTH = 64
"""Narrowest input that ttnn.topk accepts without padding."""
_NEVER = float("-inf")
_BEYOND_IDS = 1 << 24
"""Larger than any token id, and exact in every dtype used on the way."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """Sampling settings of n rows on the host.

    Attributes:
        is_greedy: bool (n,); such a row's other settings are ignored.
        top_k: int64 (n,), 1 to 32.
        top_p: float64 (n,), 0 to 1.
        temperature: float64 (n,), above 0.
        seed: uint64 (n,).
    """

    is_greedy: npt.NDArray[np.bool_]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    temperature: npt.NDArray[np.float64]
    seed: npt.NDArray[np.uint64]

    def select(self, rows: IntArray | slice) -> SamplingRows:
        """Return the given rows, in their order."""
        return SamplingRows(*(getattr(self, field.name)[rows] for field in fields(self)))

    def draw_seeds(self, positions: IntArray) -> npt.NDArray[np.int32]:
        """Return the seeds of one step's draws.

        Args:
            positions: (n,) of each row's last token; padding rows may hold anything.

        Returns:
            (n,) at least 0, as ttnn interprets 2**32 - 1 as "do not seed".
        """
        with np.errstate(over="ignore"):
            mixed = _mix(self.seed + _mix(positions.astype(np.int64).view(np.uint64)))
        return (mixed >> np.uint64(33)).astype(np.int32)


def greedy_rows(num_rows: int) -> SamplingRows:
    """Return settings of greedy rows, which are also those of padding rows."""
    return SamplingRows(
        is_greedy=np.ones(num_rows, dtype=np.bool_),
        top_k=np.ones(num_rows, dtype=np.int64),
        top_p=np.ones(num_rows),
        temperature=np.ones(num_rows),
        seed=np.zeros(num_rows, dtype=np.uint64),
    )


def parse_sampling(params: DeviceSamplingParams, num_rows: int, vocab_size: int) -> SamplingRows:
    """Check and convert a call's settings; rows without a seed get one.

    Args:
        params: One entry per row.
        num_rows: Rows of the call.
        vocab_size: Tokens to choose from.

    Raises:
        ValueError: A field has another length, or a row needs sampling on the host.
    """
    for field in fields(params):
        length = len(getattr(params, field.name))
        if length != num_rows:
            raise ValueError(f"sampling_params.{field.name} has {length} entries, not {num_rows}")
    _refuse(params)
    temperature = np.asarray(params.temperature, dtype=np.float64)
    top_k = np.asarray(params.top_k, dtype=np.int64)
    top_p = np.asarray(params.top_p, dtype=np.float64)
    is_greedy = (temperature < GREEDY_EPS) | (top_k == 1)
    if vocab_size <= MAX_TOP_K:
        top_k = np.where((top_k < 1) | (top_k > vocab_size), vocab_size, top_k)
    wide = ~is_greedy & ((top_k < 1) | (top_k > MAX_TOP_K))
    if wide.any():
        raise ValueError(
            f"top_k {top_k[wide][0]} with temperature {temperature[wide][0]}: the device draws "
            f"from 1 to {MAX_TOP_K} candidates; sample on the host"
        )
    if not ((top_p >= 0) & (top_p <= 1)).all():
        raise ValueError(f"top_p must be from 0 to 1, got {top_p.tolist()}")
    drawn = np.random.default_rng().integers(2**63, size=num_rows)
    seeds = [own if given is None else given for given, own in zip(params.seed, drawn, strict=True)]
    return SamplingRows(
        is_greedy=is_greedy,
        top_k=np.where(is_greedy, 1, top_k),
        top_p=top_p,
        temperature=np.where(is_greedy, 1.0, temperature),
        seed=np.array([int(seed) % 2**64 for seed in seeds], dtype=np.uint64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class SamplingInputs:
    """Sampling settings of a lane's rows on its chips, all equal; row-major except ``greedy``.

    Attributes:
        top_k: uint32 (B,).
        top_p: bfloat16 (B,).
        inverse_temperature: bfloat16 (B,).
        greedy: int32 (1, 1, 32, 1) in tiles: 1 for a greedy row.
        seeds: uint32 (B,).
    """

    top_k: ttnn.Tensor
    top_p: ttnn.Tensor
    inverse_temperature: ttnn.Tensor
    greedy: ttnn.Tensor
    seeds: ttnn.Tensor


def host_sampling_inputs(rows: SamplingRows, positions: IntArray) -> SamplingInputs:
    """Lay out the settings of a lane's B rows on the host.

    Args:
        rows: B rows.
        positions: (B,) of each row's last token.
    """
    greedy = torch.ones(1, 1, TILE, 1, dtype=torch.int32)
    greedy[0, 0, : len(rows.is_greedy), 0] = torch.from_numpy(rows.is_greedy)
    return SamplingInputs(
        top_k=_row_major(torch.from_numpy(rows.top_k.astype(np.int32)), ttnn.uint32),
        top_p=_row_major(torch.from_numpy(rows.top_p).bfloat16(), ttnn.bfloat16),
        inverse_temperature=_row_major(
            torch.from_numpy(1 / rows.temperature).bfloat16(), ttnn.bfloat16
        ),
        greedy=ttnn.from_torch(greedy, dtype=ttnn.int32, layout=ttnn.TILE_LAYOUT),
        seeds=host_seeds(rows, positions),
    )


def host_seeds(rows: SamplingRows, positions: IntArray) -> ttnn.Tensor:
    """Lay out the seeds of one step alone; see ``SamplingInputs.seeds``."""
    return _row_major(torch.from_numpy(rows.draw_seeds(positions)), ttnn.uint32)


def topk_pieces(width: int) -> tuple[int, int]:
    """Cut a chip's vocabulary into pieces that ttnn.topk can distribute over cores.

    Args:
        width: Vocabulary of one chip.

    Returns:
        (pieces, tokens of each); their total is at least `width`, the rest is padding.
    """
    if width > _PIECE:
        return -(-width // _PIECE), _PIECE
    return 1, max(_MIN_WIDTH, 1 << (width - 1).bit_length())


class Sampler:
    """Sampler of the next token of every row of a lane.

    Owns its constants on the device.

    Args:
        device: The lane.
        collectives: Collectives over its chips.
        num_rows: B.
        local_width: Vocabulary of one chip, padding included.
    """

    def __init__(
        self, device: ttnn.MeshDevice, collectives: Collectives, num_rows: int, local_width: int
    ) -> None:
        self._collectives = collectives
        self._num_rows = num_rows
        self._num_chips = device.get_num_devices()
        self._num_pieces, self._piece = topk_pieces(local_width)
        self._padding = self._num_pieces * self._piece - local_width
        chips, pieces = np.divmod(np.arange(self._num_chips * self._num_pieces), self._num_pieces)
        first_ids = torch.from_numpy(chips * local_width + pieces * self._piece).int()
        self._first_ids = ttnn.from_torch(
            first_ids.repeat_interleave(MAX_TOP_K).expand(1, 1, TILE, -1).contiguous(),
            dtype=ttnn.int32,
            layout=ttnn.TILE_LAYOUT,
            device=device,
            memory_config=ttnn.DRAM_MEMORY_CONFIG,
            mesh_mapper=ttnn.ShardTensorToMesh(device, dim=3),
        )
        rows = torch.arange(num_rows, dtype=torch.int32)
        self._rows = ttnn.to_device(_row_major(rows, ttnn.uint32), device)

    def sample(
        self, logits: ttnn.Tensor, inputs: SamplingInputs, tokens: ttnn.Tensor
    ) -> ttnn.Tensor:
        """Draw a token for each row.

        Args:
            logits: bfloat16 (1, 1, 32, local_width) on each chip, in tiles.
            inputs: Sampling settings.
            tokens: uint32 (1, B), overwritten.

        Returns:
            ``tokens``.
        """
        self._collectives.begin_call()
        values, ids = self._candidates(logits)
        ids = _with_winner(values, ids, inputs.greedy)
        values, ids = _widened(values, ids)
        corner = [1, 1, self._num_rows, values.shape[-1]]
        values = ttnn.slice(values, [0, 0, 0, 0], corner)
        ids = ttnn.slice(ttnn.to_layout(ids, ttnn.ROW_MAJOR_LAYOUT), [0, 0, 0, 0], corner)
        # Must come right before the draw: any arithmetic in between would advance the generators.
        ttnn.manual_seed(inputs.seeds, user_ids=self._rows)
        ttnn.sampling(
            values,
            ids,
            k=inputs.top_k,
            p=inputs.top_p,
            temp=inputs.inverse_temperature,
            output_tensor=ttnn.reshape(tokens, (1, 1, 1, self._num_rows)),
        )
        return tokens

    def _candidates(self, logits: ttnn.Tensor) -> tuple[ttnn.Tensor, ttnn.Tensor]:
        """Return values (bfloat16) and token ids (int32), (1, 1, 32, C), in vocabulary order."""
        if self._padding:
            logits = ttnn.pad(logits, [(0, 0), (0, 0), (0, 0), (0, self._padding)], value=_NEVER)
        best = [ttnn.topk(piece, k=MAX_TOP_K, dim=-1, stable=True) for piece in self._split(logits)]
        values = _joined([values for values, _ in best])
        local_ids = _joined([ttnn.typecast(ids, ttnn.int32) for _, ids in best])
        ids = ttnn.add(local_ids, self._first_ids)
        return self._collectives.gathered(values), self._collectives.gathered(ids)

    def _split(self, logits: ttnn.Tensor) -> list[ttnn.Tensor]:
        if self._num_pieces == 1:
            return [logits]
        return [
            ttnn.slice(logits, [0, 0, 0, start], [1, 1, TILE, start + self._piece])
            for start in range(0, self._num_pieces * self._piece, self._piece)
        ]


def _with_winner(values: ttnn.Tensor, ids: ttnn.Tensor, greedy: ttnn.Tensor) -> ttnn.Tensor:
    """Replace all ids of a greedy row by that of its best candidate; ties go to the lowest id.

    Any draw then gives that token; ttnn.sampling itself does not define which of equal candidates
    it draws. Ids are compared as int32, whose minima are exact; float32 is truncated on the way.
    """
    is_worse = ttnn.typecast(ttnn.lt(values, ttnn.max(values, dim=3, keepdim=True)), ttnn.int32)
    winner = ttnn.min(ttnn.where(is_worse, _BEYOND_IDS, ids), dim=3, keepdim=True)
    return ttnn.where(greedy, winner, ids)


def _widened(values: ttnn.Tensor, ids: ttnn.Tensor) -> tuple[ttnn.Tensor, ttnn.Tensor]:
    """Pad the candidates to a power of two of tiles, which ttnn.sampling needs."""
    width = values.shape[-1]
    padding = (1 << (width - 1).bit_length()) - width
    if not padding:
        return values, ids
    pads = [(0, 0), (0, 0), (0, 0), (0, padding)]
    return ttnn.pad(values, pads, value=_NEVER), ttnn.pad(ids, pads, value=0)


def _joined(tensors: list[ttnn.Tensor]) -> ttnn.Tensor:
    return tensors[0] if len(tensors) == 1 else ttnn.concat(tensors, dim=3)


def _refuse(params: DeviceSamplingParams) -> None:
    penalties: tuple[tuple[str, Sequence[float], float], ...] = (
        ("presence_penalty", params.presence_penalty, 0.0),
        ("frequency_penalty", params.frequency_penalty, 0.0),
        ("repetition_penalty", params.repetition_penalty, 1.0),
    )
    for name, given, off in penalties:
        if any(value != off for value in given):
            raise ValueError(f"{name}, but supports_device_penalties is False; sample on the host")
    if any(params.enable_log_probs) or any(n != NO_LOG_PROBS for n in params.num_logprobs):
        raise ValueError("the device computes no log-probabilities; sample on the host")


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's finaliser, which gives unrelated outputs for neighbouring inputs.

    The device's generators are shift registers, in which neighbouring seeds give similar numbers.
    """
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _row_major(values: torch.Tensor, dtype: ttnn.DataType) -> ttnn.Tensor:
    return ttnn.from_torch(values, dtype=dtype, layout=ttnn.ROW_MAJOR_LAYOUT)

"""The model of time's few efficiencies, found from measured rows.

Pure. With b for the chips of one lane (tensor parallel) and L for layers:

    decode step = k_d * [ (weights + KV read) / (b * bandwidth) * read    DRAM, per chip family
                          + vocabulary * slots * sample                   host sampling
                          + L * (b - 1) * hop ]                           all-reduce, by latency
    prefill 128 = k_p * [ (params / b * compute + L * layer) / chip speed
                          + L * (b - 1) / b * all_reduce_prefill ]        all-reduce, by bytes
    each        + lanes * (sqrt(number of lanes) - 1)                     host dispatch

k_d, k_p belong to an implementation (the code that ran the model) and are 1 for Llama's. The form
was chosen with every row in sight; the coefficients of a held-out row's prediction never saw it.
docs/simulated-mesh.md has the errors; benchmarks/simulated_mesh.py prints them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from replicas.generators.simulated.meshes import (
    BOARDS,
    BYTES_PER_ELEMENT,
    MODELS,
    ROWS,
    SLOTS_PER_LANE,
    Board,
    MeasuredRow,
    ModelSpec,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from replicas.tt.meshes import Chip

CONTEXT = 160
"""Tokens that a row reads in the first decode step after the prompt, in blocks of 32."""

MOST_CHIPS = 8
"""Chips of a lane up to which there are rows to fit: the all-reduces go round a ring. Galaxy's row
of 70B has 32, and code of its own that no other row tells anything of."""

_BASE_IMPLEMENTATION = "llama"


@dataclass(frozen=True, slots=True)
class Fit:
    """Efficiencies found from measured rows; see the module docstring for their places.

    Attributes:
        read: By chip family: how many times as long as at peak bandwidth reading takes.
        sample_s: Per element of the logits (slots times vocabulary).
        hop_s: Per layer and further chip of a decode step.
        compute_s: Per parameter of a prefill of 128 tokens on one Wormhole chip.
        layer_s: Per layer of a prefill of 128 tokens on one Wormhole chip.
        speed: By chip family: prefill speed per byte/s of memory bandwidth, Wormhole's as unit.
        all_reduce_prefill_s: Per layer of a prefill of 128 tokens, on many chips.
        decode_factors: k_d of implementations.
        prefill_factors: k_p of implementations.
        decode_lanes_s: Coefficient of sqrt(lanes) - 1 in a decode step.
        prefill_lanes_s: Likewise in a prefill.
    """

    read: dict[str, float] = field(default_factory=dict)
    sample_s: float = 0.0
    hop_s: float = 0.0
    compute_s: float = 0.0
    layer_s: float = 0.0
    speed: dict[str, float] = field(default_factory=dict)
    all_reduce_prefill_s: float = 0.0
    decode_factors: dict[str, float] = field(default_factory=dict)
    prefill_factors: dict[str, float] = field(default_factory=dict)
    decode_lanes_s: float = 0.0
    prefill_lanes_s: float = 0.0

    def step_s(self, board: Board, model: ModelSpec, num_lanes: int) -> float:
        """Return predicted seconds of a full decode step after prompts of 128 tokens."""
        one_lane_s = _decode_reads(board, model, num_lanes) * self.read[board.chip.family]
        one_lane_s += _logits(model) * self.sample_s
        one_lane_s += _hops(board, model, num_lanes) * self.hop_s
        factor = self.decode_factors.get(model.implementation, 1.0)
        return factor * one_lane_s + self.decode_lanes_s * lane_share(num_lanes)

    def ttft_s(self, board: Board, model: ModelSpec, num_lanes: int) -> float:
        """Return predicted seconds of a prefill of 128 tokens."""
        chips = board.num_chips // num_lanes
        work_s = model.num_forward_params / chips * self.compute_s + model.num_layers * self.layer_s
        one_lane_s = work_s / (self.speed[board.chip.family] * _bandwidth_ratio(board.chip))
        one_lane_s += model.num_layers * (chips - 1) / chips * self.all_reduce_prefill_s
        factor = self.prefill_factors.get(model.implementation, 1.0)
        return factor * one_lane_s + self.prefill_lanes_s * lane_share(num_lanes)

    def context_token_s(self, board: Board, model: ModelSpec, num_lanes: int) -> float:
        """Return seconds to read the KV of one token."""
        bandwidth = board.num_chips // num_lanes * board.chip.dram_bytes_per_s
        return model.kv_bytes_per_token / bandwidth * self.read[board.chip.family]


def fit(rows: Collection[MeasuredRow] = ROWS) -> Fit:
    """Find the efficiencies, stage by stage, with least squares of relative errors.

    Args:
        rows: Measured rows; must hold three models of Llama's code on n150, and p100 or p150.
    """
    found = _fit_wormhole([row for row in rows if _is_base(row) and row.board == "n150"])
    found = _fit_blackhole(found, [row for row in rows if row.board in ("p100", "p150")])
    # Qwen2 decodes in Llama's code, with biases; its published prefill is of older code.
    dense = ("llama", "qwen2")
    on_t3k = [r for r in rows if r.board == "T3K" and MODELS[r.model].implementation in dense]
    found = _fit_fabric(found, on_t3k)
    found = _fit_implementations(found, [r for r in rows if _is_other(r)])
    return _fit_lanes(found, [row for row in rows if row.num_lanes > 1])


def held_out(row: MeasuredRow) -> tuple[float, float] | None:
    """Return how far the prediction from all other rows is off: of the prompt, of the decode step.

    Args:
        row: A measured row; one that is not in `ROWS` is predicted from all of them.

    Returns:
        Relative errors; None where no other row is of its code, so that nothing can be predicted.
    """
    board, model, lanes = BOARDS[row.board], MODELS[row.model], row.num_lanes
    others = [other for other in ROWS if other != row]
    codes = {MODELS[other.model].implementation for other in others if other.num_lanes == 1}
    if board.num_chips // lanes > MOST_CHIPS or model.implementation not in codes:
        return None
    found = fit(others)
    return (
        found.ttft_s(board, model, lanes) / row.ttft_s - 1.0,
        found.step_s(board, model, lanes) / row.step_s - 1.0,
    )


def _fit_wormhole(rows: Sequence[MeasuredRow]) -> Fit:
    """Fit one chip: reading and host sampling of decode; computing and layer cost of prefill."""
    decode = [
        (_decode_reads(BOARDS[r.board], MODELS[r.model], 1), _logits(MODELS[r.model]), r.step_s)
        for r in rows
    ]
    prefill = [
        (float(MODELS[r.model].num_forward_params), float(MODELS[r.model].num_layers), r.ttft_s)
        for r in rows
    ]
    read, sample_s = _solve_two(decode)
    compute_s, layer_s = _solve_two(prefill)
    return Fit(
        read={"wormhole": read}, sample_s=sample_s, compute_s=compute_s, layer_s=layer_s,
        speed={"wormhole": 1.0},
    )  # fmt: skip


def _fit_blackhole(known: Fit, rows: Sequence[MeasuredRow]) -> Fit:
    """Return the same chip per byte of bandwidth, but for an efficiency of its own."""

    def read(row: MeasuredRow) -> float:
        board, model = BOARDS[row.board], MODELS[row.model]
        return (row.step_s - _logits(model) * known.sample_s) / _decode_reads(board, model, 1)

    def speed(row: MeasuredRow) -> float:
        model = MODELS[row.model]
        work_s = model.num_forward_params * known.compute_s + model.num_layers * known.layer_s
        return work_s / row.ttft_s / _bandwidth_ratio(BOARDS[row.board].chip)

    return dataclasses.replace(
        known,
        read={**known.read, "blackhole": _mean(map(read, rows))},
        speed={**known.speed, "blackhole": _mean(map(speed, rows))},
    )


def _fit_fabric(known: Fit, rows: Sequence[MeasuredRow]) -> Fit:
    """Fit the remaining time of shared models: per hop of a step, per layer of a prefill."""
    hop, all_reduce = [], []
    for row in rows:
        board, model = BOARDS[row.board], MODELS[row.model]
        chips = board.num_chips
        step_s, ttft_s = known.step_s(board, model, 1), known.ttft_s(board, model, 1)
        hop.append((row.step_s - step_s) / _hops(board, model, 1))
        if _is_base(row):
            share = model.num_layers * (chips - 1) / chips
            all_reduce.append((row.ttft_s - ttft_s) / share)
    return dataclasses.replace(known, hop_s=_mean(hop), all_reduce_prefill_s=_mean(all_reduce))


def _fit_implementations(known: Fit, rows: Sequence[MeasuredRow]) -> Fit:
    """Fit the relative speed of other code than Llama's, as the geometric mean of its rows."""
    decode: dict[str, list[float]] = {}
    prefill: dict[str, list[float]] = {}
    for row in rows:
        board, model = BOARDS[row.board], MODELS[row.model]
        name = model.implementation
        step, ttft = known.step_s(board, model, 1), known.ttft_s(board, model, 1)
        decode.setdefault(name, []).append(math.log(row.step_s / step))
        prefill.setdefault(name, []).append(math.log(row.ttft_s / ttft))
    return dataclasses.replace(
        known,
        decode_factors={name: math.exp(_mean(logs)) for name, logs in decode.items()},
        prefill_factors={name: math.exp(_mean(logs)) for name, logs in prefill.items()},
    )


def _fit_lanes(known: Fit, rows: Sequence[MeasuredRow]) -> Fit:
    """Fit the cost of further lanes. A square root fits both Falcon rows; line and log do not."""
    shares = [lane_share(row.num_lanes) for row in rows]
    if not rows:
        return known
    places = [(BOARDS[row.board], MODELS[row.model], row.num_lanes) for row in rows]
    decode = [r.step_s - known.step_s(*p) for r, p in zip(rows, places, strict=True)]
    prefill = [r.ttft_s - known.ttft_s(*p) for r, p in zip(rows, places, strict=True)]
    squares = sum(share * share for share in shares)
    return dataclasses.replace(
        known,
        decode_lanes_s=sum(s * y for s, y in zip(shares, decode, strict=True)) / squares,
        prefill_lanes_s=sum(s * y for s, y in zip(shares, prefill, strict=True)) / squares,
    )


def _is_base(row: MeasuredRow) -> bool:
    """Return whether Llama's general code ran it: on Galaxy the 70B model has code of its own."""
    return MODELS[row.model].implementation == _BASE_IMPLEMENTATION and row.board != "Galaxy"


def _is_other(row: MeasuredRow) -> bool:
    """Return whether other code ran it, with nothing but that between it and a prediction."""
    return MODELS[row.model].implementation != _BASE_IMPLEMENTATION and row.num_lanes == 1


def _decode_reads(board: Board, model: ModelSpec, num_lanes: int) -> float:
    """Return seconds at peak bandwidth to read the weights and a full batch's contexts."""
    weights = model.num_forward_params * BYTES_PER_ELEMENT
    contexts = SLOTS_PER_LANE * CONTEXT * model.kv_bytes_per_token
    return (weights + contexts) / (board.num_chips // num_lanes * board.chip.dram_bytes_per_s)


def _hops(board: Board, model: ModelSpec, num_lanes: int) -> int:
    """Return the chip to chip steps of the all-reduces of one forward, in a ring."""
    return model.num_layers * (board.num_chips // num_lanes - 1)


def _logits(model: ModelSpec) -> float:
    return float(SLOTS_PER_LANE * model.vocab_size)


def _bandwidth_ratio(chip: Chip) -> float:
    return chip.dram_bytes_per_s / BOARDS["n150"].chip.dram_bytes_per_s


def lane_share(num_lanes: int) -> float:
    """Return the factor on the coefficients of lanes: 0 for one lane."""
    return math.sqrt(num_lanes) - 1.0


def _solve_two(rows: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit y ≈ x1 * a + x2 * b over (x1, x2, y) by least squares, each row divided by its y."""
    s11 = s12 = s22 = s1 = s2 = 0.0
    for x1, x2, y in rows:
        u1, u2 = x1 / y, x2 / y
        s11, s12, s22 = s11 + u1 * u1, s12 + u1 * u2, s22 + u2 * u2
        s1, s2 = s1 + u1, s2 + u2
    det = s11 * s22 - s12 * s12
    return (s1 * s22 - s2 * s12) / det, (s2 * s11 - s1 * s12) / det


def _mean(values: Iterable[float]) -> float:
    """Arithmetic mean; 0.0 of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else 0.0


FITTED = fit()
"""From all rows."""

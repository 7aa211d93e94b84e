"""Facts about chips, models and published rates, each with its source.

Nothing here was measured by this project. Each assumption is a `Stated` value with its source, and
with another value where sources differ; none was fitted to a published rate.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from replicas.generators.model_config import parse_hf_config
from replicas.generators.simulated.meshes import PROMPT_LEN, ROWS, SLOTS_PER_LANE
from replicas.generators.ttnn.programs import Grid

if TYPE_CHECKING:
    from replicas.generators.ttnn.profiles import Fidelity
    from replicas.tt.meshes import Arch

_DATA = Path(__file__).parent

SOURCES = {
    "llms": "tt-metal `tech_reports/LLMs/llms.md` at 0100dbfc, sections 4.3 to 4.6",
    "dram": "tt-metal `tech_reports/Saturating_DRAM_bandwidth/Saturating_DRAM_bandwidth.md` at "
    "0c3eb94a",
    "dram-blackhole": "the same folder's `Saturating_DRAM_bandwidth_Blackhole.md` at 7ffb007c",
    "gemm": "tt-metal `tech_reports/GEMM_FLOPS/GEMM_FLOPS.md` at 06bd3735",
    "flash-decode": "tt-metal `tech_reports/FlashAttention/FlashDecode.md` at 74275f4f, section 4",
    "collectives": "tt-metal `tech_reports/CCLs/results/FULL_wormhole_b0_bfloat16_6144.md` at "
    "608f1592: tables of DRAM tensors, Wormhole LoudBox, traced",
    "galaxy": "tt-metal `models/demos/llama3_70b_galaxy/tests/decoder_perf_targets_6u.json` at "
    "02cd859b: kernels of a traced decode step of 32 rows on Wormhole",
    "one-core-norm": "tt-mlir #7717: an RMSNorm of 32 rows and 2,880 columns on one core",
    "sharded-norm": "tt-mlir #7965: the same in shards, ten times as fast",
    "readme": "tt-metal `models/README.md` at 02068156",
    "perf": "tt-metal `models/tt_transformers/PERF.md` at 040a27c1, performance settings",
    "targets": "tt-metal `models/model_targets.yaml` at 0008cdce: its CI's targets, ± 15 %",
    "inference-server": "tt-inference-server's reference targets, theoretical",
    "two-readers": "tt-metal #55080, September 2026: two cores beside each bank of a p150",
    "lofi": "tt-metal #50662, July 2026: LoFi in all products but gate and up "
    "takes a p150 of one user from 40.2 to 51.5 tokens/s",
}
"""By the names that everything below uses."""

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
MODELS = {
    name: parse_hf_config({**_LLAMA, **changes}, name)
    for name, changes in {
        "Llama-3.1-8B": {},
        "Qwen3-8B": {
            "architectures": ["Qwen3ForCausalLM"], "intermediate_size": 12288, "head_dim": 128,
            "num_hidden_layers": 36, "vocab_size": 151936, "max_position_embeddings": 40960,
        },
        "Mistral-7B": {
            "architectures": ["MistralForCausalLM"], "vocab_size": 32768, "sliding_window": None,
            "max_position_embeddings": 32768,
        },
    }.items()
}  # fmt: skip
"""By name, from their config.json."""

MESHES = ("N150", "N300", "T3K", "P150")
"""Names in `replicas.tt.meshes`, one lane each."""


@dataclass(frozen=True, slots=True)
class Cores:
    """A chip's arithmetic units.

    Attributes:
        grid: Worker cores, a matrix engine each.
        hertz: Cycles per second.
    """

    grid: Grid
    hertz: float

    def flops_per_s(self, num_cores: int, fidelity: Fidelity) -> float:
        """Return the rate of some cores, each 8x16 by 16x16 in a cycle and phase."""
        return num_cores * self.hertz * _FLOPS_PER_CYCLE / PHASES[fidelity]


_FLOPS_PER_CYCLE = 2 * 8 * 16 * 16

PHASES: dict[Fidelity, int] = {"LoFi": 1, "HiFi2": 2, "HiFi3": 3, "HiFi4": 4}
"""Passes of the matrix engine, each with other bits of the mantissas."""

CORES: dict[Arch, Cores] = {
    "wormhole": Cores(Grid(8, 8), hertz=1.0e9),
    "blackhole": Cores(Grid(13, 10), hertz=1.35e9),
}
"""Source: gemm."""

Key: TypeAlias = Literal[
    "stripes", "interleaved", "cache", "tuned", "unaided", "gap", "norm column", "norm column in "
    "shards", "heads", "rotate", "write cache", "join heads", "move", "multiply", "add", "other",
    "best column", "draw",
]  # fmt: skip


LEAST_SHARE = 0.01
"""Larger values are shares, smaller ones seconds."""


@dataclass(frozen=True, slots=True)
class Stated:
    """One assumption.

    Attributes:
        value: The value in use: a share, or seconds on Wormhole.
        text: Its meaning.
        source: A key of `SOURCES`.
        other: Another published value; None if there is none.
        other_source: Where that is written.
    """

    value: float
    text: str
    source: str
    other: float | None = None
    other_source: str = ""

    @property
    def other_is_slower(self) -> bool:
        """Whether ops take longer with the other value; values above 1 % are shares."""
        if self.other is None:
            return False
        return self.other < self.value if self.value > LEAST_SHARE else self.other > self.value


ASSUMPTIONS: dict[Key, Stated] = {
    "stripes": Stated(
        240 / 288, "of peak DRAM bandwidth: a product with weights in stripes, one per bank",
        "llms", 260 / 288, "dram",
    ),
    "interleaved": Stated(
        190 / 288, "of peak DRAM bandwidth: ops that read interleaved tensors", "llms",
    ),
    "cache": Stated(
        180 / 288, "of peak DRAM bandwidth: decode attention, of the rows' whole contexts",
        "flash-decode",
    ),
    "tuned": Stated(
        0.76, "of the arithmetic of the cores at the banks: the most that products in HiFi2 and "
        "bfloat8_b reach on N150, whose rows are in L1; of 512 rows, the fewest measured", "gemm",
        0.44, "gemm",
    ),
    "unaided": Stated(
        0.52, "of all cores' arithmetic: programs that ttnn chooses, and chunks", "gemm",
        0.78, "gemm",
    ),
    "gap": Stated(0.7e-6, "between two ops of a trace", "galaxy", 6e-6, "llms"),
    "norm column": Stated(
        108e-6 / 2880, "per column of a norm of 32 rows on one core", "one-core-norm",
    ),
    "norm column in shards": Stated(10.8e-6 / 2880, "the same in shards", "sharded-norm"),
    "heads": Stated(8.0e-6, "heads cut from rows", "galaxy"),
    "rotate": Stated(2.2e-6, "a rotation", "galaxy"),
    "write cache": Stated(4.5e-6, "keys or values, or both, written to the cache", "galaxy"),
    "join heads": Stated(8.4e-6, "heads joined to rows", "galaxy"),
    "move": Stated(1.3e-6, "a change of shards or layout", "galaxy", 3.9e-6, "galaxy"),
    "multiply": Stated(2.4e-6, "SiLU and product of the MLP's halves", "galaxy"),
    "add": Stated(0.85e-6, "a residual sum", "galaxy"),
    "other": Stated(3.1e-6, "any other op on few tiles", "galaxy"),
    "best column": Stated(
        289e-6 / 16384, "per column of the 32 best of a vocabulary (`topk`)", "galaxy",
    ),
    "draw": Stated(122e-6, "the draw itself, with the gap before it", "galaxy"),
}  # fmt: skip
"""Seconds of kernels hold for 32 rows, whatever the width; Blackhole's are shorter as its clock is
faster."""


@dataclass(frozen=True, slots=True)
class Published:
    """A rate that Tenstorrent has published.

    Attributes:
        model: Name of a model.
        mesh: Name of a mesh.
        batch: Users.
        prompt: Tokens of a prompt; None if not published.
        ttft_ms: Time to the first token.
        tokens_per_s_per_user: Of decode.
        kind: "measured", a target, or a special condition.
        source: A key of `SOURCES`.
    """

    model: str
    mesh: str
    batch: int
    prompt: int | None
    ttft_ms: float
    tokens_per_s_per_user: float
    kind: str
    source: str


def published() -> list[Published]:
    """Every rate of these models and meshes: those of the simulated mesh, and published.csv."""
    names = {mesh.lower(): mesh for mesh in MESHES}
    found = [
        Published(
            row.model, names[row.board.lower()], SLOTS_PER_LANE, PROMPT_LEN, row.ttft_ms,
            row.tokens_per_s_per_user, "measured", "readme",
        )
        for row in ROWS
        if row.model in MODELS and row.board.lower() in names
    ]  # fmt: skip
    with (_DATA / "published.csv").open(encoding="utf-8", newline="") as file:
        found += [
            Published(
                row["model"], row["mesh"], int(row["batch"]), int(row["prompt"] or 0) or None,
                float(row["ttft_ms"]), float(row["tokens_per_s_per_user"]), row["kind"],
                row["source"],
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip
    order = {name: place for place, name in enumerate((*MODELS, *MESHES))}
    return sorted(found, key=lambda rate: (order[rate.model], order[rate.mesh]))


Collective: TypeAlias = Literal["all_gather", "reduce_scatter"]
Topology: TypeAlias = Literal["line", "ring"]


def _measured_collectives() -> dict[tuple[str, str, int], list[tuple[float, float]]]:
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    with (_DATA / "collectives.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = row["collective"], row["topology"], int(row["chips"])
            found.setdefault(key, []).append((float(row["bytes"]), float(row["us"]) * 1e-6))
    return found


_COLLECTIVES = _measured_collectives()


def collective_s(kind: Collective, topology: Topology, num_chips: int, num_bytes: float) -> float:
    """Return the seconds of a collective on Wormhole, interpolated between measurements.

    Tensors below the smallest measured one take as long as that. Above the largest the last line is
    extended.

    Args:
        kind: Which.
        topology: How the chips are joined.
        num_chips: 2 or 8.
        num_bytes: Of the whole tensor that is summed or gathered.
    """
    points = _COLLECTIVES[kind, topology, num_chips]
    if num_bytes <= points[0][0]:
        return points[0][1]
    lines = list(pairwise(points))
    place = bisect_left([end for _, (end, _) in lines], num_bytes)
    (start, start_s), (end, end_s) = lines[min(place, len(lines) - 1)]
    return start_s + (num_bytes - start) * (end_s - start_s) / (end - start)

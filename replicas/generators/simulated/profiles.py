"""Times and memory of a model on a board: measured where available, otherwise predicted.

Pure. A pair of board and model that Tenstorrent measured uses that row; other pairs use the
prediction of `calibration`. Lanes beyond those of a row add the fitted cost of lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from replicas.errors import ConfigError
from replicas.generators.simulated.calibration import (
    CONTEXT,
    FITTED,
    MOST_CHIPS,
    lane_share,
)
from replicas.generators.simulated.meshes import (
    BOARDS,
    MODELS,
    PROMPT_LEN,
    ROWS,
    SLOTS_PER_LANE,
    Board,
    MeasuredRow,
    ModelSpec,
)
from replicas.generators.simulated.timing import LinkTiming, MeshTiming, padded_prefill_len

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replicas.config import EngineConfig, SimulatedMeshConfig
    from replicas.generators.protocol import ModelCapabilities

T = TypeVar("T")

CAPABILITIES: ModelCapabilities = {
    "supports_prefix_caching": True,
    "supports_chunked_prefill": True,
    "supports_async_decode": True,
    "supports_sample_on_device": True,
    "supports_sample_in_prefill": True,
    "supports_device_penalties": False,
    "device_draws_keep_no_state": True,
}
"""Capabilities of the simulated generator, for simulators that create none."""

HOST_S = 0.0013
HOST_ROW_S = 14e-6
"""Seconds that our engine's host spends on a step, and on each of its rows, outside the device:
scheduling, input tables, sampling, waking up. Taken off the measured rows, because an engine adds
its own. Measured by benchmarks/simulated_mesh.py on two cores of an AMD EPYC: 1.3 to 2.0 ms with 32
rows, 4.7 to 6.7 with 256, 16 to 20 with 1,024."""

DRAM_UTILISATION = 0.95
"""Share of DRAM that weights and KV may fill; the rest is activations and fragments. Assumed."""
TRACE_REGION_BYTES = 50_000_000
"""Of each chip; vllm-tt-plugin's default."""
COMPILE_S_PER_BUCKET = 10.0
"""Seconds to compile and capture one padded length. Assumed, as no figure is published."""


@dataclass(frozen=True, slots=True)
class MeshProfile:
    """One model on one board in so many lanes.

    Attributes:
        board: The board.
        model: The model.
        num_lanes: DP groups; each has its share of the chips to itself.
        row: The measured row that it reproduces; None where it is predicted.
        ttft_s: Seconds of a prompt of 128 tokens, host included.
        step_s: Seconds of a full decode step after it, host included.
    """

    board: Board
    model: ModelSpec
    num_lanes: int
    row: MeasuredRow | None
    ttft_s: float
    step_s: float

    @property
    def chips_per_lane(self) -> int:
        """Chips that share the weights of one lane."""
        return self.board.num_chips // self.num_lanes

    @property
    def max_tokens_per_lane(self) -> int:
        """KV tokens that fit in a lane's DRAM beside the weights; may be 0 or less."""
        chips = self.chips_per_lane
        usable = chips * (self.board.chip.dram_bytes * DRAM_UTILISATION - TRACE_REGION_BYTES)
        return int((usable - self.model.weight_bytes) // self.model.kv_bytes_per_token)

    def compile_s(self, max_model_len: int | None = None) -> float:
        """Return seconds of warm-up: every padded prompt length, and decode."""
        longest = padded_prefill_len(max_model_len or self.model.max_context)
        num_buckets = 1 if longest == PROMPT_LEN else 2 + max(0, (longest // 1024).bit_length() - 1)
        return COMPILE_S_PER_BUCKET * (num_buckets + 1)

    def timing(
        self,
        *,
        block_size: int,
        link: LinkTiming,
        compile_s: float | None = None,
        num_slots: int | None = None,
    ) -> MeshTiming:
        """Return times of single steps.

        Args:
            block_size: Tokens per KV block.
            link: What moving KV costs.
            compile_s: Seconds of warm-up; None takes the estimate.
            num_slots: Decode slots of the engine, whose host time is taken off a decode step; None
                for all that the lanes have.
        """
        model, lanes = self.model, lane_share(self.num_lanes)
        decode_lanes_s = FITTED.decode_lanes_s * lanes
        prefill_lanes_s = FITTED.prefill_lanes_s * lanes
        read_s = FITTED.context_token_s(self.board, model, self.num_lanes)
        slots = SLOTS_PER_LANE * self.num_lanes if num_slots is None else num_slots
        # Attention costs 4 * width * layers operations per pair of tokens, the rest 2 per
        # parameter and token, at the same speed.
        per_pair = 2 * model.num_layers * model.attention_width / model.num_forward_params
        token_s = (self.ttft_s - prefill_lanes_s - HOST_S - HOST_ROW_S) / PROMPT_LEN
        token_s /= 1.0 + per_pair * PROMPT_LEN / 2
        base_s = self.step_s - decode_lanes_s - HOST_S - slots * HOST_ROW_S
        return MeshTiming(
            block_size=block_size,
            prefill_token_s=token_s,
            prefill_token_pair_s=token_s * per_pair,
            # The host alone may take longer than a small model in many lanes is predicted to.
            decode_base_s=max(base_s - SLOTS_PER_LANE * CONTEXT * read_s, 0.0),
            context_token_s=read_s,
            prefill_lanes_s=prefill_lanes_s,
            decode_lanes_s=decode_lanes_s,
            compile_s=self.compile_s() if compile_s is None else compile_s,
            host_s=HOST_S,
            host_row_s=HOST_ROW_S,
            bytes_per_token=model.kv_bytes_per_token,
            link=link,
        )


def mesh_profile(board_name: str, model_name: str, num_lanes: int = 1) -> MeshProfile:
    """Return the profile of a model on a board.

    Args:
        board_name: A key of `meshes.BOARDS`.
        model_name: A key of `meshes.MODELS`.
        num_lanes: DP groups that share the board's chips out among them.

    Raises:
        ConfigError: A name is unknown, the lanes do not divide the chips, there is neither a row
            nor a prediction, or the weights do not fit; says the numbers.
    """
    board = _known(BOARDS, board_name, "board")
    model = _known(MODELS, model_name, "model")
    if board.num_chips % num_lanes:
        raise ConfigError(
            f"tt_data_parallel {num_lanes} does not divide the {board.num_chips} chips of "
            f"{board_name}"
        )
    row = _row(board, model, num_lanes)
    if row is None:
        if board.num_chips // num_lanes > MOST_CHIPS:
            raise ConfigError(
                f"no figures for {model_name} on {board.num_chips // num_lanes} chips of "
                f"{board_name} a lane: nothing was measured, and predictions end at "
                f"{MOST_CHIPS} chips; use more lanes (tt_data_parallel)"
            )
        ttft_s = FITTED.ttft_s(board, model, num_lanes)
        step_s = FITTED.step_s(board, model, num_lanes)
    else:
        more_lanes = lane_share(num_lanes) - lane_share(row.num_lanes)
        ttft_s = row.ttft_s + FITTED.prefill_lanes_s * more_lanes
        step_s = row.step_s + FITTED.decode_lanes_s * more_lanes
    profile = MeshProfile(board, model, num_lanes, row, ttft_s, step_s)
    if profile.max_tokens_per_lane < SLOTS_PER_LANE:
        raise ConfigError(
            f"{model_name} does not fit {board_name} in {num_lanes} lanes: its weights take "
            f"{model.weight_bytes / 1e9:.1f} GB, and a lane's {profile.chips_per_lane} chips have "
            f"{profile.chips_per_lane * board.chip.dram_bytes / 1e9:.1f} GB; use fewer lanes or a "
            "larger board"
        )
    return profile


def engine_profile(config: EngineConfig, mesh: SimulatedMeshConfig) -> MeshProfile:
    """Return the profile of an engine.

    Args:
        config: The engine's configuration.
        mesh: Its `simulated_mesh`.

    Raises:
        ConfigError: See `mesh_profile`; or a lane has more slots than a decode batch has rows.
    """
    if config.slots_per_group > SLOTS_PER_LANE:
        raise ConfigError(
            f"max_batch_size {config.max_batch_size} in {config.tt_data_parallel} lanes is "
            f"{config.slots_per_group} slots a lane, and a mesh decodes at most {SLOTS_PER_LANE}"
        )
    return mesh_profile(mesh.board, mesh.model, config.tt_data_parallel)


def engine_timing(
    config: EngineConfig, mesh: SimulatedMeshConfig, compile_s: float | None = None
) -> MeshTiming:
    """Return times of an engine's steps.

    Args:
        config: The engine's configuration.
        mesh: Its `simulated_mesh`.
        compile_s: Seconds of warm-up; None takes the profile's estimate.
    """
    profile = engine_profile(config, mesh)
    if compile_s is None:
        compile_s = profile.compile_s(config.max_model_len)
    link = LinkTiming(mesh.link_setup_s, mesh.link_bytes_per_s)
    return profile.timing(
        block_size=config.block_size,
        link=link,
        compile_s=compile_s,
        num_slots=config.max_batch_size,
    )


def _row(board: Board, model: ModelSpec, num_lanes: int) -> MeasuredRow | None:
    """Return a row of the same shape on as many of the same chips, best with as many lanes."""
    chips = board.num_chips // num_lanes
    found = [
        row
        for row in ROWS
        if _shape(MODELS[row.model]) == _shape(model)
        and BOARDS[row.board].chip == board.chip
        and BOARDS[row.board].num_chips // row.num_lanes == chips
    ]
    return min(found, key=lambda row: abs(row.num_lanes - num_lanes), default=None)


def _shape(model: ModelSpec) -> tuple[object, ...]:
    """Return fine-tunes of one model run alike."""
    return (
        model.implementation, model.hidden_size, model.intermediate_size, model.num_layers,
        model.num_kv_heads, model.vocab_size, model.num_experts,
    )  # fmt: skip


def _known(table: Mapping[str, T], name: str, what: str) -> T:
    if name not in table:
        raise ConfigError(f"simulated_mesh.{what} {name!r} is not known; known: {', '.join(table)}")
    return table[name]

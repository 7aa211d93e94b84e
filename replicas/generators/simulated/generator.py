"""The simulated generator: Tenstorrent's generator interface over a model that only hashes.

It writes and reads a paged KV cache as a model would, so that its tokens are right only if paging,
prefix caching, lanes and KV transfer are; and it takes as long as its `SimulatedMesh` says.
Source of the interface: see `replicas.generators.protocol`.
"""

# The interface is fixed by another project, so its methods keep all of their arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from replicas.errors import ConfigError
from replicas.generators.model_config import to_model_config
from replicas.generators.simulated.device import SimulatedMesh
from replicas.generators.simulated.meshes import BOARDS, MODELS
from replicas.generators.simulated.profiles import CAPABILITIES, mesh_profile
from replicas.generators.simulated.tokens import NextToken, PagedKVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import (
        DeviceSamplingParams,
        Generator,
        KVCache,
        KVCacheShape,
        ModelCapabilities,
        SupportsTokenBudget,
    )

_HOT = 1e30
"""The one logit that is not zero: every temperature, top-k and top-p leaves its token alone, and so
may sampling on the device."""
_UNKNOWN_TOKEN_BUDGET = 131_072
"""What a TT class without a budget of its own gets."""
_NUM_WARM_UPS = 4
"""Prefill and decode, each compiled and captured: every one is a quarter of the warm-up."""


@dataclass(frozen=True, slots=True)
class DeviceOutput:
    """Output of a decode on the device: (B, 1) tokens or (B, 1, V) logits, and its event."""

    host: torch.Tensor
    event: float


@dataclass(slots=True)
class _Resident:
    """Decode state on the device: (B, 1) tokens, (B,) their positions, (B, K) page table."""

    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    page_table: npt.NDArray[np.int32]


class SimulatedGenerator:
    """A text-only decoder on a `SimulatedMesh`.

    Args:
        config: Vocabulary and end tokens that it serves.
        mesh: The device.
        max_batch_size: Slots over all lanes.
        num_lanes: DP groups.
    """

    model_capabilities: ClassVar[ModelCapabilities] = CAPABILITIES
    decode_input_update_contract: ClassVar[int] = 1

    def __init__(
        self, config: ModelConfig, mesh: SimulatedMesh, max_batch_size: int, num_lanes: int
    ) -> None:
        self._mesh = mesh
        self._vocab_size = config.vocab_size
        self._next_token = NextToken(config.vocab_size, config.eos_token_id)
        self._max_batch_size = max_batch_size
        self._num_lanes = num_lanes
        # Of the last decode call, if that has drawn its tokens and nothing else has run since.
        self._resident: _Resident | None = None

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: object,
        mesh_device: SimulatedMesh,
        max_batch_size: int,
        *,
        max_seq_len: int,
        tt_data_parallel: int = 1,
        optimizations: str | None = None,
    ) -> SimulatedGenerator:
        """Make a model; see `GeneratorBase.initialize_vllm_model`. There are no weights to load.

        Raises:
            ConfigError: The device is of another kind, or the lanes do not divide the slots.
        """
        if not isinstance(mesh_device, SimulatedMesh):
            raise ConfigError(
                "the simulated generator runs on a SimulatedMesh, not "
                f"{type(mesh_device).__name__}; set simulated_mesh"
            )
        if max_batch_size % tt_data_parallel:
            raise ConfigError(f"{max_batch_size=} is no multiple of {tt_data_parallel=}")
        return cls(to_model_config(hf_config), mesh_device, max_batch_size, tt_data_parallel)

    @classmethod
    def get_max_tokens_all_users(
        cls,
        *,
        model_name: str,
        num_devices: int,
        tt_data_parallel: int,
        max_model_len: int,
        max_num_seqs: int,
    ) -> int:
        """Return the token budget of a lane; see `SupportsTokenBudget.get_max_tokens_all_users`.

        Args:
            model_name: "board/model" with the names in `meshes`; any other name gets the default of
                a class without this method.
            num_devices: Ignored; the board decides.
            tt_data_parallel: Lanes.
            max_model_len: Ignored.
            max_num_seqs: Ignored.

        Raises:
            ConfigError: The model does not fit the board in so many lanes.
        """
        board, _, model = model_name.partition("/")
        if board not in BOARDS or model not in MODELS:
            return _UNKNOWN_TOKEN_BUDGET
        return mesh_profile(board, model, tt_data_parallel).max_tokens_per_lane

    def allocate_kv_cache(
        self, kv_cache_shape: KVCacheShape, dtype: torch.dtype, num_layers: int
    ) -> PagedKVCache:
        """Allocate a zeroed cache; heads, head size, dtype and layers are the model's own."""
        num_blocks, _, block_size, _ = kv_cache_shape
        return PagedKVCache(self._num_lanes, num_blocks, block_size)

    def warmup_model_prefill(
        self,
        *,
        kv_cache: KVCache,
        enable_trace: bool,
        can_sample_on_device: bool = False,
        **kwargs: object,
    ) -> None:
        """Spend a share of the warm-up."""
        self._warm_up()

    def warmup_model_decode(
        self,
        *,
        kv_cache: KVCache,
        enable_trace: bool,
        max_batch_size: int,
        num_blocks: int,
        can_sample_on_device: bool = False,
        **kwargs: object,
    ) -> None:
        """Spend a share of the warm-up."""
        self._warm_up()

    def prefill_forward(
        self,
        *,
        tokens: torch.Tensor,
        page_table: torch.Tensor,
        kv_cache: PagedKVCache,
        enable_trace: bool,
        prompt_lens: torch.Tensor,
        start_pos: torch.Tensor,
        empty_slots: Sequence[int],
        sampling_params: DeviceSamplingParams | None = None,
        page_tables_per_layer: Sequence[torch.Tensor] | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Prefill; see `Generator.prefill_forward`.

        Returns:
            (N, 1, V) float32, one-hot; with `sampling_params` int32 (N, 1).

        Raises:
            ValueError: A slot is out of range, or an option is not supported.
        """
        _refuse_layers(page_tables_per_layer)
        self._resident = None
        lanes = self._lanes_of(np.asarray(empty_slots, dtype=np.int64))
        starts, ends = start_pos.tolist(), prompt_lens.tolist()
        chunks = list(zip(lanes.tolist(), starts, ends, strict=True))
        with self._mesh.busy(self._mesh.timing.prefill_s(chunks)):
            tables, ids = page_table.numpy(), tokens.numpy()
            for row, (lane, start, end) in enumerate(chunks):
                kv_cache.write_tokens(lane, tables[row], ids[row, start:end], start)
            sums = kv_cache.context_sums(lanes, tables, prompt_lens.numpy())
            token_ids = self._next_token(sums)
        tokens = torch.from_numpy(token_ids.astype(np.int32))[:, None]
        return self._one_hot(tokens) if sampling_params is None else tokens

    def decode_forward(
        self,
        *,
        tokens: torch.Tensor,
        page_table: torch.Tensor,
        kv_cache: PagedKVCache,
        start_pos: torch.Tensor,
        enable_trace: bool,
        read_from_device: bool = True,
        sampling_params: DeviceSamplingParams | None = None,
        page_tables_per_layer: Sequence[torch.Tensor] | None = None,
        reload_inputs: bool = True,
        reload_page_table: bool = False,
        reload_sampling_params: bool = False,
        reset_sampling_state: bool = False,
        slot_remap: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | DeviceOutput:
        """Decode; see `Generator.decode_forward`.

        Returns:
            (B, 1, V) float32, one-hot; with `sampling_params` int32 (B, 1). Zero where the position
            is -1. Left on the device without `read_from_device`.

        Raises:
            TypeError: `reset_batch` was passed.
            ValueError: The batch does not have `max_batch_size` rows, the device has no previous
                step to continue from, or an option is not supported.
        """
        if "reset_batch" in kwargs:
            raise TypeError("reset_batch is retired; decode contract 1 has four reload commands")
        _refuse_layers(page_tables_per_layer)
        if len(start_pos) != self._max_batch_size:
            raise ValueError(f"{len(start_pos)} rows for a batch of {self._max_batch_size}")
        if reload_inputs:
            positions = start_pos.numpy().astype(np.int64)
            found = _Resident(tokens.numpy(), positions, page_table.numpy().copy())
        elif self._resident is None:
            raise ValueError("the device drew no tokens in the last step: set reload_inputs")
        else:
            found = self._resident
            if reload_page_table:
                found.page_table = page_table.numpy().copy()
                # Rows without blocks have ended: they cost nothing and are not read.
                found.positions[found.page_table[:, 0] == 0] = -1
        live = np.flatnonzero(found.positions >= 0)
        lanes, rows = self._lanes_of(live), found.positions[live]
        contexts = list(zip(lanes.tolist(), (rows + 1).tolist(), strict=True))
        # From here on the device works concurrently; host computation below is part of its time.
        event = self._mesh.submit(self._mesh.timing.decode_s(contexts))
        output = self._decode(found, live, lanes, rows, kv_cache)
        self._resident = None
        host = torch.from_numpy(output)
        if sampling_params is None:
            host = self._one_hot(host)
            host[torch.from_numpy(found.positions < 0)] = 0.0
        else:
            found.positions[live] += 1
            self._resident = _Resident(output, found.positions, found.page_table)
        left = DeviceOutput(host, event)
        return self._read(left) if read_from_device else left

    def read_decode_output(
        self, tt_out: DeviceOutput, async_read: bool = True
    ) -> tuple[torch.Tensor, list[object]]:
        """Return the output, and with `async_read` the event that it is there."""
        if async_read:
            return tt_out.host, [tt_out.event]
        return self._read(tt_out), []

    def process_decode_output_host(
        self, tt_out: torch.Tensor, is_tokens: bool = False
    ) -> torch.Tensor:
        """Return the output as it is."""
        return tt_out

    def _decode(
        self,
        found: _Resident,
        live: npt.NDArray[np.int64],
        lanes: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        kv_cache: PagedKVCache,
    ) -> npt.NDArray[np.int32]:
        """Write the rows' KV; int32 (B, 1) of their next tokens, 0 in all others."""
        width = int(positions.max(initial=0)) // kv_cache.block_size + 1
        tables = found.page_table[live, :width]
        kv_cache.write_rows(lanes, tables, found.tokens[live, 0], positions)
        output = np.zeros((self._max_batch_size, 1), dtype=np.int32)
        output[live, 0] = self._next_token(kv_cache.context_sums(lanes, tables, positions + 1))
        return output

    def _read(self, output: DeviceOutput) -> torch.Tensor:
        self._mesh.wait(output.event)
        return output.host

    def _warm_up(self) -> None:
        with self._mesh.busy(self._mesh.timing.warm_up_s() / _NUM_WARM_UPS):
            pass

    def _lanes_of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if len(slots) and not 0 <= slots.min() <= slots.max() < self._max_batch_size:
            raise ValueError(f"slots {slots} for a batch of {self._max_batch_size}")
        lanes: npt.NDArray[np.int64] = slots // (self._max_batch_size // self._num_lanes)
        return lanes

    def _one_hot(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (n, 1, V) of tokens (n, 1)."""
        logits = torch.zeros((len(tokens), 1, self._vocab_size))
        return logits.scatter_(-1, tokens.long()[:, :, None], _HOT)


def _refuse_layers(page_tables_per_layer: Sequence[torch.Tensor] | None) -> None:
    if page_tables_per_layer is not None:
        raise ValueError("page_tables_per_layer given, but every layer uses page_table")


if TYPE_CHECKING:  # fails type checking when the class and the protocols part ways
    _generator: type[Generator] = SimulatedGenerator
    _budget: type[SupportsTokenBudget] = SimulatedGenerator

"""The simulated generator: Tenstorrent's generator interface over a model that only hashes.

It writes and reads a paged KV cache as a model would, so that its tokens are right only if paging,
prefix caching, lanes and KV transfer are; and it takes as long as its `SimulatedMesh` says.
Source of the interface: see `replicas.generators.protocol`.
"""

# The interface is fixed by another project, so its methods keep all of their arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

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
        """What a lane's DRAM holds; see `SupportsTokenBudget.get_max_tokens_all_users`.

        Args:
            model_name: "board/model", as `meshes` names both; any other gets what a class without
                this method gets.
            num_devices: Ignored: the board says.
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
    ) -> torch.Tensor:
        """Decode; see `Generator.decode_forward`.

        Returns:
            (B, 1, V) float32, one-hot; with `sampling_params` int32 (B, 1). Zero where the position
            is -1.

        Raises:
            TypeError: `reset_batch` was passed.
            ValueError: The batch is not `max_batch_size` rows, or an option is not supported.
        """
        if "reset_batch" in kwargs:
            raise TypeError("reset_batch is retired; decode contract 1 has four reload commands")
        if not reload_inputs:
            raise ValueError("needs reload_inputs: supports_async_decode is False")
        _refuse_layers(page_tables_per_layer)
        if len(start_pos) != self._max_batch_size:
            raise ValueError(f"{len(start_pos)} rows for a batch of {self._max_batch_size}")
        live = np.flatnonzero(start_pos.numpy() >= 0)
        lanes, positions = self._lanes_of(live), start_pos.numpy()[live].astype(np.int64)
        rows = list(zip(lanes.tolist(), (positions + 1).tolist(), strict=True))
        with self._mesh.busy(self._mesh.timing.decode_s(rows)):
            width = int(positions.max(initial=0)) // kv_cache.block_size + 1
            tables = page_table.numpy()[live, :width]
            kv_cache.write_rows(lanes, tables, tokens.numpy()[live, 0], positions)
            token_ids = self._next_token(kv_cache.context_sums(lanes, tables, positions + 1))
        output = torch.zeros((len(start_pos), 1), dtype=torch.int32)
        output.numpy()[live, 0] = token_ids
        if sampling_params is not None:
            return output
        logits = self._one_hot(output)
        logits[start_pos < 0] = 0.0
        return logits

    def read_decode_output(
        self, tt_out: torch.Tensor, async_read: bool = True
    ) -> tuple[torch.Tensor, list[object]]:
        """Return the output and no events."""
        return tt_out, []

    def process_decode_output_host(
        self, tt_out: torch.Tensor, is_tokens: bool = False
    ) -> torch.Tensor:
        """Return the output as it is."""
        return tt_out

    def _warm_up(self) -> None:
        with self._mesh.busy(self._mesh.timing.warm_up_s() / _NUM_WARM_UPS):
            pass

    def _lanes_of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if len(slots) and not 0 <= slots.min() <= slots.max() < self._max_batch_size:
            raise ValueError(f"slots {slots} for a batch of {self._max_batch_size}")
        lanes: npt.NDArray[np.int64] = slots // (self._max_batch_size // self._num_lanes)
        return lanes

    def _one_hot(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (n, 1, V) of tokens (n, 1)."""
        logits = torch.zeros((len(tokens), 1, self._vocab_size))
        return logits.scatter_(-1, tokens.long()[:, :, None], _HOT)


def _refuse_layers(page_tables_per_layer: Sequence[torch.Tensor] | None) -> None:
    if page_tables_per_layer is not None:
        raise ValueError("page_tables_per_layer given, but every layer uses page_table")


if TYPE_CHECKING:  # fails type checking when the class and the protocols part ways
    _generator: type[Generator] = SimulatedGenerator
    _budget: type[SupportsTokenBudget] = SimulatedGenerator

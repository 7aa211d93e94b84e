"""One lane of Llama, Mistral, Qwen2 and Qwen3 as a sequence of ttnn operations.

Tensor parallelism over the lane's chips: the embedding and the output layer are split by
vocabulary, attention by heads, the MLP by its inner columns. Between them every chip has the whole
hidden state. Activations of a chunk are in DRAM, those of a decode step in L1.

Which program runs depends on the bucket, on whether a chunk begins at 0, on how many tokens its
attention takes at once, and on nothing else of a request: positions, blocks, lengths are tensors.

Dimensions: S tokens of a bucket, B decode rows, V vocabulary padded to whole tiles on each chip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import ttnn

from replicas.errors import ConfigError
from replicas.generators.ttnn.attention import PagedAttention
from replicas.generators.ttnn.buckets import TILE, check_cache, check_lane
from replicas.generators.ttnn.collectives import Collectives
from replicas.generators.ttnn.kernels import kernels_of
from replicas.generators.ttnn.mlp import mlp
from replicas.generators.ttnn.products import (
    ChunkProducts,
    RowProducts,
    chip_cores,
    moved,
    row_program,
)
from replicas.generators.ttnn.programs import lane_programs
from replicas.generators.ttnn.rope import DeviceRope

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replicas.generators.model_config import ModelConfig
    from replicas.generators.ttnn.inputs import TTDecodeInputs, TTPrefillInputs
    from replicas.generators.ttnn.products import Products
    from replicas.generators.ttnn.profiles import Profile
    from replicas.generators.ttnn.weights import DeviceWeights, TTLayerWeights

    LaneCache = Sequence[Sequence[ttnn.Tensor]]
    Attend = Callable[[ttnn.Tensor, TTLayerWeights, Sequence[ttnn.Tensor]], ttnn.Tensor]

PADDING_LOGIT = -1e30
"""Logit of the vocabulary's padding: never the best, and without probability."""


class TTTransformer:
    """Decoder model on one lane: a submesh (1, tp).

    Owns the rotary tables, semaphores and other constants on the device. Weights and KV cache
    belong to the caller. Every call has fixed shapes: see ``inputs``.
    the caller's. Every call has fixed shapes: see ``inputs``.

    Attributes:
        collectives: Collectives over the lane's chips, also used by the sampler.
    """

    def __init__(  # noqa: PLR0913 - what a lane is made of
        self,
        config: ModelConfig,
        device: ttnn.MeshDevice,
        weights: DeviceWeights,
        profile: Profile,
        *,
        max_seq_len: int,
        max_rows: int,
        block_size: int,
    ) -> None:
        """Put the constants on the device.

        Args:
            config: The model.
            device: The lane, (1, tp) chips.
            weights: Its weights on the lane.
            profile: Precision of the operations.
            max_seq_len: Tokens of the longest sequence.
            max_rows: Rows of every decode step, B.
            block_size: Tokens per KV block.

        Raises:
            ConfigError: The model does not fit the lane; says which two numbers do not.
        """
        tp = device.get_num_devices()
        check_lane(config, tp, max_rows=max_rows, block_size=block_size)
        self._config = config
        self._weights = weights
        self._tp = tp
        self._num_rows = max_rows
        self._kernels = kernels_of(profile)
        chip = chip_cores(device)
        programs = lane_programs(config, profile, chip, tp)
        self.collectives = Collectives(device)
        self._rows = RowProducts(config, programs, self._kernels, device, self.collectives)
        self._chunk = ChunkProducts(config, profile, self._kernels, chip, self.collectives, tp=tp)
        self._output_program = row_program(programs.output)
        self._rope = DeviceRope(config.rope, config.head_dim, max_seq_len, device)
        self._attention = PagedAttention(
            config, device, self._kernels, tp=tp, max_rows=max_rows, block_size=block_size
        )
        self._vocab_per_chip = weights.num_vocab_padded // tp
        self._first_token_id = _first_token_ids(device, tp, self._vocab_per_chip)
        self._padding_bias = _padding_bias(device, config.vocab_size, weights.num_vocab_padded)

    def close(self) -> None:
        """Free the semaphores, which must happen before the mesh is closed; idempotent."""
        self.collectives.close()

    def attention_piece(self, num_tokens: int, start: int) -> int:
        """Return attention's piece of a chunk in tokens; see `PagedAttention.piece`."""
        return self._attention.piece(num_tokens, start)

    def prefill(self, inputs: TTPrefillInputs, cache: LaneCache, piece: int) -> ttnn.Tensor:
        """Compute a chunk, write its KV and return the logits of its last token.

        Args:
            inputs: The chunk, on the device.
            cache: Keys and values of each layer, (blocks, kv_heads / tp, block_size, head_dim).
            piece: Result of `attention_piece`.

        Returns:
            bfloat16 (1, 1, 32, V / tp) on each chip, tiles in DRAM: 32 times the same row. The
            vocabulary's padding has ``PADDING_LOGIT``. The caller frees it.
        """
        dram = ttnn.DRAM_MEMORY_CONFIG
        self.collectives.begin_call()
        x = self._embedded(inputs.tokens, dram)
        rope = self._rope.of_chunk(inputs.rope_indices)

        def attend(
            normed: ttnn.Tensor, layer: TTLayerWeights, planes: Sequence[ttnn.Tensor]
        ) -> ttnn.Tensor:
            return self._attention.prefill(
                normed, layer, self._chunk, rope, inputs, planes, piece=piece
            )

        x = self._layers(x, attend, cache, self._chunk)
        tiles = ttnn.slice(
            x,
            inputs.last_tile_start,
            inputs.last_tile_end,
            slice_dim=2,
            # The number of pieces is compiled in; where they begin is a tensor.
            num_devices=x.shape[2] // TILE,
        )
        ttnn.deallocate(x)
        rows = ttnn.to_layout(tiles, ttnn.ROW_MAJOR_LAYOUT)
        ttnn.deallocate(tiles)
        last = ttnn.embedding(inputs.last_index, rows, layout=ttnn.TILE_LAYOUT)
        ttnn.deallocate(rows)
        return self._logits(ttnn.reshape(last, (1, 1, TILE, self._config.hidden_size)))

    def decode(self, inputs: TTDecodeInputs, cache: LaneCache) -> ttnn.Tensor:
        """Compute one token of each row, write its KV and return its logits.

        Args:
            inputs: The rows, on the device.
            cache: As in ``prefill``.

        Returns:
            bfloat16 (1, 1, 32, V / tp) on each chip, tiles in DRAM; rows B to 31, and those of
            padding rows, mean nothing. The vocabulary's padding as in ``prefill``. The caller frees
            it.

        Raises:
            ConfigError: There are not B rows, or the cache has fewer blocks than a page table has
                entries.
        """
        l1 = ttnn.L1_MEMORY_CONFIG
        check_cache(cache[0][0].shape[0], inputs.page_table.shape[-1])
        if inputs.tokens.shape[-1] != self._num_rows:
            raise ConfigError(
                f"a decode step has {inputs.tokens.shape[-1]} rows, but the lane {self._num_rows}"
            )
        self.collectives.begin_call()
        x = self._embedded(inputs.tokens, l1)
        if self._num_rows < TILE:
            x = ttnn.pad(x, [(0, 0), (0, 0), (0, TILE - self._num_rows), (0, 0)], value=0.0)
        rope = self._rope.of_rows(inputs.rope_indices, self._attention.rotated_in)

        def attend(
            normed: ttnn.Tensor, layer: TTLayerWeights, planes: Sequence[ttnn.Tensor]
        ) -> ttnn.Tensor:
            return self._attention.decode(normed, layer, self._rows, rope, inputs, planes)

        x = moved(x, self._rows.residual)
        return self._logits(self._layers(x, attend, cache, self._rows))

    def _embedded(self, tokens: ttnn.Tensor, memory_config: ttnn.MemoryConfig) -> ttnn.Tensor:
        """Return (1, 1, n, hidden) on every chip for tokens (1, n)."""
        if self._tp > 1:
            tokens = self._local_rows(tokens)
        x = ttnn.embedding(
            tokens, self._weights.embedding, layout=ttnn.TILE_LAYOUT, memory_config=memory_config
        )
        x = ttnn.reshape(x, (1, 1, tokens.shape[-1], self._config.hidden_size))
        return self.collectives.summed(x, memory_config)

    def _local_rows(self, tokens: ttnn.Tensor) -> ttnn.Tensor:
        """Return each chip's embedding row of a token; the zero row for tokens of other chips."""
        tiles = ttnn.to_layout(ttnn.typecast(tokens, ttnn.int32), ttnn.TILE_LAYOUT)
        local = ttnn.subtract(tiles, self._first_token_id)
        is_other = ttnn.logical_or(ttnn.lt(local, 0), ttnn.ge(local, self._vocab_per_chip))
        rows = ttnn.where(is_other, self._vocab_per_chip, local)
        return ttnn.to_layout(ttnn.typecast(rows, ttnn.uint32), ttnn.ROW_MAJOR_LAYOUT)

    def _layers(
        self,
        x: ttnn.Tensor,
        attend: Attend,
        cache: LaneCache,
        products: Products,
    ) -> ttnn.Tensor:
        """Run the decoder layers on hidden states, which are freed."""
        for layer, planes in zip(self._weights.layers, cache, strict=True):
            out = attend(products.attention_norm(x, layer.input_norm), layer, planes)
            x = products.added(x, out)
            out = mlp(products.mlp_norm(x, layer.post_norm), layer, products)
            x = products.added(x, out)
        return x

    def _logits(self, x: ttnn.Tensor) -> ttnn.Tensor:
        """Return the logits of 32 hidden states, which are freed."""
        shards = self._rows.attention_norm(x, self._weights.final_norm)
        ttnn.deallocate(x)
        normed = ttnn.to_memory_config(shards, ttnn.L1_MEMORY_CONFIG)
        ttnn.deallocate(shards)
        logits = ttnn.linear(
            normed,
            self._weights.lm_head,
            bias=self._padding_bias,
            dtype=ttnn.bfloat16,
            memory_config=ttnn.DRAM_MEMORY_CONFIG,
            program_config=self._output_program,
            compute_kernel_config=self._kernels.linear,
        )
        ttnn.deallocate(normed)
        return logits


def _first_token_ids(device: ttnn.MeshDevice, tp: int, vocab_per_chip: int) -> ttnn.Tensor:
    """Return int32 (1, 1) on each chip: the token of the first row of its embedding."""
    first = torch.arange(tp, dtype=torch.int32).view(1, tp) * vocab_per_chip
    return ttnn.from_torch(
        first,
        dtype=ttnn.int32,
        layout=ttnn.TILE_LAYOUT,
        device=device,
        memory_config=ttnn.DRAM_MEMORY_CONFIG,
        mesh_mapper=ttnn.ShardTensorToMesh(device, dim=1),
    )


def _padding_bias(device: ttnn.MeshDevice, vocab_size: int, num_padded: int) -> ttnn.Tensor | None:
    """Return (1, 1, 1, V / tp) on each chip, or None where no vocabulary is padded."""
    if vocab_size == num_padded:
        return None
    bias = torch.zeros(1, 1, 1, num_padded, dtype=torch.bfloat16)
    bias[..., vocab_size:] = PADDING_LOGIT
    return ttnn.from_torch(
        bias,
        dtype=ttnn.bfloat16,
        layout=ttnn.TILE_LAYOUT,
        device=device,
        memory_config=ttnn.DRAM_MEMORY_CONFIG,
        mesh_mapper=ttnn.ShardTensorToMesh(device, dim=3),
    )

"""Matrix products, norms and sums of a lane, with their ttnn configurations.

Turns the choices of `programs` into program and memory configurations. A decode step and a chunk go
through the same layers, so `RowProducts` and `ChunkProducts` have the same methods.

Dimensions: S tokens of a chunk; k and n, rows and columns of a weight on one chip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import ttnn

from replicas.generators.ttnn.buckets import TILE
from replicas.generators.ttnn.programs import (
    BankProduct,
    ChipCores,
    ColumnProduct,
    Grid,
    bank_columns,
    chunk_product,
    product_sizes,
    weight_tile_bytes,
)

if TYPE_CHECKING:
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.ttnn.collectives import Collectives
    from replicas.generators.ttnn.kernels import LaneKernels
    from replicas.generators.ttnn.profiles import ProductName, Profile
    from replicas.generators.ttnn.programs import ChunkProduct, LanePrograms, Norm


class Products(Protocol):
    """Operations of a call's layers, with tensors in the memory that they need."""

    def attention_norm(self, x: ttnn.Tensor, weight: ttnn.Tensor) -> ttnn.Tensor:
        """Return the RMSNorm of the residual stream, where ``qkv`` needs it."""
        ...

    def mlp_norm(self, x: ttnn.Tensor, weight: ttnn.Tensor) -> ttnn.Tensor:
        """Return the RMSNorm of the residual stream, where ``gate`` and ``up`` need it."""
        ...

    def times(
        self,
        name: ProductName,
        x: ttnn.Tensor,
        weight: ttnn.Tensor,
        bias: ttnn.Tensor | None = None,
    ) -> ttnn.Tensor:
        """Return the product with the weight of that name, and the bias added; ``x`` stays."""
        ...

    def summed(self, partial: ttnn.Tensor, bias: ttnn.Tensor | None = None) -> ttnn.Tensor:
        """Return the sum of all chips' summands plus the bias on every chip; free the summands."""
        ...

    def added(self, x: ttnn.Tensor, out: ttnn.Tensor) -> ttnn.Tensor:
        """Return the residual stream plus a branch's output; free both."""
        ...


def chip_cores(device: ttnn.MeshDevice) -> ChipCores:
    """Return the properties of a lane's chips that programs depend on."""
    grid = device.compute_with_storage_grid_size()
    return ChipCores(Grid(grid.x, grid.y), device.dram_grid_size().x)


def striped(rows: int, columns: int, dram_banks: int) -> ttnn.MemoryConfig:
    """Return the memory configuration of a weight in column stripes, one per bank.

    Args:
        rows: Rows of the weight on a chip, in elements.
        columns: Columns of the weight on a chip, in elements.
        dram_banks: Of the chip.
    """
    width = bank_columns(columns // TILE, dram_banks) * TILE
    last = ttnn.CoreCoord(dram_banks - 1, 0)
    banks = ttnn.CoreRangeSet([ttnn.CoreRange(ttnn.CoreCoord(0, 0), last)])
    return ttnn.MemoryConfig(
        ttnn.TensorMemoryLayout.WIDTH_SHARDED,
        ttnn.BufferType.DRAM,
        ttnn.ShardSpec(banks, [rows, width], ttnn.ShardOrientation.ROW_MAJOR),
    )


def core_range(first: int, count: int, grid: ttnn.CoreCoord) -> ttnn.CoreRangeSet:
    """Return cores of a chip's grid from ``first``, counted row by row as ops distribute rows.

    Args:
        first: Index of the first core.
        count: Number of cores.
        grid: Of the chip.
    """
    ranges = []
    end = first + count
    while first < end:
        row, column = divmod(first, grid.x)
        whole_rows = (end - first) // grid.x if column == 0 else 0
        taken = whole_rows * grid.x or min(end - first, grid.x - column)
        last = ttnn.CoreCoord(column + min(taken, grid.x) - 1, row + max(whole_rows, 1) - 1)
        ranges.append(ttnn.CoreRange(ttnn.CoreCoord(column, row), last))
        first += taken
    return ttnn.CoreRangeSet(ranges)


class RowProducts:
    """Products of a decode step: 32 rows, in shards of columns in L1.

    Owner: nothing on the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        programs: LanePrograms,
        kernels: LaneKernels,
        device: ttnn.MeshDevice,
        collectives: Collectives,
    ) -> None:
        """Create the ttnn configurations for the choices of ``programs``."""
        self._kernels = kernels
        self._collectives = collectives
        tp = self._tp = device.get_num_devices()
        self._eps = config.rms_norm_eps
        self._grid = device.compute_with_storage_grid_size()
        self._programs = programs
        self.residual = _rectangle_shards(programs.residual)
        """Memory configuration of the residual stream."""
        self._mlp_input = _rectangle_shards(programs.mlp_norm)
        self._norms = {
            "attention": (self.residual, _norm_program(programs.residual)),
            "mlp": (self._mlp_input, _norm_program(programs.mlp_norm)),
        }
        self._inputs = {
            "qkv": self.residual,
            "o": self._shards(config.num_attention_heads // tp, config.head_dim),
            "gate": self._mlp_input,
            "up": self._mlp_input,
        }
        sizes = product_sizes(config, tp)
        self._outputs = {}
        for name, product in programs.decode.items():
            if isinstance(product, BankProduct):
                num_tiles = sizes[name][1] // TILE
                cores = -(-num_tiles // product.columns_per_core)
                self._outputs[name] = self._shards(cores, product.columns_per_core * TILE)
        down = programs.decode["down"]
        if isinstance(down, BankProduct):
            self._inputs["down"] = self._shards(down.cores, sizes["down"][0] // down.cores)

    def attention_norm(self, x: ttnn.Tensor, weight: ttnn.Tensor) -> ttnn.Tensor:
        """Normalise (1, 1, 32, hidden); see `Products`."""
        return self._norm("attention", x, weight)

    def mlp_norm(self, x: ttnn.Tensor, weight: ttnn.Tensor) -> ttnn.Tensor:
        """Normalise (1, 1, 32, hidden); see `Products`."""
        return self._norm("mlp", x, weight)

    def times(
        self,
        name: ProductName,
        x: ttnn.Tensor,
        weight: ttnn.Tensor,
        bias: ttnn.Tensor | None = None,
    ) -> ttnn.Tensor:
        """Multiply (1, 1, 32, k) in L1 to (1, 1, 32, n) in L1; see `Products`."""
        product = self._programs.decode[name]
        is_striped = isinstance(product, BankProduct)
        where = self._inputs[name] if is_striped else ttnn.L1_MEMORY_CONFIG
        rows = moved(x, where)
        out = ttnn.linear(
            rows,
            weight,
            dtype=self._kernels.activation_dtype,
            memory_config=self._outputs[name] if is_striped else ttnn.L1_MEMORY_CONFIG,
            program_config=row_program(product),
            compute_kernel_config=self._kernels.product(name, weight),
        )
        if rows is not x:
            ttnn.deallocate(rows)
        # The program for stripes takes no bias.
        return out if bias is None else _biased(out, bias, ttnn.L1_MEMORY_CONFIG)

    def summed(self, partial: ttnn.Tensor, bias: ttnn.Tensor | None = None) -> ttnn.Tensor:
        """Sum over the chips, (1, 1, 32, hidden) in L1; see `Products`."""
        out = partial
        if self._tp > 1:
            flat = freed_after_move(partial, ttnn.L1_MEMORY_CONFIG)
            out = self._collectives.summed(flat, ttnn.L1_MEMORY_CONFIG)
        return out if bias is None else _biased(out, bias, ttnn.L1_MEMORY_CONFIG)

    def added(self, x: ttnn.Tensor, out: ttnn.Tensor) -> ttnn.Tensor:
        """Add two tensors (1, 1, 32, hidden); see `Products`."""
        out = freed_after_move(out, self.residual)
        return _sum(x, out, self.residual)

    def _norm(self, kind: str, x: ttnn.Tensor, weight: ttnn.Tensor) -> ttnn.Tensor:
        where, program = self._norms[kind]
        rows = moved(x, where)
        out = ttnn.rms_norm(
            rows,
            epsilon=self._eps,
            weight=weight,
            memory_config=where,
            program_config=program,
            compute_kernel_config=self._kernels.norm,
        )
        if rows is not x:
            ttnn.deallocate(rows)
        return out

    def _shards(self, num_cores: int, width: int) -> ttnn.MemoryConfig:
        """Return 32 rows in shards of ``width`` columns, on the first cores row by row."""
        return width_shards(core_range(0, num_cores, self._grid), width)


class ChunkProducts:
    """Products of a chunk of a prompt: tensors (1, 1, S, ...), interleaved in DRAM.

    Owner: nothing on the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        profile: Profile,
        kernels: LaneKernels,
        chip: ChipCores,
        collectives: Collectives,
        *,
        tp: int,
    ) -> None:
        """Prepare; programs are chosen at the first chunk of each length."""
        self._config = config
        self._profile = profile
        self._kernels = kernels
        self._chip = chip
        self._collectives = collectives
        self._sizes = product_sizes(config, tp)

    def attention_norm(self, x: ttnn.Tensor, weight: ttnn.Tensor) -> ttnn.Tensor:
        """Return the RMSNorm of the residual stream, where ``qkv`` needs it."""
        return ttnn.rms_norm(
            x,
            epsilon=self._config.rms_norm_eps,
            weight=weight,
            memory_config=ttnn.DRAM_MEMORY_CONFIG,
            compute_kernel_config=self._kernels.norm,
        )

    mlp_norm = attention_norm

    def times(
        self,
        name: ProductName,
        x: ttnn.Tensor,
        weight: ttnn.Tensor,
        bias: ttnn.Tensor | None = None,
    ) -> ttnn.Tensor:
        """Multiply (1, 1, S, k) to (1, 1, S, n); see `Products`."""
        num_tokens, k = x.shape[2], x.shape[3]
        product = self.program(name, num_tokens)
        parts = 1 if product is None else num_tokens // product.tokens
        out = ttnn.linear(
            x if parts == 1 else ttnn.reshape(x, (1, parts, num_tokens // parts, k)),
            weight,
            dtype=self._kernels.activation_dtype,
            memory_config=ttnn.DRAM_MEMORY_CONFIG,
            program_config=chunk_program(product, is_whole=parts == 1) if product else None,
            compute_kernel_config=self._kernels.product(name, weight),
        )
        if parts > 1:
            out = ttnn.reshape(out, (1, 1, num_tokens, self._sizes[name][1]))
        # The program for stripes takes no bias.
        return out if bias is None else _biased(out, bias, ttnn.DRAM_MEMORY_CONFIG)

    def program(self, name: ProductName, num_tokens: int) -> ChunkProduct | None:
        """Return the program of a product of ``num_tokens`` rows; see `programs.chunk_product`."""
        k, n = self._sizes[name]
        tile_bytes = weight_tile_bytes(self._profile, name)
        return chunk_product(
            num_tokens, k // TILE, n // TILE, self._chip, tile_bytes, self._profile.product(name)
        )

    def summed(self, partial: ttnn.Tensor, bias: ttnn.Tensor | None = None) -> ttnn.Tensor:
        """Return the sum of all chips' summands plus the bias on every chip; free the summands."""
        out = self._collectives.summed(partial, ttnn.DRAM_MEMORY_CONFIG)
        return out if bias is None else _biased(out, bias, ttnn.DRAM_MEMORY_CONFIG)

    def added(self, x: ttnn.Tensor, out: ttnn.Tensor) -> ttnn.Tensor:
        """Return the residual stream plus a branch's output; free both."""
        return _sum(x, out, ttnn.DRAM_MEMORY_CONFIG)


def moved(x: ttnn.Tensor, memory_config: ttnn.MemoryConfig) -> ttnn.Tensor:
    """Return ``x`` if it is in this memory, otherwise a copy; keep ``x``."""
    if x.memory_config() == memory_config:
        return x
    return ttnn.to_memory_config(x, memory_config)


def row_program(product: BankProduct | ColumnProduct) -> object:
    """Return the program configuration of a product of 32 rows."""
    if isinstance(product, BankProduct):
        return ttnn.MatmulMultiCoreReuseMultiCastDRAMShardedProgramConfig(
            in0_block_w=product.block,
            per_core_M=1,
            per_core_N=product.columns_per_core,
            fused_activation=None,
            num_workers_per_dram_bank=product.readers,
        )
    return ttnn.MatmulMultiCoreReuseMultiCast1DProgramConfig(
        compute_with_storage_grid_size=(product.grid.columns, product.grid.rows),
        in0_block_w=product.block,
        out_subblock_h=1,
        out_subblock_w=product.subblock,
        out_block_h=1,
        out_block_w=product.columns_at_once,
        per_core_M=1,
        per_core_N=product.columns_per_core,
        fuse_batch=True,
        fused_activation=None,
        mcast_in0=True,
    )


def chunk_program(product: ChunkProduct, *, is_whole: bool) -> object:
    """Return the program configuration of a chunk's product, computed whole or in parts."""
    return ttnn.MatmulMultiCoreReuseMultiCastProgramConfig(
        compute_with_storage_grid_size=(product.grid.columns, product.grid.rows),
        in0_block_w=product.block,
        out_subblock_h=1,
        out_subblock_w=product.subblock,
        per_core_M=product.rows_per_core,
        per_core_N=product.columns_per_core,
        transpose_mcast=False,
        fused_activation=None,
        fuse_batch=is_whole,
    )


def _norm_program(norm: Norm) -> object:
    return ttnn.LayerNormShardedMultiCoreProgramConfig(
        compute_with_storage_grid_size=(norm.grid.columns, norm.grid.rows),
        subblock_w=norm.subblock,
        block_h=1,
        block_w=norm.columns_per_core,
        inplace=False,
    )


def _rectangle_shards(norm: Norm) -> ttnn.MemoryConfig:
    last = ttnn.CoreCoord(norm.grid.columns - 1, norm.grid.rows - 1)
    cores = ttnn.CoreRangeSet([ttnn.CoreRange(ttnn.CoreCoord(0, 0), last)])
    return width_shards(cores, norm.columns_per_core * TILE)


def width_shards(cores: ttnn.CoreRangeSet, width: int) -> ttnn.MemoryConfig:
    """Return 32 rows in shards of ``width`` columns in L1."""
    return ttnn.MemoryConfig(
        ttnn.TensorMemoryLayout.WIDTH_SHARDED,
        ttnn.BufferType.L1,
        ttnn.ShardSpec(cores, [TILE, width], ttnn.ShardOrientation.ROW_MAJOR),
    )


def freed_after_move(x: ttnn.Tensor, memory_config: ttnn.MemoryConfig) -> ttnn.Tensor:
    """Return ``x`` if it is in this memory, otherwise a copy, and free ``x``."""
    there = moved(x, memory_config)
    if there is not x:
        ttnn.deallocate(x)
    return there


def _biased(x: ttnn.Tensor, bias: ttnn.Tensor, memory_config: ttnn.MemoryConfig) -> ttnn.Tensor:
    """Return ``x`` with the bias added to each row; in place if ``x`` is interleaved."""
    flat = freed_after_move(x, memory_config)
    return ttnn.add(flat, bias, memory_config=memory_config, output_tensor=flat)


def _sum(x: ttnn.Tensor, out: ttnn.Tensor, memory_config: ttnn.MemoryConfig) -> ttnn.Tensor:
    """Return the sum and free both."""
    total = ttnn.add(x, out, memory_config=memory_config)
    ttnn.deallocate(x)
    ttnn.deallocate(out)
    return total

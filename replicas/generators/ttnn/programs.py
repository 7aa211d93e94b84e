"""Which program computes each matrix product of a lane, on which cores, and what it takes of L1.

Arithmetic alone, for one chip of a lane. ttnn chooses a program by itself where it is given none,
and for a decode step that is one that reads weights again and again; so every product has one here.

- A decode step's products read every weight once, so the memory's bandwidth is their limit. Their
  weights lie in column stripes, one per DRAM bank, and a core beside each bank, or two, read its
  own (`BankProduct`). Where a stripe does not fit those cores' L1, weights are interleaved and
  every core takes some columns (`ColumnProduct`): the output layer, whose columns are the most.
- A chunk's products are limited by arithmetic, and read the same weights (`ChunkProduct`).

Grids, and blocks along the summed dimension, are those of `ModelArgs` in tt-metal's
models/tt_transformers/tt/model_config.py; L1 is counted as the program factories of ttnn's matmul
allocate circular buffers. Sizes are in tiles unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from replicas.generators.ttnn.buckets import TILE, padded_vocab_size
from replicas.generators.ttnn.profiles import PRODUCTS, TILE_BYTES

if TYPE_CHECKING:
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.ttnn.profiles import Precision, ProductName, Profile

_FLOAT32_TILE_BYTES = 4096

L1_FOR_PRODUCTS = 1_200_000
"""Bytes of a core's L1 that a product's circular buffers may take. A Wormhole core has 1,499,136, a
Blackhole core more; kernels, and the activations of a decode step, have the rest."""

_GRID_EDGE = 8
"""Cores along each edge of a grid of shards, as many as every chip has; upstream's limit too."""

_RESIDUAL_CORES = 32
"""A grid of shards has the number of cores that is next to this."""

_LONGEST_BLOCK = 8
"""Tiles along the summed dimension that are taken at once, at most."""

_BANKS_OF_A_P150 = 8

_MOST_CHUNK_ROWS = 2048 // TILE
"""Rows of a chunk that are multiplied at once, at most."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A rectangle of cores from the first one.

    Attributes:
        columns: Cores side by side.
        rows: Cores one above the other.
    """

    columns: int
    rows: int

    @property
    def num_cores(self) -> int:
        """Of the rectangle."""
        return self.columns * self.rows


@dataclass(frozen=True, slots=True)
class ChipCores:
    """What the programs of a chip depend on.

    Attributes:
        grid: Its worker cores.
        dram_banks: Banks of its memory: 12 on Wormhole, 8 on a p150, 7 on a p100.
    """

    grid: Grid
    dram_banks: int


@dataclass(frozen=True, slots=True)
class BankProduct:
    """32 rows times weights in stripes; ttnn's MatmulMultiCoreReuseMultiCastDRAMSharded program.

    Attributes:
        cores: How many hold the rows, and then the result, in shards of columns.
        block: Tiles along the summed dimension that are taken at once.
        columns_per_core: Columns of the result on each core.
        columns_per_bank: Columns of the weights in each bank; the last may have some in vain.
        readers: Cores beside each bank that share out its columns.
        l1_bytes: Circular buffers of the cores beside the banks.
    """

    cores: int
    block: int
    columns_per_core: int
    columns_per_bank: int
    readers: int
    l1_bytes: int


@dataclass(frozen=True, slots=True)
class ColumnProduct:
    """32 rows times interleaved weights; ttnn's MatmulMultiCoreReuseMultiCast1D program.

    Attributes:
        grid: Cores, each of which computes some columns.
        block: See `BankProduct`.
        columns_per_core: Columns of each core.
        columns_at_once: Those that it has in L1 at a time; divides the former.
        subblock: Columns that are accumulated at once; divides the former.
        l1_bytes: Circular buffers of a core.
        reason: Why it is no `BankProduct`.
    """

    grid: Grid
    block: int
    columns_per_core: int
    columns_at_once: int
    subblock: int
    l1_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class ChunkProduct:
    """A chunk times weights; ttnn's MatmulMultiCoreReuseMultiCast program in two dimensions.

    Attributes:
        tokens: Rows, not tiles, that are multiplied at once; divides the chunk.
        grid: Cores: some rows and some columns each.
        block: See `BankProduct`.
        rows_per_core: Rows of each core.
        columns_per_core: Columns of each core, no fewer than a bank has: ttnn's reader of stripes
            runs over otherwise.
        subblock: Columns that are accumulated at once.
        l1_bytes: Circular buffers of a core.
    """

    tokens: int
    grid: Grid
    block: int
    rows_per_core: int
    columns_per_core: int
    subblock: int
    l1_bytes: int


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over rows in shards of columns; ttnn's LayerNormShardedMultiCore program.

    Attributes:
        grid: Cores that have a shard.
        columns_per_core: Columns of each.
        subblock: Columns that are taken at once; divides the former.
    """

    grid: Grid
    columns_per_core: int
    subblock: int


@dataclass(frozen=True, slots=True)
class LanePrograms:
    """The programs of one chip of a lane.

    Attributes:
        residual: Of the residual stream of a decode step, and of the attention's norm.
        mlp_norm: Of the MLP's.
        decode: Product -> its program in a decode step.
        output: Of the output layer, which always has 32 rows.
    """

    residual: Norm
    mlp_norm: Norm
    decode: dict[ProductName, BankProduct | ColumnProduct]
    output: ColumnProduct


def product_sizes(model: ModelConfig, tp: int) -> dict[ProductName, tuple[int, int]]:
    """Return rows and columns of each weight on one of ``tp`` chips, in elements."""
    hidden, inner = model.hidden_size, model.intermediate_size // tp
    heads = model.num_attention_heads // tp * model.head_dim
    kv = model.num_key_value_heads // tp * model.head_dim
    return {
        "qkv": (hidden, heads + 2 * kv),
        "o": (heads, hidden),
        "gate": (hidden, inner),
        "up": (hidden, inner),
        "down": (inner, hidden),
    }


def lane_programs(model: ModelConfig, profile: Profile, chip: ChipCores, tp: int) -> LanePrograms:
    """Choose the programs of a lane.

    Args:
        model: The model; it divides among the chips (`buckets.check_lane`).
        profile: Dtypes and precision.
        chip: One of its chips.
        tp: How many there are.
    """
    sizes = {name: (k // TILE, n // TILE) for name, (k, n) in product_sizes(model, tp).items()}
    hidden, inner = sizes["gate"]
    residual = shard_grid(hidden)
    mlp = common_grid(hidden, inner)
    cores = {
        "qkv": residual.num_cores,
        "o": model.num_attention_heads // tp,
        "gate": mlp.num_cores,
        "up": mlp.num_cores,
        "down": mlp.num_cores,
    }
    decode = {
        name: _decode_product(
            *sizes[name],
            cores[name],
            chip,
            weight_tile_bytes(profile, name),
            profile.product(name),
        )
        for name in PRODUCTS
    }
    vocab = padded_vocab_size(model.vocab_size, tp) // tp // TILE
    output = column_product(
        hidden, vocab, chip.grid, TILE_BYTES[profile.weight_dtype], profile.linear,
        "the output layer's columns are too many for stripes",
    )  # fmt: skip
    return LanePrograms(_norm(hidden, residual), _norm(hidden, mlp), decode, output)


def weight_tile_bytes(profile: Profile, name: ProductName) -> int:
    """Return bytes of a tile of a product's weights, in the layer where they have the most."""
    return max(TILE_BYTES[profile.weight(name, is_last=is_last)] for is_last in (False, True))


def shard_grid(num_tiles: int) -> Grid:
    """Return the grid that shares out ``num_tiles`` evenly and has next to 32 cores."""
    divisors = [n for n in range(1, _GRID_EDGE**2 + 1) if num_tiles % n == 0]
    return _rectangle(sorted(divisors, key=lambda n: abs(n - _RESIDUAL_CORES)))


def common_grid(first: int, second: int) -> Grid:
    """Return the largest grid that shares out both numbers of tiles evenly."""
    both = [n for n in range(_GRID_EDGE**2, 0, -1) if first % n == second % n == 0]
    return _rectangle(both)


def _rectangle(candidates: list[int]) -> Grid:
    """Return the first of these numbers of cores that is a rectangle; 1 is one."""
    return next(
        Grid(n // rows, rows)
        for n in candidates
        for rows in range(1, _GRID_EDGE + 1)
        if n % rows == 0 and n // rows <= _GRID_EDGE
    )


def bank_readers(dram_banks: int) -> int:
    """Return cores beside each bank that compute a product with weights in stripes.

    ttnn takes two on Blackhole alone. They are measured on one p150 (tt-metal #55080); a P300's, a
    P150x4's and a Blackhole Galaxy's chips have as many banks.
    """
    return 2 if dram_banks == _BANKS_OF_A_P150 else 1


def bank_columns(num_columns: int, dram_banks: int) -> int:
    """Columns of tiles in each bank, of a weight of ``num_columns``; as many for each reader."""
    readers = bank_readers(dram_banks)
    return -(-num_columns // (dram_banks * readers)) * readers


def _norm(hidden: int, grid: Grid) -> Norm:
    columns = hidden // grid.num_cores
    return Norm(grid, columns, _largest_divisor(columns, 4))


def _decode_product(
    k: int, n: int, cores: int, chip: ChipCores, tile_bytes: int, precision: Precision
) -> BankProduct | ColumnProduct:
    if k % cores:
        reason = f"{k} tiles of columns do not divide among {cores} cores"
        return column_product(k, n, chip.grid, tile_bytes, precision, reason)
    if chunk_product(TILE, k, n, chip, tile_bytes, precision) is None:
        reason = f"{n} tiles of columns are too many for a chunk's program for stripes"
        return column_product(k, n, chip.grid, tile_bytes, precision, reason)
    per_bank, readers = bank_columns(n, chip.dram_banks), bank_readers(chip.dram_banks)
    per_reader, per_core = per_bank // readers, -(-n // cores)
    shard = k // cores
    l1_bytes = 0
    for block in range(min(shard, _LONGEST_BLOCK), 0, -1):
        if shard % block:
            continue
        rows = (2 * block + shard) * TILE_BYTES["bfloat16"]
        weights = 3 * block * per_reader * tile_bytes
        result = per_reader * _result_bytes(precision) + per_core * TILE_BYTES["bfloat16"]
        l1_bytes = rows + weights + result
        if l1_bytes <= L1_FOR_PRODUCTS:
            return BankProduct(cores, block, per_core, per_bank, readers, l1_bytes)
    reason = f"stripes of {per_bank} tiles need {l1_bytes} bytes of L1, of {L1_FOR_PRODUCTS}"
    return column_product(k, n, chip.grid, tile_bytes, precision, reason)


def column_product(
    k: int, n: int, grid: Grid, tile_bytes: int, precision: Precision, reason: str
) -> ColumnProduct:
    """A program for 32 rows of ``k`` tiles and interleaved weights of ``n`` columns of tiles.

    Args:
        k: Summed dimension.
        n: Columns.
        grid: Cores.
        tile_bytes: Of a tile of the weights.
        precision: Of the arithmetic.
        reason: See `ColumnProduct`.
    """
    per_core = -(-n // grid.num_cores)
    for at_once in _divisors(per_core, per_core):
        for block in _divisors(k, _LONGEST_BLOCK):
            l1_bytes = 2 * block * (TILE_BYTES["bfloat16"] + at_once * tile_bytes)
            l1_bytes += at_once * _result_bytes(precision)
            if l1_bytes <= L1_FOR_PRODUCTS:
                subblock = _largest_divisor(at_once, _most_accumulated(precision))
                return ColumnProduct(grid, block, per_core, at_once, subblock, l1_bytes, reason)
    raise AssertionError("one column of tiles fits any core")


def chunk_product(
    num_tokens: int, k: int, n: int, chip: ChipCores, tile_bytes: int, precision: Precision
) -> ChunkProduct | None:
    """Return a program for a chunk and weights in stripes or interleaved.

    Of those that fit, the one that multiplies the most rows at once, if it takes blocks of four
    tiles, or else the longest block there is.

    Args:
        num_tokens: Rows, a multiple of 32; not tiles.
        k: Summed dimension.
        n: Columns.
        chip: Cores and banks.
        tile_bytes: Of a tile of the weights.
        precision: Of the arithmetic.

    Returns:
        None where none fits: weights are interleaved then, and ttnn has a program for those.
    """
    grid = Grid(
        min(chip.grid.columns, chip.dram_banks, _GRID_EDGE), min(chip.grid.rows, _GRID_EDGE)
    )
    columns = max(-(-n // grid.columns), bank_columns(n, chip.dram_banks))
    subblock = _largest_divisor(columns, _most_accumulated(precision))
    fitting = []
    for rows in _divisors(num_tokens // TILE, _MOST_CHUNK_ROWS):
        per_core = -(-rows // grid.rows)
        for block in _divisors(k, _LONGEST_BLOCK):
            l1_bytes = 2 * block * (per_core * TILE_BYTES["bfloat16"] + columns * tile_bytes)
            l1_bytes += per_core * columns * _result_bytes(precision)
            if l1_bytes <= L1_FOR_PRODUCTS:
                found = ChunkProduct(
                    rows * TILE, grid, block, per_core, columns, subblock, l1_bytes
                )
                if block >= min(4, _largest_divisor(k, _LONGEST_BLOCK)):
                    return found
                fitting.append(found)
    return max(fitting, key=lambda product: (product.block, product.tokens), default=None)


def _result_bytes(precision: Precision) -> int:
    """Of a tile of the result: as it is stored, and as it is summed up where that is another."""
    stored = TILE_BYTES["bfloat16"]
    return stored + _FLOAT32_TILE_BYTES if precision.fp32_accumulation else stored


def _most_accumulated(precision: Precision) -> int:
    """Return tiles that a core's destination registers hold."""
    return 4 if precision.fp32_accumulation else 8


def _divisors(number: int, most: int) -> list[int]:
    """Return divisors of up to ``most``, falling."""
    return [n for n in range(min(number, most), 0, -1) if number % n == 0]


def _largest_divisor(number: int, most: int) -> int:
    return _divisors(number, most)[0]

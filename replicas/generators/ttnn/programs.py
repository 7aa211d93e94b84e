"""Choice of the program and cores for each matrix product of a lane, and its use of L1.

Pure arithmetic for one chip of a lane. ttnn's own choice for a decode step reads weights
repeatedly, so every product gets an explicit program here.

- A decode step's products read every weight once, so they are limited by memory bandwidth. Their
weights are stored in column stripes, one per DRAM bank, and one or two cores beside each bank read
its stripe (`BankProduct`). If a stripe does not fit these cores' L1, weights are interleaved and
every core computes some columns (`ColumnProduct`): the output layer, which has the most columns.
- A chunk's products are limited by arithmetic, and read the same weights (`ChunkProduct`).

Grids, and blocks along the summed dimension, are those of `ModelArgs` in tt-metal's
models/tt_transformers/tt/model_config.py. L1 is counted as the program factories of ttnn's matmul
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
"""Bytes of a core's L1 for a product's circular buffers. A Wormhole core has 1,499,136, a Blackhole
core more; the rest is for kernels and the activations of a decode step."""

_GRID_EDGE = 8
"""Most cores along an edge of a grid of shards. Every chip has as many; also upstream's limit."""

_RESIDUAL_CORES = 32
"""Preferred number of cores of a grid of shards; the nearest possible one is used."""

_LONGEST_BLOCK = 8
"""Most tiles along the summed dimension that are processed at once."""

_BANKS_OF_A_P150 = 8

_MOST_CHUNK_ROWS = 2048 // TILE
"""Most rows of a chunk that are multiplied at once."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Rectangle of cores that starts at the first one.

    Attributes:
        columns: Cores side by side.
        rows: Cores one above the other.
    """

    columns: int
    rows: int

    @property
    def num_cores(self) -> int:
        """Number of cores of the rectangle."""
        return self.columns * self.rows


@dataclass(frozen=True, slots=True)
class ChipCores:
    """Properties of a chip that its programs depend on.

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
        cores: Number of cores that store the rows, and then the result, in shards of columns.
        block: Tiles along the summed dimension that are processed at once.
        columns_per_core: Columns of the result on each core.
        columns_per_bank: Columns of the weights in each bank, padding in the last one included.
        readers: Cores beside each bank that share its columns.
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
        columns_at_once: Columns that it has in L1 at a time; divides `columns_per_core`.
        subblock: Columns that are accumulated at once; divides `columns_at_once`.
        l1_bytes: Circular buffers of a core.
        reason: Why it is not a `BankProduct`.
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
        columns_per_core: Columns of each core, at least as many as a bank has, as ttnn's reader of
            stripes overruns otherwise.
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
    """Norm over rows in shards of columns; ttnn's LayerNormShardedMultiCore program.

    Attributes:
        grid: Cores that have a shard.
        columns_per_core: Columns of each.
        subblock: Columns that are processed at once; divides `columns_per_core`.
    """

    grid: Grid
    columns_per_core: int
    subblock: int


@dataclass(frozen=True, slots=True)
class LanePrograms:
    """Programs of one chip of a lane.

    Attributes:
        residual: Norm of the attention, whose shards the residual stream of a decode step has.
        mlp_norm: Norm of the MLP.
        decode: Product -> its program in a decode step.
        output: Program of the output layer, which always has 32 rows.
    """

    residual: Norm
    mlp_norm: Norm
    decode: dict[ProductName, BankProduct | ColumnProduct]
    output: ColumnProduct


def product_sizes(model: ModelConfig, tp: int) -> dict[ProductName, tuple[int, int]]:
    """Return the rows and columns of each weight on one of ``tp`` chips, in elements."""
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
        tp: Number of chips of the lane.
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
    """Return the largest size in bytes, over the layers, of a tile of a product's weights."""
    return max(TILE_BYTES[profile.weight(name, is_last=is_last)] for is_last in (False, True))


def shard_grid(num_tiles: int) -> Grid:
    """Return the grid nearest to 32 cores that divides ``num_tiles`` evenly."""
    divisors = [n for n in range(1, _GRID_EDGE**2 + 1) if num_tiles % n == 0]
    return _rectangle(sorted(divisors, key=lambda n: abs(n - _RESIDUAL_CORES)))


def common_grid(first: int, second: int) -> Grid:
    """Return the largest grid that divides both numbers of tiles evenly."""
    both = [n for n in range(_GRID_EDGE**2, 0, -1) if first % n == second % n == 0]
    return _rectangle(both)


def _rectangle(candidates: list[int]) -> Grid:
    """Return the first of these numbers of cores that forms a rectangle; 1 always does."""
    return next(
        Grid(n // rows, rows)
        for n in candidates
        for rows in range(1, _GRID_EDGE + 1)
        if n % rows == 0 and n // rows <= _GRID_EDGE
    )


def bank_readers(dram_banks: int) -> int:
    """Return the number of cores beside each bank that compute a product with stripes.

    ttnn supports two on Blackhole only. They were measured on one p150 (tt-metal #55080); chips of
    a P300, a P150x4 and a Blackhole Galaxy have as many banks.
    """
    return 2 if dram_banks == _BANKS_OF_A_P150 else 1


def bank_columns(num_columns: int, dram_banks: int) -> int:
    """Return columns of tiles per bank for ``num_columns`` columns, divisible among the readers."""
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
    """Return a program for 32 rows of ``k`` tiles and interleaved weights of ``n`` columns.

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

    Among programs that fit L1, this is the one that multiplies the most rows at once with blocks of
    at least four tiles, or else the one with the longest block.

    Args:
        num_tokens: Rows, a multiple of 32; not tiles.
        k: Summed dimension.
        n: Columns.
        chip: Cores and banks.
        tile_bytes: Of a tile of the weights.
        precision: Of the arithmetic.

    Returns:
        None if no program fits; weights are then interleaved, and ttnn chooses the program.
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
    """Return bytes of a tile of the result: stored, plus its sums if they have another format."""
    stored = TILE_BYTES["bfloat16"]
    return stored + _FLOAT32_TILE_BYTES if precision.fp32_accumulation else stored


def _most_accumulated(precision: Precision) -> int:
    """Return how many tiles a core's destination registers hold."""
    return 4 if precision.fp32_accumulation else 8


def _divisors(number: int, most: int) -> list[int]:
    """Return the divisors up to ``most``, in descending order."""
    return [n for n in range(min(number, most), 0, -1) if number % n == 0]


def _largest_divisor(number: int, most: int) -> int:
    return _divisors(number, most)[0]

"""Ops of a step, and the programs and dtypes of the native and of upstream's models.

Bytes are the traffic between DRAM and the cores; data in L1 costs none. Dimensions of a product are
(rows, K) by (K, N).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from replicas.generators.ttnn.buckets import TILE, padded_vocab_size
from replicas.generators.ttnn.profiles import PRODUCTS, TILE_BYTES
from replicas.generators.ttnn.programs import (
    BankProduct,
    ChipCores,
    bank_columns,
    bank_readers,
    lane_programs,
    product_sizes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replicas.generators.model_config import ModelConfig
    from replicas.generators.ttnn.profiles import Dtype, Fidelity, ProductName, Profile
    from scripts.roofline.facts import Collective, Key

Product: TypeAlias = Literal["qkv", "o", "gate", "up", "down", "output"]
"""A matrix product: of a layer, by the name of its weight, or of the output layer."""
Program: TypeAlias = Literal["stripes", "columns", "chunk"]
"""How a product is computed: weights in stripes, one per bank of DRAM, each read by cores beside
it; interleaved weights, some columns on each core, every weight read once; or some rows and some
columns on each core."""

_OUTPUT: Product = "output"
ALL_PRODUCTS: tuple[Product, ...] = (*PRODUCTS, _OUTPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One kind of op of a step.

    Attributes:
        part: Its group on the page.
        calls: Functions of ttnn that it stands for, in order.
        count: How often it runs.
        num_bytes: DRAM traffic of one.
        read: Share of the bandwidth that it has.
        flops: Arithmetic of one, of whole tiles.
        fidelity: Of the arithmetic.
        program: Of a product; None for others.
        readers: Cores beside each bank that compute a product with weights in stripes.
        kernel: Its time where neither bytes nor arithmetic decide.
        columns: Factor on that time.
        exchanged: Collective, and bytes of its tensor.
    """

    part: str
    calls: tuple[str, ...]
    count: int = 1
    num_bytes: float = 0.0
    read: Key = "interleaved"
    flops: float = 0.0
    fidelity: Fidelity = "HiFi4"
    program: Program | None = None
    readers: int = 1
    kernel: Key | None = None
    columns: int = 1
    exchanged: tuple[Collective, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes and fidelities, as far as they cost time.

    Attributes:
        name: On the page.
        weights: Product -> dtype of its weights, and fidelity.
        kv_dtype: KV cache.
        attention: Fidelity of the attention in decode.
        last: The same as `weights` in the last layer, where it is another.
    """

    name: str
    weights: Mapping[Product, tuple[Dtype, Fidelity]]
    kv_dtype: Dtype
    attention: Fidelity
    last: Mapping[Product, tuple[Dtype, Fidelity]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """The programs of a step.

    Attributes:
        products: Product -> program in a decode step.
        norms: How a norm of 32 rows runs.
        is_fused: Queries and keys are rotated by one op.
        readers: Cores beside each bank that compute a layer's products with weights in stripes.
    """

    products: Mapping[Product, Program]
    norms: Literal["norm column", "norm column in shards"]
    is_fused: bool
    readers: int = 1


UPSTREAM = Design(
    products=dict.fromkeys(ALL_PRODUCTS, "stripes"),
    norms="norm column in shards",
    is_fused=True,
)
"""Of tt-metal's models/tt_transformers."""

UPSTREAM_PRECISION = Precision(
    name="upstream",
    weights={
        **dict.fromkeys(ALL_PRODUCTS, ("bfloat8_b", "HiFi2")),
        "gate": ("bfloat4_b", "LoFi"),
        "up": ("bfloat4_b", "LoFi"),
    },
    kv_dtype="bfloat8_b",
    attention="HiFi2",
    last={"gate": ("bfloat8_b", "HiFi2"), "up": ("bfloat8_b", "HiFi2")},
)
"""tt_transformers' performance settings for Llama-3.1-8B."""


COLLECTIVES: Mapping[Collective, str] = {
    "reduce_scatter": "experimental.reduce_scatter_minimal_async",
    "all_gather": "experimental.all_gather_async",
}
"""By what ttnn calls them; one after the other, a sum over chips."""


def sums_over_chips(count: int, num_bytes: float) -> list[Op]:
    """Return `count` sums of a tensor of `num_bytes`."""
    return [
        Op(part="sums over chips", calls=(call,), count=count, exchanged=(kind, num_bytes))
        for kind, call in COLLECTIVES.items()
    ]


def native_precision(profile: Profile) -> Precision:
    """Return the precision of a profile of the native models."""

    def of(name: ProductName, *, is_last: bool) -> tuple[Dtype, Fidelity]:
        return (
            profile.weight(name, is_last=is_last),
            profile.product(name, is_last=is_last).fidelity,
        )

    weights: dict[Product, tuple[Dtype, Fidelity]] = {
        _OUTPUT: (profile.weight_dtype, profile.linear.fidelity)
    }
    last: dict[Product, tuple[Dtype, Fidelity]] = {}
    for name in PRODUCTS:
        weights[name] = of(name, is_last=False)
        if of(name, is_last=True) != weights[name]:
            last[name] = of(name, is_last=True)
    return Precision(
        name=profile.name,
        weights=weights,
        kv_dtype=profile.kv_dtype,
        attention=profile.attention_of_rows.fidelity,
        last=last,
    )


def native_design(model: ModelConfig, profile: Profile, chip: ChipCores, tp: int) -> Design:
    """The programs of the native models, as `lane_programs` chooses them."""
    programs = lane_programs(model, profile, chip, tp)
    products: dict[Product, Program] = {_OUTPUT: "columns"}
    for name, product in programs.decode.items():
        products[name] = "stripes" if isinstance(product, BankProduct) else "columns"
    return Design(
        products=products,
        norms="norm column in shards",
        is_fused=False,
        readers=bank_readers(chip.dram_banks),
    )


def product_shape(model: ModelConfig, tp: int, product: Product) -> tuple[int, int]:
    """K and N of a product on one of ``tp`` chips."""
    if product == "output":
        return model.hidden_size, padded_vocab_size(model.vocab_size, tp) // tp
    return product_sizes(model, tp)[product]


def products(  # noqa: PLR0913 - what their times depend on
    model: ModelConfig,
    tp: int,
    precision: Precision,
    program: Mapping[Product, Program],
    *,
    num_banks: int,
    readers: int = 1,
    num_tokens: int = TILE,
) -> list[Op]:
    """The products of a step: those of every layer, and the output layer's of 32 rows.

    Args:
        model: The model.
        tp: Chips of the lane.
        precision: Dtypes.
        program: Of each product.
        num_banks: Of a chip's DRAM.
        readers: Of a layer's products.
        num_tokens: Rows of a layer's products; whole tiles.
    """
    found = []
    for product in ALL_PRODUCTS:
        shape = product_shape(model, tp, product)
        is_output = product == _OUTPUT
        rows = TILE if is_output else num_tokens
        count = 1 if is_output else model.num_hidden_layers
        kinds = [(precision.weights[product], count)]
        if product in precision.last:
            kinds = [(precision.weights[product], count - 1), (precision.last[product], 1)]
        for (dtype, fidelity), times in kinds:
            if times:
                op = _product(shape, rows, dtype, program[product], num_banks)
                cores = 1 if is_output else readers
                found.append(
                    replace(op, part=product, count=times, fidelity=fidelity, readers=cores)
                )
    return found


def _product(
    shape: tuple[int, int], num_rows: int, dtype: Dtype, program: Program, num_banks: int
) -> Op:
    """A product, but for whose it is."""
    k, n = shape
    rows, columns = k // TILE, -(-n // TILE)
    if program == "stripes":
        # The bank that has the most columns decides.
        columns = bank_columns(columns, num_banks) * num_banks
    num_bytes = rows * columns * TILE_BYTES[dtype]
    if program == "chunk":
        num_bytes += num_rows // TILE * (rows + columns) * TILE_BYTES["bfloat16"]
    return Op(
        part="",
        calls=("linear",),
        num_bytes=num_bytes,
        read="stripes" if program == "stripes" else "interleaved",
        flops=2.0 * num_rows * TILE**2 * rows * columns,
        program=program,
    )

"""What an op of a step is, and which programs and dtypes the native models and upstream's have.

Bytes are those that go between DRAM and the cores; what is in L1 costs none. Dimensions of a
product are (rows, K) by (K, N).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from replicas.generators.ttnn.buckets import TILE, padded_vocab_size
from replicas.generators.ttnn.profiles import PRODUCTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replicas.generators.model_config import ModelConfig
    from replicas.generators.ttnn.profiles import Fidelity, Profile
    from scripts.roofline.facts import Collective, Key

Product: TypeAlias = Literal["qkv", "o", "gate", "up", "down", "output"]
Program: TypeAlias = Literal["stripes", "columns", "tiles", "chunk"]
"""How a product is computed: weights in stripes, one per bank of DRAM, each read by a core beside
it; interleaved weights, some columns on each core, every weight read once; a tile of the result at
a time, both sides read anew for each; or some rows and some columns on each core."""

LAYER_PRODUCTS: tuple[Product, ...] = ("qkv", "o", "gate", "up", "down")
_OUTPUT: Product = "output"

TILE_BYTES = {"bfloat4_b": 576, "bfloat8_b": 1088, "bfloat16": 2048}
"""Bytes of 32x32 elements: a mantissa each, an exponent for 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One kind of op of a step.

    Attributes:
        part: What it belongs to, on the page.
        calls: Functions of ttnn that it stands for, in order.
        count: How often it runs.
        num_bytes: DRAM traffic of one.
        read: Share of the bandwidth that it has.
        flops: Arithmetic of one, of whole tiles.
        fidelity: Of the arithmetic.
        program: Of a product; None for others.
        kernel: Its time where neither bytes nor arithmetic decide.
        columns: What that time is multiplied with.
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
    kernel: Key | None = None
    columns: int = 1
    exchanged: tuple[Collective, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes and fidelities, as far as they cost time.

    Attributes:
        name: On the page.
        dtypes: Product -> dtype of its weights.
        fidelities: Product -> fidelity.
        kv_dtype: KV cache.
        attention: Fidelity of the attention in decode.
        last_dtypes: Product -> dtype in the last layer, where it is another.
    """

    name: str
    dtypes: Mapping[Product, str]
    fidelities: Mapping[Product, Fidelity]
    kv_dtype: str
    attention: Fidelity
    last_dtypes: Mapping[Product, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Which programs a step takes.

    Attributes:
        products: Product -> program in a decode step.
        norms: How a norm of 32 rows runs.
        is_fused: Queries and keys are rotated, keys and values written, by one op each.
        sums: Collectives that add up what the chips have.
    """

    products: Mapping[Product, Program]
    norms: Literal["norm column", "norm column in shards"]
    is_fused: bool
    sums: tuple[Collective, ...]


NATIVE = Design(
    products={**dict.fromkeys(LAYER_PRODUCTS, "stripes"), "output": "columns"},
    norms="norm column in shards",
    is_fused=False,
    sums=("all_reduce",),
)
"""Of replicas/generators/ttnn."""

UPSTREAM = Design(
    products=dict.fromkeys((*LAYER_PRODUCTS, "output"), "stripes"),
    norms="norm column in shards",
    is_fused=True,
    sums=("reduce_scatter", "all_gather"),
)
"""Of tt-metal's models/tt_transformers."""


def native_precision(profile: Profile) -> Precision:
    """What a profile of the native models says."""
    dtypes: dict[Product, str] = {_OUTPUT: profile.weight_dtype}
    fidelities: dict[Product, Fidelity] = {_OUTPUT: profile.linear.fidelity}
    last: dict[Product, str] = {}
    for name in PRODUCTS:
        dtypes[name] = profile.weight(name, is_last=False)
        fidelities[name] = profile.product(name).fidelity
        if profile.weight(name, is_last=True) != dtypes[name]:
            last[name] = profile.weight(name, is_last=True)
    return Precision(
        name=profile.name,
        dtypes=dtypes,
        fidelities=fidelities,
        kv_dtype=profile.kv_dtype,
        attention=profile.attention_of_rows.fidelity,
        last_dtypes=last,
    )


UPSTREAM_PRECISION = Precision(
    name="upstream",
    dtypes={
        "qkv": "bfloat8_b", "o": "bfloat8_b", "gate": "bfloat4_b", "up": "bfloat4_b",
        "down": "bfloat8_b", "output": "bfloat8_b",
    },
    fidelities={
        "qkv": "HiFi2", "o": "HiFi2", "gate": "LoFi", "up": "LoFi", "down": "HiFi2",
        "output": "HiFi2",
    },
    kv_dtype="bfloat8_b",
    attention="HiFi2",
    last_dtypes={"gate": "bfloat8_b", "up": "bfloat8_b"},
)  # fmt: skip
"""tt_transformers' performance settings for Llama-3.1-8B."""


def product_shape(model: ModelConfig, tp: int, product: Product) -> tuple[int, int]:
    """K and N of a product on one of ``tp`` chips."""
    hidden, inner = model.hidden_size, model.intermediate_size // tp
    heads = model.num_attention_heads // tp * model.head_dim
    kv = model.num_key_value_heads // tp * model.head_dim
    shapes: dict[Product, tuple[int, int]] = {
        "qkv": (hidden, heads + 2 * kv),
        "o": (heads, hidden),
        "gate": (hidden, inner),
        "up": (hidden, inner),
        "down": (inner, hidden),
        "output": (hidden, padded_vocab_size(model.vocab_size, tp) // tp),
    }
    return shapes[product]


def products(
    model: ModelConfig,
    tp: int,
    precision: Precision,
    program: Mapping[Product, Program],
    *,
    num_banks: int,
    num_tokens: int = TILE,
) -> list[Op]:
    """The products of a step: those of every layer, and the output layer's of 32 rows.

    Args:
        model: The model.
        tp: Chips of the lane.
        precision: Dtypes.
        program: Of each product.
        num_banks: Of a chip's DRAM.
        num_tokens: Rows of a layer's products; whole tiles.
    """
    found = []
    for product in (*LAYER_PRODUCTS, _OUTPUT):
        shape = product_shape(model, tp, product)
        last = precision.last_dtypes.get(product)
        count = 1 if product == _OUTPUT else model.num_hidden_layers
        rows = TILE if product == _OUTPUT else num_tokens
        for dtype, times in (
            (precision.dtypes[product], count - bool(last)),
            (last, int(bool(last))),
        ):
            if dtype is not None and times:
                op = _product(shape, rows, dtype, program[product], num_banks)
                fidelity = precision.fidelities[product]
                found.append(replace(op, part=product, count=times, fidelity=fidelity))
    return found


def _product(
    shape: tuple[int, int], num_rows: int, dtype: str, program: Program, num_banks: int
) -> Op:
    """A product, but for whose it is."""
    k, n = shape
    rows, columns = k // TILE, -(-n // TILE)
    if program == "stripes":
        # The bank that has the most columns decides.
        columns = -(-columns // num_banks) * num_banks
    num_bytes = rows * columns * TILE_BYTES[dtype]
    if program == "tiles":
        num_bytes += rows * columns * TILE_BYTES["bfloat16"]
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

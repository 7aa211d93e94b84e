"""A decode step of one lane, from its tokens to the next ones: 32 rows, however many are used.

tests/tt/test_roofline.py holds the calls to those that the native models make.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.generators.ttnn.buckets import TILE, padded_vocab_size
from replicas.generators.ttnn.profiles import TILE_BYTES
from scripts.roofline.ops import COLLECTIVES, Op, products, sums_over_chips

if TYPE_CHECKING:
    from replicas.generators.model_config import ModelConfig
    from scripts.roofline.facts import Key
    from scripts.roofline.ops import Design, Precision

_PIECE = 32768
"""Most columns of one `topk`."""


LOCAL_ROWS = (
    "typecast", "to_layout", "subtract", "lt", "ge", "logical_or", "where", "typecast",
    "to_layout",
)  # fmt: skip
"""Which row of its part of the embedding each chip takes."""


def decode_ops(
    model: ModelConfig,
    tp: int,
    precision: Precision,
    design: Design,
    *,
    num_banks: int,
    context: int,
) -> list[Op]:
    """Every op of a decode step that draws its tokens.

    Args:
        model: The model.
        tp: Chips of the lane.
        precision: Dtypes.
        design: Programs.
        num_banks: Of a chip's DRAM.
        context: Tokens that each of the 32 rows attends to.
    """
    num_layers = model.num_hidden_layers
    return [
        *_beginning(model, tp, design),
        _norm(model, design, 2 * num_layers),
        *_attention(model, tp, precision, design, context),
        Op(part="rest of a layer", calls=("mul",), count=num_layers, kernel="multiply"),
        Op(part="rest of a layer", calls=("add",), count=2 * num_layers, kernel="add"),
        *_sums(model, tp, 2 * num_layers),
        _norm(model, design, 1),
        *_drawing(model, tp),
        *products(
            model, tp, precision, design.products, num_banks=num_banks, readers=design.readers
        ),
    ]


def _beginning(model: ModelConfig, tp: int, design: Design) -> list[Op]:
    """Embedding, and the rows of the rotary tables."""
    calls = [*(LOCAL_ROWS if tp > 1 else ()), "embedding", "reshape"]
    calls += 2 * ["embedding", "reshape", "to_layout", "to_memory_config"]
    # The residual stream into its shards, and out of them before the output layer.
    calls += 2 * ["to_memory_config"]
    if not design.is_fused:
        calls += 2 * ["to_memory_config"]  # rotary rows for the cores that have keys
    ops = [Op(part="embedding, rotary rows", calls=(call,), kernel="other") for call in calls]
    return [*ops, *_sums(model, tp, 1)]


def _norm(model: ModelConfig, design: Design, count: int) -> Op:
    columns = model.hidden_size
    return Op(part="norms", calls=("rms_norm",), count=count, kernel=design.norms, columns=columns)


def _sums(model: ModelConfig, tp: int, count: int) -> list[Op]:
    return sums_over_chips(count, 2.0 * TILE * model.hidden_size) if tp > 1 else []


def _attention(
    model: ModelConfig, tp: int, precision: Precision, design: Design, context: int
) -> list[Op]:
    """Between the two products of an attention."""
    num_layers, head_dim = model.num_hidden_layers, model.head_dim
    kv_heads = model.num_key_value_heads // tp
    tiles = -(-context // TILE) * kv_heads * TILE * (head_dim // TILE)

    def op(call: str, kernel: Key, times: int = 1, columns: int = 1) -> Op:
        return Op(
            part="rest of a layer", calls=(call,), count=times * num_layers, kernel=kernel,
            columns=columns,
        )  # fmt: skip

    normed = [
        op("to_memory_config", "move", 4),
        # Heads of a row are a tile row, on a core each.
        op("rms_norm", "norm column", 2, head_dim),
    ]
    return [
        op("experimental.nlp_create_qkv_heads_decode", "heads"),
        *(normed if model.qk_norm else ()),
        op("experimental.rotary_embedding_hf", "rotate", 1 if design.is_fused else 2),
        op("experimental.paged_fused_update_cache", "write cache"),
        Op(
            part="attention",
            calls=("transformer.paged_scaled_dot_product_attention_decode",),
            count=num_layers,
            num_bytes=2.0 * tiles * TILE_BYTES[precision.kv_dtype],
            read="cache",
            # Query heads of one KV head fill a row of tiles; scores, then their sum of values.
            flops=2.0 * 2 * TILE**3 * tiles,
            fidelity=precision.attention,
        ),
        # Between the grids of products that follow each other; a collective's is none.
        op("to_memory_config", "move", 4 if tp == 1 else 6),
        op("experimental.nlp_concat_heads_decode", "join heads"),
    ]


def _drawing(model: ModelConfig, tp: int) -> list[Op]:
    """From logits to tokens, and the positions of the next step."""
    width = padded_vocab_size(model.vocab_size, tp) // tp
    pieces = -(-width // _PIECE)
    piece = _PIECE if pieces > 1 else 1 << (width - 1).bit_length()
    small = [
        *(["pad"] if pieces * piece > width else []),
        *(["slice"] * pieces if pieces > 1 else []),
        *["typecast"] * pieces,
        *(["concat"] * 2 if pieces > 1 else []),
        "add", "max", "lt", "typecast", "where", "min", "where",
        *(["pad"] * 2 if pieces * tp & (pieces * tp - 1) else []),
        "slice", "to_layout", "slice", "manual_seed", "reshape", "plus_one", "plus_one",
    ]  # fmt: skip
    gathers = [
        Op(
            part="drawing", calls=(COLLECTIVES["all_gather"],), count=2,
            exchanged=("all_gather", 2.0 * TILE * TILE * pieces * tp),
        )
    ]  # fmt: skip
    return [
        Op(part="drawing", calls=("topk",), count=pieces, kernel="best column", columns=piece),
        *(Op(part="drawing", calls=(call,), kernel="other") for call in small),
        *(gathers if tp > 1 else ()),
        Op(part="drawing", calls=("sampling",), kernel="draw"),
    ]

"""A chunk of a prompt from position 0, up to its last token's logits. Activations are in DRAM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.generators.ttnn.buckets import TILE
from replicas.generators.ttnn.profiles import PRODUCTS, TILE_BYTES
from scripts.roofline.decode import LOCAL_ROWS
from scripts.roofline.ops import Op, products, sums_over_chips

if TYPE_CHECKING:
    from replicas.generators.model_config import ModelConfig
    from scripts.roofline.ops import Design, Precision, Product, Program

_BYTES = 2
"""Of an element of an activation, bfloat16."""


def chunk_ops(  # noqa: PLR0913 - as `decode_ops`
    model: ModelConfig,
    tp: int,
    precision: Precision,
    design: Design,
    *,
    num_banks: int,
    num_cores: int,
    num_tokens: int,
) -> list[Op]:
    """Every op of a chunk.

    Args:
        model: The model.
        tp: Chips of the lane.
        precision: Dtypes.
        design: Programs of the output layer.
        num_banks: Of a chip's DRAM.
        num_cores: Of a chip.
        num_tokens: S, whole tiles.
    """
    layers, hidden = model.num_hidden_layers, model.hidden_size
    width = num_tokens * _BYTES
    inner = model.intermediate_size // tp
    programs: dict[Product, Program] = {**design.products}
    programs.update(dict.fromkeys(PRODUCTS, "chunk"))
    # A core has whole rows of tiles to norm.
    columns = -(-num_tokens // TILE // num_cores) * hidden
    sums = sums_over_chips(2 * layers + 1, width * hidden) if tp > 1 else []
    return [
        Op(part="norms", calls=("rms_norm",), count=2 * layers, num_bytes=2 * width * hidden,
           kernel="norm column", columns=columns),
        *_attention(model, tp, precision, num_tokens),
        Op(part="rest of a layer", calls=("mul",), count=layers, num_bytes=3 * width * inner),
        Op(part="rest of a layer", calls=("add",), count=2 * layers, num_bytes=3 * width * hidden),
        *sums,
        *_ends(model, tp, width),
        Op(part="norms", calls=("rms_norm",), kernel=design.norms, columns=hidden),
        *products(
            model, tp, precision, programs, num_banks=num_banks, num_tokens=num_tokens
        ),
    ]  # fmt: skip


def _ends(model: ModelConfig, tp: int, width: int) -> list[Op]:
    """Embedding, the rows of the rotary tables, and the last token's row."""
    calls = ["reshape", *(2 * ["embedding", "reshape"])]
    calls += ["slice", "to_layout", "embedding", "reshape", *(2 * ["to_memory_config"])]
    calls += LOCAL_ROWS if tp > 1 else ()
    return [
        Op(part="ends", calls=("embedding",), num_bytes=2 * width * model.hidden_size),
        *(Op(part="ends", calls=(call,), kernel="other") for call in calls),
    ]


def _attention(model: ModelConfig, tp: int, precision: Precision, num_tokens: int) -> list[Op]:
    """Between the two products of an attention."""
    layers, width = model.num_hidden_layers, num_tokens * _BYTES
    q = model.num_attention_heads // tp * model.head_dim
    kv = model.num_key_value_heads // tp * model.head_dim
    casts = precision.kv_dtype != "bfloat16"
    kv_bytes = num_tokens * kv * TILE_BYTES[precision.kv_dtype] / TILE**2

    def op(call: str, num_bytes: float) -> Op:
        return Op(part="rest of a layer", calls=(call,), count=layers, num_bytes=num_bytes)

    return [
        op("experimental.nlp_create_qkv_heads", 2 * width * (q + 2 * kv)),
        *([op("rms_norm", 2 * width * q), op("rms_norm", 2 * width * kv)] if model.qk_norm else []),
        op("experimental.rotary_embedding_hf", 2 * width * q),
        op("experimental.rotary_embedding_hf", 2 * width * kv),
        *(2 * [op("typecast", width * kv + kv_bytes)] if casts else []),
        *(2 * [op("experimental.paged_fill_cache", 2 * kv_bytes)]),
        Op(
            part="attention",
            calls=("transformer.scaled_dot_product_attention",),
            count=layers,
            num_bytes=2 * width * q + 2 * kv_bytes,
            # Half of the scores are masked, and not computed.
            flops=2.0 * num_tokens**2 * q,
            fidelity="HiFi4",
        ),
        op("experimental.nlp_concat_heads", 2 * width * q),
    ]

"""Fields of /v1/embeddings and /v1/rerank. Pure.

Source: OpenAI API reference (openai-python 3.51 request types); vLLM 0.32
`entrypoints/pooling/embed/protocol.py`, `entrypoints/pooling/score/protocol.py`.
"""

from __future__ import annotations

from cluster.edge.fields import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    OBJECT,
    STRING,
    FieldTable,
    acts,
    any_of,
    array_of,
    choice,
    no_effect,
    not_yet,
)
from cluster.edge.openai_fields import COMPLETION_FIELDS

_AS_COMPLETION = (
    "truncate_prompt_tokens", "truncation_side", "add_special_tokens", "priority", "cache_salt",
    "user", "request_id",
)  # fmt: skip
_SHARED = {
    "model": acts(STRING, "Name of a served model."),
    "pooling": acts(
        choice("last", "mean"), "State of the last token (the default), or the mean of all states."
    ),
    **{name: COMPLETION_FIELDS[name] for name in _AS_COMPLETION},
    "use_activation": not_yet(BOOLEAN, "False does not scale vectors.", neutral=(True,)),
    "mm_processor_kwargs": not_yet(OBJECT, "Options for images.", neutral=({},)),
}

EMBEDDING_FIELDS = FieldTable(
    "EmbeddingRequest",
    {
        "input": acts(
            any_of(
                STRING,
                array_of(STRING),
                array_of(INTEGER),
                array_of(array_of(INTEGER)),
            ),
            "A text or token ids, or up to 256 of either.",
            is_required=True,
        ),
        **_SHARED,
        "encoding_format": acts(
            choice("float", "base64"), "base64: the bytes of little-endian 32-bit floats."
        ),
        "dimensions": not_yet(INTEGER, "Shorter vectors, which the model was not trained for."),
        "messages": not_yet(ANYTHING, "A conversation to embed."),
        "embed_dtype": not_yet(STRING, "Type of the numbers.", neutral=("float32",)),
        "endianness": not_yet(STRING, "Order of bytes.", neutral=("little", "native")),
    },
)

RERANK_FIELDS = FieldTable(
    "RerankRequest",
    {
        "query": acts(STRING, "The text to compare with.", is_required=True),
        "documents": acts(array_of(STRING, minItems=1), "Up to 255 texts.", is_required=True),
        "top_n": acts(INTEGER, "Return so many of the most similar; 0: all."),
        "return_documents": acts(BOOLEAN, "False leaves the texts out of the answer."),
        **_SHARED,
        "rank_fields": no_effect(ANYTHING, "Fields of documents that are objects."),
        "max_chunks_per_doc": no_effect(INTEGER, "Documents are not cut."),
    },
)

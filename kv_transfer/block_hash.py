"""Chain hash of blocks of tokens: one definition for prefix caches, the router and the pool.

``h_i = BLAKE2b(h_{i-1} or root, token ids of block i as little-endian int32)``, keyed with the
root. Under one root, equal hashes mean equal prefixes, so a block is found without comparing the
tokens before it. Clients choose the tokens. With a weak hash, a client could search for two prompts
of one hash and be answered from the KV of the other. Hence a cryptographic hash of 32 bytes, and in
an engine a root that only processes of the deployment can compute. Pure; owns no state.
Source of the scheme: vLLM v1/core/kv_cache_utils.py (chain with parent), with raw int32 bytes in
place of a serialised tuple.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

HASH_BYTES = 32
NAME_BYTES = 8

PREFIX_CACHE = "prefix cache"
"""Purpose of the key of prefix caches, which is the first key that ``KeyRing.derive`` gives."""


Image: TypeAlias = tuple[str, int, int, bytes]
"""Data for placeholders of a prompt: modality, index of the first one, their number, hash of the
data. As in `replicas.messages.MultimodalInput`."""


def prefix_root(
    key: bytes, cache_salt: str, adapter: str = "", images: Sequence[Image] = ()
) -> bytes:
    """Return the root of a request's chain in prefix caches, which also keys its hashes.

    Args:
        key: Secret shared by all engines whose hashes must agree; 16 to 64 bytes.
        cache_salt: Salt of the request; equal tokens under two salts never share a block.
        adapter: LoRA adapter of the request; "" is none.
        images: Its images, in the order of their placeholders. All of them key all blocks, also
            those before them.
    """
    scope = cache_salt.encode()
    if adapter or images:
        # No text has the byte 0xff, so no salt alone gives this root.
        scope = b"\xff" + msgspec.msgpack.encode((cache_salt, adapter, images))
    return hashlib.blake2b(
        scope, digest_size=HASH_BYTES, key=key, person=b"ttserve prefix"
    ).digest()


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, root: bytes
) -> None:
    """Append the hashes of the full blocks of ``token_ids`` that ``hashes`` does not cover yet.

    Args:
        hashes: Hashes of the first ``len(hashes)`` blocks, 32 bytes each; grown in place.
        token_ids: All tokens so far.
        block_size: Tokens per block.
        root: Root of the chain, ``HASH_BYTES`` long; the same in every call for this chain.
    """
    start, full = len(hashes), len(token_ids) // block_size
    if start >= full:
        return
    # struct.pack is faster than an array for a list of Python integers, which a prompt is.
    raw = struct.pack(
        f"<{(full - start) * block_size}i", *token_ids[start * block_size : full * block_size]
    )
    width = 4 * block_size
    parent = hashes[-1] if hashes else root
    for i in range(full - start):
        chained = parent + raw[i * width : (i + 1) * width]
        parent = hashlib.blake2b(
            chained, digest_size=HASH_BYTES, key=root, person=b"ttserve block"
        ).digest()
        hashes.append(parent)


def block_names(hashes: Iterable[bytes]) -> list[int]:
    """Return 64-bit names of blocks, for uses in which a collision costs only time.

    Unsigned, little-endian, the first ``NAME_BYTES`` bytes. Never look KV up by these.
    """
    return [int.from_bytes(block_hash[:NAME_BYTES], "little") for block_hash in hashes]

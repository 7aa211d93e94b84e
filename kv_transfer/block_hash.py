"""Chain hash of blocks of tokens: one definition for prefix caches, the router and the pool.

``h_i = BLAKE2b(h_{i-1} or root, token ids of block i as little-endian int32)``, keyed with the
root: equal hashes mean equal prefixes under one root, so that a block can be found without
comparing what came before it. Clients choose the tokens, and whoever found two prompts of one hash
would have the one answered from the other's KV: hence a cryptographic hash of 32 bytes, and in an
engine a root that nobody outside of the deployment can compute. Pure; owns no state.
Source of the scheme: vLLM v1/core/kv_cache_utils.py (chain with parent), with raw int32 bytes in
place of a serialised tuple.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence

HASH_BYTES = 32
NAME_BYTES = 8

PREFIX_CACHE = "prefix cache"
"""Purpose of the key of prefix caches: the first that ``KeyRing.derive`` gives for it."""


def prefix_root(key: bytes, cache_salt: str) -> bytes:
    """Return what a request's chain starts from, and is keyed with, in prefix caches.

    Args:
        key: Secret of all engines that should agree; 16 to 64 bytes.
        cache_salt: Of the request; equal tokens under another salt never share a block.
    """
    return hashlib.blake2b(
        cache_salt.encode(), digest_size=HASH_BYTES, key=key, person=b"ttserve prefix"
    ).digest()


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, root: bytes
) -> None:
    """Append the hashes of the full blocks of ``token_ids`` that ``hashes`` does not cover yet.

    Args:
        hashes: Hashes of the first ``len(hashes)`` blocks, 32 bytes each; grown in place.
        token_ids: All tokens so far.
        block_size: Tokens per block.
        root: Of the chain, ``HASH_BYTES`` long; the same each time that it is extended.
    """
    start, full = len(hashes), len(token_ids) // block_size
    if start >= full:
        return
    # Faster than an array for lists of Python integers, which is what a prompt is.
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
    """What blocks are called where a mistake costs time alone: 64 bits of their hashes.

    Unsigned, little-endian, the first ``NAME_BYTES`` bytes. Never look KV up by these.
    """
    return [int.from_bytes(block_hash[:NAME_BYTES], "little") for block_hash in hashes]

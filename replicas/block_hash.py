"""Chain hash of full KV blocks: one definition for the engine's prefix cache and for the router.

`h_i = xxh3_128(h_{i-1} or salt, token ids of block i as little-endian int32)`: equal hashes mean
equal prefixes, so that a block can be found without comparing what came before it.
Source of the scheme: vLLM v1/core/kv_cache_utils.py (chain with parent), with raw int32 bytes in
place of a serialised tuple.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence


def chain_start(cache_salt: str) -> bytes:
    """The salt that starts the chain of a request.

    Hashed, so that whoever may choose a salt cannot make it the middle of somebody else's chain.

    Args:
        cache_salt: Of the request; empty for none.
    """
    return hashlib.blake2b(cache_salt.encode(), digest_size=32).digest() if cache_salt else b""


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, salt: bytes = b""
) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` does not cover yet.

    Args:
        hashes: Hashes of the first `len(hashes)` blocks; grown in place.
        token_ids: All tokens so far.
        block_size: Tokens per block.
        salt: Starts the chain: equal tokens under another salt never share a block.
    """
    start, full = len(hashes), len(token_ids) // block_size
    if start >= full:
        return
    # Faster than an array for lists of Python integers, which is what a prompt is.
    raw = struct.pack(
        f"<{(full - start) * block_size}i", *token_ids[start * block_size : full * block_size]
    )
    width = 4 * block_size
    parent = hashes[-1] if hashes else salt
    for i in range(full - start):
        parent = xxhash.xxh3_128_digest(parent + raw[i * width : (i + 1) * width])
        hashes.append(parent)

"""Counter-based random numbers: equal (seed, index) give equal numbers on every machine.

Pure; needs only numpy. Used by the sampler, and by front ends to mint seeds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_PHILOX_M = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_W = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_MASK32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)


def philox4x32(
    counter: tuple[npt.NDArray[np.uint64], ...], key: tuple[npt.NDArray[np.uint64], ...]
) -> tuple[npt.NDArray[np.uint64], ...]:
    """Compute Philox-4x32-10: four random words per lane from a 128-bit counter and a 64-bit key.

    Args:
        counter: Four arrays of 32-bit words, each uint64 (R,).
        key: Two arrays of 32-bit words, each uint64 (R,).

    Returns:
        Four arrays of 32-bit words, each uint64 (R,).

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _PHILOX_M[0], c2 * _PHILOX_M[1]
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT32) ^ c1 ^ k0,
            p1 & _MASK32,
            (p0 >> _SHIFT32) ^ c3 ^ k1,
            p0 & _MASK32,
        )
        k0, k1 = (k0 + _PHILOX_W[0]) & _MASK32, (k1 + _PHILOX_W[1]) & _MASK32
    return c0, c1, c2, c3


def uniform(
    seeds: npt.NDArray[np.int64], indices: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return random numbers in [0, 1) with 53 random bits, one per (seed, output index).

    Args:
        seeds: int64 (R,).
        indices: (R,) output index of the token to draw.
    """
    key = seeds.astype(np.int64).view(np.uint64)
    count = indices.astype(np.uint64)
    zero = np.zeros_like(key)
    w0, w1, _, _ = philox4x32(
        (count & _MASK32, count >> _SHIFT32, zero, zero), (key & _MASK32, key >> _SHIFT32)
    )
    bits = ((w0 << _SHIFT32) | w1) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def mint_seed(base: int, count: int) -> int:
    """Return the seed of the `count`-th request under a base seed: 63 random bits, reproducible.

    The front end mints the seed once, so that every engine that runs the request draws the same
    numbers.
    """
    drawn = uniform(np.array([base], dtype=np.int64), np.array([count], dtype=np.int64))
    return int(drawn[0] * 2.0**53) << 10

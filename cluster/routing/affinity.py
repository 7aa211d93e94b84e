"""Session affinity by rendezvous hashing, for when no other cost decides. Pure.

Every ingress computes the same order of places without communication. When a place comes or goes,
only its own sessions move.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from cluster.routing.placement import Placement


def place_keys(placements: Iterable[Placement]) -> npt.NDArray[np.uint64]:
    """Return a number for each place, the same in every process."""
    return np.array([_key(f"{p.incarnation}/{p.dp_group}") for p in placements], dtype=np.uint64)


def affinities(session: str, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return a session's affinity to each place, in [0, 1); its home is the place of the highest.

    Args:
        session: The session.
        keys: Keys of the places, from `place_keys`.
    """
    mixed = keys ^ np.uint64(_key(session))
    # The finaliser of splitmix64, modulo 2 ** 64.
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _key(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")

"""The causal mask: one definition for every attention back end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


def causal_mask(positions: npt.NDArray[np.integer], length: int) -> npt.NDArray[np.bool_]:
    """Return which positions of its sequence each token attends to: its own and all earlier ones.

    Args:
        positions: (n,) position of each token in its own sequence.
        length: Number of positions to cover. With ``positions`` 0..n-1 and ``length`` n the result
            is the triangle that the first chunks of all requests share.

    Returns:
        (n, length) bool.
    """
    mask: npt.NDArray[np.bool_] = np.arange(length)[None, :] <= positions[:, None]
    return mask

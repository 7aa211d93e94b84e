"""Lease that every store hands out."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


class HeldLease:
    """``Lease`` that a function of its store ends. Owner: the caller of ``get``."""

    def __init__(self, value: NDArray[np.uint8], end: Callable[[], bool]) -> None:
        """Hold a value (1-D).

        Args:
            value: Made read-only here.
            end: Ends the lease and returns whether it had lasted until then. Called once.
        """
        value.flags.writeable = False
        self._value = value
        self._end = end
        self._was_protected: bool | None = None

    @property
    def value(self) -> NDArray[np.uint8]:
        """Value, 1-D and read-only."""
        return self._value

    def release(self) -> bool:
        """End the lease; return whether the value was protected until now."""
        if self._was_protected is None:
            self._was_protected = self._end()
        return self._was_protected

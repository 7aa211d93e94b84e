"""A lease as every store hands it out."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


class HeldLease:
    """A ``Lease`` whose end is the store's business. Owner: whoever got it."""

    def __init__(self, value: NDArray[np.uint8], end: Callable[[], bool]) -> None:
        """Take a value (1-D).

        Args:
            value: Made read-only here.
            end: Ends the lease; returns whether it had lasted until then. Called once.
        """
        value.flags.writeable = False
        self._value = value
        self._end = end
        self._was_protected: bool | None = None

    @property
    def value(self) -> NDArray[np.uint8]:
        """The value."""
        return self._value

    def release(self) -> bool:
        """Give the value up."""
        if self._was_protected is None:
            self._was_protected = self._end()
        return self._was_protected

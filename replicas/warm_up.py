"""Names and durations of the passes of an engine's warm-up, in its log."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def timed_pass(name: str) -> Iterator[None]:
    """Log how long a pass took, unless it raises. Passes may contain others."""
    began_s = time.perf_counter()
    yield
    logger.info("warm-up: %s took %.3f s", name, time.perf_counter() - began_s)

"""The row processors of a worker, in the order in which they change logits.

The order is vLLM's. Source: vLLM v1/sample/sampler.py `Sampler.forward`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.engine.rows.penalties import Penalties

if TYPE_CHECKING:
    from replicas.engine.rows.processor import RowProcessor


def row_processors() -> list[RowProcessor]:
    """Return new processors, without state."""
    return [Penalties()]

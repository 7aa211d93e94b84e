"""The row processors of a worker, in the order in which they change logits.

The order is vLLM's, whose runner masks by grammars before its sampler. Source: vLLM
v1/sample/sampler.py `Sampler.forward`, v1/structured_output/utils.py `apply_grammar_bitmask`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.engine.rows.grammar import GrammarProcessor
from replicas.engine.rows.penalties import Penalties

if TYPE_CHECKING:
    from replicas.engine.rows.grammar import GrammarCache
    from replicas.engine.rows.processor import RowProcessor


def row_processors(grammars: GrammarCache | None = None) -> list[RowProcessor]:
    """Return new processors, without state.

    Args:
        grammars: The worker's grammars; None: no row has one.
    """
    first: list[RowProcessor] = [] if grammars is None else [GrammarProcessor(grammars)]
    return [*first, Penalties()]

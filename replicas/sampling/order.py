"""The row processors of a worker, in the order in which they change logits.

The order is vLLM's, whose runner masks by grammars before its sampler. Source: vLLM
v1/sample/sampler.py `Sampler.forward`, v1/structured_output/utils.py `apply_grammar_bitmask`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.sampling.grammar import GrammarProcessor
from replicas.sampling.penalties import Penalties
from replicas.sampling.reasoning_budget import ReasoningBudgets
from replicas.sampling.token_masks import AllowedTokens, BadWords, LogitBias, MinTokens

if TYPE_CHECKING:
    from collections.abc import Collection

    from replicas.sampling.grammar import GrammarCache
    from replicas.sampling.logprobs import Logprobs
    from replicas.sampling.processor import RowProcessor


def row_processors(
    eos_token_ids: Collection[int],
    grammars: GrammarCache | None = None,
    logprobs: Logprobs | None = None,
) -> list[RowProcessor]:
    """Return new processors, without state.

    Args:
        eos_token_ids: The model's end tokens.
        grammars: The worker's grammars; None: no row has one.
        logprobs: Reader of log probabilities, which the caller asks for them.
    """
    first: list[RowProcessor] = [] if grammars is None else [GrammarProcessor(grammars)]
    last: list[RowProcessor] = []
    if logprobs is not None:
        # Raw values are those that a grammar has masked: it changes what the model may say.
        (first if logprobs.mode.startswith("raw") else last).append(logprobs)
    return [
        *first,
        AllowedTokens(),
        BadWords(),
        MinTokens(eos_token_ids),
        LogitBias(),
        Penalties(),
        ReasoningBudgets(),
        *last,
    ]

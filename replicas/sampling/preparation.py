"""Orders to compile grammars, and their results.

Plain records that could cross a process boundary, as those of `replicas.engine.step`; apart from
the grammars themselves, so that a scheduler imports no compiler.
"""

import msgspec

from replicas.sampling_params import StructuredOutputs

NUM_GRAMMAR_THREADS = 2
"""Grammars that a worker compiles at once."""


class Preparation(msgspec.Struct, frozen=True, array_like=True):
    """An order to a worker to compile a grammar and keep it.

    Attributes:
        grammar: The grammar.
        is_wanted: False: it need not be kept any longer.
    """

    grammar: StructuredOutputs
    is_wanted: bool = True


class Prepared(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that a worker has compiled, or `error`, the reason why there is none."""

    grammar: StructuredOutputs
    error: str | None = None

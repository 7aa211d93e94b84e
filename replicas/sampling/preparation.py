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
    """State of a grammar that a worker was ordered to compile.

    Attributes:
        grammar: The grammar.
        error: Why there is none; None if it is compiled.
        cpu_s: Seconds of CPU time of its compilation, if that is not over; None if it is.
    """

    grammar: StructuredOutputs
    error: str | None = None
    cpu_s: float | None = None

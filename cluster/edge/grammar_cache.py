"""Grammars of messages that were built before.

Clients repeat their tools with every turn of a conversation, and building the grammar of many tools
takes up to 30 ms.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from cluster.edge.structured_outputs import Grammar

MAX_CHARS = 2**24
"""Characters of all grammars that are kept."""


class GrammarCache:
    """Grammars by what they were built from; the least recently used ones are dropped.

    Owner: one event loop.

    Args:
        max_chars: Most characters of all grammars.
    """

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._grammars: OrderedDict[Hashable, Grammar] = OrderedDict()

    def get(self, key: Hashable) -> Grammar | None:
        """Return a grammar, or None."""
        found = self._grammars.get(key)
        if found is not None:
            self._grammars.move_to_end(key)
        return found

    def add(self, key: Hashable, grammar: Grammar) -> None:
        """Keep a grammar, unless it is larger than all may be."""
        if key in self._grammars or grammar.num_chars > self._max_chars:
            return
        self._grammars[key] = grammar
        self._num_chars += grammar.num_chars
        while self._num_chars > self._max_chars:
            _, dropped = self._grammars.popitem(last=False)
            self._num_chars -= dropped.num_chars

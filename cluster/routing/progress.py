"""Outputs that the client of one request has, and where an interrupted stream stopped. Pure.

Owner: the request's `Run`. Engines that run a request one after the other may repeat tokens and
endings, but must not leave any out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from replicas.messages import TokenOutput


class Seam(NamedTuple):
    """The point at which a stream was interrupted, until another decode engine continues it.

    Attributes:
        reason: Why the first engine was left, as a metric's label.
        why: The same reason for a person.
        heard_s: Time of its last token.
        kv: How the next engine gets the KV, as a metric's label: "moved", "cached" or "recomputed".
    """

    reason: str
    why: str
    heard_s: float
    kv: str


class Progress:
    """Tokens and endings of every choice of one request.

    Args:
        num_choices: Number of answers that were asked for.

    Attributes:
        tokens: For each choice the tokens that the client has, or gets next; with them another
            engine can continue a lost one's stream.
        seam: Set from the moment in which a decode engine was left until another one gives a token.
    """

    def __init__(self, num_choices: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_choices)]
        self.seam: Seam | None = None
        self._unfinished = set(range(num_choices))
        self._heard_s = 0.0

    @property
    def has_tokens(self) -> bool:
        """Whether the prompt has been computed and the client has tokens."""
        return any(self.tokens)

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return not self._unfinished

    @property
    def ended(self) -> list[int]:
        """The choices that have ended."""
        return [choice for choice in range(len(self.tokens)) if choice not in self._unfinished]

    @property
    def longest(self) -> list[int]:
        """Tokens of the longest choice."""
        return max(self.tokens, key=len)

    def break_off(self, reason: str, why: str, kv: str) -> None:
        """Record that a decode engine will give no more tokens."""
        self.seam = self.seam or Seam(reason, why, self._heard_s, kv)

    def heard(self, now_s: float) -> Seam | None:
        """Record that a decode engine has given tokens; return the seam that this closes."""
        seam, self.seam = self.seam, None
        self._heard_s = now_s
        return seam

    def end(self, choice: int) -> bool:
        """Record that the client wants no more of a choice; return False if it had ended."""
        if choice not in self._unfinished:
            return False
        self._unfinished.discard(choice)
        return True

    def note(self, output: TokenOutput) -> None:
        """Add the new tokens and endings of an output; ignore a choice that has ended.

        An engine may have ended a choice before it reads that the client wants no more of it. The
        tokens before that end are not delivered.
        """
        if output.choice not in self._unfinished:
            return
        tokens = self.tokens[output.choice]
        assert output.index <= len(tokens), f"tokens before index {output.index} are missing"
        tokens += output.token_ids[len(tokens) - output.index :]
        if output.finish_reason is not None:
            self._unfinished.discard(output.choice)

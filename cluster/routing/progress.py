"""What the client of one request has of each choice, which have ended, where it broke off. Pure.

Owner: the request's `Run`. Engines that run the request one after the other may say the same tokens
and endings again; none may leave any out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from replicas.messages import TokenOutput


class Seam(NamedTuple):
    """Where a stream broke off that another decode engine is to go on with.

    Attributes:
        reason: Why the one before was left, a metric's label.
        why: The same for a person.
        heard_s: When it had given its last token.
        kv: How the next one comes by its KV, a metric's label: "moved", "cached" or "recomputed".
    """

    reason: str
    why: str
    heard_s: float
    kv: str


class Progress:
    """See the module docstring.

    Args:
        num_choices: Answers that were asked for.

    Attributes:
        tokens: For each choice, the tokens that the client has, or gets next: with them another
            engine can go on from where a lost one was.
        seam: Set from the moment in which a decode engine was left until another one gives a token.
    """

    def __init__(self, num_choices: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_choices)]
        self.seam: Seam | None = None
        self._unfinished = set(range(num_choices))
        self._heard_s = 0.0

    @property
    def has_tokens(self) -> bool:
        """Whether the prompt has been computed, and the client has something."""
        return any(self.tokens)

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return not self._unfinished

    @property
    def longest(self) -> list[int]:
        """The tokens of the choice that has most."""
        return max(self.tokens, key=len)

    def break_off(self, reason: str, why: str, kv: str) -> None:
        """The decode engine that gave tokens gives no more."""
        self.seam = self.seam or Seam(reason, why, self._heard_s, kv)

    def heard(self, now_s: float) -> Seam | None:
        """A decode engine has given tokens; where that ends a seam, which."""
        seam, self.seam = self.seam, None
        self._heard_s = now_s
        return seam

    def note(self, output: TokenOutput) -> None:
        """Add what an output has that is new."""
        tokens = self.tokens[output.choice]
        assert output.index <= len(tokens), f"tokens before index {output.index} are missing"
        tokens += output.token_ids[len(tokens) - output.index :]
        if output.finish_reason is not None:
            self._unfinished.discard(output.choice)

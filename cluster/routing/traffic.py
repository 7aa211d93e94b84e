"""What one ingress was asked since it started: what a cluster is scaled by. Pure.

Owner: the router. Counts only grow, so that whoever looks seldom misses nothing, and those of
several ingresses may be added; what is under way is a difference of two.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from replicas.messages import num_pairs


@dataclass(slots=True)
class Traffic:
    """See the module docstring.

    Attributes:
        came: Requests, refused ones too: they are demand as well.
        came_tokens: Their prompt tokens.
        came_pairs: Their pairs of tokens of which one attends to the other.
        begun: Requests that have their first token.
        begun_tokens: Their prompt tokens.
        cached_tokens: Those that a prefix cache had.
        ended: Requests that had begun and are over.
        ended_tokens: Their prompt tokens.
        output_tokens: What they got, of all choices.
        dropped: Requests that were over before they began.
        dropped_tokens: Their prompt tokens.
    """

    came: float = 0.0
    came_tokens: float = 0.0
    came_pairs: float = 0.0
    begun: float = 0.0
    begun_tokens: float = 0.0
    cached_tokens: float = 0.0
    ended: float = 0.0
    ended_tokens: float = 0.0
    output_tokens: float = 0.0
    dropped: float = 0.0
    dropped_tokens: float = 0.0

    @property
    def num_waiting(self) -> float:
        """Requests without a first token."""
        return self.came - self.begun - self.dropped

    @property
    def num_decoding(self) -> float:
        """Requests with one that are not over."""
        return self.begun - self.ended

    def come(self, num_prompt_tokens: int) -> None:
        """A request has come."""
        self.came += 1
        self.came_tokens += num_prompt_tokens
        self.came_pairs += num_pairs(0, num_prompt_tokens)

    def begin(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """It has its first token."""
        self.begun += 1
        self.begun_tokens += num_prompt_tokens
        self.cached_tokens += num_cached_tokens

    def end(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """It is over, with so many tokens."""
        if num_output_tokens:
            self.ended += 1
            self.ended_tokens += num_prompt_tokens
            self.output_tokens += num_output_tokens
        else:
            self.dropped += 1
            self.dropped_tokens += num_prompt_tokens

    def as_dict(self) -> dict[str, float]:
        """By name."""
        return asdict(self)

    def __add__(self, other: Traffic) -> Traffic:
        """Of both together."""
        return Traffic(*map(sum, zip(self._values(), other._values(), strict=True)))

    def __sub__(self, earlier: Traffic) -> Traffic:
        """Since an earlier look at the same counts."""
        pairs = zip(self._values(), earlier._values(), strict=True)
        return Traffic(*(now - before for now, before in pairs))

    def _values(self) -> tuple[float, ...]:
        return tuple(asdict(self).values())

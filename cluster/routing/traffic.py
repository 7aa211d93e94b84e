"""Counts of one ingress since its start, which autoscaling reads. Pure.

Owner: the router. Counts only grow, so a reader that polls seldom misses nothing, and the counts of
several ingresses can be added. Requests under way are differences of two counts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from replicas.messages import num_pairs


@dataclass(slots=True)
class Traffic:
    """Counts of requests and tokens since the start of an ingress.

    Attributes:
        came: Requests that arrived; refused ones count too, as demand.
        came_tokens: Their prompt tokens.
        came_pairs: Pairs of prompt tokens of which one attends to the other.
        begun: Requests that have their first token.
        begun_tokens: Their prompt tokens.
        cached_tokens: Those that were found in a prefix cache.
        ended: Requests that had begun and have ended.
        ended_tokens: Their prompt tokens.
        output_tokens: Their output tokens, over all choices.
        dropped: Requests that ended before they began.
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
        """Number of requests without a first token."""
        return self.came - self.begun - self.dropped

    @property
    def num_decoding(self) -> float:
        """Number of requests with a first token that have not ended."""
        return self.begun - self.ended

    def come(self, num_prompt_tokens: int) -> None:
        """Count a request that arrived."""
        self.came += 1
        self.came_tokens += num_prompt_tokens
        self.came_pairs += num_pairs(0, num_prompt_tokens)

    def begin(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count a request that got its first token."""
        self.begun += 1
        self.begun_tokens += num_prompt_tokens
        self.cached_tokens += num_cached_tokens

    def end(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count a request that ended, with its number of output tokens."""
        if num_output_tokens:
            self.ended += 1
            self.ended_tokens += num_prompt_tokens
            self.output_tokens += num_output_tokens
        else:
            self.dropped += 1
            self.dropped_tokens += num_prompt_tokens

    def as_dict(self) -> dict[str, float]:
        """Return the counts by name."""
        return asdict(self)

    def __add__(self, other: Traffic) -> Traffic:
        """Return the sum of the counts of two ingresses."""
        return Traffic(*map(sum, zip(self._values(), other._values(), strict=True)))

    def __sub__(self, earlier: Traffic) -> Traffic:
        """Return the counts since an earlier copy."""
        pairs = zip(self._values(), earlier._values(), strict=True)
        return Traffic(*(now - before for now, before in pairs))

    def _values(self) -> tuple[float, ...]:
        return tuple(asdict(self).values())

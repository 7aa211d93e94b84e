"""Moments at which a benchmark sends its requests. Pure.

Source: vLLM 0.32 `benchmarks/serve.py`, `get_request`: gaps from a gamma distribution, scaled so
that a constant rate is met exactly.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from cluster.bench.errors import BenchError

if TYPE_CHECKING:
    import numpy.typing as npt


class RampUp(msgspec.Struct, frozen=True):
    """A request rate that changes from the first request to the last.

    Attributes:
        strategy: "linear" adds the same to the rate from request to request, "exponential"
            multiplies it by the same.
        start_rps: Rate at the first request, above 0.
        end_rps: Rate at the last one, above 0.

    Raises:
        BenchError: A rate is not positive and finite.
    """

    strategy: Literal["linear", "exponential"]
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        for name, rate in (("start", self.start_rps), ("end", self.end_rps)):
            if not 0 < rate < math.inf:
                raise BenchError(f"--ramp-up-{name}-rps is {rate}; give a number above 0")

    def rates(self, num_requests: int) -> npt.NDArray[np.float64]:
        """Return the rate at each request, in requests per second: float64 (num_requests,)."""
        progress = np.arange(num_requests) / max(num_requests - 1, 1)
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        rates: npt.NDArray[np.float64] = (
            self.start_rps * (self.end_rps / self.start_rps) ** progress
        )
        return rates


def arrival_times(
    num_requests: int,
    rate: float,
    burstiness: float,
    random: np.random.Generator,
    ramp_up: RampUp | None = None,
) -> npt.NDArray[np.float64]:
    """Return the seconds after the start at which requests are sent: float64 (num_requests,).

    They are sorted.

    Args:
        num_requests: At least 1.
        rate: Requests per second; infinite sends all at once. Ignored with `ramp_up`.
        burstiness: Shape of the gamma distribution of the gaps: 1 is a Poisson process, less comes
            in bursts, more is more regular, infinite is equally spaced.
        random: Source of the gaps.
        ramp_up: A changing rate instead of `rate`.

    Raises:
        BenchError: The rate or the burstiness is not positive.
    """
    if not rate > 0:
        raise BenchError(f"--request-rate is {rate}; give a number above 0, or inf")
    if not burstiness > 0:
        raise BenchError(f"--burstiness is {burstiness}; give a number above 0, or inf")
    if ramp_up is None and math.isinf(rate):
        return np.zeros(num_requests)
    rates = np.full(num_requests, rate) if ramp_up is None else ramp_up.rates(num_requests)
    if math.isinf(burstiness):
        gaps = 1.0 / rates
    else:
        gaps = random.gamma(burstiness, 1.0 / (rates * burstiness))
    times: npt.NDArray[np.float64] = np.cumsum(gaps)
    if ramp_up is None and times[-1] > 0:
        # The sum of the drawn gaps misses the duration by some percent, which would be counted as
        # a difference in throughput.
        times *= num_requests / rate / times[-1]
    return times

"""Measured demand on a cluster, and a forecast for when a replica that starts now is ready. Pure.

Owned by one autoscaler, which reads the ingresses' counters every few seconds. Ingresses may come
and go between two readings.
"""

from __future__ import annotations

import math
from collections import deque
from copy import copy
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cluster.routing.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from cluster.routing.step_time import StepCosts

_MIN_OBSERVATIONS = 6
"""Observations needed before a slope, or the variance of arrivals, is trusted."""
_MIN_OBSERVATIONS_PER_SIDE = 2
"""Observations needed before and after a step in the rate."""
_MAX_EXTRAPOLATION = 1.0 / 3.0
"""A linear trend is extrapolated for at most this share of the time over which it was observed."""
_SURGE_DEVIATIONS = 3.0
"""Standard deviations by which recent arrivals must exceed the mean to count as a surge."""


class DemandForecast(NamedTuple):
    """The demand on a cluster at some time.

    Attributes:
        requests_per_s: Rate of arrivals.
        prompt_s: Mean seconds that one replica needs to compute a request's prompt.
        burstiness: Variance of the work arriving in a few seconds, divided by that of equal
            requests with Poisson arrivals: 1 for those.
        output_tokens: Mean output tokens of a request.
        context_tokens: Mean context of a request while it decodes.
        num_decoding: Requests that decode now.
        backlog_s: Seconds that one replica would need for the prompts that wait now.
    """

    requests_per_s: float
    prompt_s: float
    burstiness: float
    output_tokens: float
    context_tokens: float
    num_decoding: float
    backlog_s: float


class _Observation(NamedTuple):
    """The arrivals between two readings; a forecast converts them to seconds of work."""

    at_s: float
    seconds: float
    requests: float
    tokens: float
    pairs: float


class Meter:
    """The recent arrivals of a cluster, and forecasts from them.

    Args:
        window_s: How far back arrivals count: longer than a burst, far shorter than a daily cycle.
        recent_s: Length of the most recent period, over which a surge is detected.
    """

    def __init__(self, window_s: float, recent_s: float) -> None:
        self._window_s = window_s
        self._recent_s = recent_s
        self._observations: deque[_Observation] = deque()
        self._last: dict[str, Traffic] = {}
        # Includes ingresses that are missing now: they may come back.
        self._known: dict[str, Traffic] = {}
        self._last_s: float | None = None
        self._total = Traffic()

    def observe(self, now_s: float, counted: Mapping[str, Traffic]) -> None:
        """Record each ingress's counters.

        Args:
            now_s: The time. Readings that are not later than the last one are ignored.
            counted: Counters by ingress; a name is never reused.
        """
        if self._last_s is not None and now_s <= self._last_s:
            return
        if self._last_s is None:
            # It is unknown when these requests arrived.
            self._total = sum(counted.values(), Traffic())
        else:
            new = sum(
                (traffic - self._known.get(name, Traffic()) for name, traffic in counted.items()),
                Traffic(),
            )
            self._total += new
            seconds = now_s - self._last_s
            self._observations.append(
                _Observation(now_s, seconds, new.came, new.came_tokens, new.came_pairs)
            )
        self._last = {name: copy(traffic) for name, traffic in counted.items()}
        self._known |= self._last
        self._last_s = now_s
        while self._observations and self._observations[0].at_s <= now_s - self._window_s:
            self._observations.popleft()

    def demand(self, ahead_s: float, costs: StepCosts) -> DemandForecast | None:
        """Forecast the demand `ahead_s` seconds from now; None until a request has ended.

        Args:
            ahead_s: Seconds from the last reading.
            costs: Costs of the parts of a step, as learned so far.
        """
        total = self._total
        if not self._observations or not total.ended or not total.came:
            return None
        works_s = [
            _work_s(
                observation.requests,
                observation.tokens,
                observation.pairs,
                self._uncached_share,
                costs,
            )
            for observation in self._observations
        ]
        num_requests, work_s = (
            sum(observation.requests for observation in self._observations),
            sum(works_s),
        )
        if not num_requests:
            num_requests = total.came
            work_s = _work_s(
                total.came, total.came_tokens, total.came_pairs, self._uncached_share, costs
            )
        trend = _RateTrend(self._observations)
        now = sum(self._last.values(), Traffic())
        mean_tokens = now.came_tokens / max(now.came, 1.0)
        waiting_tokens = now.came_tokens - now.begun_tokens - now.dropped_tokens
        waiting_pairs = max(waiting_tokens, 0.0) * now.came_pairs / max(now.came_tokens, 1.0)
        output_tokens = total.output_tokens / total.ended
        return DemandForecast(
            max(trend.rate(ahead_s), self._surge_rate(trend), 0.0),
            work_s / num_requests,
            trend.burstiness(np.array(works_s), work_s / num_requests),
            output_tokens,
            mean_tokens + output_tokens / 2.0,
            max(now.num_decoding, 0.0),
            _work_s(
                max(now.num_waiting, 0.0), max(waiting_tokens, 0.0), waiting_pairs,
                self._uncached_share, costs,
            ),
        )  # fmt: skip

    @property
    def _uncached_share(self) -> float:
        """The share of prompt tokens that are in no prefix cache."""
        total = self._total
        return 1.0 - total.cached_tokens / max(total.begun_tokens, 1.0)

    def _surge_rate(self, trend: _RateTrend) -> float:
        """Return the recent rate of requests if chance does not explain the rise, else 0."""
        since_s = self._observations[-1].at_s - self._recent_s
        recent = [observation for observation in self._observations if observation.at_s > since_s]
        seconds = sum(observation.seconds for observation in recent)
        num_requests = sum(observation.requests for observation in recent)
        expected = trend.level * seconds
        deviation = math.sqrt(max(expected, 1.0) * max(trend.dispersion, 1.0))
        is_more = num_requests - expected > _SURGE_DEVIATIONS * deviation
        return num_requests / seconds if is_more else 0.0


class _RateTrend:
    """A model of the observed rates: constant, linear, or one step between two levels.

    Chosen by Schwarz's criterion (1978), which weighs the unexplained rest against the number of
    parameters. After a step the rate is assumed to stay: a line through a step would be
    extrapolated far beyond it.

    Attributes:
        level: Mean requests per second.
        dispersion: Variance of an observation's requests about the model, divided by their mean;
            1 for Poisson arrivals.
    """

    def __init__(self, observations: deque[_Observation]) -> None:
        self._seconds = np.array([observation.seconds for observation in observations])
        counts = np.array([observation.requests for observation in observations])
        at_s = np.array([observation.at_s for observation in observations]) - self._seconds / 2.0
        self._from_mean_s = at_s - at_s.mean()
        self._to_now_s = observations[-1].at_s - float(at_s.mean())
        self.level = float(counts.sum() / self._seconds.sum())
        self._slope = 0.0
        self._rate_after_step: float | None = None
        self._rates: npt.NDArray[np.float64] = np.full(len(observations), self.level)
        self.dispersion = 1.0
        if len(observations) >= _MIN_OBSERVATIONS and self.level > 0.0:
            self._choose(counts / self._seconds)
            self.dispersion = float(((counts - self._expected) ** 2).mean() / counts.mean())

    @property
    def _expected(self) -> npt.NDArray[np.float64]:
        """The requests of each observation that the model expects."""
        expected: npt.NDArray[np.float64] = self._rates * self._seconds
        return expected

    def rate(self, ahead_s: float) -> float:
        """Return the requests per second, `ahead_s` seconds after the last observation."""
        if self._rate_after_step is not None:
            return self._rate_after_step
        carried_s = min(ahead_s, _MAX_EXTRAPOLATION * float(self._seconds.sum()))
        return max(self.level + self._slope * (self._to_now_s + carried_s), 0.0)

    def burstiness(self, work_s: npt.NDArray[np.float64], prompt_s: float) -> float:
        """Return `DemandForecast.burstiness`: work varies with counts and with prompt lengths."""
        mean_s = float(work_s.mean())
        if len(work_s) < _MIN_OBSERVATIONS or mean_s <= 0.0:
            return 1.0
        rest_s = work_s - self._expected * prompt_s
        return max(float((rest_s**2).mean()) / (mean_s * prompt_s), 0.5)

    def _choose(self, rates: npt.NDArray[np.float64]) -> None:
        """Use the line, or the step, if it explains the observations better than a constant."""
        num = len(rates)
        # Poisson arrivals vary by this much. A model that leaves less unexplained fits noise.
        chance = num * self.level / float(self._seconds.mean())

        def criterion(by: npt.NDArray[np.float64], num_parameters: int) -> float:
            rest = max(float(((rates - by) ** 2).sum()), chance)
            return num * math.log(rest) + num_parameters * math.log(num)

        slope = float((self._from_mean_s * rates).sum() / (self._from_mean_s**2).sum())
        line = rates.mean() + slope * self._from_mean_s
        ends = range(_MIN_OBSERVATIONS_PER_SIDE, num - _MIN_OBSERVATIONS_PER_SIDE + 1)
        steps = [np.repeat([rates[:k].mean(), rates[k:].mean()], [k, num - k]) for k in ends]
        step = min(steps, key=lambda by: float(((rates - by) ** 2).sum()))
        least = criterion(self._rates, 1)
        if criterion(line, 2) < least:
            least = criterion(line, 2)
            self._rates, self._slope = line, slope
        if criterion(step, 3) < least:
            self._rates, self._slope, self._rate_after_step = step, 0.0, float(step[-1])


def _work_s(
    num_prompts: float, num_tokens: float, num_pairs: float, missed: float, costs: StepCosts
) -> float:
    """Return the seconds of computing these prompts, of which the share `missed` is not cached."""
    return costs.prompts_s(num_prompts, missed * num_tokens, missed * num_pairs)

"""What is asked of a cluster, and what will be when a replica that starts now is there. Pure.

Owner: one autoscaler. It looks at what ingresses have counted every few seconds; between two looks
an ingress may have come or gone.
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

_FEWEST = 6
"""Looks before which a slope, or how much arrivals vary, is not believed."""
_FEWEST_A_SIDE = 2
"""Looks before and after a step."""
_CARRIED = 1.0 / 3.0
"""A line is carried on for this share of the time in which it was seen, at the most."""
_SUDDEN = 3.0
"""Standard deviations that arrivals of late have to be more than the mean to count as more."""


class Demand(NamedTuple):
    """What is asked of a cluster at some time.

    Attributes:
        requests_per_s: That come.
        prompt_s: Seconds that one replica computes on the prompt of each, in the mean.
        burstiness: Variance of the work that comes in a few seconds over that of equal requests
            that come at random: 1 for those.
        output_tokens: Of each request, in the mean.
        context_tokens: Of each while it decodes, in the mean.
        num_decoding: Requests that decode now.
        backlog_s: Seconds that one replica would compute on the prompts that wait now.
    """

    requests_per_s: float
    prompt_s: float
    burstiness: float
    output_tokens: float
    context_tokens: float
    num_decoding: float
    backlog_s: float


class _Look(NamedTuple):
    """What came between two looks; what that takes is told by what is known of costs later on."""

    at_s: float
    seconds: float
    requests: float
    tokens: float
    pairs: float


class Meter:
    """See the module docstring.

    Args:
        window_s: How far back demand is looked at; a day's rise and fall is far longer, and a burst
            shorter.
        recent_s: Within what time demand that is suddenly more is noticed.
    """

    def __init__(self, window_s: float, recent_s: float) -> None:
        self._window_s = window_s
        self._recent_s = recent_s
        self._looks: deque[_Look] = deque()
        self._last: dict[str, Traffic] = {}
        # Those that are away, too: they may come back.
        self._known: dict[str, Traffic] = {}
        self._last_s: float | None = None
        self._total = Traffic()

    def look(self, now_s: float, counted: Mapping[str, Traffic]) -> None:
        """Take over what each ingress has counted by now.

        Args:
            now_s: When; a look at the same time, or an earlier one, is passed over.
            counted: By ingress, a name that is never given again.
        """
        if self._last_s is not None and now_s <= self._last_s:
            return
        if self._last_s is None:
            # When that came nobody knows.
            self._total = sum(counted.values(), Traffic())
        else:
            new = sum(
                (traffic - self._known.get(name, Traffic()) for name, traffic in counted.items()),
                Traffic(),
            )
            self._total += new
            seconds = now_s - self._last_s
            self._looks.append(_Look(now_s, seconds, new.came, new.came_tokens, new.came_pairs))
        self._last = {name: copy(traffic) for name, traffic in counted.items()}
        self._known |= self._last
        self._last_s = now_s
        while self._looks and self._looks[0].at_s <= now_s - self._window_s:
            self._looks.popleft()

    def demand(self, ahead_s: float, costs: StepCosts) -> Demand | None:
        """What will be asked `ahead_s` seconds from now; None before anything was seen to end.

        Args:
            ahead_s: That.
            costs: Of the parts of a step, as known by now.
        """
        total = self._total
        if not self._looks or not total.ended or not total.came:
            return None
        works_s = [
            _work_s(look.requests, look.tokens, look.pairs, self._missed, costs)
            for look in self._looks
        ]
        num_requests, work_s = sum(look.requests for look in self._looks), sum(works_s)
        if not num_requests:
            num_requests = total.came
            work_s = _work_s(total.came, total.came_tokens, total.came_pairs, self._missed, costs)
        course = _Course(self._looks)
        now = sum(self._last.values(), Traffic())
        mean_tokens = now.came_tokens / max(now.came, 1.0)
        waiting_tokens = now.came_tokens - now.begun_tokens - now.dropped_tokens
        waiting_pairs = max(waiting_tokens, 0.0) * now.came_pairs / max(now.came_tokens, 1.0)
        output_tokens = total.output_tokens / total.ended
        return Demand(
            max(course.rate(ahead_s), self._sudden(course), 0.0),
            work_s / num_requests,
            course.burstiness(np.array(works_s), work_s / num_requests),
            output_tokens,
            mean_tokens + output_tokens / 2.0,
            max(now.num_decoding, 0.0),
            _work_s(
                max(now.num_waiting, 0.0), max(waiting_tokens, 0.0), waiting_pairs, self._missed,
                costs,
            ),
        )  # fmt: skip

    @property
    def _missed(self) -> float:
        """Share of prompt tokens that no prefix cache has."""
        total = self._total
        return 1.0 - total.cached_tokens / max(total.begun_tokens, 1.0)

    def _sudden(self, course: _Course) -> float:
        """Requests per second of late, where that is more than can be chance."""
        since_s = self._looks[-1].at_s - self._recent_s
        recent = [look for look in self._looks if look.at_s > since_s]
        seconds = sum(look.seconds for look in recent)
        num_requests = sum(look.requests for look in recent)
        expected = course.level * seconds
        deviation = math.sqrt(max(expected, 1.0) * max(course.dispersion, 1.0))
        is_more = num_requests - expected > _SUDDEN * deviation
        return num_requests / seconds if is_more else 0.0


class _Course:
    """How the looks' rates went: level, along a straight line, or by a step from level to level.

    Of these the one with the least of Schwarz's criterion (1978): what it leaves unexplained, and
    more for each number that it takes. What has jumped is taken to stay there: a line through a
    jump would be carried on far beyond it.

    Attributes:
        level: Requests per second in the middle of the looks.
        dispersion: Variance of a look's requests about their course over their mean; 1 for those
            that come at random.
    """

    def __init__(self, looks: deque[_Look]) -> None:
        self._seconds = np.array([look.seconds for look in looks])
        counts = np.array([look.requests for look in looks])
        at_s = np.array([look.at_s for look in looks]) - self._seconds / 2.0
        self._from_mean_s = at_s - at_s.mean()
        self._to_now_s = looks[-1].at_s - float(at_s.mean())
        self.level = float(counts.sum() / self._seconds.sum())
        self._slope = 0.0
        self._after_step: float | None = None
        self._rates: npt.NDArray[np.float64] = np.full(len(looks), self.level)
        self.dispersion = 1.0
        if len(looks) >= _FEWEST and self.level > 0.0:
            self._choose(counts / self._seconds)
            self.dispersion = float(((counts - self._expected) ** 2).mean() / counts.mean())

    @property
    def _expected(self) -> npt.NDArray[np.float64]:
        """Requests of each look."""
        expected: npt.NDArray[np.float64] = self._rates * self._seconds
        return expected

    def rate(self, ahead_s: float) -> float:
        """Requests per second, so long after the last look."""
        if self._after_step is not None:
            return self._after_step
        carried_s = min(ahead_s, _CARRIED * float(self._seconds.sum()))
        return max(self.level + self._slope * (self._to_now_s + carried_s), 0.0)

    def burstiness(self, work_s: npt.NDArray[np.float64], prompt_s: float) -> float:
        """See `Demand`; the work of each look varies as counts do, and as prompts differ."""
        mean_s = float(work_s.mean())
        if len(work_s) < _FEWEST or mean_s <= 0.0:
            return 1.0
        rest_s = work_s - self._expected * prompt_s
        return max(float((rest_s**2).mean()) / (mean_s * prompt_s), 0.5)

    def _choose(self, rates: npt.NDArray[np.float64]) -> None:
        """Take the line, or the step, if it explains the looks better than the level."""
        num = len(rates)
        # Requests at random vary so much: who explains more than the rest explains chance.
        chance = num * self.level / float(self._seconds.mean())

        def criterion(by: npt.NDArray[np.float64], num_parameters: int) -> float:
            rest = max(float(((rates - by) ** 2).sum()), chance)
            return num * math.log(rest) + num_parameters * math.log(num)

        slope = float((self._from_mean_s * rates).sum() / (self._from_mean_s**2).sum())
        line = rates.mean() + slope * self._from_mean_s
        ends = range(_FEWEST_A_SIDE, num - _FEWEST_A_SIDE + 1)
        steps = [np.repeat([rates[:k].mean(), rates[k:].mean()], [k, num - k]) for k in ends]
        step = min(steps, key=lambda by: float(((rates - by) ** 2).sum()))
        least = criterion(self._rates, 1)
        if criterion(line, 2) < least:
            least = criterion(line, 2)
            self._rates, self._slope = line, slope
        if criterion(step, 3) < least:
            self._rates, self._slope, self._after_step = step, 0.0, float(step[-1])


def _work_s(
    num_prompts: float, num_tokens: float, num_pairs: float, missed: float, costs: StepCosts
) -> float:
    """Seconds of computing prompts of which a share is not cached."""
    return costs.prompts_s(num_prompts, missed * num_tokens, missed * num_pairs)

"""Plans prompts on decode engines when the prefill engines would be late. Pure.

Owner: one ingress's event loop; of the prompts that it has given to decode engines and the times
these took.

A prompt stops the decoding sequences of its engine, so it goes to the engine with the fewest, as
late as its deadline allows. Prompts that arrive meanwhile join it, one in each DP group, in the
same time. A batch is worth it if it serves more prompts than it makes sequences miss their
objective per token. At least one engine only decodes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from cluster.routing.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cluster.routing.entry import AdmissionEntry
    from cluster.routing.forecast import Forecast

SPARE = 0.1
"""Share by which a prompt may take longer than expected."""
QUICK_SHARE = 0.75
"""Share of the objective per token: an engine with shorter steps can take more rows."""
_WEIGHT = 0.1
"""Weight of the latest prompt in the expected time of its length."""
_EARLY_S = 1e-3
"""A timer may come early by the clock's resolution."""


class Helper(NamedTuple):
    """A decode engine that could compute prompts as well.

    Attributes:
        lanes: DP groups with a free slot.
        step_tokens: Tokens that one of its steps can compute.
        num_rows: Sequences that hold a slot there or are about to get one.
        num_prompts: Prompts that it already has to compute, from all ingresses.
        step_s: Seconds of its latest decode step.
    """

    lanes: tuple[int, ...]
    step_tokens: int
    num_rows: int
    num_prompts: int
    step_s: float


class Batch(NamedTuple):
    """Prompts that one engine would compute beside each other.

    Attributes:
        engine: Its incarnation.
        entries: Requests that would be late elsewhere.
        begin_s: Latest start at which none of them is late.
        is_full: Whether no further spilled request would fit.
        others: Other queued requests that fit beside them.
    """

    engine: str
    entries: Sequence[AdmissionEntry]
    begin_s: float
    is_full: bool
    others: Sequence[AdmissionEntry] = ()


class Helpers:
    """Decode engines that compute prompts, and the plan for more.

    Args:
        forecast: Predicts the length of answers.
    """

    def __init__(self, forecast: Forecast) -> None:
        self._forecast = forecast
        # Prompt tokens and time of the question, by engine and request; and the longest prompt of
        # those that an engine was asked for together.
        self._asked: dict[str, dict[str, tuple[int, float]]] = {}
        self._longest: dict[str, int] = {}
        self._seen_s: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"Helpers({self._asked})"

    # --- outstanding prompts ----------------------------------------------------------------------

    def ask(self, engine: str, request_id: str, num_tokens: int, now_s: float) -> None:
        """Record that an engine was given a prompt."""
        longest = self._longest[engine] if engine in self._asked else 0
        self._longest[engine] = max(longest, num_tokens)
        self._asked.setdefault(engine, {})[request_id] = num_tokens, now_s

    def forget(self, engine: str, request_id: str) -> None:
        """Drop a prompt that the engine will not compute. Idempotent."""
        asked = self._asked.get(engine, {})
        asked.pop(request_id, None)
        if not asked:
            self._asked.pop(engine, None)
            self._longest.pop(engine, None)

    def done(self, engine: str, request_id: str, now_s: float) -> None:
        """Record that an engine has computed a prompt, in the time of the longest one beside it."""
        num_tokens, asked_s = self._asked[engine][request_id]
        if num_tokens == self._longest[engine]:
            length, took_s = _padded(num_tokens), now_s - asked_s
            seen_s = self._seen_s.setdefault(length, took_s)
            self._seen_s[length] = seen_s + _WEIGHT * (took_s - seen_s)
        self.forget(engine, request_id)

    def prompt_s(self, num_tokens: int) -> float:
        """Return how long a prompt takes on an idle helper, from earlier ones; 0 before the first.

        A length without samples is scaled from the nearest one, and takes at most the time of any
        longer one.
        """
        if not self._seen_s:
            return 0.0
        length = _padded(num_tokens)
        nearest = min(self._seen_s, key=lambda seen: max(seen / length, length / seen))
        longer_s = (seen_s for other, seen_s in self._seen_s.items() if other >= length)
        return min(self._seen_s[nearest] * length / nearest, *longer_s, math.inf)

    # --- planning ---------------------------------------------------------------------------------

    def plan(
        self, waiting: Iterable[AdmissionEntry], helpers: Mapping[str, Helper], now_s: float
    ) -> list[Batch]:
        """Return the batches that free decode engines would compute, and when each has to begin.

        Args:
            waiting: All queued requests, with spilled ones in order.
            helpers: The decode engines, by incarnation.
            now_s: The time.
        """
        left: list[AdmissionEntry] = []
        others: list[AdmissionEntry] = []
        for entry in waiting:
            if entry.demand.num_choices == 1:
                (left if entry.is_spilled else others).append(entry)
        # Take last those that prefill engines would serve first.
        others.sort(key=lambda entry: entry.key, reverse=True)
        batches: list[Batch] = []
        num_spared = len(helpers) - len(self._asked)
        for engine in self._free(helpers):
            if not left or num_spared < 2:
                break
            batch = self._fill(engine, helpers[engine], left, now_s)
            both = self._fill(engine, helpers[engine], [*batch.entries, *others], now_s).entries
            if len(both) > self._num_harmed(batch, helpers[engine], now_s):
                batches.append(batch._replace(others=both[len(batch.entries) :]))
                num_spared -= 1
                left = [entry for entry in left if entry not in batch.entries]
                others = [entry for entry in others if entry not in both]
        return batches

    def due(
        self, waiting: Iterable[AdmissionEntry], helpers: Mapping[str, Helper], now_s: float
    ) -> list[tuple[AdmissionEntry, Placement]]:
        """Return the requests to give to helpers now, and the DP group of each.

        Each DP group gets one: two would take twice as long.
        """
        given: list[tuple[AdmissionEntry, Placement]] = []
        for batch in self.plan(waiting, helpers, now_s):
            if batch.is_full or not self._seen_s or now_s >= batch.begin_s - _EARLY_S:
                entries = (*batch.entries, *batch.others)
                lanes = (Placement(batch.engine, lane) for lane in helpers[batch.engine].lanes)
                given += zip(entries, lanes, strict=False)
        return given

    def to_spare(self, entry: AdmissionEntry, helpers: Mapping[str, Helper]) -> set[str]:
        """Return engines to avoid for a request without a helper while there is room elsewhere.

        These are engines that compute prompts. Idle engines are avoided as well if another one that
        is in use is fast enough.
        """
        if not helpers:
            return set()
        spared = {*self._asked}
        quick_s = QUICK_SHARE * entry.tpot_s
        if any(h.num_rows and h.step_s < quick_s for e, h in helpers.items() if e not in spared):
            spared |= {engine for engine, helper in helpers.items() if not helper.num_rows}
        return spared

    def check_empty(self) -> None:
        """Assert that no prompt is outstanding."""
        assert not self._asked, f"{self!r}"

    def _free(self, helpers: Mapping[str, Helper]) -> list[str]:
        """Return engines without a prompt, those with the fewest sequences first."""
        free = [e for e, h in helpers.items() if not h.num_prompts and e not in self._asked]
        return sorted(free, key=lambda engine: (helpers[engine].num_rows, engine))

    def _fill(
        self, engine: str, helper: Helper, entries: Sequence[AdmissionEntry], now_s: float
    ) -> Batch:
        """Return a batch of as many entries as fit beside each other and can still be in time."""
        # Until the first sample, only one prompt is given: it shows how long they take.
        most = len(helper.lanes) if self._seen_s else min(len(helper.lanes), 1)
        chosen: list[AdmissionEntry] = []
        begin_s, longest_s, latest_s, num_tokens = math.inf, 0.0, math.inf, 0
        for entry in entries:
            if len(chosen) == most or num_tokens + entry.num_tokens > helper.step_tokens:
                return Batch(engine, chosen, begin_s, is_full=True)
            new_longest_s = max(longest_s, self.prompt_s(entry.num_tokens))
            new_latest_s = min(latest_s, entry.arrived_s + entry.ttft_s)
            new_begin_s = new_latest_s - (1.0 + SPARE) * new_longest_s
            if new_begin_s >= now_s - _EARLY_S:
                chosen.append(entry)
                begin_s, longest_s, latest_s = new_begin_s, new_longest_s, new_latest_s
                num_tokens += entry.num_tokens
        return Batch(engine, chosen, begin_s, is_full=len(chosen) == most)

    def _num_harmed(self, batch: Batch, helper: Helper, now_s: float) -> float:
        """Return how many sequences would miss their objective because decoding stops meanwhile.

        It assumes exponentially distributed answer lengths: the remaining length does not depend on
        the tokens so far, and short answers miss the objective.
        """
        tpot_s = min((entry.tpot_s for entry in batch.entries), default=math.inf)
        mean_output, num_rows = self._forecast.num_output_tokens, float(helper.num_rows)
        if math.isinf(tpot_s) or not mean_output:
            return 0.0
        took_s = max(self.prompt_s(entry.num_tokens) for entry in batch.entries)
        if helper.step_s > 0.0:
            num_rows *= math.exp(-max(batch.begin_s - now_s, 0.0) / (mean_output * helper.step_s))
        spare_s = max(tpot_s - helper.step_s, 1e-9)
        return num_rows * -math.expm1(-took_s / (spare_s * mean_output))


def _padded(num_tokens: int) -> int:
    """Return a length as a mesh pads it."""
    return 1 << (num_tokens - 1).bit_length()

"""How many tokens to draft in a step, learned from what drafts cost and bring. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.messages import DraftCounters

if TYPE_CHECKING:
    from collections.abc import Sequence


class DraftController:
    """The limit of drafts in a step, by the number of its rows, from what drafts cost and bring.

    Until a row has a draft, only every `_WATCH_STEPS`-th step looks for drafts, because each search
    costs time. A trial with as many drafts as possible follows. Then a draft pays if the share of
    right drafts at its position, times the seconds of a token without drafts, is more than the
    seconds that one more draft costs. As text with few drafts brings less than the search costs,
    steps with that limit must also give more tokens a second than steps without drafts.

    That differs with the number of rows, so each power of two of rows has figures of its own. They
    are learned from steps of decoding rows alone. Where drafts do not pay they are tried again
    after `RETRY_STEPS` steps, and after twice as many each time that they do not pay again, up to
    `_MOST_RETRY_STEPS`.

    Pure: it is fed with durations and has no clock.

    Args:
        max_drafts: The most drafts of a row in one step.

    Attributes:
        counters: Totals of all steps.
    """

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._figures: dict[int, _DraftFigures] = {}
        self.counters = DraftCounters(num_accepted_tokens_per_pos=[0] * max_drafts)

    def limit(self, num_rows: int, *, has_drafts: bool) -> int:
        """Return the most drafts for each row of the next step.

        Args:
            num_rows: Decoding rows of the step.
            has_drafts: Whether the last step has proposed drafts.
        """
        return self._of_rows(num_rows).limit(has_drafts=has_drafts)

    def learn(
        self,
        num_rows: int,
        limit: int,
        planned: Sequence[int],
        counts: Sequence[int],
        seconds: float,
    ) -> None:
        """Take note of a step of decoding rows.

        Args:
            num_rows: Its rows.
            limit: Its limit of drafts.
            planned: For each row one more than its drafts; empty if there were none.
            counts: New tokens of each row; empty: one each.
            seconds: Duration of the step.
        """
        figures = self._of_rows(num_rows)
        if not limit:
            figures.add_plain(num_rows, seconds)
            return
        counts = counts or [1] * num_rows
        figures.add_drafts(planned, counts, seconds)
        for num_tokens, count in zip(planned, counts, strict=False):
            if num_tokens > 1:
                self.counters.num_drafts += 1
                self.counters.num_draft_tokens += num_tokens - 1
                self.counters.num_accepted_tokens += count - 1
                for position in range(count - 1):
                    self.counters.num_accepted_tokens_per_pos[position] += 1

    def _of_rows(self, num_rows: int) -> _DraftFigures:
        bucket = max(num_rows - 1, 0).bit_length()
        figures = self._figures.get(bucket)
        if figures is None:
            figures = self._figures[bucket] = _DraftFigures(self._max_drafts)
        return figures


RETRY_STEPS = 256
"""Steps until drafts that did not pay are tried again, or plain steps are measured again."""
_MOST_RETRY_STEPS = 8 * RETRY_STEPS
_PLAIN_STEPS = 4
"""Steps without drafts of which the mean is taken before drafts are used."""
_WATCH_STEPS = 4
"""Steps of which one looks for drafts while there are none."""
_TRIED_ROWS = 4
"""Rows with drafts after which a trial ends."""
_TRIED_STEPS = 16
"""Steps after which a trial ends, and over which tokens a second are counted."""
_DOUBT = 2
"""Wrong drafts that are added to the counted ones: few right drafts may be luck."""
_REMEMBERED_ROWS = 32
"""Rows with drafts after which older ones count half."""
_MARGIN = 1.1
"""What a draft must bring, in units of its cost, for drafts to be used after a trial."""
_MOST_SLOWDOWN = 8.0
"""Seconds of a step with drafts that count, in units of those without: it may lose its core."""
_GAIN = 1.03
"""Tokens a second with drafts, in units of those without, from which drafts are used."""


class _DraftFigures:
    """Figures of steps with about the same number of rows."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        # Seconds of a step without drafts, of each of its tokens, and of a draft beside them.
        self._plain_s, self._token_s, self._draft_s = _Mean(), _Mean(), _Mean()
        self._steps_since_plain = 0
        # Steps until the next trial if no draft pays.
        self._retry_steps = RETRY_STEPS
        self._paying: int | None
        self._drafted: list[float]
        self._right: list[float]
        self._start_trial()

    def limit(self, *, has_drafts: bool) -> int:
        """Return the most drafts for each row of the next step."""
        if self._plain_s.count < _PLAIN_STEPS:
            return 0
        if self._paying is not None:
            return self._paying
        is_watching = not (has_drafts or any(self._drafted))
        return 0 if is_watching and self._num_watched % _WATCH_STEPS else self._max_drafts

    def add_plain(self, num_rows: int, seconds: float) -> None:
        """Take note of a step without drafts, which looked for none."""
        self._plain_s.add(seconds)
        self._token_s.add(seconds / num_rows)
        self._steps_since_plain = 0
        if self._plain_s.count > _PLAIN_STEPS:
            self._num_watched += 1
        self._decide()

    def add_drafts(self, planned: Sequence[int], counts: Sequence[int], seconds: float) -> None:
        """Take note of a step that used drafts or looked for them; see `DraftController.learn`."""
        self._steps_since_plain += 1
        if self._steps_since_plain >= RETRY_STEPS:
            # Contexts have changed: measure steps without drafts again.
            self._plain_s, self._token_s = _Mean(), _Mean()
            self._steps_since_plain = 0
            return
        self._num_watched += 1
        num_drafts = sum(planned) - len(planned)
        if num_drafts:
            plain_s = self._plain_s.value
            self._draft_s.add(max(seconds - plain_s, 0.0) / num_drafts)
        if sum(self._drafted) > _REMEMBERED_ROWS:
            self._drafted = [count / 2 for count in self._drafted]
            self._right = [count / 2 for count in self._right]
        for num_tokens, count in zip(planned, counts, strict=False):
            if num_tokens > 1:
                self._drafted[num_tokens - 1] += 1
                self._right[count - 1] += 1
        if any(self._drafted):
            self._rate.add(sum(counts), min(seconds, _MOST_SLOWDOWN * self._plain_s.value))
        self._decide()

    def _start_trial(self) -> None:
        self._draft_s = _Mean()
        # By number: rows with so many drafts, and rows with so many right ones.
        self._drafted = [0.0] * (self._max_drafts + 1)
        self._right = [0.0] * (self._max_drafts + 1)
        self._rate = _Rate()
        self._num_watched = 0
        # Drafts that pay; None during a trial.
        self._paying = None
        self._steps_to_trial = 0

    def _decide(self) -> None:
        if self._steps_to_trial:
            self._steps_to_trial -= 1
            if not self._steps_to_trial:
                self._start_trial()
        # A limit of 0 stands until the next trial, as nothing more is learned.
        is_tried = sum(self._drafted) >= _TRIED_ROWS or self._rate.num_steps >= _TRIED_STEPS
        if not is_tried or self._paying == 0:
            return
        before = self._max_drafts if self._paying is None else self._paying
        self._paying = self._num_paying(_MARGIN if self._paying is None else 1.0)
        if self._paying != before:
            self._rate = _Rate()
        elif self._rate.num_steps >= _TRIED_STEPS:
            if self._rate.tokens * self._token_s.value > _GAIN * self._rate.seconds:
                self._retry_steps = RETRY_STEPS
            else:
                self._paying = 0
        if self._paying == 0:
            self._steps_to_trial = self._retry_steps
            self._retry_steps = min(2 * self._retry_steps, _MOST_RETRY_STEPS)
        elif self._paying < self._max_drafts and not self._steps_to_trial:
            self._steps_to_trial = RETRY_STEPS

    def _num_paying(self, margin: float) -> int:
        """Return how many drafts of a row bring more than `margin` times what each costs."""
        share = 0.0
        for position in range(self._max_drafts):
            num_drafted = sum(self._drafted[position + 1 :])
            if num_drafted:
                share = sum(self._right[position + 1 :]) / (num_drafted + _DOUBT)
            if share * self._token_s.value <= margin * self._draft_s.value:
                return position
        return self._max_drafts


class _Rate:
    """Tokens and seconds of the latest steps; from twice `_TRIED_STEPS` on they count half."""

    __slots__ = ("num_steps", "seconds", "tokens")

    def __init__(self) -> None:
        self.num_steps = 0
        self.tokens = self.seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a step."""
        if self.num_steps >= 2 * _TRIED_STEPS:
            self.num_steps, self.tokens, self.seconds = (
                self.num_steps // 2,
                self.tokens / 2,
                self.seconds / 2,
            )
        self.num_steps += 1
        self.tokens += tokens
        self.seconds += seconds


class _Mean:
    """Running mean of the latest values; the first ones have equal weights."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        """Add a value, at most four times the mean: a process may have lost its core meanwhile."""
        if self.count >= _PLAIN_STEPS and self.value > 0.0:
            value = min(value, 4.0 * self.value)
        self.count += 1
        self.value += (value - self.value) / min(self.count, 16)

"""One choice of a place, kept so that somebody may ask later why it was made. Pure.

Every placement pays for keeping one: of the few best places the numbers are copied, for views are
written in place, and nothing is named, added up or predicted before somebody asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from cluster.routing.demand import Demand
    from cluster.routing.placement import Placement
    from cluster.routing.views import Views

    Numbers = npt.NDArray[np.float64]
    Side = Literal["decode", "prefill", "prompt"]
    """Of a slot; of a prefill engine for a prompt; of a decode engine that computes it itself."""

FEW = 3
"""Places that are kept of a choice: the chosen one, and those that cost least beside it."""


class Weighed(Protocol):
    """One level of a policy, as it was looked at."""

    def at(self, places: npt.NDArray[np.int64]) -> Weighed:
        """What it said of these alone: a copy, for views are written in place."""

    def parts(self, rank: int) -> dict[str, float]:
        """What each of its terms, with its weight, said of one place."""


class Parts(NamedTuple):
    """A level whose terms were worked out one by one.

    Attributes:
        names: Of its terms.
        values: What each of them, with its weight, says of all places; one number where that is the
            same.
    """

    names: Sequence[str]
    values: list[Numbers | float]

    def at(self, places: npt.NDArray[np.int64]) -> Parts:
        """See `Weighed`."""
        values = [v if isinstance(v, float) else v[places] for v in self.values]
        return Parts(self.names, values)

    def parts(self, rank: int) -> dict[str, float]:
        """See `Weighed`."""
        values = (v if isinstance(v, float) else float(v[rank]) for v in self.values)
        return dict(zip(self.names, values, strict=True))


class Whole(NamedTuple):
    """All that a policy can ask of all places: what another one would choose among.

    Attributes:
        placements: The places.
        seqs: Sequence number of the snapshot that each was weighed by.
        columns: Of each column of the views what all have.
        fitting: Which of them could take the request.
        missed: Prompt tokens that each would have to compute; None if nobody asked.
        session: Of the request.
        turn: Whose turn it was.
    """

    placements: Sequence[Placement]
    seqs: list[int]
    columns: Numbers
    fitting: npt.NDArray[np.bool_]
    missed: Numbers | float | None
    session: str
    turn: int


class Looked(Protocol):
    """A request before all places, as a policy has looked at it; see `cluster.routing.cost.Scene`.

    Attributes:
        demand: The request.
        views: The places.
        fitting: Which of them could take it.
        num_fitting: How many these are.
        weighed: Levels that were looked at; none where there was no other place.
        costs: What the first of them said that tells places apart; None if none does.
    """

    demand: Demand
    views: Views
    fitting: npt.NDArray[np.bool_]
    num_fitting: int
    weighed: list[Weighed]
    costs: Numbers | None

    @property
    def missed_if_asked(self) -> Numbers | float | None:
        """Prompt tokens that each place would have to compute; None if no term asked."""


class Choice:
    """See the module docstring; never changes.

    Args:
        scene: The request before all places, as the policy has looked at it.
        index: Which place was chosen.
        num_refused: How many places had refused it.
        whole: The whole of it, for whoever keeps that.
        num_spared: How many were left aside, as long as there is another one.
        ttft_s: Predicted seconds to the first token, where that is not what the views say.
        elsewhere_s: What the best prefill engine would have cost, where that was compared.

    Attributes:
        num_prompt_tokens: Of the request; with its output, where it has migrated.
        num_choices: Of the request.
        num_output_tokens: Most that it expects.
        places: The few best, the chosen one first.
        seqs: Sequence number of the snapshot that each place was weighed by.
        columns: Of each column of the views what these have.
        costs: Of each; infinite where it could not take the request.
        missed_tokens: Of each; None if nobody asked.
        num_places: How many there were.
        num_fitting: How many could take it.
        num_refused: As given.
        num_spared: As given.
        ttft_s: As given.
        elsewhere_s: As given.
        whole: As given.
    """

    __slots__ = (
        "_levels", "columns", "costs", "elsewhere_s", "missed_tokens", "num_choices", "num_fitting",
        "num_output_tokens", "num_places", "num_prompt_tokens", "num_refused", "num_spared",
        "places", "seqs", "ttft_s", "whole",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913 - keyword-only: what few choices have
        self,
        scene: Looked,
        index: int,
        num_refused: int,
        whole: Whole | None,
        *,
        num_spared: int = 0,
        ttft_s: float | None = None,
        elsewhere_s: float | None = None,
    ) -> None:
        demand, views, costs, missed = scene.demand, scene.views, scene.costs, scene.missed_if_asked
        few = [index] if costs is None else _few(index, costs)
        at = np.array(few)
        self.num_prompt_tokens = demand.num_prompt_tokens
        self.num_choices = demand.num_choices
        self.num_output_tokens = demand.expected_output_tokens
        self.places = [views.placements[i] for i in few]
        self.seqs = [views.told[i].seq for i in few]
        self.columns = views.columns_of(at)
        self.costs = None if costs is None else costs[at]
        self.missed_tokens = missed[at] if isinstance(missed, np.ndarray) else missed
        self._levels = [level.at(at) for level in scene.weighed]
        self.num_places = len(views)
        self.num_fitting = scene.num_fitting
        self.num_refused, self.num_spared = num_refused, num_spared
        self.ttft_s, self.elsewhere_s = ttft_s, elsewhere_s
        self.whole = whole

    @property
    def chosen(self) -> Placement:
        """Where the request was to go."""
        return self.places[0]

    def terms(self, rank: int) -> dict[str, float]:
        """What each term added to the cost of one of the few, in the order of the levels."""
        return {name: part for level in self._levels for name, part in level.parts(rank).items()}


class Notes(Protocol):
    """Takes every choice that a policy makes."""

    @property
    def keeps_whole(self) -> bool:
        """Whether it wants the whole of each."""

    def note(self, side: Side, request_id: str, choice: Choice) -> None:
        """A choice was made."""


def _few(index: int, costs: Numbers) -> list[int]:
    """The chosen one, then those that cost least of all that could take it."""
    left, few = costs.copy(), [index]
    while len(few) < FEW:
        left[few[-1]] = np.inf
        next_one = int(left.argmin())
        if left[next_one] == np.inf:
            break
        few.append(next_one)
    return few

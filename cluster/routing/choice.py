"""One placement decision, kept so that it can be explained later. Pure.

Every placement pays for this, so little is done: the values of the few best places are copied, as
views are written in place. Names, sums and predictions are computed only when they are read.
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
    """A decode slot; a prompt on a prefill engine (prefill) or on a decode engine (prompt)."""

FEW = 3
"""Number of places kept of a choice: the chosen one, and the cheapest others."""


class Weighed(Protocol):
    """One level of a policy with its values."""

    def at(self, places: npt.NDArray[np.int64]) -> Weighed:
        """Return the level for some places only: a copy, because views are written in place."""

    def parts(self, rank: int) -> dict[str, float]:
        """Return the weighted value of each of its terms for one place."""


class Parts(NamedTuple):
    """A level whose terms were computed one by one.

    Attributes:
        names: Names of its terms.
        values: Weighted value of each term for all places; one number if it is the same for all.
    """

    names: Sequence[str]
    values: list[Numbers | float]

    def at(self, places: npt.NDArray[np.int64]) -> Parts:
        """Return the level for some places only."""
        values = [v if isinstance(v, float) else v[places] for v in self.values]
        return Parts(self.names, values)

    def parts(self, rank: int) -> dict[str, float]:
        """Return the weighted value of each of its terms for one place."""
        values = (v if isinstance(v, float) else float(v[rank]) for v in self.values)
        return dict(zip(self.names, values, strict=True))


class Whole(NamedTuple):
    """All inputs of a choice, for all places: enough for another policy to choose again.

    Attributes:
        placements: The places.
        seqs: Sequence number of the snapshot behind each place.
        columns: All columns of the views.
        fitting: Which places could take the request.
        missed: Prompt tokens that each place would have to compute; None if no term used them.
        session: Session of the request.
        turn: Index of the place whose turn it was.
    """

    placements: Sequence[Placement]
    seqs: list[int]
    columns: Numbers
    fitting: npt.NDArray[np.bool_]
    missed: Numbers | float | None
    session: str
    turn: int


class Looked(Protocol):
    """The part of `cluster.routing.cost.Scene` that a `Choice` reads.

    Attributes:
        demand: The request.
        views: The places.
        fitting: Which of them could take it.
        num_fitting: Number of these.
        weighed: Levels that were computed; none if there was only one place.
        costs: Costs of the first level whose costs differ between places; None without one.
    """

    demand: Demand
    views: Views
    fitting: npt.NDArray[np.bool_]
    num_fitting: int
    weighed: list[Weighed]
    costs: Numbers | None

    @property
    def missed_if_asked(self) -> Numbers | float | None:
        """Prompt tokens that each place would have to compute; None if no term used them."""


class Choice:
    """One placement with its few best places; never changes.

    Args:
        scene: The request and all places, after the policy has chosen.
        index: Index of the chosen place.
        num_refused: Number of places that had refused the request.
        whole: All inputs of the choice, if they are kept.
        num_spared: Number of places to be avoided while there is another one.
        ttft_s: Predicted seconds to the first token, if not derived from the views.
        elsewhere_s: Cost of the best prefill engine, if it was compared.

    Attributes:
        num_prompt_tokens: Prompt tokens of the request; with its output, if it has migrated.
        num_choices: Number of its choices.
        num_output_tokens: Largest number of output tokens that it expects.
        places: The few best places, the chosen one first.
        seqs: Sequence number of the snapshot behind each of them.
        columns: Their columns of the views.
        costs: Their costs; infinite for places that could not take the request.
        missed_tokens: Prompt tokens that each would have to compute; None if no term used them.
        num_places: Number of all places.
        num_fitting: Number of places that could take it.
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
        self.seqs = [views.summaries[i].seq for i in few]
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
        """The place that was chosen."""
        return self.places[0]

    def terms(self, rank: int) -> dict[str, float]:
        """Return the cost of one of the few places by term, in the order of the levels."""
        return {name: part for level in self._levels for name, part in level.parts(rank).items()}


class Notes(Protocol):
    """A receiver of every choice that a policy makes."""

    @property
    def keeps_whole(self) -> bool:
        """Whether it needs `Choice.whole`."""

    def note(self, side: Side, request_id: str, choice: Choice) -> None:
        """Receive a choice."""


def _few(index: int, costs: Numbers) -> list[int]:
    """Return the indices of the chosen place and of the cheapest others that could take it."""
    left, few = costs.copy(), [index]
    while len(few) < FEW:
        left[few[-1]] = np.inf
        next_one = int(left.argmin())
        if left[next_one] == np.inf:
            break
        few.append(next_one)
    return few

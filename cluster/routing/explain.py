"""Records why requests went where they did: choices, predictions and results.

Owner: one ingress's event loop. It keeps the latest `KEPT` requests of this ingress, and of
requests to which clients gave one id the latest `KEPT_OF_AN_ID`; no text. A prediction counts from
one placement on, and is made only once steps have shown their costs. If there was only one place,
no first token is predicted, because no costs were compared.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cluster.errors import ServingError
from cluster.routing.cost import FIRST_TOKEN_S, Scene
from cluster.routing.demand import Demand
from cluster.routing.linear import Linear
from cluster.routing.views import ADDED, Column, Views

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.routing.choice import Choice, Side
    from cluster.routing.metrics import RouterMetrics

_FITS = np.ones(1, dtype=np.bool_)
"""The chosen place could take the request."""
KEPT = 1024
KEPT_OF_AN_ID = 16
"""Limit of records of one client id.

Clients choose ids and may repeat one: its records must neither push out all others nor make one
answer as large as the whole book.
"""
MOST_MADE = 32
"""Placements kept of one request: a request that is refused again and again is placed as often."""
_FIRST_TOKEN = Linear((1.0, FIRST_TOKEN_S))


class Made(NamedTuple):
    """A placement: its time on the event loop's clock, its side, and the choice."""

    made_s: float
    side: Side
    choice: Choice


class RouteFigures(NamedTuple):
    """Figures of a request, predicted or actual; None where unknown.

    Attributes:
        ttft_s: Seconds from the placement of the prompt to the first token.
        token_s: Seconds of each further token.
        cached_tokens: Prompt tokens that need not be computed.
    """

    ttft_s: float | None = None
    token_s: float | None = None
    cached_tokens: int | None = None


class Route:
    """The record of one request. Owner: the `Run` of the request, until it ends.

    Args:
        request_id: Id of the request.
        num_prompt_tokens: Number of its prompt tokens.
        arrived_s: Time of its arrival, on the event loop's clock.

    Attributes:
        request_id: As given.
        num_prompt_tokens: As given.
        arrived_s: As given.
        made: Its placements in their order.
        first_s: Time of its first token.
        last_s: Time of the last token so far from a decode engine.
        ended_s: Time of its end.
        outcome: "running", "finished", "abort", or the code of its error.
        num_tokens: Output tokens over all choices.
        num_cached_tokens: Cached tokens of its prompt, as reported by the engine that computed it.
    """

    __slots__ = (
        "arrived_s", "ended_s", "first_s", "last_s", "made", "num_cached_tokens",
        "num_prompt_tokens", "num_tokens", "outcome", "request_id",
    )  # fmt: skip

    def __init__(self, request_id: str, num_prompt_tokens: int, arrived_s: float) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.arrived_s = arrived_s
        self.made: list[Made] = []
        self.first_s: float | None = None
        self.last_s = 0.0
        self.ended_s: float | None = None
        self.outcome = "running"
        self.num_tokens = 0
        self.num_cached_tokens: int | None = None

    def __copy__(self) -> Route:
        """Return a copy of the record for another thread to read."""
        route = Route(self.request_id, self.num_prompt_tokens, self.arrived_s)
        for name in self.__slots__:
            setattr(route, name, getattr(self, name))
        route.made = list(self.made)
        return route

    def began(self, num_cached_tokens: int, now_s: float) -> None:
        """Record the first token."""
        self.first_s = self.last_s = now_s
        self.num_cached_tokens = num_cached_tokens

    def last_of(self, side: Side) -> Made | None:
        """Return the latest placement on one side, or None."""
        return next((made for made in reversed(self.made) if made.side == side), None)

    @property
    def of_prompt(self) -> Made | None:
        """The placement of the engine that computed the prompt, as far as placements show it."""
        before = [m for m in self.made if self.first_s is None or m.made_s <= self.first_s]
        candidates = [made for made in before if made.side != "decode"] or before
        return candidates[-1] if candidates else None

    @property
    def predicted(self) -> RouteFigures:
        """Predicted figures of the request."""
        prompt, decode = self.of_prompt, self.last_of("decode")
        ttft_s = token_s = num_cached = scene = None
        if decode is not None:
            scene = _scene(decode.choice)
            token_s = _token_s(decode.choice, scene)
        if prompt is not None:
            num_cached = predicted_cached_tokens(prompt.choice)
            # Most prompts are computed on the engine that decodes them.
            ttft_s = predicted_ttft_s(prompt.choice, scene if prompt is decode else None)
        return RouteFigures(ttft_s, token_s, num_cached)

    @property
    def actual(self) -> RouteFigures:
        """Actual figures so far; the time of a token only if the request did not migrate."""
        if self.first_s is None:
            return RouteFigures()
        prompt, token_s = self.of_prompt, None
        if self.num_tokens > 1 and not self._moved:
            token_s = (self.last_s - self.first_s) / (self.num_tokens - 1)
        ttft_s = None if prompt is None else self.first_s - prompt.made_s
        return RouteFigures(ttft_s, token_s, self.num_cached_tokens)

    @property
    def _moved(self) -> bool:
        first_s = self.first_s
        return first_s is None or any(
            made.side == "decode" and made.made_s > first_s for made in self.made[1:]
        )


def client_id(request_id: str) -> str:
    """Return the client's id of a request from the id that engines know.

    `cluster.edge.explain.engine_request_id` appends a hyphen and hexadecimal digits.
    """
    return request_id.rpartition("-")[0] or request_id


@dataclass(slots=True)
class ClientRoutes:
    """The routes of requests to which clients gave one id.

    Attributes:
        kept: The latest of them, the oldest first.
        num_dropped: Number of earlier ones that made room for these.
    """

    kept: deque[Route] = field(default_factory=deque)
    num_dropped: int = 0


class Following:
    """A context that ends a request's route when the request ends, however it ends."""

    def __init__(self, routes: Routes, route: Route) -> None:
        self._routes = routes
        self._route = route

    def __enter__(self) -> Route:
        return self._route

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self._route.outcome = "finished"
        elif isinstance(error, ServingError):
            self._route.outcome = error.code
        else:
            self._route.outcome = "error" if isinstance(error, Exception) else "abort"
        self._routes.end(self._route)


class Routes:
    """The records of the latest requests of this ingress.

    Args:
        metrics: Gets the ratios of actual to predicted figures.
    """

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        # Running requests are recorded to their end, even if they are no longer kept.
        self._running: dict[str, Route] = {}
        self._kept: OrderedDict[str, Route] = OrderedDict()
        self._by_client_id: dict[str, ClientRoutes] = {}
        self._on_end: Callable[[Route], None] | None = None

    def __repr__(self) -> str:
        return f"Routes({len(self._kept)})"

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def keeps_whole(self) -> bool:
        """Whether choices are kept with all their inputs."""
        return self._on_end is not None

    def log(self, on_end: Callable[[Route], None]) -> None:
        """Call `on_end` with every route that ends, and keep the inputs of its choices."""
        self._on_end = on_end

    def follow(self, request_id: str, num_prompt_tokens: int) -> Following:
        """Open the record of a request that arrived; the returned context ends it."""
        now_s = asyncio.get_running_loop().time()
        route = Route(request_id, num_prompt_tokens, now_s)
        self._running[request_id] = self._kept[request_id] = route
        same = self._by_client_id.setdefault(client_id(request_id), ClientRoutes())
        same.kept.append(route)
        if len(same.kept) > KEPT_OF_AN_ID:
            del self._kept[same.kept.popleft().request_id]
            same.num_dropped += 1
        elif len(self._kept) > KEPT:
            self._drop_oldest()
        return Following(self, route)

    def note(self, side: Side, request_id: str, choice: Choice) -> None:
        """Record a choice; ignored once the request has ended."""
        route = self._running.get(request_id)
        if route is not None:
            if len(route.made) == MOST_MADE:
                # The first ones show how it began, the last ones why it is where it is.
                del route.made[MOST_MADE // 2]
            route.made.append(Made(asyncio.get_running_loop().time(), side, choice))

    def end(self, route: Route) -> None:
        """Close a request's record."""
        self._running.pop(route.request_id, None)
        route.ended_s = asyncio.get_running_loop().time()
        predicted, actual = route.predicted, route.actual
        self._compare("ttft", predicted.ttft_s, actual.ttft_s)
        self._compare("token", predicted.token_s, actual.token_s)
        if predicted.cached_tokens is not None and actual.cached_tokens is not None:
            length = route.num_prompt_tokens
            missed = length - predicted.cached_tokens, length - actual.cached_tokens
            self._compare("computed_tokens", *missed)
        if self._on_end is not None:
            self._on_end(route)

    def get(self, request_id: str) -> Route | None:
        """Return the route of one request by the id that engines know; None if it was dropped."""
        return self._running.get(request_id) or self._kept.get(request_id)

    def of_client_id(self, name: str) -> ClientRoutes | None:
        """Return the routes kept for a client id; None if there are none."""
        return self._by_client_id.get(name)

    def _drop_oldest(self) -> None:
        _, oldest = self._kept.popitem(last=False)
        name = client_id(oldest.request_id)
        same = self._by_client_id[name]
        # Both orders are by arrival: the oldest of all is the oldest with its id.
        same.kept.popleft()
        same.num_dropped += 1
        if not same.kept:
            del self._by_client_id[name]

    def _compare(self, of: str, predicted: float | None, actual: float | None) -> None:
        if predicted and actual is not None:
            self._metrics.prediction.labels(of).observe(actual / predicted)


def predicted_ttft_s(choice: Choice, scene: Scene | None = None) -> float | None:
    """Return the predicted seconds to the first token; None if the place computes no prompt.

    Args:
        choice: The choice.
        scene: The scene of the choice, if the caller has made it.
    """
    columns = choice.columns
    if choice.ttft_s is not None:
        return choice.ttft_s
    if choice.missed_tokens is None or not columns[Column.PROMPT_S :, 0][:3].any():
        return None
    return float((scene or _scene(choice)).product(_FIRST_TOKEN).total()[0])


def predicted_token_s(choice: Choice) -> float | None:
    """Return the predicted seconds of a decode step with the request; None if costs are unknown."""
    return _token_s(choice, _scene(choice))


def _token_s(choice: Choice, scene: Scene) -> float | None:
    step_s, num_rows = choice.columns[[Column.STEP_S, Column.ROWS], 0].tolist()
    scene.views.add(choice.num_choices, scene.demand.num_first_tokens)
    # The rates are summed over the sequences there and the new one.
    added_s = float(scene.views.rates[ADDED, 0].sum()) / (num_rows + 1.0)
    return step_s + added_s if step_s else None


def predicted_cached_tokens(choice: Choice) -> int | None:
    """Return the prompt tokens that are cached there; None if the policy does not use them."""
    missed = choice.missed_tokens
    if missed is None:
        return None
    return choice.num_prompt_tokens - int(missed if isinstance(missed, float) else missed[0])


def _scene(choice: Choice) -> Scene:
    """Return the scene of the request with the chosen place only."""
    num_cached = predicted_cached_tokens(choice) or 0
    demand = Demand(
        "", range(choice.num_prompt_tokens), choice.num_choices, choice.num_output_tokens
    )
    views = Views.of([choice.chosen], choice.columns[:, :1])
    return Scene(demand, views, _FITS, lambda _: {choice.chosen: num_cached})

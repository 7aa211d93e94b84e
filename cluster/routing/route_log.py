"""Placements with all that they were chosen among, a JSON line for each request that has ended.

`cluster.lab.replay` chooses again from it. Lines hold lengths, names of replicas and of sessions,
and nothing of any text. Owner: the thread that writes; a disk that is slow or full, or a line that
cannot be made, costs lines, which are counted, and no request anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from typing import TYPE_CHECKING

import msgspec

from cluster.routing.explain import RouteFigures
from cluster.routing.placement import Placement
from cluster.routing.views import Column

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cluster.routing.choice import Side
    from cluster.routing.explain import Made, Route

logger = logging.getLogger(__name__)

MAX_WAITING = 256
"""Requests whose lines are yet to be written; beyond it lines are lost."""


class LoggedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One placement; see `cluster.routing.choice.Choice` and `Whole`.

    Attributes:
        made_s: When it was made, on its ingress's clock.
        chosen: Index of the place.
        columns: By the names of the views' columns, what all places had.
    """

    made_s: float
    side: str
    num_prompt_tokens: int
    num_choices: int
    num_output_tokens: int
    session: str
    turn: int
    chosen: int
    places: list[Placement]
    seqs: list[int]
    fitting: list[bool]
    missed: list[float] | float | None
    columns: dict[str, list[float]]


class LoggedRoute(msgspec.Struct, frozen=True, kw_only=True):
    """One request; see `cluster.routing.explain.Route`."""

    request_id: str
    policy: str
    outcome: str
    arrived_s: float
    ended_s: float | None
    num_prompt_tokens: int
    num_tokens: int
    predicted: RouteFigures
    actual: RouteFigures
    choices: list[LoggedChoice]


class RouteLog:
    """See the module docstring.

    Args:
        folder: Where its file is to be; made if it is not there.
        name: Of the ingress, and of the file.
        policy: Who chooses.
        on_lost: Called with each line that is not written, from any thread.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, folder: Path, name: str, policy: str, on_lost: Callable[[], None]) -> None:
        self._policy = policy
        self._on_lost = on_lost
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(folder / f"routes-{name}.jsonl", flags, 0o600)
        self._routes: queue.Queue[Route | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="routes", daemon=True)
        self._thread.start()

    def write(self, route: Route) -> None:
        """Write a route that has ended, soon; never waits."""
        try:
            self._routes.put_nowait(route)
        except queue.Full:
            self._on_lost()

    def close(self) -> None:
        """Write what waits, as far as the disk takes it within a second."""
        with contextlib.suppress(queue.Full):
            self._routes.put(None, timeout=1.0)
        self._thread.join(timeout=1.0)

    def _write_all(self) -> None:
        was_told = False
        while (route := self._routes.get()) is not None:
            try:
                line = msgspec.json.encode(logged(route, self._policy)) + b"\n"
                is_lost = os.write(self._fd, line) < len(line)
            except Exception:
                # Of this line; those that follow may be in order.
                is_lost = True
                if not was_told:
                    logger.exception(
                        "could not write a line of the route log; further failures are only counted"
                    )
                was_told = True
            if is_lost:
                self._on_lost()
        os.close(self._fd)


def logged(route: Route, policy: str) -> LoggedRoute:
    """What a line says."""
    return LoggedRoute(
        request_id=route.request_id,
        policy=policy,
        outcome=route.outcome,
        arrived_s=route.arrived_s,
        ended_s=route.ended_s,
        num_prompt_tokens=route.num_prompt_tokens,
        num_tokens=route.num_tokens,
        predicted=route.predicted,
        actual=route.actual,
        choices=[choice for made in route.made if (choice := _logged_choice(made))],
    )


def _logged_choice(made: Made) -> LoggedChoice | None:
    side: Side
    made_s, side, choice = made
    whole = choice.whole
    if whole is None:
        return None
    missed = whole.missed
    return LoggedChoice(
        made_s=made_s,
        side=side,
        num_prompt_tokens=choice.num_prompt_tokens,
        num_choices=choice.num_choices,
        num_output_tokens=choice.num_output_tokens,
        session=whole.session,
        turn=whole.turn,
        chosen=whole.placements.index(choice.chosen),
        places=list(whole.placements),
        seqs=whole.seqs,
        fitting=whole.fitting.tolist(),
        missed=missed if missed is None or isinstance(missed, float) else missed.tolist(),
        columns={c.name.lower(): whole.columns[c].tolist() for c in Column},
    )

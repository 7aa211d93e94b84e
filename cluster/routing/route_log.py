"""The route log: a JSON line for each ended request with its placements and their alternatives.

`cluster.lab.replay` chooses again from it. Lines hold lengths and names of replicas and sessions,
and no text. Owner: the thread that writes. If the disk is slow or full, or a line cannot be made,
lines are lost and counted; requests are not affected.
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
"""Limit of requests whose lines are not written yet; beyond it lines are lost."""


class LoggedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One placement; see `cluster.routing.choice.Choice` and `Whole`.

    Attributes:
        made_s: Time of the placement, on its ingress's clock.
        chosen: Index of the chosen place.
        columns: Values of all places by the name of the views' column.
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
    """A file with the routes of one ingress, and the thread that writes it.

    Args:
        folder: Folder of the file; created if needed.
        name: Name of the ingress, and part of the file's.
        policy: Name of the policy.
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
        """Queue a route that has ended; never waits."""
        try:
            self._routes.put_nowait(route)
        except queue.Full:
            self._on_lost()

    def close(self) -> None:
        """Write queued lines, as far as the disk takes them within a second."""
        with contextlib.suppress(queue.Full):
            self._routes.put(None, timeout=1.0)
        self._thread.join(timeout=1.0)

    def _write_all(self) -> None:
        has_logged = False
        while (route := self._routes.get()) is not None:
            try:
                line = msgspec.json.encode(logged(route, self._policy)) + b"\n"
                is_lost = os.write(self._fd, line) < len(line)
            except Exception:
                # Only this line is lost; later ones may be written.
                is_lost = True
                if not has_logged:
                    logger.exception(
                        "could not write a line of the route log; further failures are only counted"
                    )
                has_logged = True
            if is_lost:
                self._on_lost()
        os.close(self._fd)


def logged(route: Route, policy: str) -> LoggedRoute:
    """Return the line of a route."""
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

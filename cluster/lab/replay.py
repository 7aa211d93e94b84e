"""Replays logged placements with another policy, and compares the choices.

    python -m cluster.lab.replay /var/log/ttserve/routes-*.jsonl --policy cache_and_load

Reads the files of `args.router.route_log`. Each placement is repeated by itself, in the situation
that the logged policy had created; use the simulator for the effect on later placements. Policies
with random choices draw other numbers than the logged run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

import msgspec
import numpy as np

from cluster.config.schema import PolicyName
from cluster.routing.cost import PRESETS, CostPolicy, Scene, cost, make_policies
from cluster.routing.demand import Demand
from cluster.routing.route_log import LoggedRoute
from cluster.routing.views import Column, Views

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.routing.placement import Placement
    from cluster.routing.route_log import LoggedChoice


_COLUMNS = frozenset(column.name.lower() for column in Column)


class ReplayedPlacement(NamedTuple):
    """One placement, repeated with another policy.

    Attributes:
        side: "prefill" or "decode".
        logged: Index of the logged place.
        replayed: Index of the place that the other policy chooses.
        logged_s: Seconds that the logged place adds to the request and all others, by the cost of
            `least_delay`.
        replayed_s: Seconds that the other place adds.
    """

    side: str
    logged: int
    replayed: int
    logged_s: float
    replayed_s: float


def replay(
    routes: Iterable[LoggedRoute], policy: PolicyName, seed: int = 0
) -> list[ReplayedPlacement]:
    """Repeat all placements with another policy, in the order of the log.

    Args:
        routes: The logged routes.
        policy: The other policy.
        seed: Seed of its random choices.
    """
    choices = [choice for route in routes for choice in route.choices]
    return [_choose(choice, policy, seed) for choice in sorted(choices, key=lambda c: c.made_s)]


def read(paths: Iterable[Path]) -> tuple[list[LoggedRoute], int]:
    """Read the routes of log files; return them and the number of unreadable lines.

    A line may be incomplete: after a kill or on a full disk, joined to the next line, or at the end
    of a file that is still written. Logs of older versions may lack columns that policies need.
    """
    decoder = msgspec.json.Decoder(LoggedRoute)
    routes = [
        _read_line(decoder, line) for path in paths for line in path.read_bytes().splitlines()
    ]
    readable = [route for route in routes if route is not None]
    return readable, len(routes) - len(readable)


def _read_line(decoder: msgspec.json.Decoder[LoggedRoute], line: bytes) -> LoggedRoute | None:
    with contextlib.suppress(msgspec.DecodeError):
        route = decoder.decode(line)
        # An older version may have logged fewer columns.
        if all(choice.columns.keys() >= _COLUMNS for choice in route.choices):
            return route
    return None


def _choose(choice: LoggedChoice, policy: PolicyName, seed: int) -> ReplayedPlacement:
    demand = Demand(
        "",
        range(choice.num_prompt_tokens),
        choice.num_choices,
        choice.num_output_tokens,
        session=choice.session,
    )
    views = Views.of(
        choice.places, np.array([choice.columns[column.name.lower()] for column in Column])
    )
    cached = _cached(choice)
    policies = make_policies(policy, lambda _: cached, seed)
    chooser = policies.prefill if choice.side == "prefill" else policies.decode
    assert isinstance(chooser, CostPolicy)
    chooser.turn = choice.turn
    refused = [p for p, fits in zip(choice.places, choice.fitting, strict=True) if not fits]
    placement = chooser.place(demand, views, refused)
    replayed = None if placement is None else views.index_of(placement)
    assert replayed is not None, "the logged place has room"
    level = PRESETS["least_delay"][choice.side == "prefill"][0]
    scene = Scene(demand, views, np.array(choice.fitting), lambda _: cached, 0, random.Random(0))
    added_s = np.broadcast_to(cost(level, scene), len(views))
    return ReplayedPlacement(
        choice.side,
        choice.chosen,
        replayed,
        float(added_s[choice.chosen]),
        float(added_s[replayed]),
    )


def _cached(choice: LoggedChoice) -> dict[Placement, int]:
    """Return the prompt tokens that were known to be cached, by place."""
    missed = choice.missed
    if not isinstance(missed, list):
        return {}
    length = choice.num_prompt_tokens
    return {p: length - int(m) for p, m in zip(choice.places, missed, strict=True) if m < length}


def main(arguments: Sequence[str] | None = None) -> None:
    """Read log files, replay them, and print how often and by how much the choices differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="log files of args.router.route_log")
    parser.add_argument("--policy", choices=get_args(PolicyName), default="least_delay")
    parser.add_argument("--seed", type=int, default=0, help="seed of the policy's random choices")
    options = parser.parse_args(arguments)
    try:
        routes, num_unreadable = read(options.files)
    except OSError as error:
        parser.error(str(error))
    lines, figures = summary(replay(routes, options.policy, options.seed))
    figures["unreadable_lines"] = num_unreadable
    print("\n".join([*lines, json.dumps(figures)]))  # noqa: T201 - a command's output


def summary(placements: Sequence[ReplayedPlacement]) -> tuple[list[str], dict[str, float]]:
    """Return how often and by how much the policies differ: rows of a table, and figures."""
    lines = [f"{'':>8} {'placements':>10} {'same':>8} {'logged adds':>11} {'replayed':>9}"]
    figures: dict[str, float] = {"placements": len(placements)}
    for side in ("decode", "prefill"):
        rows = [row for row in placements if row.side == side]
        if rows:
            same = float(np.mean([row.logged == row.replayed for row in rows]))
            logged_ms, replayed_ms = (
                1e3 * float(np.mean(s)) for s in zip(*(r[3:] for r in rows), strict=True)
            )
            cells = f"{len(rows):>10,} {same:>8.1%} {logged_ms:>8.1f} ms {replayed_ms:>6.1f} ms"
            lines.append(f"{side:>8} {cells}")
            figures[f"{side}_same"] = round(same, 4)
            figures[f"{side}_added_ms_logged"] = round(logged_ms, 3)
            figures[f"{side}_added_ms_replayed"] = round(replayed_ms, 3)
    return lines, figures


if __name__ == "__main__":
    main()

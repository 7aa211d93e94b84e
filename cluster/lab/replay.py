"""Choose again, by another policy, among what placements were chosen among.

    python -m cluster.lab.replay /var/log/ttserve/routes-*.jsonl --policy cache_and_load

Reads the files of `args.router.route_log`. Each placement is judged by itself, in the situation
that the logged policy had made: what would have become of later ones is for the simulator to say.
Policies that draw do not draw the same again. The last line is one JSON object.
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


class Again(NamedTuple):
    """One placement, chosen again.

    Attributes:
        side: Of it.
        then: Index of the place that was chosen.
        now: Index of the one that the other policy chooses.
        then_s: Seconds that the one adds, to the request and to all others, as `least_delay` has
            it.
        now_s: Seconds that the other adds.
    """

    side: str
    then: int
    now: int
    then_s: float
    now_s: float


def replay(routes: Iterable[LoggedRoute], policy: PolicyName, seed: int = 0) -> list[Again]:
    """Choose again, in the order in which it was chosen.

    Args:
        routes: What was logged.
        policy: Who chooses now.
        seed: Of what it draws.
    """
    choices = [choice for route in routes for choice in route.choices]
    return [_choose(choice, policy, seed) for choice in sorted(choices, key=lambda c: c.made_s)]


def read(paths: Iterable[Path]) -> tuple[list[LoggedRoute], int]:
    """What files say, line by line, and how many lines are left out.

    A process that is killed, or a disk that is full, leaves part of a line, to which the next one
    is then joined; of a file that is still written, the last line may be such a part. And an older
    version may have looked at less than policies ask now.
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
        # An older version may have looked at less.
        if all(choice.columns.keys() >= _COLUMNS for choice in route.choices):
            return route
    return None


def _choose(choice: LoggedChoice, policy: PolicyName, seed: int) -> Again:
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
    now = None if placement is None else views.index_of(placement)
    assert now is not None, "one could take it"
    level = PRESETS["least_delay"][choice.side == "prefill"][0]
    scene = Scene(demand, views, np.array(choice.fitting), lambda _: cached, 0, random.Random(0))
    added_s = np.broadcast_to(cost(level, scene), len(views))
    return Again(
        choice.side, choice.chosen, now, float(added_s[choice.chosen]), float(added_s[now])
    )


def _cached(choice: LoggedChoice) -> dict[Placement, int]:
    """Prompt tokens that were known to be cached, by place."""
    missed = choice.missed
    if not isinstance(missed, list):
        return {}
    length = choice.num_prompt_tokens
    return {p: length - int(m) for p, m in zip(choice.places, missed, strict=True) if m < length}


def main(arguments: Sequence[str] | None = None) -> None:
    """Read files, choose again, and say how often and by how much that differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="of args.router.route_log")
    parser.add_argument("--policy", choices=get_args(PolicyName), default="least_delay")
    parser.add_argument("--seed", type=int, default=0, help="of what the policy draws")
    options = parser.parse_args(arguments)
    try:
        routes, num_unreadable = read(options.files)
    except OSError as error:
        parser.error(str(error))
    lines, figures = summary(replay(routes, options.policy, options.seed))
    figures["unreadable_lines"] = num_unreadable
    print("\n".join([*lines, json.dumps(figures)]))  # noqa: T201 - a command's output


def summary(again: Sequence[Again]) -> tuple[list[str], dict[str, float]]:
    """How often, and by how much, the policies differ: rows of a table, and figures."""
    lines = [f"{'':>8} {'placements':>10} {'as then':>8} {'added then':>11} {'now':>9}"]
    figures: dict[str, float] = {"placements": len(again)}
    for side in ("decode", "prefill"):
        rows = [row for row in again if row.side == side]
        if rows:
            same = float(np.mean([row.then == row.now for row in rows]))
            then_ms, now_ms = (
                1e3 * float(np.mean(s)) for s in zip(*(r[3:] for r in rows), strict=True)
            )
            cells = f"{len(rows):>10,} {same:>8.1%} {then_ms:>8.1f} ms {now_ms:>6.1f} ms"
            lines.append(f"{side:>8} {cells}")
            figures[f"{side}_same"] = round(same, 4)
            figures[f"{side}_added_ms_then"] = round(then_ms, 3)
            figures[f"{side}_added_ms_now"] = round(now_ms, 3)
    return lines, figures


if __name__ == "__main__":
    main()

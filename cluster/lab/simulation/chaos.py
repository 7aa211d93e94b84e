"""Chaos testing: runs random scenarios, seed by seed, up to a number of events.

Distributes the seeds over processes and shows the progress. A failing scenario is shrunk, written
to a file, and reported with the command that replays it exactly.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import logging
import multiprocessing
import time
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cluster.lab.simulation.adversarial_scenarios import random_scenario
from cluster.lab.simulation.scenario import Scenario, run_scenario
from cluster.lab.simulation.shrink import Shrinker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.lab.simulation.records import EventRecord
    from cluster.lab.simulation.scenario import Outcome

SHRINK_S = 30.0
"""Real seconds for shrinking a failing scenario."""
NUM_TRACE_LINES = 40
_AHEAD = 4
"""Seeds that are queued for each process, so that none is idle."""


class ChaosError(Exception):
    """The run cannot start; the message says what to change."""


class ChaosOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `ttserve chaos`; its help describes them."""

    seed: int = 0
    events: int = 1_000_000
    jobs: int = 1
    out: Path = Path("chaos")


class ShrunkFailure(NamedTuple):
    """A failing scenario, shrunk.

    Attributes:
        failure: The failure of the original scenario.
        shrunk: A smaller scenario that fails in the same way.
        outcome: The outcome of `shrunk`.
        num_runs: Runs that shrinking took.
    """

    failure: str
    shrunk: Scenario
    outcome: Outcome
    num_runs: int


class ChaosSummary(NamedTuple):
    """The results of a chaos run.

    Attributes:
        failed_seed: The first seed whose scenario failed, or None.
    """

    num_seeds: int
    num_events: int
    outcomes: dict[str, int]
    failed_seed: int | None
    wall_s: float


def run_seed(seed: int) -> Outcome:
    """Run the scenario of one seed; the outcome has no log, to be small between processes."""
    return dataclasses.replace(run_scenario(random_scenario(seed)), log=[])


def explore(
    options: ChaosOptions, progress: Callable[[int, int], None] = lambda _seeds, _events: None
) -> ChaosSummary:
    """Run seeds until enough events have passed or one fails.

    `progress` is called with (seeds done, events done) after each seed.
    """
    started = time.perf_counter()
    num_seeds = num_events = 0
    failed_seed: int | None = None
    outcomes: Counter[str] = Counter()
    for seed, outcome in enumerate(_run_seeds(options), options.seed):
        num_seeds += 1
        num_events += outcome.num_events
        outcomes.update(outcome.outcomes)
        progress(num_seeds, num_events)
        if outcome.failure is not None:
            failed_seed = seed
            break
        if num_events >= options.events:
            break
    wall_s = time.perf_counter() - started
    return ChaosSummary(num_seeds, num_events, dict(sorted(outcomes.items())), failed_seed, wall_s)


def investigate(scenario: Scenario, shrink_s: float) -> ShrunkFailure | None:
    """Run a scenario, and if it fails, shrink it for at most `shrink_s` real seconds.

    Returns None if the scenario passes.
    """
    first = run_scenario(scenario)
    if first.failure is None:
        return None
    kind = failure_kind(first.failure)

    def fails(smaller: Scenario) -> bool:
        failure = run_scenario(smaller).failure
        return failure is not None and failure_kind(failure) == kind

    shrinker = Shrinker(fails, shrink_s)
    shrunk = shrinker.shrink(scenario)
    return ShrunkFailure(first.failure, shrunk, run_scenario(shrunk), shrinker.num_runs)


def failure_kind(failure: str) -> str:
    """Return the part that failures of one bug share: the type of error and the failing check."""
    return failure.split("): ", 1)[0]


def trace_text(log: list[EventRecord]) -> str:
    """Format the last lines of an event log."""
    return "".join(
        f"{event.at_s:12.6f}  {event.kind:10}  {event.subject:12}  "
        + " ".join(f"{x:g}" if isinstance(x, float) else str(x) for x in event.detail)
        + "\n"
        for event in log[-NUM_TRACE_LINES:]
    )


def chaos(options: ChaosOptions, echo: Callable[[str], None], *, shows_progress: bool) -> bool:
    """Run `ttserve chaos` without `--replay`; return whether every scenario passed.

    `shows_progress` is for a terminal: one line that is updated.
    """
    _be_quiet()
    last_s = started = time.perf_counter()

    def progress(num_seeds: int, num_events: int) -> None:
        nonlocal last_s
        now_s = time.perf_counter()
        # A log file gets a line now and then, a terminal one line that is updated.
        if now_s - last_s >= (0.2 if shows_progress else 20.0):
            last_s = now_s
            rate = num_events / (now_s - started)
            line = f"{num_events:,} of {options.events:,} events, {num_seeds} seeds, {rate:,.0f}/s"
            echo(f"\r{line}" if shows_progress else f"{line}\n")

    summary = explore(options, progress)
    if shows_progress:
        echo("\r\033[K")
    if summary.failed_seed is not None:
        report_failure(random_scenario(summary.failed_seed), options, echo)
        return False
    echo(
        f"{summary.num_events:,} events of {summary.num_seeds} scenarios (seeds {options.seed} to "
        f"{options.seed + summary.num_seeds - 1}) in {summary.wall_s:.0f} s: every invariant "
        f"held, and every request ended once: {_counts(summary.outcomes)}\n"
    )
    return True


def replay(path: Path, echo: Callable[[str], None]) -> bool:
    """Run `ttserve chaos --replay`; return whether the scenario passes.

    Raises:
        ChaosError: The file cannot be read as a scenario.
    """
    _be_quiet()
    try:
        scenario = Scenario.from_json(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise ChaosError(f"cannot read a scenario from {path}: {error}") from error
    outcome = run_scenario(scenario)
    echo(trace_text(outcome.log))
    if outcome.failure is not None:
        echo(f"failed after {outcome.num_events:,} events: {outcome.failure}\n")
        return False
    counts = _counts(outcome.outcomes)
    echo(f"passed: {outcome.num_events:,} events, {counts}; digest {outcome.digest}\n")
    return True


def report_failure(scenario: Scenario, options: ChaosOptions, echo: Callable[[str], None]) -> None:
    """Shrink a failing scenario, write it to a file, and report how to replay it."""
    echo(f"seed {scenario.seed} fails; replay it with\n")
    echo(f"    ttserve chaos --seed {scenario.seed} --events 1\n")
    echo(f"shrinking it, for at most {SHRINK_S:g} s ...\n")
    find = investigate(scenario, SHRINK_S)
    if find is None:
        echo("it passes when run again, so the simulation is not deterministic; this is a bug\n")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"seed-{scenario.seed}.json"
    path.write_bytes(find.shrunk.to_json())
    echo(f"{find.failure}\n\n")
    echo(
        f"shrunk in {find.num_runs} runs from {len(scenario.requests)} requests and "
        f"{len(scenario.faults)} faults to {len(find.shrunk.requests)} and "
        f"{len(find.shrunk.faults)}; the last {NUM_TRACE_LINES} events:\n"
    )
    echo(trace_text(find.outcome.log))
    echo(f"{find.outcome.failure}\n\nreplay it with\n    ttserve chaos --replay {path}\n")


def _run_seeds(options: ChaosOptions) -> Iterator[Outcome]:
    """Yield the outcomes of consecutive seeds, in order, without end."""
    seeds = itertools.count(options.seed)
    if options.jobs == 1:
        yield from map(run_seed, seeds)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        options.jobs, mp_context=context, initializer=_be_quiet
    ) as pool:
        waiting: deque[concurrent.futures.Future[Outcome]] = deque()
        try:
            while True:
                while len(waiting) < _AHEAD * options.jobs:
                    waiting.append(pool.submit(run_seed, next(seeds)))
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _counts(outcomes: dict[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())


def _be_quiet() -> None:
    """Hide the engines' warnings about clients that leave, which is frequent here."""
    logging.getLogger("replicas").setLevel(logging.CRITICAL)

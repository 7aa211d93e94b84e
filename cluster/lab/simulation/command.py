"""Implements `ttserve simulate`: reads a config file and a trace, prints tables, writes files.

It reads the configuration as a start of the cluster would, runs a `Simulation` and reports the
result. Python programs can use the same functions: `load_cluster`, `load_trace`, `run_cluster`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import msgspec

from cluster.config.resolve import read_args, resolve
from cluster.config.schema import PolicyName
from cluster.config.serve_file import read_faults, read_serve_file
from cluster.errors import BadRequestError, ClusterConfigError
from cluster.lab.simulation.network import NetworkConfig
from cluster.lab.simulation.options import PoolSpec, SimulationOptions
from cluster.lab.simulation.plots import MissingPlotLibraryError, plot_run, require_matplotlib
from cluster.lab.simulation.records import EventRecord
from cluster.lab.simulation.report import print_summary, progress_display, write_events
from cluster.lab.simulation.simulator import Simulation
from cluster.lab.simulation.summary import Slo, summarise, to_json
from cluster.lab.workloads.errors import WorkloadError
from cluster.lab.workloads.load import load_workload
from replicas.generators.simulated.profiles import engine_timing
from replicas.simulation.virtual_engine import simulated_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cluster.config.resolve import ClusterConfig
    from cluster.lab.simulation.records import SimulationResult
    from cluster.lab.simulation.summary import Summary
    from cluster.lab.workloads.request import Workload
    from replicas.config import EngineConfig, Role
    from replicas.faults import FaultPlan

_EXAMPLES = "configs/sim-n150x4.yaml, configs/sim-t3k-2p2d.yaml and configs/sim-galaxy.yaml"
_POLICIES: tuple[str, ...] = get_args(PolicyName)

# A `simulated_mesh` includes the whole time of a KV transfer, so the network adds none.
_NETWORK = NetworkConfig(kv_bytes_per_s=math.inf)


class SimulateError(Exception):
    """The command cannot run with its arguments; the message says what to change."""


class SimulateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `ttserve simulate`; its help describes them."""

    trace: Path
    format: str = "auto"
    replicas: int | None = None
    policy: str | None = None
    faults: Path | None = None
    plot: Path | None = None
    json: Path | None = None
    log: Path | None = None
    speed_up: float = 1.0
    limit: int | None = None
    seed: int = 0
    slo: Slo = Slo()


def simulate(config: Path, options: SimulateOptions) -> Summary:
    """Run the command: simulate, print the tables, write the requested files.

    Raises:
        SimulateError: An argument cannot be used; or a file could not be written.
    """
    cluster = load_cluster(
        config, replicas=options.replicas, policy=options.policy, faults=options.faults
    )
    _check_outputs(options)
    workload = load_trace(options)
    # Warnings of simulated engines would only repeat the tables and the optional log.
    logging.getLogger().addHandler(logging.NullHandler())
    requests = workload.requests
    with progress_display(requests[-1].arrival_s, len(requests)) as progress:
        result = run_cluster(
            cluster,
            workload,
            seed=options.seed,
            speed_up=options.speed_up,
            keeps_events=options.log is not None,
            progress=progress,
        )
    summary = summarise(result, options.slo)
    print_summary(summary, wall_s=result.wall_s)
    for line in _remarks(result, cluster.max_model_len):
        print(line)  # noqa: T201 - a command's output
    _write(options, result, summary, cluster.fault_plan)
    return summary


def load_cluster(
    path: Path,
    *,
    replicas: int | None = None,
    policy: str | None = None,
    faults: Path | None = None,
) -> ClusterConfig:
    """Read a Serve config file as a start of the cluster would; None keeps the file's value.

    All its engines must have a simulated mesh. `replicas` is the total of all pools, see
    `scale_pools`; `faults` is the file of a fault plan.

    Raises:
        SimulateError: The file, or its combination with the arguments, is not valid.
    """
    if policy is not None and policy not in _POLICIES:
        raise SimulateError(f"no policy {policy!r}; use one of {', '.join(_POLICIES)}")
    try:
        file = read_serve_file(path)
        args: dict[str, Any] = {"faults": None if faults is None else read_faults(faults)}
        if policy is not None:
            args["router"] = {"policy": policy}
        if replicas is not None:
            counts = {role: pool.replicas for role, pool in read_args(file.args).pools.items()}
            scaled = scale_pools(counts, replicas)
            args["pools"] = {role: {"replicas": count} for role, count in scaled.items()}
        cluster = resolve(file.override(args=args).args)
    except ClusterConfigError as error:
        raise SimulateError(f"{path}: {error}") from error
    for role, engine in cluster.engines.items():
        _check_engine(path, role, engine)
    return cluster


def scale_pools(counts: Mapping[Role, int], total: int) -> dict[Role, int]:
    """Distribute `total` replicas over the pools in their present proportion.

    Each pool gets the integer part of its share, and at least one. The rest goes to the pools with
    the largest remainders; at equal remainders prefill is first.

    Raises:
        SimulateError: There are more pools than replicas.
    """
    if total < len(counts):
        raise SimulateError(
            f"--replicas {total} is too few for the pools {' and '.join(counts)}; "
            f"use {len(counts)} or more"
        )
    whole = sum(counts.values())
    scaled = {role: max(1, count * total // whole) for role, count in counts.items()}
    # A pool that was raised to one replica has a negative remainder.
    remainders = {role: count * total - scaled[role] * whole for role, count in counts.items()}
    first = sorted(counts, key=lambda role: (-remainders[role], role != "prefill"))
    for i in range(total - sum(scaled.values())):
        scaled[first[i % len(first)]] += 1
    while sum(scaled.values()) > total:
        scaled[max(scaled, key=lambda role: scaled[role])] -= 1
    return scaled


def load_trace(options: SimulateOptions) -> Workload:
    """Read the workload, with the options' limit and speed-up.

    Raises:
        SimulateError: The workload cannot be read, or is empty.
    """
    try:
        workload = load_workload(
            options.trace,
            format=cast("Any", options.format),
            seed=options.seed,
            limit=options.limit,
        )
        return workload.speed_up(options.speed_up)
    except (WorkloadError, OSError) as error:
        raise SimulateError(str(error)) from error


def read_slo(ttft_ms: float | None, tpot_ms: float | None, e2e_ms: float | None) -> Slo:
    """Convert the command line's objectives, in ms.

    Raises:
        SimulateError: An objective is not positive.
    """
    bounds_ms = {"ttft": ttft_ms, "tpot": tpot_ms, "e2e": e2e_ms}
    for name, bound_ms in bounds_ms.items():
        if bound_ms is not None and not 0 < bound_ms < math.inf:
            raise SimulateError(f"--slo-{name}-ms {bound_ms:g} must be more than 0 and finite")
    return Slo(**{f"{n}_s": ms / 1e3 for n, ms in bounds_ms.items() if ms is not None})


def run_cluster(
    cluster: ClusterConfig,
    workload: Workload,
    *,
    seed: int = 0,
    speed_up: float = 1.0,
    keeps_events: bool = False,
    progress: Callable[[float, int, int], None] = lambda _now_s, _done, _events: None,
) -> SimulationResult:
    """Simulate a cluster with a configuration from `load_cluster`.

    `speed_up` is only recorded: the workload is already faster. See `Simulation` for `progress`.
    """
    simulation = Simulation(
        pool_specs(cluster),
        workload,
        SimulationOptions(
            seed=seed,
            router=cluster.router,
            ingresses=cluster.ingress.replicas,
            network=_NETWORK,
            faults=cluster.fault_plan,
            keeps_events=keeps_events,
        ),
        progress,
    )
    with seldom_collecting():
        result = simulation.run()
    return msgspec.structs.replace(result, speed_up=speed_up, config=_config_facts(cluster))


@contextlib.contextmanager
def seldom_collecting() -> Iterator[None]:
    """Run the garbage collector rarely: a run keeps millions of objects but has few cycles."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def pool_specs(cluster: ClusterConfig) -> list[PoolSpec]:
    """Return the simulator's pools, with the properties that a real engine would report."""
    specs = []
    for role, pool in cluster.pools.items():
        engine = cluster.engines[role]
        mesh = engine.simulated_mesh
        assert mesh is not None, role
        # `compile_s` in a file shortens real starts. Without it, use the estimate for a real mesh.
        timing = engine_timing(engine, mesh, mesh.compile_s or None)
        facts, drain_timeout_s = simulated_facts(engine), pool.drain_timeout_s
        spec = PoolSpec(role, pool.replicas, engine, timing, facts, drain_timeout_s=drain_timeout_s)
        specs.append(spec)
    return specs


def _check_engine(path: Path, role: Role, engine: EngineConfig) -> None:
    if engine.simulated_mesh is None:
        raise SimulateError(
            f"{path}: the engines of pool {role} have no simulated_mesh, which the simulator needs "
            "for the time of their steps; add `simulated_mesh: {model: Llama-3.1-8B, board: n150}` "
            f"to args.engine, or start with one of {_EXAMPLES}"
        )
    if engine.kv_connector not in (None, "p2p"):
        raise SimulateError(
            f"{path}: args.kv_connector {engine.kv_connector!r}: the simulator supports p2p only"
        )


def _check_outputs(options: SimulateOptions) -> None:
    """Check before a long run that its results can be written."""
    for name, file in (("--json", options.json), ("--log", options.log)):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise SimulateError(f"{name} {file}: must be a file in an existing folder")
    if options.plot is None:
        return
    if options.plot.exists() and not options.plot.is_dir():
        raise SimulateError(f"--plot {options.plot}: must be a folder, and is a file")
    try:
        require_matplotlib()
    except MissingPlotLibraryError as error:
        raise SimulateError(f"--plot: {error}") from error


def _write(
    options: SimulateOptions, result: SimulationResult, summary: Summary, plan: FaultPlan
) -> None:
    try:
        if options.json is not None:
            options.json.write_bytes(to_json(summary))
        if options.log is not None:
            write_events(result.events, options.log)
        if options.plot is not None:
            # The planned faults: the log may be off, and does not have the end of a fault.
            faults = [EventRecord(f.at_s, f.kind, f.target) for f in plan.faults]
            plot_run(msgspec.structs.replace(result, events=faults), options.plot, slo=options.slo)
    except OSError as error:
        raise SimulateError(str(error)) from error


def _config_facts(cluster: ClusterConfig) -> dict[str, str | int | float | bool]:
    """Return facts of the configuration for titles and files."""
    facts: dict[str, str | int | float | bool] = {}
    boards: dict[str, None] = {}
    for role, pool in cluster.pools.items():
        engine = cluster.engines[role]
        assert engine.simulated_mesh is not None
        facts["model"] = engine.simulated_mesh.model
        boards[engine.simulated_mesh.board] = None
        facts[f"{role}_replicas"] = pool.replicas
        facts[f"{role}_lanes"] = engine.tt_data_parallel
        facts[f"{role}_slots"] = engine.max_batch_size
    return {**facts, "board": " + ".join(boards), "max_model_len": cluster.max_model_len}


def _remarks(result: SimulationResult, longest: int) -> list[str]:
    """Return remarks on requests that were too long."""
    refused = BadRequestError.__name__
    num_long = sum(r.num_prompt_tokens >= longest for r in result.records)
    num_cut = sum(
        r.num_prompt_tokens < longest < r.num_prompt_tokens + r.num_output_tokens_asked
        for r in result.records
    )
    remarks = []
    if num_long:
        remarks.append(
            f"prompts too long for max_model_len {longest:,}: {num_long:,} (failed, as {refused})"
        )
    if num_cut:
        remarks.append(f"answers cut off at max_model_len {longest:,}: {num_cut:,}")
    return remarks

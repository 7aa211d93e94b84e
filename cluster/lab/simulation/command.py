"""Everything behind `ttserve simulate`: a config file and a trace in, tables and files out.

It owns nothing: it reads what a start of the cluster would read, gives it to `Simulation`, and the
result to the report. Whoever simulates from Python uses the same parts: `load_cluster`,
`load_trace`, `run_cluster`.
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
from replicas.virtual_engine import simulated_facts

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

# A `simulated_mesh` counts the whole way of KV, wire included, on each engine's side.
_NETWORK = NetworkConfig(kv_bytes_per_s=math.inf)


class SimulateError(Exception):
    """The command cannot do what it was told; the message says what to change."""


class SimulateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command's options, under their names; its help says what each of them does."""

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
    """Run the command: simulate, show the tables, write the files that were asked for.

    Raises:
        SimulateError: Something that was given cannot work; nothing has been written.
    """
    cluster = load_cluster(
        config, replicas=options.replicas, policy=options.policy, faults=options.faults
    )
    _check_outputs(options)
    workload = load_trace(options)
    # What a simulated engine warns of is in the tables and in the log that one may ask for.
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
    """Read a Serve config file as a start of the cluster would; None keeps what the file says.

    All its engines run on a simulated mesh. `replicas` is of all pools together, see `scale_pools`;
    `faults` is the file of a fault plan.

    Raises:
        SimulateError: The file, or what it was changed into, cannot work.
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
    """Share `total` replicas out among the pools in the proportion that they have now.

    Each pool gets the whole part of its share, and at least one; what is left goes to the pools
    with the largest remainders, prefill first where they are equal.

    Raises:
        SimulateError: There are more pools than replicas.
    """
    if total < len(counts):
        raise SimulateError(
            f"--replicas {total} is too few for the pools {' and '.join(counts)}; "
            f"give {len(counts)} or more"
        )
    whole = sum(counts.values())
    scaled = {role: max(1, count * total // whole) for role, count in counts.items()}
    # A pool that has more than its share, for it must have one, has nothing left to get.
    remainders = {role: count * total - scaled[role] * whole for role, count in counts.items()}
    first = sorted(counts, key=lambda role: (-remainders[role], role != "prefill"))
    for i in range(total - sum(scaled.values())):
        scaled[first[i % len(first)]] += 1
    while sum(scaled.values()) > total:
        scaled[max(scaled, key=lambda role: scaled[role])] -= 1
    return scaled


def load_trace(options: SimulateOptions) -> Workload:
    """Read the workload, cut and sped up as the options say.

    Raises:
        SimulateError: It cannot be read, or nothing is left of it.
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
    """Objectives as the command line has them, in ms.

    Raises:
        SimulateError: One is not positive.
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
    """Simulate a cluster of a configuration from `load_cluster`.

    The workload has been sped up already: `speed_up` is for the record. See `Simulation` for
    `progress`.
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
    """Let the garbage collector look seldom: a run keeps millions of objects and few cycles."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def pool_specs(cluster: ClusterConfig) -> list[PoolSpec]:
    """The pools as the simulator takes them: what a real start would find out of each engine."""
    specs = []
    for role, pool in cluster.pools.items():
        engine = cluster.engines[role]
        mesh = engine.simulated_mesh
        assert mesh is not None, role
        # A file says how long whoever looks at a real start wants to wait. Not given, it is the
        # time of the mesh itself: a replica that died is not back before that.
        timing = engine_timing(engine, mesh, mesh.compile_s or None)
        facts, drain_timeout_s = simulated_facts(engine), pool.drain_timeout_s
        spec = PoolSpec(role, pool.replicas, engine, timing, facts, drain_timeout_s=drain_timeout_s)
        specs.append(spec)
    return specs


def _check_engine(path: Path, role: Role, engine: EngineConfig) -> None:
    if engine.simulated_mesh is None:
        raise SimulateError(
            f"{path}: the engines of pool {role} have no simulated_mesh, so nothing says how long "
            "their steps take; add `simulated_mesh: {model: Llama-3.1-8B, board: n150}` to "
            f"args.engine, or begin with one of {_EXAMPLES}"
        )
    if engine.kv_connector not in (None, "p2p"):
        raise SimulateError(
            f"{path}: args.kv_connector {engine.kv_connector!r}: the simulator knows p2p only"
        )


def _check_outputs(options: SimulateOptions) -> None:
    """Find out before a long run, not after it, that its results could not be kept."""
    for name, file in (("--json", options.json), ("--log", options.log)):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise SimulateError(f"{name} {file}: give a file in a folder that exists")
    if options.plot is None:
        return
    if options.plot.exists() and not options.plot.is_dir():
        raise SimulateError(f"--plot {options.plot}: is a file; give a folder")
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
            # Faults as they were planned: the log may be off, and has no line where one ends.
            faults = [EventRecord(f.at_s, f.kind, f.target) for f in plan.faults]
            plot_run(msgspec.structs.replace(result, events=faults), options.plot, slo=options.slo)
    except OSError as error:
        raise SimulateError(str(error)) from error


def _config_facts(cluster: ClusterConfig) -> dict[str, str | int | float | bool]:
    """What titles and files say of the configuration."""
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
    """What the tables do not explain by themselves."""
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

"""The report of `ttserve doctor`: engines that can run on this host, missing parts, open sockets.

Combines findings on the boards (`cluster.lifecycle.findings`) and on the sockets
(`cluster.lifecycle.listeners`). `check_pools` checks a configuration against them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import msgspec

from cluster.config.environment import process_environment
from cluster.lifecycle import haproxy
from cluster.lifecycle.findings import Finding, can_run_mesh, devices_word, findings
from cluster.lifecycle.listeners import Listener, judge_ray, ray_environments, read_listeners
from cluster.lifecycle.ray_token import judge_tokens
from replicas.errors import ConfigError
from replicas.generators.model_config import load_engine_model
from replicas.generators.plugin.routes import route_mesh
from replicas.mesh_environment import check_generator
from replicas.tt.boards import (
    RESOURCE,
    HostReport,
    MeshChoice,
    can_write,
    mesh_choices,
    mesh_problem,
    num_devices,
    read_host,
    visible_number,
)
from replicas.tt.trace_regions import trace_region_bytes
from replicas.user_cache import NO_HOME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.config.resolve import ClusterConfig
    from cluster.config.schema import PoolConfig
    from replicas.config import EngineConfig, MeshConfig
    from replicas.tt.meshes import MeshSpec


@dataclass(frozen=True, slots=True)
class PoolCheck:
    """The check of one pool of a configuration against this host.

    Attributes:
        pool: The pool's role.
        mesh: The mesh of its engines.
        problem: Reason why none of its engines can start here; None if one can.
        note: Further remarks; "" for none.
    """

    pool: str
    mesh: str
    problem: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of `ttserve doctor`.

    Attributes:
        host: Boards and software of this host.
        findings: Findings on them, the boards first.
        meshes: Names of meshes that the boards can form.
        can_run_mesh: Whether an engine can open a mesh here.
        http_front: "haproxy", or "python" for Serve's own proxy.
        pools: Checks of the given configuration's pools.
        listeners: Sockets on which this user's clusters listen.
        ray: Problems with access to Ray or to its token.
    """

    host: HostReport
    findings: tuple[Finding, ...]
    meshes: tuple[MeshChoice, ...]
    can_run_mesh: bool
    http_front: Literal["haproxy", "python"]
    pools: tuple[PoolCheck, ...]
    listeners: tuple[Listener, ...]
    ray: tuple[Finding, ...]

    @property
    def is_good(self) -> bool:
        """Whether each given pool can run here and Ray is closed to others."""
        return all(pool.problem is None for pool in self.pools) and not self.ray


def diagnose(config: ClusterConfig | None = None) -> Diagnosis:
    """Examine this host, and check a configuration against it."""
    environment = process_environment()
    report = read_host(environment)
    listeners = read_listeners()
    return Diagnosis(
        host=report,
        findings=findings(report),
        meshes=mesh_choices(report),
        can_run_mesh=can_run_mesh(report),
        http_front="python" if haproxy.find_script() is None else "haproxy",
        pools=() if config is None else check_pools(config, report, environment),
        listeners=listeners,
        ray=judge_ray(listeners) + judge_tokens([environment, *ray_environments()]),
    )


def check_pools(
    config: ClusterConfig, report: HostReport, environment: Mapping[str, str]
) -> tuple[PoolCheck, ...]:
    """Check for each pool whether its mesh is on this host.

    Replicas may run on other hosts too, so a pool fails only if none of its engines fits here.

    Args:
        config: The configuration to check.
        report: Boards and software of this host.
        environment: The environment of this process.
    """
    checks = []
    num_left = len(report.usable)
    for role, pool in config.pools.items():
        engine = config.engines[role]
        if engine.mesh is None:
            simulated = engine.simulated_mesh
            checks.append(
                PoolCheck(role, "CPU" if simulated is None else f"simulated {simulated.board}")
            )
            continue
        spec = engine.mesh.spec
        problem = _named_problem(engine.mesh, report) or mesh_problem(report, spec)
        devices = num_devices(report, spec)
        if problem is None:
            problem = _count_problem(pool, spec, devices, report)
        if problem is None and not can_run_mesh(report):
            lacks = [f.subject for f in findings(report) if f.level == "missing"]
            problem = f"fix first: {', '.join(lacks)}"
        num_fitting = min(pool.replicas, num_left // devices)
        num_left -= num_fitting * devices
        if problem is None:
            problem = _generator_problem(engine, environment)
        if problem is None:
            problem = _cache_problem(engine, engine.mesh)
        note = _trace_note(engine, engine.mesh)
        if problem is None and report.mock_descriptor is None and num_fitting < pool.replicas:
            fits = f"{num_fitting} of {pool.replicas} replicas fit here; others need further hosts"
            note = f"{fits}; {note}" if note else fits
        checks.append(PoolCheck(role, spec.name, problem, note))
    return tuple(checks)


def _named_problem(mesh: MeshConfig, report: HostReport) -> str | None:
    """Return why a mesh cannot consist of the boards in its `visible_devices`, or None."""
    numbers = mesh.visible_devices
    if numbers is None or report.mock_descriptor is not None:
        return None
    # `visible_devices` replaces TT_VISIBLE_DEVICES for the engine.
    here = replace(report, visible_devices=None).usable
    seen = sorted(n for d in here if (n := visible_number(report.devices, d)) is not None)
    strays = [str(number) for number in numbers if number not in seen]
    if strays:
        known = ", ".join(map(str, seen)) or "none"
        return f"visible_devices names {', '.join(strays)}, and the boards here are {known}"
    named_alone = replace(report, visible_devices=",".join(map(str, numbers)))
    problem = mesh_problem(named_alone, mesh.spec)
    return (
        None if problem is None else f"of the boards in visible_devices {list(numbers)}: {problem}"
    )


def _generator_problem(engine: EngineConfig, environment: Mapping[str, str]) -> str | None:
    """Return why the engine's generator is not installed here, or None."""
    try:
        check_generator(engine, environment)
    except ConfigError as error:
        return str(error)
    return None


def _count_problem(
    pool: PoolConfig, spec: MeshSpec, devices: int, report: HostReport
) -> str | None:
    """Return why Ray would assign a replica other boards than its grid needs here, or None."""
    asked = pool.resources.get(RESOURCE, spec.num_pcie_devices)
    # With 0, Ray binds no boards and the engine sees all of this host. A pool may reserve more
    # boards than it needs, if there are that many.
    is_enough = not asked or devices <= asked <= max(devices, len(report.usable))
    if spec.board is not None or report.mock_descriptor is not None or is_enough:
        return None
    return (
        f"{spec.name} is {devices} {devices_word(devices)} here, and the pool asks Ray for "
        f"{asked:g}: set its resources: {{{RESOURCE}: {devices}}}"
    )


def _cache_problem(engine: EngineConfig, mesh: MeshConfig) -> str | None:
    """Return why a foreign generator cannot store converted weights, or None.

    The native generators run without a store.
    """
    folder = mesh.weight_cache_folder
    if engine.uses_native_generator:
        return None
    if folder is None:
        return f"{NO_HOME}, or weight_cache: its class stores weights there"
    if can_write(folder):
        return None
    return f"this user cannot write to {folder}, where its class stores weights: set weight_cache"


def _trace_note(engine: EngineConfig, mesh: MeshConfig) -> str:
    """Return a note if the configured trace region is smaller than the usual one, else ""."""
    size = mesh.trace_region_size
    if size is None or mesh.trace == "none":
        return ""
    try:
        num_layers = load_engine_model(engine).num_hidden_layers
    except ConfigError:
        return ""
    left_out = route_mesh(engine.generator, msgspec.structs.replace(mesh, trace_region_size=None))
    usual = trace_region_bytes(left_out, num_layers, engine.tt_data_parallel)
    if size >= usual:
        return ""
    return (
        f"trace_region_size {size} is less than the {usual} that such a mesh and model usually "
        f"need: remove it to use {usual}"
    )


def doctor_text(diagnosis: Diagnosis) -> str:
    """Format the diagnosis as plain lines of text."""
    lines = ["Host", *_finding_lines(diagnosis.findings)]
    lines.append("Meshes for engine.mesh.name")
    lines += [f"  {_choice_text(choice)}" for choice in diagnosis.meshes]
    if not diagnosis.meshes:
        lines.append("  the name of the boards" if diagnosis.host.usable else "  none")
    lines.append("Running here")
    lines += [f"  {line}" for line in _what_runs(diagnosis)]
    if diagnosis.listeners or diagnosis.ray:
        lines += ["Listening (see SECURITY.md)", *_finding_lines(diagnosis.ray)]
        lines += [f"  {_listener_text(listener)}" for listener in diagnosis.listeners]
    if diagnosis.pools:
        lines.append("Configuration")
        lines += [f"  {_pool_text(check)}" for check in diagnosis.pools]
    return "\n".join(lines) + "\n"


def _finding_lines(found: tuple[Finding, ...]) -> list[str]:
    lines = []
    for finding in found:
        lines.append(f"  {finding.level:8}{finding.subject:16}{finding.text}")
        lines += [f"{'':26}-> {step}" for step in finding.advice]
    return lines


def _listener_text(listener: Listener) -> str:
    return (
        f"{listener.level:8}{listener.socket:16}{listener.address} of process {listener.pid}: "
        f"{listener.verdict}"
    )


def _choice_text(choice: MeshChoice) -> str:
    count = f"{choice.num_replicas} replica{'' if choice.num_replicas == 1 else 's'}"
    return f"{choice.mesh:24}{count}" + (f", if {choice.condition}" if choice.condition else "")


def _what_runs(diagnosis: Diagnosis) -> list[str]:
    lines = []
    if diagnosis.can_run_mesh and diagnosis.host.mock_descriptor is None:
        lines.append("engines on a mesh of these boards")
    elif diagnosis.can_run_mesh:
        lines.append("engines on ttnn's mock cluster: every call is checked, nothing is computed")
    else:
        lines.append("no engine on a mesh")
    lines.append("engines on the CPU, with torch: any supported model folder (`ttserve serve`)")
    lines.append("engines on simulated meshes: times and memory of a board, no real text")
    if diagnosis.http_front == "haproxy":
        lines.append("HTTP through HAProxy")
    else:
        lines.append("HTTP through Serve's Python proxy, which is slower: HAProxy is not installed")
        lines.append("-> install ray[serve] on Linux, or haproxy, and ttserve beside it")
    return lines


def _pool_text(check: PoolCheck) -> str:
    verdict = "cannot run here: " + check.problem if check.problem is not None else "can run here"
    return f"{check.pool:8}{check.mesh:16}{verdict}" + (f"; {check.note}" if check.note else "")

"""Fault plans: which fault hits which replica, and when.

Values and pure queries. Real simulated-mesh engines (`replicas.simulation.fault_injection`, the
simulated device and the KV transport) and the simulator query the same `ReplicaFaults` with seconds
of the plan. An engine process converts its own clock through `PlanClock`; the simulator counts from
its start.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import msgspec

from replicas.errors import FaultPlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FaultKind = Literal[
    "kill", "freeze", "slow", "drop_link", "corrupt", "partition",
    "hang", "deaf", "mute", "backpressure", "clock", "ignore_sigterm", "replace", "flip",
]  # fmt: skip
"""Kind of a fault.

- kill: the process ends at once.
- freeze: the whole process stops for `duration_s`.
- slow: the device takes `factor` times as long.
- drop_link: KV connections break at that instant.
- corrupt: KV payloads sent by the replica have flipped bytes.
- partition: no message gets from or to the replica.
- hang: a device call does not return before the window's end; the rest of the process works.
- deaf: messages from clients do not reach the replica.
- mute: messages to clients do not reach them.
- backpressure: the replica's inbox is full and accepts no messages.
- clock: the wall clock is off by `shift_s`.
- ignore_sigterm: the process ignores requests to end.
- replace: the replica is drained, stopped and started again, as in a rolling update.
- flip: the replica changes its role, prefill to decode or back, unless it is the last of its role.
"""

KINDS: tuple[str, ...] = get_args(FaultKind)
INGRESS = "ingress"
"""Pool name of ingresses in a fault's target."""
_INSTANTS = frozenset({"kill", "drop_link", "replace", "flip"})
_SIMULATED = frozenset({"replace", "flip"})
"""Kinds that only the simulator injects; real replicas have tools for them."""
_INGRESS_KINDS = ("kill", "clock")
"""Kinds that an ingress supports."""
_FIELDS = ("at_s", "target", "kind", "duration_s", "factor", "shift_s")
_TARGET = re.compile(r"(prefill|decode|both|ingress)/(0|[1-9][0-9]*)")


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of a fault plan.

    Attributes:
        at_s: Start, in seconds after the plan's epoch.
        target: The replica as "pool/rank", such as "decode/1"; or "ingress/0".
        kind: See `FaultKind`.
        duration_s: Duration in seconds; None is forever. Not for kill, drop_link, replace and flip,
            which are instants.
        factor: slow only: factor on the duration of a device step.
        shift_s: clock only: seconds by which the wall clock is ahead; negative is behind.
    """

    at_s: float
    target: str
    kind: FaultKind
    duration_s: float | None = None
    factor: float = 1.0
    shift_s: float = 0.0

    @property
    def window(self) -> FaultWindow:
        """Period in which the fault holds; an instant ends when it starts."""
        if self.kind in _INSTANTS:
            return FaultWindow(self.at_s, self.at_s)
        duration_s = math.inf if self.duration_s is None else self.duration_s
        return FaultWindow(self.at_s, self.at_s + duration_s)


class FaultWindow(NamedTuple):
    """Half-open period [`start_s`, `end_s`) in seconds of a plan; the end may be infinite."""

    start_s: float
    end_s: float

    def holds(self, now_s: float) -> bool:
        """Return whether a moment lies in the window."""
        return self.start_s <= now_s < self.end_s


class ReplicaFaults:
    """Faults of one replica as pure functions of time.

    `now_s` is in seconds of the plan everywhere. The object is stateless: the caller tracks which
    instants (kill, dropped link) it has acted on.

    Args:
        faults: The entries of this replica; their targets are not checked.
    """

    __slots__ = ("_changes_s", "_clocks", "_slow", "_windows")

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        ordered = sorted(faults, key=lambda fault: fault.at_s)
        self._windows: dict[str, tuple[FaultWindow, ...]] = {
            kind: tuple(fault.window for fault in ordered if fault.kind == kind) for kind in KINDS
        }
        self._slow = tuple((f.window, f.factor) for f in ordered if f.kind == "slow")
        self._clocks = tuple((f.window, f.shift_s) for f in ordered if f.kind == "clock")
        moments_s = {moment_s for fault in ordered for moment_s in fault.window}
        self._changes_s = tuple(sorted(moments_s - {math.inf}))

    def __bool__(self) -> bool:
        """Return whether there is any fault."""
        return bool(self._changes_s)

    # --- the device ----------------------------------------------------------------------------

    def slow_factor(self, now_s: float) -> float:
        """Return the factor on the duration of a device step that starts now; 1 without a fault."""
        return next((factor for window, factor in self._slow if window.holds(now_s)), 1.0)

    def hang_left_s(self, now_s: float) -> float:
        """Return the least duration of a device call that starts now; 0 without a fault."""
        ends_s = [window.end_s for window in self._windows["hang"] if window.holds(now_s)]
        return max(ends_s, default=now_s) - now_s

    # --- the ways to and from it ---------------------------------------------------------------

    def corrupts(self, now_s: float) -> bool:
        """Return whether KV payloads sent now have flipped bytes.

        The transport corrupts payloads after computing the checksum, so that the receiver can
        detect it. Reads of the device's memory are unaffected.
        """
        return self._holds("corrupt", now_s)

    def is_partitioned(self, now_s: float) -> bool:
        """Return whether the replica is cut off in both directions now."""
        return self._holds("partition", now_s)

    def is_deaf(self, now_s: float) -> bool:
        """Return whether messages from clients are lost now."""
        return self._holds("deaf", now_s) or self.is_partitioned(now_s)

    def is_mute(self, now_s: float) -> bool:
        """Return whether messages to clients are lost now."""
        return self._holds("mute", now_s) or self.is_partitioned(now_s)

    def is_backpressured(self, now_s: float) -> bool:
        """Return whether the inbox accepts no messages now; they queue, in order, until it does."""
        return self._holds("backpressure", now_s)

    # --- the process ---------------------------------------------------------------------------

    def is_frozen(self, now_s: float) -> bool:
        """Return whether the engine process is frozen now."""
        return self._holds("freeze", now_s)

    def ignores_sigterm(self, now_s: float) -> bool:
        """Return whether the process ignores requests to end now."""
        return self._holds("ignore_sigterm", now_s)

    def clock_shift_s(self, now_s: float) -> float:
        """Return by how many seconds the replica's wall clock is ahead now."""
        return sum(shift_s for window, shift_s in self._clocks if window.holds(now_s))

    # --- when ----------------------------------------------------------------------------------

    def kills(self) -> tuple[float, ...]:
        """Return the times at which the process is killed, in order."""
        return self._starts_s("kill")

    def replacements(self) -> tuple[float, ...]:
        """Return the times at which the replica is replaced, in order."""
        return self._starts_s("replace")

    def flips(self) -> tuple[float, ...]:
        """Return the times at which the role changes, in order."""
        return self._starts_s("flip")

    def link_drops(self) -> tuple[float, ...]:
        """Return the times at which KV connections break, in order."""
        return self._starts_s("drop_link")

    def freezes(self) -> tuple[FaultWindow, ...]:
        """Return the windows in which the engine is frozen, in order."""
        return self._windows["freeze"]

    def hangs(self) -> tuple[FaultWindow, ...]:
        """Return the windows in which the device hangs, in order."""
        return self._windows["hang"]

    def backpressures(self) -> tuple[FaultWindow, ...]:
        """Return the windows in which the inbox is full, in order."""
        return self._windows["backpressure"]

    def silences(self) -> tuple[FaultWindow, ...]:
        """Return the windows in which clients receive no message from it, by kind."""
        return self._windows["partition"] + self._windows["mute"]

    def gaps(self) -> tuple[FaultWindow, ...]:
        """Return the windows in which messages are lost. Connections break at the end of each."""
        return self.silences() + self._windows["deaf"]

    def next_change_s(self, now_s: float) -> float | None:
        """Return the next moment at which any answer changes or an instant occurs, or None."""
        for change_s in self._changes_s:
            if change_s > now_s:
                return change_s
        return None

    def _holds(self, kind: FaultKind, now_s: float) -> bool:
        return any(window.holds(now_s) for window in self._windows[kind])

    def _starts_s(self, kind: FaultKind) -> tuple[float, ...]:
        return tuple(window.start_s for window in self._windows[kind])


NO_FAULTS = ReplicaFaults()
"""Faults of a healthy replica."""


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All faults of a cluster.

    Attributes:
        faults: The entries in the file's order.
    """

    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, raw: object) -> FaultPlan:
        """Read and check a plan.

        Args:
            raw: Content of a YAML or JSON file: a list of mappings with the fields of `Fault`.

        Raises:
            FaultPlanError: The plan cannot work; names the entry and says what to do.
        """
        if not isinstance(raw, list | tuple):
            raise FaultPlanError(
                f"a fault plan is a list of entries with {', '.join(_FIELDS)}; "
                f"got {_type_name(raw)}"
            )
        faults = tuple(_parse_entry(entry, f"[{i}]") for i, entry in enumerate(raw))
        _check_overlaps(faults)
        return cls(faults=faults)

    def entries_for(self, target: str) -> tuple[Fault, ...]:
        """Return the entries of one replica, given as "pool/rank"."""
        return tuple(fault for fault in self.faults if fault.target == target)

    def for_target(self, target: str) -> ReplicaFaults:
        """Return the faults of one replica, given as "pool/rank"."""
        return ReplicaFaults(self.entries_for(target))

    def check_targets(self, num_replicas: Mapping[str, int]) -> None:
        """Check that every target exists.

        Args:
            num_replicas: Pool -> number of its replicas.

        Raises:
            FaultPlanError: A target does not exist; names the entry and the pools.
        """
        for i, fault in enumerate(self.faults):
            pool, _, rank = fault.target.partition("/")
            if pool not in num_replicas:
                raise FaultPlanError(
                    f"[{i}].target: {fault.target!r}: this cluster has no pool {pool!r}; "
                    f"use one of {', '.join(sorted(num_replicas))}"
                )
            if int(rank) >= num_replicas[pool]:
                raise FaultPlanError(
                    f"[{i}].target: {fault.target!r}: pool {pool!r} has {num_replicas[pool]} "
                    f"replica(s); use {pool}/0 to {pool}/{num_replicas[pool] - 1}"
                )

    def check_real(self) -> None:
        """Check that real replicas, outside the simulator, support every entry.

        Raises:
            FaultPlanError: An entry is for the simulator only; names it.
        """
        for i, fault in enumerate(self.faults):
            if fault.kind in _SIMULATED or fault.target.startswith(INGRESS):
                raise FaultPlanError(
                    f"[{i}]: {fault.kind} of {fault.target} works only in the simulator; remove it "
                    "and kill the ingress's process, deploy a changed configuration, or use "
                    "`ttserve flip` instead"
                )


class PlanClock(msgspec.Struct, frozen=True):
    """Conversion between a process's clock and seconds of a plan.

    Attributes:
        offset_s: Seconds of the plan minus the clock's reading.
    """

    offset_s: float = 0.0

    @classmethod
    def since(cls, epoch_unix_s: float, *, unix_s: float, now_s: float) -> PlanClock:
        """Make the clock of one process.

        Args:
            epoch_unix_s: Start of the plan in Unix time.
            unix_s: Unix time now.
            now_s: The process's monotonic clock at the same moment, so that later steps of the wall
                clock do not shift the plan.
        """
        return cls(unix_s - epoch_unix_s - now_s)

    def plan_s(self, now_s: float) -> float:
        """Return seconds of the plan at a reading of the process's clock."""
        return now_s + self.offset_s

    def clock_s(self, plan_s: float) -> float:
        """Return the reading of the process's clock at a moment of the plan."""
        return plan_s - self.offset_s


def _parse_entry(entry: object, where: str) -> Fault:
    if not isinstance(entry, dict):
        raise FaultPlanError(
            f"{where}: an entry is a mapping with {', '.join(_FIELDS)}; got {_type_name(entry)}"
        )
    for key in entry:
        if key not in _FIELDS:
            raise FaultPlanError(f"{where}: unknown field {key!r}; use {', '.join(_FIELDS)}")
    for key in _FIELDS[:3]:
        if key not in entry:
            raise FaultPlanError(f"{where}: {key} is missing; every entry needs it")
    if entry["kind"] not in KINDS:
        raise FaultPlanError(
            f"{where}.kind: unknown kind {entry['kind']!r}; use one of {', '.join(KINDS)}"
        )
    try:
        fault = msgspec.convert(entry, Fault)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise FaultPlanError(f"{where}{path.rstrip('`')}: {message}") from error
    _check_times(fault, where)
    _check_kind(fault, where)
    _check_amounts(fault, where)
    return fault


def _check_times(fault: Fault, where: str) -> None:
    if not (math.isfinite(fault.at_s) and fault.at_s >= 0):
        raise FaultPlanError(
            f"{where}.at_s: give seconds after the start, 0 or more; got {fault.at_s}"
        )
    if _TARGET.fullmatch(fault.target) is None:
        raise FaultPlanError(
            f"{where}.target: {fault.target!r} is not a replica; give pool/rank with a pool of "
            "prefill, decode or both, such as decode/1, or give ingress/rank"
        )
    if fault.duration_s is None:
        return
    if fault.kind in _INSTANTS:
        raise FaultPlanError(f"{where}.duration_s: {fault.kind} is an instant; remove duration_s")
    if not (math.isfinite(fault.duration_s) and fault.duration_s > 0):
        raise FaultPlanError(
            f"{where}.duration_s: give positive seconds, or leave it out for no end; "
            f"got {fault.duration_s}"
        )


def _check_kind(fault: Fault, where: str) -> None:
    """Refuse a kind that the target does not support."""
    if fault.target.startswith(INGRESS) and fault.kind not in _INGRESS_KINDS:
        raise FaultPlanError(
            f"{where}.target: {fault.kind} is not supported for {fault.target}, only "
            f"{' and '.join(_INGRESS_KINDS)}; target a replica of pool prefill, decode or both"
        )


def _check_amounts(fault: Fault, where: str) -> None:
    if fault.kind != "slow":
        if fault.factor != 1.0:
            raise FaultPlanError(f"{where}.factor: {fault.kind} takes no factor; remove it")
    elif not (math.isfinite(fault.factor) and fault.factor > 1.0):
        raise FaultPlanError(
            f"{where}.factor: slow needs a factor above 1 on the duration of a device step; "
            f"got {fault.factor}"
        )
    if fault.kind != "clock":
        if fault.shift_s:
            raise FaultPlanError(f"{where}.shift_s: {fault.kind} takes no shift_s; remove it")
    elif not (math.isfinite(fault.shift_s) and fault.shift_s):
        raise FaultPlanError(
            f"{where}.shift_s: clock needs the seconds by which the wall clock is ahead, "
            f"negative for behind; got {fault.shift_s}"
        )


def _check_overlaps(faults: tuple[Fault, ...]) -> None:
    """Refuse overlapping windows of one kind on one replica, which would be ambiguous."""
    for i, later in enumerate(faults):
        for j, earlier in enumerate(faults[:i]):
            if (earlier.target, earlier.kind) != (later.target, later.kind):
                continue
            one, two = earlier.window, later.window
            if max(one.start_s, two.start_s) < min(one.end_s, two.end_s):
                raise FaultPlanError(
                    f"[{i}]: this {later.kind} of {later.target} overlaps entry [{j}]; "
                    "merge them, or move one of them"
                )


def _type_name(raw: object) -> str:
    return "nothing" if raw is None else type(raw).__name__

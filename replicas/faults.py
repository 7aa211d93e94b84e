"""Fault plans: what goes wrong with which replica, and when.

Pure values and queries. Real simulated-mesh engines (`replicas.engine.fault_injection`, the
simulated device and the KV transport) and the simulator ask the same `ReplicaFaults`, each with
seconds of the plan: a process of its own gets them from its clock through `PlanClock`, the
simulator counts from its start.
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
    "hang", "deaf", "mute", "clog", "clock", "cling", "replace", "flip",
]  # fmt: skip
"""What happens, and to what.

kill: the process ends at once. freeze: all of it stops, for `duration_s`. slow: its device takes
`factor` times as long. drop_link: its KV connections break at that instant. corrupt: KV payloads
that leave it have flipped bytes. partition: nothing gets from or to it. hang: a device call does
not come back before the window's end; the rest of the process works on. deaf: nothing that clients
send reaches it. mute: nothing that it sends reaches clients. clog: its inbox is full, and takes
nothing. clock: its wall clock is off by `shift_s`. cling: told to end, it does not. replace: it is
drained, ended and started again, as in a rolling update. flip: it changes its role, prefill for
decode or back, unless it is the last of its role.
"""

KINDS: tuple[str, ...] = get_args(FaultKind)
INGRESS = "ingress"
"""What fails beside engines, as targets name it."""
_INSTANTS = frozenset({"kill", "drop_link", "replace", "flip"})
_SIMULATED = frozenset({"replace", "flip"})
"""What other tools do to real replicas."""
_INGRESS_KINDS = ("kill", "clock")
"""What can happen to what is no engine."""
_FIELDS = ("at_s", "target", "kind", "duration_s", "factor", "shift_s")
_TARGET = re.compile(r"(prefill|decode|both|ingress)/(0|[1-9][0-9]*)")


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of a plan.

    Attributes:
        at_s: When, in seconds after the plan's epoch.
        target: Which replica: "pool/rank", for one "decode/1"; or "ingress/0".
        kind: What goes wrong.
        duration_s: How long; None is for ever. Nothing for kill, drop_link, replace and flip,
            which are instants.
        factor: slow only: how many times as long a device step takes.
        shift_s: clock only: seconds that the wall clock is ahead; less than 0 is behind.
    """

    at_s: float
    target: str
    kind: FaultKind
    duration_s: float | None = None
    factor: float = 1.0
    shift_s: float = 0.0

    @property
    def window(self) -> Window:
        """When it holds; an instant ends where it starts."""
        if self.kind in _INSTANTS:
            return Window(self.at_s, self.at_s)
        duration_s = math.inf if self.duration_s is None else self.duration_s
        return Window(self.at_s, self.at_s + duration_s)


class Window(NamedTuple):
    """Seconds of a plan from `start_s` up to but excluding `end_s`, which may be infinite."""

    start_s: float
    end_s: float

    def holds(self, now_s: float) -> bool:
        """Whether a moment lies in it."""
        return self.start_s <= now_s < self.end_s


class ReplicaFaults:
    """What is wrong with one replica at a time; the same answer however often it is asked.

    `now_s` is in seconds of the plan everywhere. Nothing is remembered: whether an instant (kill,
    dropped link) has been acted on is the caller's business.

    Args:
        faults: The entries of this replica; their targets are not looked at.
    """

    __slots__ = ("_changes_s", "_clocks", "_slow", "_windows")

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        ordered = sorted(faults, key=lambda fault: fault.at_s)
        self._windows: dict[str, tuple[Window, ...]] = {
            kind: tuple(fault.window for fault in ordered if fault.kind == kind) for kind in KINDS
        }
        self._slow = tuple((f.window, f.factor) for f in ordered if f.kind == "slow")
        self._clocks = tuple((f.window, f.shift_s) for f in ordered if f.kind == "clock")
        moments_s = {moment_s for fault in ordered for moment_s in fault.window}
        self._changes_s = tuple(sorted(moments_s - {math.inf}))

    def __bool__(self) -> bool:
        """Whether anything ever goes wrong."""
        return bool(self._changes_s)

    # --- the device ----------------------------------------------------------------------------

    def slow_factor(self, now_s: float) -> float:
        """How many times as long a device step that starts now takes; 1 where nothing is wrong."""
        return next((factor for window, factor in self._slow if window.holds(now_s)), 1.0)

    def hang_left_s(self, now_s: float) -> float:
        """How long a device call that starts now takes at least; 0 where nothing is wrong."""
        ends_s = [window.end_s for window in self._windows["hang"] if window.holds(now_s)]
        return max(ends_s, default=now_s) - now_s

    # --- the ways to and from it ---------------------------------------------------------------

    def corrupts(self, now_s: float) -> bool:
        """Whether KV payloads that leave the replica now have flipped bytes.

        On the wire: the transport asks, after the checksum was taken, so that the other end can
        tell. Not the business of whoever reads the device's memory.
        """
        return self._holds("corrupt", now_s)

    def is_partitioned(self, now_s: float) -> bool:
        """Whether nothing gets from or to the replica now."""
        return self._holds("partition", now_s)

    def is_deaf(self, now_s: float) -> bool:
        """Whether nothing that clients send reaches it now."""
        return self._holds("deaf", now_s) or self.is_partitioned(now_s)

    def is_mute(self, now_s: float) -> bool:
        """Whether nothing that it sends reaches clients now."""
        return self._holds("mute", now_s) or self.is_partitioned(now_s)

    def is_clogged(self, now_s: float) -> bool:
        """Whether its inbox takes nothing now: what clients send waits for its end, in order."""
        return self._holds("clog", now_s)

    # --- the process ---------------------------------------------------------------------------

    def is_frozen(self, now_s: float) -> bool:
        """Whether the engine process stands still now."""
        return self._holds("freeze", now_s)

    def clings(self, now_s: float) -> bool:
        """Whether it would not end now if it were told to."""
        return self._holds("cling", now_s)

    def clock_shift_s(self, now_s: float) -> float:
        """How many seconds its wall clock is ahead of the others' now."""
        return sum(shift_s for window, shift_s in self._clocks if window.holds(now_s))

    # --- when ----------------------------------------------------------------------------------

    def kills(self) -> tuple[float, ...]:
        """When the process ends, in order."""
        return self._starts_s("kill")

    def replacements(self) -> tuple[float, ...]:
        """When it is drained, ended and started again, in order."""
        return self._starts_s("replace")

    def flips(self) -> tuple[float, ...]:
        """When its role changes, in order."""
        return self._starts_s("flip")

    def link_drops(self) -> tuple[float, ...]:
        """When its KV connections break, in order."""
        return self._starts_s("drop_link")

    def freezes(self) -> tuple[Window, ...]:
        """When the engine stands still, in order."""
        return self._windows["freeze"]

    def hangs(self) -> tuple[Window, ...]:
        """When its device does not answer, in order."""
        return self._windows["hang"]

    def clogs(self) -> tuple[Window, ...]:
        """When its inbox takes nothing, in order."""
        return self._windows["clog"]

    def silences(self) -> tuple[Window, ...]:
        """When clients hear nothing of it, in order of their kinds."""
        return self._windows["partition"] + self._windows["mute"]

    def gaps(self) -> tuple[Window, ...]:
        """When messages between it and clients are lost: connections break when that is over."""
        return self.silences() + self._windows["deaf"]

    def next_change_s(self, now_s: float) -> float | None:
        """The first moment after now at which an answer changes or an instant lies, or None."""
        for change_s in self._changes_s:
            if change_s > now_s:
                return change_s
        return None

    def _holds(self, kind: FaultKind, now_s: float) -> bool:
        return any(window.holds(now_s) for window in self._windows[kind])

    def _starts_s(self, kind: FaultKind) -> tuple[float, ...]:
        return tuple(window.start_s for window in self._windows[kind])


NO_FAULTS = ReplicaFaults()
"""A replica with which nothing is wrong."""


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that goes wrong in a cluster.

    Attributes:
        faults: The entries, as they stand in the file.
    """

    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, raw: object) -> FaultPlan:
        """Read and check a plan.

        Args:
            raw: What a YAML or JSON file held: a list of mappings with the fields of `Fault`.

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
        """The entries about one replica, "pool/rank"."""
        return tuple(fault for fault in self.faults if fault.target == target)

    def for_target(self, target: str) -> ReplicaFaults:
        """What happens to one replica, "pool/rank"."""
        return ReplicaFaults(self.entries_for(target))

    def check_targets(self, num_replicas: Mapping[str, int]) -> None:
        """Check that every target exists.

        Args:
            num_replicas: How many replicas each pool has.

        Raises:
            FaultPlanError: One does not; names the entry and the pools.
        """
        for i, fault in enumerate(self.faults):
            pool, _, rank = fault.target.partition("/")
            if pool not in num_replicas:
                raise FaultPlanError(
                    f"[{i}].target: {fault.target!r}: there is no pool {pool!r} here; "
                    f"use one of {', '.join(sorted(num_replicas))}"
                )
            if int(rank) >= num_replicas[pool]:
                raise FaultPlanError(
                    f"[{i}].target: {fault.target!r}: pool {pool!r} has {num_replicas[pool]} "
                    f"replica(s); use {pool}/0 to {pool}/{num_replicas[pool] - 1}"
                )

    def check_real(self) -> None:
        """Check that replicas outside the simulator can act on it.

        Raises:
            FaultPlanError: They cannot on an entry; names it.
        """
        for i, fault in enumerate(self.faults):
            if fault.kind in _SIMULATED or fault.target.startswith(INGRESS):
                raise FaultPlanError(
                    f"[{i}]: {fault.kind} of {fault.target} happens in the simulator alone; kill "
                    "the ingress's process, deploy a changed configuration, or use `ttserve flip`, "
                    "and remove it here"
                )


class PlanClock(msgspec.Struct, frozen=True):
    """Turns readings of a process's own clock into seconds of a plan, and back.

    Attributes:
        offset_s: What a reading lacks to seconds of the plan.
    """

    offset_s: float = 0.0

    @classmethod
    def since(cls, epoch_unix_s: float, *, unix_s: float, now_s: float) -> PlanClock:
        """Make the clock of one process.

        Args:
            epoch_unix_s: Where the plan starts, in Unix time.
            unix_s: Unix time now.
            now_s: The process's monotonic clock at the same moment: later steps of the wall clock
                do not move the plan.
        """
        return cls(unix_s - epoch_unix_s - now_s)

    def plan_s(self, now_s: float) -> float:
        """Seconds of the plan at a reading of the process's clock."""
        return now_s + self.offset_s

    def clock_s(self, plan_s: float) -> float:
        """What the process's clock reads at a moment of the plan."""
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
            f"{where}.target: {fault.target!r} is no replica; give pool/rank with a pool of "
            "prefill, decode, both, for one decode/1, or ingress/rank"
        )
    if fault.duration_s is None:
        return
    if fault.kind in _INSTANTS:
        raise FaultPlanError(
            f"{where}.duration_s: {fault.kind} happens at an instant; remove duration_s"
        )
    if not (math.isfinite(fault.duration_s) and fault.duration_s > 0):
        raise FaultPlanError(
            f"{where}.duration_s: give positive seconds, or leave it out for ever; "
            f"got {fault.duration_s}"
        )


def _check_kind(fault: Fault, where: str) -> None:
    """Refuse what cannot happen to its target."""
    if fault.target.startswith(INGRESS) and fault.kind not in _INGRESS_KINDS:
        raise FaultPlanError(
            f"{where}.target: {fault.kind} does not happen to {fault.target}, only "
            f"{' and '.join(_INGRESS_KINDS)}; give a replica of a pool of prefill, decode, both"
        )


def _check_amounts(fault: Fault, where: str) -> None:
    if fault.kind != "slow":
        if fault.factor != 1.0:
            raise FaultPlanError(f"{where}.factor: {fault.kind} takes no factor; remove it")
    elif not (math.isfinite(fault.factor) and fault.factor > 1.0):
        raise FaultPlanError(
            f"{where}.factor: slow needs a factor above 1, the times as long that a device step "
            f"takes; got {fault.factor}"
        )
    if fault.kind != "clock":
        if fault.shift_s:
            raise FaultPlanError(f"{where}.shift_s: {fault.kind} takes no shift_s; remove it")
    elif not (math.isfinite(fault.shift_s) and fault.shift_s):
        raise FaultPlanError(
            f"{where}.shift_s: clock needs seconds that the wall clock is ahead, less than 0 for "
            f"behind; got {fault.shift_s}"
        )


def _check_overlaps(faults: tuple[Fault, ...]) -> None:
    """Refuse two windows of one kind on one replica: which one holds would be anyone's guess."""
    for i, later in enumerate(faults):
        for j, earlier in enumerate(faults[:i]):
            if (earlier.target, earlier.kind) != (later.target, later.kind):
                continue
            one, two = earlier.window, later.window
            if max(one.start_s, two.start_s) < min(one.end_s, two.end_s):
                raise FaultPlanError(
                    f"[{i}]: this {later.kind} of {later.target} overlaps entry [{j}]; "
                    "make them one, or move one of them"
                )


def _type_name(raw: object) -> str:
    return "nothing" if raw is None else type(raw).__name__

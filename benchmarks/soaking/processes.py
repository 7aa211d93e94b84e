"""Resources of the processes of one server. Linux only: reads /proc."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.soaking.growth import Sample
from cluster.lifecycle.processes import process_table

if TYPE_CHECKING:
    from cluster.lifecycle.processes import Process

_ENGINE = "replicas.engine_process.process"
_FAULTY_ENGINE = "replicas.simulation.faulty_process"
_OURS = (
    (_ENGINE, "engine"),
    (_FAULTY_ENGINE, "engine"),
    ("cluster.lifecycle.driver", "driver"),
    ("kv_transfer.stores", "kv pool"),
    ("haproxy", "haproxy"),
)
_REPLICA = re.compile(r"ray::ServeReplica:[^:]*:(\w+)")


class ProcessSampler:
    """Takes samples of a server's processes, and gives each a name that it keeps.

    Owner of the names; the processes are the server's.

    Args:
        root: Id of the process at the top, `ttserve serve`.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._sessions: set[int] = set()
        self._names: dict[tuple[int, str], tuple[str, bool]] = {}

    def look(self, time_s: float, num_requests: int) -> list[Sample]:
        """One sample of each process that runs now.

        Args:
            time_s: Seconds since the load began.
            num_requests: Requests that have begun.
        """
        family = self._family()
        samples = []
        for process in family.values():
            name, is_ours = self._name(process, family.get(process.parent_id))
            # It may have ended since it was listed.
            with contextlib.suppress(OSError, KeyError):
                folder = Path(f"/proc/{process.process_id}")
                memory = _fields(folder / "smaps_rollup")
                samples.append(
                    Sample(
                        time_s=time_s,
                        num_requests=num_requests,
                        process=name,
                        process_id=process.process_id,
                        is_ours=is_ours,
                        anonymous_bytes=_fields(folder / "status")["RssAnon"],
                        pss_bytes=memory["Pss"],
                        num_descriptors=len(os.listdir(folder / "fd")),
                        num_threads=process.num_threads,
                    )
                )
        return samples

    def ours(self) -> dict[str, int]:
        """Process id of each of the cluster's own processes that runs now, by name."""
        family = self._family()
        named = {
            process_id: self._name(process, family.get(process.parent_id))
            for process_id, process in family.items()
        }
        return {name: process_id for process_id, (name, is_ours) in named.items() if is_ours}

    def _family(self) -> dict[int, Process]:
        """The root, all below it, and the sessions that these lead: some lose their parents."""
        table = process_table()
        family = {self._root} & table.keys()
        while True:
            more = {
                p.process_id
                for p in table.values()
                if p.parent_id in family or p.session_id in self._sessions
            } - family
            if not more:
                return {process_id: table[process_id] for process_id in sorted(family)}
            family |= more
            # The root itself may be one of many in its terminal's session.
            self._sessions |= {table[process_id].session_id for process_id in more} & family

    def _name(self, process: Process, parent: Process | None) -> tuple[str, bool]:
        """Return a name, after what the process runs now, and whether it is the cluster's."""
        key = process.process_id, process.started
        kind, is_ours = _kind(process, parent, self._root)
        known = self._names.get(key)
        if known is None or not known[0].startswith(kind):
            taken = {name for name, _ in self._names.values()}
            number = next(n for n in range(1, len(taken) + 2) if f"{kind} {n}" not in taken)
            self._names[key] = f"{kind} {number}", is_ours
        return self._names[key]


def _kind(process: Process, parent: Process | None, root: int) -> tuple[str, bool]:
    if process.process_id == root:
        return "supervisor", True
    if (replica := _REPLICA.search(process.command)) is not None:
        return ("ingress" if replica[1] == "ingress" else f"actor {replica[1]}"), True
    for word, kind in _OURS:
        if word in process.command:
            of = _REPLICA.search(parent.command) if parent is not None else None
            return (f"{kind} {of[1]}" if of is not None else kind), True
    return _rays_name(process.command), False


def _rays_name(command: str) -> str:
    """Return what a Ray process runs, without the running method that an actor's title adds."""
    words = command.split() or ["?"]
    if words[0].startswith("ray::"):
        return words[0].partition(".")[0]
    is_python = "python" in Path(words[0]).name
    script = next((word for word in words[1:] if not word.startswith("-")), words[0])
    return Path(script if is_python else words[0]).name


def _fields(path: Path) -> dict[str, int]:
    """Bytes of each line `name: number kB`."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found

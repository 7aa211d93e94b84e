"""Run of one fuzz target in a process of its own, and the report of what went wrong there.

The process runs the target with changed inputs until its processor time is used up. An input whose
outcome is new (a refusal raised at another place, an answer of another kind) joins those that are
changed further.

An input fails the target if it raises something else than a refusal, takes more than `MAX_INPUT_S`
of processor time, or needs more than `MAX_INPUT_BYTES` of memory. A crash or an endless loop in
native code leaves no time to report, so each input is written to a shared file before it is run.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from tests.fuzz.mutation import MAX_BYTES, Format, Mutator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

MAX_INPUT_S = 10.0
"""Processor time that an input may take. A hundred times what the slowest takes, so that it means
a loop without end or work that grows faster than the input."""
MAX_INPUT_WALL_S = 300.0
"""The same in time that passes, for an input that waits for ever. On a busy host the process runs
only when nothing else does."""
MAX_INPUT_BYTES = 2**30
"""Address space that the process may take after the first inputs."""
_MAX_CORPUS = 1024
_FAILED = 70
_HEAD_BYTES = 8
_SHOWN_BYTES = 2000
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Target(NamedTuple):
    """A parser of untrusted input.

    Attributes:
        make: Returns what reads an input, and returns a hashable description of the outcome. It may
            check the outcome with assertions.
        seeds: Returns inputs to begin with, which show what the parser knows.
        refusals: Exceptions with which the parser refuses an input.
        format: Format of the inputs.
        words: See `Mutator`.
    """

    make: Callable[[], Callable[[bytes], object]]
    seeds: Callable[[], Iterable[bytes]]
    refusals: tuple[type[BaseException], ...] = ()
    format: Format = Format()
    words: tuple[bytes, ...] = ()


class _Order(NamedTuple):
    """What a process does; see `run_targets`."""

    seconds: float
    seed: int
    data: bytes | None
    max_input_s: float


class Result(NamedTuple):
    """What a run of a target found.

    Attributes:
        num_inputs: Number of inputs.
        num_outcomes: Number of different outcomes.
        failure: Description of the input that failed; "" if none has.
        data: That input.
    """

    num_inputs: int
    num_outcomes: int
    failure: str = ""
    data: bytes = b""


def run_targets(
    targets: Mapping[str, Target],
    *,
    seconds: float = 0.0,
    seed: int = 1,
    data: bytes | None = None,
    jobs: int = 1,
    max_input_s: float = MAX_INPUT_S,
) -> Iterator[tuple[str, Result]]:
    """Run targets, each in a process of its own, and yield what they find.

    The processes are forks of this one, which must have no other thread.

    Args:
        targets: The targets by their names.
        seconds: Processor time of each; 0 runs the seeds alone.
        seed: Seed of the changes.
        data: The only input, if given.
        jobs: Most processes at a time.
        max_input_s: Processor time that one input may take.
    """
    order = _Order(seconds, seed, data, max_input_s)
    left = list(targets.items())
    with tempfile.TemporaryDirectory() as folder:
        running: dict[int, str] = {}
        while left or running:
            while left and len(running) < jobs:
                name, target = left.pop(0)
                pid = os.fork()
                if pid == 0:
                    _run_in_fork(target, Path(folder, name), order)
                running[pid] = name
            pid, status = os.wait()
            name = running.pop(pid)
            yield name, _result(Path(folder, name), os.waitstatus_to_exitcode(status))


def _result(path: Path, code: int) -> Result:
    """Return what a process wrote to its files."""
    if code == 0:
        return Result(*json.loads(path.with_suffix(".result").read_text(encoding="ascii")))
    kind = _EXITS.get(code, f"ended its process with code {code}")
    stderr = path.with_suffix(".stderr").read_bytes()
    return Result(0, 0, f"{kind}\n{stderr[-6000:].decode(errors='replace')}", _shared(path))


def _shared(path: Path) -> bytes:
    """Return the input that a process tried last."""
    try:
        framed = path.with_suffix(".input").read_bytes()
    except FileNotFoundError:
        return b""
    size = int.from_bytes(framed[:_HEAD_BYTES], "little")
    return framed[_HEAD_BYTES : _HEAD_BYTES + size]


_EXITS = {
    _FAILED: "raised an exception that is no refusal",
    -signal.SIGPROF: "took too much processor time",
    -signal.SIGALRM: f"was not done after {MAX_INPUT_WALL_S:g} s",
}


def shown(data: bytes) -> str:
    """Return an input as Python writes it, cut to what a terminal can take."""
    more = len(data) - _SHOWN_BYTES
    return f"{data[:_SHOWN_BYTES]!r}" + (f" and {more} bytes more" if more > 0 else "")


class _Watch:
    """Limits of one input, and the file that shows it to the parent."""

    def __init__(self, shared: Path, max_input_s: float) -> None:
        self._max_input_s = max_input_s
        with shared.open("w+b") as file:
            file.truncate(_HEAD_BYTES + MAX_BYTES)
            self._shared = mmap.mmap(file.fileno(), 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Both signals show the stacks of all threads, then end the process.
        for number in (signal.SIGPROF, signal.SIGALRM):
            faulthandler.register(number, all_threads=True, chain=True)
        faulthandler.enable()

    def limit_memory(self) -> None:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + MAX_INPUT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

    def begin(self, data: bytes) -> None:
        self._shared[: _HEAD_BYTES + len(data)] = len(data).to_bytes(_HEAD_BYTES, "little") + data
        signal.setitimer(signal.ITIMER_PROF, self._max_input_s)
        signal.setitimer(signal.ITIMER_REAL, MAX_INPUT_WALL_S)

    def end(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)


class _Fuzzer:
    """The inputs of one target, and what became of them."""

    def __init__(self, target: Target, rng: random.Random, watch: _Watch) -> None:
        self._read = target.make()
        self._refusals = target.refusals
        self._watch = watch
        self._rng = rng
        self._mutator = Mutator(target.format, target.words, rng)
        self._corpus = [seed[:MAX_BYTES] for seed in target.seeds()]
        self._outcomes: set[object] = set()
        self.num_inputs = 0

    @property
    def num_outcomes(self) -> int:
        return len(self._outcomes)

    def run_for(self, seconds: float, only: bytes | None) -> None:
        """Run the seeds, then changed inputs for so long; or only one input."""
        for data in self._corpus if only is None else [only]:
            self.run(data)
        # Seeds load what is loaded on demand, which must not count as an input's memory.
        self._watch.limit_memory()
        end_s = _cpu_s() + seconds
        while only is None and seconds and (self.num_inputs % 64 or _cpu_s() < end_s):
            self.run_changed()

    def run_changed(self) -> None:
        data, other = self._rng.choice(self._corpus), self._rng.choice(self._corpus)
        changed = self._mutator.mutate(data, other)
        if self.run(changed) and len(self._corpus) < _MAX_CORPUS:
            self._corpus.append(changed)

    def run(self, data: bytes) -> bool:
        """Run one input; return whether its outcome is new."""
        self._watch.begin(data)
        try:
            outcome: object = self._read(data)
        except self._refusals as refusal:
            outcome = _place(refusal)
        finally:
            self._watch.end()
        self.num_inputs += 1
        if outcome in self._outcomes:
            return False
        self._outcomes.add(outcome)
        return True


def _place(refusal: BaseException) -> tuple[object, ...]:
    """Return where an exception was raised: its type, and the lines of its innermost frames."""
    frames = traceback.extract_tb(refusal.__traceback__)[-4:]
    return (type(refusal), *((frame.filename, frame.lineno) for frame in frames))


def _cpu_s() -> float:
    """Return the processor time of this process and its children, in seconds."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = time.process_time() + ended.ru_utime + ended.ru_stime
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text(encoding="ascii").split():
            try:
                stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
            except OSError:  # the child has ended
                continue
            user, system = stat.rpartition(")")[2].split()[11:13]
            used_s += (int(user) + int(system)) / _TICKS_PER_S
    return used_s


def _run_in_fork(target: Target, path: Path, order: _Order) -> NoReturn:
    """Run a target in this process and end it; see `run_targets`."""
    code = _FAILED
    try:
        with path.with_suffix(".stderr").open("wb") as stderr:
            os.dup2(stderr.fileno(), sys.stderr.fileno())
        watch = _Watch(path.with_suffix(".input"), order.max_input_s)
        fuzzer = _Fuzzer(target, random.Random(f"{path.name} {order.seed}"), watch)
        fuzzer.run_for(order.seconds, order.data)
        counts = json.dumps([fuzzer.num_inputs, fuzzer.num_outcomes])
        path.with_suffix(".result").write_text(counts, encoding="ascii")
        code = 0
    except BaseException:  # noqa: BLE001 - also panics of native code, which are no Exceptions
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        # Threads that wait for the input would keep the process.
        os._exit(code)

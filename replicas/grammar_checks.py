"""Checks of grammars for front ends, in a child process that may be ended at any time.

Some small grammars take very long to compile, and no limit of llguidance stops that. A thread that
compiles one would be lost, so a child process compiles: the kernel ends it after `MAX_CPU_S` of
processor time, or if it needs too much memory. A grammar that ends the child is refused.

    client ─ check(spec) ─→ GrammarChecker ─ frames on pipes ─→ `python -m replicas.grammar_checks`
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from replicas.errors import EngineStartError, InvalidRequestError
from replicas.sampling_params import StructuredOutputs

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_CPU_S = 0.5
"""Processor time that a grammar may take to compile."""
MAX_WALL_S = 10.0
"""The same in time that passes, for a host that has no processor to spare."""
MAX_MEMORY_BYTES = 2 * 2**30
"""Address space that the child may take after its start."""
_START_S = 60.0
_NUM_REMEMBERED = 4096
_NICENESS = 5
_HEAD = struct.Struct("<I")


def special_ids_for_checks(special_tokens: Iterable[str]) -> dict[str, int]:
    """Return the ids that special tokens have in grammars that are only checked."""
    return {text: 256 + i for i, text in enumerate(sorted(special_tokens))}


class _Verdict(msgspec.Struct, array_like=True):
    """Answer of the child: the wrong field and why, or nothing."""

    param: str = ""
    text: str = ""

    def apply(self) -> None:
        """Refuse the grammar if something is wrong; raises InvalidRequestError."""
        if self.param:
            raise InvalidRequestError(self.param, self.text)


class _ChildEndedError(Exception):
    """The child has ended, or does not answer."""


_ENDED_BY_GRAMMAR = frozenset({-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV})
"""Exit codes of a child that a grammar has ended: too much processor time, memory, or stack."""


class GrammarChecker:
    """Checks whether grammars compile. May be shared by threads, which wait for each other.

    Args:
        special_tokens: Text of the special tokens that structural tags may begin with.
    """

    def __init__(self, special_tokens: Iterable[str] = ()) -> None:
        self._special_tokens = sorted(special_tokens)
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., GrammarChecker] | None = None
        # Verdicts by the hash of the grammar, the least recently used first.
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()

    def recall(self, spec: StructuredOutputs) -> bool:
        """Return whether a grammar is known to pass; does not wait for other threads.

        Raises:
            InvalidRequestError: It is known to be refused; see `check`.
        """
        verdict = self._verdicts.get(_hash(spec))
        if verdict is None:
            return False
        verdict.apply()
        return True

    def check(self, spec: StructuredOutputs) -> None:
        """Check a grammar; the first call starts the child, which takes about 0.2 s.

        Raises:
            InvalidRequestError: The grammar cannot be used; `param` names its field.
            EngineStartError: The child does not start.
        """
        key = _hash(spec)
        with self._lock:
            verdict = self._verdicts.get(key) or self._ask(spec)
            self._verdicts[key] = verdict
            self._verdicts.move_to_end(key)
            if len(self._verdicts) > _NUM_REMEMBERED:
                self._verdicts.popitem(last=False)
        verdict.apply()

    def close(self) -> None:
        """End the child, if there is one. A later check starts another."""
        with self._lock:
            self._drop()

    def _ask(self, spec: StructuredOutputs) -> _Verdict:
        """Return the child's verdict, or one about a grammar that has ended the child.

        Raises:
            InvalidRequestError: The child did not answer, which may be the host's fault.
            EngineStartError: The child does not start.
        """
        child = self._child or self._start()
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            _write(child.stdin, msgspec.msgpack.encode(spec))
            answer = _read_within(child.stdout, MAX_WALL_S)
        except (_ChildEndedError, OSError) as error:
            self._drop()
            param = f"structured_outputs.{spec.kind}"
            text = f"{param} takes too long or too much memory to compile; simplify it"
            if child.returncode in _ENDED_BY_GRAMMAR:
                return _Verdict(param, text)
            raise InvalidRequestError(param, text) from error
        return msgspec.msgpack.decode(answer, type=_Verdict)

    def _start(self) -> subprocess.Popen[bytes]:
        child = self._child = subprocess.Popen(
            [sys.executable, "-m", "replicas.grammar_checks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._end = weakref.finalize(self, _end_child, child)
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            _write(child.stdin, msgspec.msgpack.encode(self._special_tokens))
            _read_within(child.stdout, _START_S)
        except (_ChildEndedError, OSError) as error:
            self._drop()
            raise EngineStartError("the process that checks grammars does not start") from error
        return child

    def _drop(self) -> None:
        if self._end is not None:
            self._end()
        self._child = self._end = None


def _end_child(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            # What was not flushed is lost with the child.
            with contextlib.suppress(OSError):
                pipe.close()


def _hash(spec: StructuredOutputs) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(spec), digest_size=16).digest()


def _write(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(_HEAD.pack(len(message)) + message)
    pipe.flush()


def _read_within(pipe: IO[bytes], timeout_s: float) -> bytes:
    """Return the child's next message, of which it writes the whole at once.

    Raises:
        _ChildEndedError: There is none in time.
    """
    ready, _, _ = select.select([pipe], [], [], timeout_s)
    message = _read(pipe) if ready else None
    if message is None:
        raise _ChildEndedError
    return message


def _read(pipe: IO[bytes]) -> bytes | None:
    head = pipe.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    (size,) = _HEAD.unpack(head)
    message = pipe.read(size)
    return message if len(message) == size else None


def main() -> None:
    """Check grammars from stdin until it is closed, and answer each on stdout."""
    os.nice(_NICENESS)
    # Ctrl-C reaches the whole process group, but the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A crash on purpose leaves no file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Imported here, so that front ends do not load it.
    from replicas.grammars import GrammarCompiler

    # NumPy reserves address space for each core, so the present amount depends on the host.
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = num_pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    first = _read(sys.stdin.buffer)
    if first is None:
        return
    compiler = GrammarCompiler.for_checks(msgspec.msgpack.decode(first, type=list[str]))
    _write(sys.stdout.buffer, b"")
    while (message := _read(sys.stdin.buffer)) is not None:
        verdict = _Verdict()
        # The default action of SIGPROF ends the process.
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        try:
            compiler.compile(msgspec.msgpack.decode(message, type=StructuredOutputs))
        except InvalidRequestError as error:
            verdict = _Verdict(error.param, str(error))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(sys.stdout.buffer, msgspec.msgpack.encode(verdict))


if __name__ == "__main__":
    main()

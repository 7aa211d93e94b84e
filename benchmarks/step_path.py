"""Python functions of the engine that a plain decode step calls.

Eight rows of the demo model decode on the CPU, drawn on the host at temperature 1: no message, no
new block, no row that ends, no KV connector. Counts the named functions that `begin_step`,
`collect_step` and `end_step` call of `replicas/engine`, `replicas/sampling` and the watchdog, the
classes that define them, and their modules. A comprehension belongs to the function around it.
Frames to clients are not part of a step.

    python -m benchmarks.step_path
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cluster.config.resolve import demo_model_folder
from replicas import engine, sampling, watchdog
from replicas.config import EngineConfig
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.messages import AddRequest, EngineRequest
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType, FrameType

NUM_ROWS = 8
BLOCK_SIZE = 32
PATHS = (
    f"{Path(engine.__file__).parent}/",
    f"{Path(sampling.__file__).parent}/",
    watchdog.__file__,
)
"""Folders, and a file, whose functions are counted."""
MODULES = ("replicas.engine.", "replicas.sampling.", "replicas.watchdog")


class Call(NamedTuple):
    """One call.

    Attributes:
        depth: Calls of the engine's functions around it.
        module: Name of the function's module, without its package.
        owner: Class that defines the function; empty if none does.
        function: Its name.
    """

    depth: int
    module: str
    owner: str
    function: str


class Counts(NamedTuple):
    """Size of a path: calls, and the distinct functions, classes and modules among them."""

    calls: int
    functions: int
    classes: int
    modules: int


def decode_step() -> list[Call]:
    """Return the calls of one plain decode step, in order."""
    config = EngineConfig(
        model=str(demo_model_folder()),
        max_batch_size=NUM_ROWS,
        max_model_len=128,
        block_size=BLOCK_SIZE,
        num_blocks=1 + 4 * NUM_ROWS,
        num_threads=1,
    )
    core = EngineCore(config, UniProcExecutor(config))
    try:
        for row in range(NUM_ROWS):
            sampling = SamplingParams(max_tokens=16, temperature=1.0, seed=row, ignore_eos=True)
            request = EngineRequest(f"row-{row}", [*range(1, 9)], sampling)
            core.handle(b"benchmark", AddRequest(request), 0.0)
        # The prompts, then steps in which caches of the rows' common state are made.
        for _ in range(4):
            core.step(0.0)
            core.take_events()
        return _calls_of_step(core)
    finally:
        core.shutdown()


def count(calls: Iterable[Call]) -> Counts:
    """Count the distinct functions, classes and modules of a path."""
    calls = list(calls)
    functions = {call[1:] for call in calls}
    classes = {call[1:3] for call in calls if call.owner}
    return Counts(len(calls), len(functions), len(classes), len({call.module for call in calls}))


def _calls_of_step(core: EngineCore) -> list[Call]:
    found: list[tuple[int, CodeType]] = []
    depth = 0

    def note(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal depth
        code = frame.f_code
        if not code.co_filename.startswith(PATHS) or code.co_name.startswith("<"):
            return
        if event == "call":
            found.append((depth, code))
            depth += 1
        elif event == "return":
            depth -= 1

    sys.setprofile(note)
    try:
        step = core.begin_step(0.0)
        core.collect_step(step)
        core.end_step(step, 0.0)
    finally:
        sys.setprofile(None)
    owners = dict(_owners())
    return [
        Call(depth, Path(code.co_filename).stem, owners.get(code, ""), code.co_name)
        for depth, code in found
    ]


def _owners() -> Iterator[tuple[CodeType, str]]:
    """Yield the code of each method of the engine's classes, and its class."""
    for name, module in [*sys.modules.items()]:
        if not name.startswith(MODULES):
            continue
        for owner, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ != name:
                continue
            for member in vars(cls).values():
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                code = getattr(inspect.unwrap(function), "__code__", None)
                if code is not None:
                    yield code, owner


def main() -> None:
    """Print the path, then one JSON object as the last line."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    calls = decode_step()
    for call in calls:
        name = ".".join(part for part in call[1:] if part)
        print(f"{'  ' * call.depth}{name}")
    print(json.dumps(count(calls)._asdict()))


if __name__ == "__main__":
    main()

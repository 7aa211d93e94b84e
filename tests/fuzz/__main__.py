"""Run fuzz targets: `python -m tests.fuzz --seconds 60`; see `make fuzz`.

A failed input is printed, and written to generated/fuzz, from where `--input` runs it again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path

from tests.fuzz.runner import run_targets, shown
from tests.fuzz.targets import TARGETS


def main() -> int:
    """Run the targets; return 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="processor time of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--input", type=Path, help="file with the only input to run")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    names = options.targets or list(TARGETS)
    unknown = sorted(set(names) - set(TARGETS))
    if unknown:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    data = None if options.input is None else options.input.read_bytes()
    results = run_targets(
        {name: TARGETS[name] for name in names},
        seconds=options.seconds,
        seed=options.seed,
        data=data,
        jobs=options.jobs,
    )
    has_failed = False
    for name, result in results:
        if not result.failure:
            print(f"{name:14} {result.num_inputs:8} inputs {result.num_outcomes:6} outcomes")
            continue
        has_failed = True
        digest = hashlib.blake2b(result.data, digest_size=4).hexdigest()
        file = Path("generated", "fuzz", f"{name}-{digest}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(result.data)
        print(f"{name}: FAILED: an input {result.failure}")
        print(f"input: {shown(result.data)}")
        print(f"again: python -m tests.fuzz {name} --input {file}")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())

"""Run the kernels with random calls under AddressSanitizer and UndefinedBehaviorSanitizer.

python -m tests.kernels --calls 2000 --seed 0
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from replicas.generators.torch import build_kernels

FLAGS = (
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g",
    "-O1",
)  # fmt: skip
HERE = Path(__file__).parent


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.kernels", description=__doc__)
    parser.add_argument("--calls", type=int, default=2000, help="of each kernel (default: 2000)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        print("sanitizers: skipped, they need gcc or clang")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        library, program = Path(folder) / "libkernels.so", Path(folder) / "random_calls"
        build_kernels.build(library, extra_flags=FLAGS)
        subprocess.run(
            [compiler, "-std=gnu11", *FLAGS, f"-I{build_kernels.SOURCES}", "-o", str(program),
             str(HERE / "random_calls.c"), str(library), f"-Wl,-rpath,{folder}"],
            check=True,
        )  # fmt: skip
        # Nothing of the process's own environment may switch a check off.
        environment = {key: value for key, value in os.environ.items() if "SAN_OPTIONS" not in key}
        command = [str(program), str(given.calls), str(given.seed)]
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

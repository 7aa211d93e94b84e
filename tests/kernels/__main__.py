"""Run the kernels with random calls under AddressSanitizer, UBSan and ThreadSanitizer.

python -m tests.kernels --calls 2000 --seed 0
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from replicas.generators.torch import build_kernels

FLAGS = ("-fno-omit-frame-pointer", "-g", "-O1")
# Sanitizers, and what runs under them.
RUNS = {
    ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"): (),
    ("-fsanitize=thread",): ("layers",),
}
HERE = Path(__file__).parent


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.kernels", description=__doc__)
    parser.add_argument("--calls", type=int, default=2000, help="of each kernel (default: 2000)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    compiler, *options = build_kernels.find_compiler() or [None]
    if compiler is None or options:
        print("sanitizers: skipped, they need gcc or clang")
        return 0
    for sanitizers, only in RUNS.items():
        print(*sanitizers, flush=True)
        code = run(compiler, (*sanitizers, *FLAGS), [str(given.calls), str(given.seed), *only])
        if code:
            return code
    return 0


def run(compiler, flags, arguments):
    """Build and run the program; returns its exit code, 0 where the sanitizer is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        library, program = Path(folder) / "libkernels.so", Path(folder) / "random_calls"
        empty = subprocess.run(
            [compiler, *flags, "-xc", "-", "-o", str(program)],
            input="int main(void) { return 0; }", text=True, capture_output=True, check=False,
        )  # fmt: skip
        if empty.returncode or subprocess.run([program], check=False).returncode:
            print(f"skipped, {compiler} does not have it here, or it does not run on this host")
            return 0
        build_kernels.build(library, extra_flags=flags)
        subprocess.run(
            [compiler, "-std=gnu11", "-pthread", *flags, f"-I{build_kernels.SOURCES}", "-o",
             str(program), str(HERE / "random_calls.c"), str(library), f"-Wl,-rpath,{folder}"],
            check=True,
        )  # fmt: skip
        # Nothing of the process's own environment may switch a check off.
        environment = {key: value for key, value in os.environ.items() if "SAN_OPTIONS" not in key}
        command = [str(program), *arguments]
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

"""Build of the kernel library from `csrc/`, with the standard library alone.

`build_backend.py` calls it when the package is installed. After a change of a C file in a checkout:

    python -m replicas.generators.torch.build_kernels

The library holds each kernel once for every instruction set of the processor's architecture, and
`native.py` chooses at run time. A host without a C compiler gets none; see `find_compiler`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = Path(__file__).parent / "_kernels.so"

_FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-psabi",
    "-Wno-unknown-pragmas",
)  # fmt: skip
"""A compiler that fused or reordered operations here and not there would change bits of a result
with what is computed beside it. Kernels fuse explicitly."""

_PER_LIBRARY = ("check.c", "layout.c", "processor.c", "wait.c")
"""Sources that are compiled once."""
_PER_SET = (
    "attention.c", "delta.c", "layers.c", "norm_rope.c", "products.c", "sampling.c", "variant.c",
)  # fmt: skip
"""Sources that are compiled for each instruction set."""
_INCLUDED = (
    "attention.inc", "attention_pairs.inc", "attention_plain.inc", "delta.inc", "internal.h",
    "item.h", "item_bfloat16.h", "item_end.h", "item_float32.h", "item_float64.h", "kernels.h",
    "norm_rope.inc", "simd.h",
)  # fmt: skip
FILES = tuple(sorted((*_PER_LIBRARY, *_PER_SET, *_INCLUDED)))
"""All of `csrc/`. A file that something else left there does not count."""

_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (
    *_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16",
    "-mamx-tile", "-mamx-bf16", "-mprefer-vector-width=512",
)  # fmt: skip
_PROBES = {
    "avx2": "__m256 f(__m256 a) { return _mm256_fmadd_ps(a, a, a); }",
    "avx512": """
        __m512 f(__m512 a, __m512i b) {
          b = (__m512i)_mm512_cvtne2ps_pbh(a, _mm512_scalef_ps(a, a));
          b = _mm512_maskz_loadu_epi16(7, &b);
          return _mm512_dpbf16_ps(_mm512_mul_ps(a, a), (__m512bh)b, (__m512bh)b);
        }
        void g(void *a) {
          _tile_loadconfig(a);
          _tile_loadd(0, a, 64);
          _tile_dpbf16ps(0, 1, 2);
          _tile_stored(0, a, 64);
        }""",
}
"""What the sources need of a compiler, for each instruction set."""
_HASH_DIGITS, _CHECKSUM_BYTES = 16, 16

WITHOUT = (
    "ttserve has no compiled kernels: engines on the CPU will compute with PyTorch's batched "
    "operations, several times slower"
)
_X86 = {"x86_64", "AMD64"}


class BuildError(Exception):
    """The library cannot be built here; the message says why."""


@dataclass(frozen=True)
class _InstructionSet:
    """An instruction set that kernels are compiled for.

    Attributes:
        name: Suffix of its functions.
        needs: Features as an expression of `kernels.h`.
        flags: Arguments that select the instructions.
    """

    name: str
    needs: str
    flags: tuple[str, ...]


def find_compiler() -> list[str] | None:
    """Return the command of a C compiler: the host's, or that of the ziglang package, or None."""
    for name in ("cc", "gcc", "clang"):
        if (found := shutil.which(name)) is not None:
            return [found]
    if importlib.util.find_spec("ziglang") is not None:
        # Its default is the processor at hand, whose code would not run on others.
        return [sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline"]
    return None


def source_hash(sources: Path = SOURCES) -> str:
    """Return what identifies the sources and the flags, 16 hexadecimal digits.

    Raises:
        BuildError: A source cannot be read.
    """
    digest = hashlib.blake2b(repr((_FLAGS, _AVX512)).encode(), digest_size=_HASH_DIGITS // 2)
    try:
        for name in FILES:
            digest.update(name.encode() + b"\0" + (sources / name).read_bytes())
    except OSError as error:
        raise BuildError(f"a source of the kernels cannot be read: {error}") from error
    return digest.hexdigest()


def build(
    library: Path = LIBRARY, *, extra_flags: tuple[str, ...] = (), requires_all: bool = False
) -> None:
    """Compile and link the library; replaces an older one at once.

    Args:
        library: Where to write it.
        extra_flags: More flags for compiler and linker, such as sanitizers.
        requires_all: Fail where the compiler does not know one of the instruction sets.

    Raises:
        BuildError: There is no compiler, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C compiler (cc, gcc, clang or the ziglang package) was found")
    known = _instruction_sets()
    sets = [one for one in known if _accepts(compiler, one)]
    if requires_all and len(sets) < len(known):
        lacking = ", ".join(one.name for one in known if one not in sets)
        raise BuildError(
            f"{compiler[0]} cannot compile {lacking}; install gcc 11, clang 12 or a later one"
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [*compiler, *_FLAGS, *extra_flags, "-c"]
        jobs = _jobs(sets, command, Path(folder))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, jobs))
        # Beside the library, which it replaces at once.
        new = library.with_name(f"{library.name}.{os.getpid()}")
        objects = [job[-1] for job in jobs]
        try:
            _run([*compiler, "-shared", "-pthread", *extra_flags, "-o", str(new), *objects, "-lm"])
            _seal(new)
            os.replace(new, library)
        finally:
            new.unlink(missing_ok=True)


def _instruction_sets() -> list[_InstructionSet]:
    found = [_InstructionSet("portable", "0", ())]
    if platform.machine() in _X86:
        found.append(_InstructionSet("avx2", "KERNEL_AVX2", _AVX2))
        wide = "KERNEL_AVX2 | KERNEL_AVX512"
        found.append(_InstructionSet("avx512", f"({wide})", _AVX512))
        found.append(_InstructionSet("amx", f"({wide} | KERNEL_AMX)", (*_AVX512, "-DHAS_TILES")))
    return found


def _jobs(sets: list[_InstructionSet], command: list[str], folder: Path) -> list[list[str]]:
    """Return the commands that compile; the last word of each is its object file."""
    have = [f"-DHAVE_{one.name}" for one in sets]
    jobs = [
        [*command, *have, str(SOURCES / name), "-o", str(folder / f"{name}.o")]
        for name in _PER_LIBRARY
    ]
    for name in _PER_SET:
        for one in sets:
            defines = [f"-DKERNEL_VARIANT={one.name}", f"-DKERNEL_NEEDS={one.needs}"]
            target = str(folder / f"{name}_{one.name}.o")
            jobs.append([*command, *one.flags, *defines, str(SOURCES / name), "-o", target])
    return jobs


def _accepts(compiler: list[str], one: _InstructionSet) -> bool:
    """Return whether a compiler knows an instruction set; says so where it does not."""
    probed = "avx512" if one.name == "amx" else one.name
    if probed not in _PROBES:
        return True
    command = [*compiler, *one.flags, "-x", "c", "-c", "-", "-o", os.devnull]
    probe = f"#include <immintrin.h>\n{_PROBES[probed]}\n"
    done = subprocess.run(command, input=probe, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(f"the kernels lack {one.name}, which {compiler[0]} cannot compile\n")
    return done.returncode == 0


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr or done.stdout}")


def _seal(library: Path) -> None:
    """Append the hash of the sources and a checksum, which loaders ignore; see `seal_of`."""
    content = library.read_bytes() + source_hash().encode()
    library.write_bytes(content + hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest())


def seal_of(library: Path) -> str | None:
    """Return the hash of the sources of a library, or None if the file is missing or damaged.

    Loading a damaged library could end the process.
    """
    try:
        whole = library.read_bytes()
    except OSError:
        return None
    content, checksum = whole[:-_CHECKSUM_BYTES], whole[-_CHECKSUM_BYTES:]
    if hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest() != checksum:
        return None
    return content[-_HASH_DIGITS:].decode(errors="replace")


def is_current(library: Path = LIBRARY) -> bool:
    """Return whether a library is intact and was built from the sources as they are."""
    return seal_of(library) == source_hash()


def main() -> int:
    """Build the library of this checkout; exit code 1 where that is not possible."""
    parser = argparse.ArgumentParser(description="Build the kernel library of the torch generator.")
    parser.add_argument("--if-changed", action="store_true", help="only where a source has changed")
    given = parser.parse_args()
    try:
        if not (given.if_changed and is_current()):
            build()
    except BuildError as error:
        sys.stderr.write(f"{WITHOUT}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

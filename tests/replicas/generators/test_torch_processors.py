"""Compiled code is that of the processor which numba compiles for, not of the one at hand."""

import os
import subprocess
import sys

from replicas.generators.torch import kernels, tiles

ASK = """
from replicas.generators.torch import kernels, pairs, tiles
print(kernels._version(), pairs.are_supported(), tiles.are_supported())
"""


def on_processor(name, features):
    """(version, has pairs, has tiles) of a process that compiles for it, but runs nothing."""
    environment = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.split()


def test_code_for_another_processor_is_not_taken_for_this_and_tiles_are_asked_for():
    version, *plain = on_processor("haswell", "+avx2,+fma")
    _, *with_pairs = on_processor("haswell", "+avx512bf16")
    other_version, *with_tiles = on_processor("haswell", "+avx512bf16,+amx-tile,+amx-bf16")
    assert len({version, other_version, kernels._version()}) == 3
    assert plain == ["False", "False"]
    assert with_pairs == ["True", "False"]
    # Code for tiles may be compiled on a host whose processor, or kernel, has none.
    assert with_tiles == ["True", str(tiles._is_permitted())]

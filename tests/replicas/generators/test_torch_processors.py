"""Compiled code is that of the processor which numba compiles for, not of the one at hand."""

import os
import subprocess
import sys

from replicas.generators.torch import kernels

ASK = """
from replicas.generators.torch import kernels, pairs
print(kernels._version(), pairs.are_supported(), pairs.suit_products())
"""


def on_processor(name, features):
    """(version, supported, suit products) of a process that compiles for it, but runs nothing."""
    environment = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.split()


def test_code_for_another_processor_is_not_taken_for_this_and_faster_products_leave_attention():
    version, *plain = on_processor("haswell", "+avx2,+fma")
    _, *with_pairs = on_processor("haswell", "+avx512bf16")
    other_version, *with_tiles = on_processor("haswell", "+avx512bf16,+amx-bf16")
    assert len({version, other_version, kernels._version()}) == 3
    assert plain == ["False", "False"]
    assert with_pairs == ["True", "True"]
    assert with_tiles == ["True", "False"]

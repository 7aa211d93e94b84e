"""An engine on the CPU keeps freed memory, so that its results cost no page faults."""

import subprocess
import sys

import pytest

from tests.models import model_folder

COUNT = """
import resource, sys, torch
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from tests.engines import make_config

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        # Freed at once, so that the top of the heap would be given back.
        kept = [torch.zeros(1 << 20, dtype=torch.float32) for _ in range(6)]
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

config = make_config(sys.argv[1])
core = EngineCore(config, UniProcExecutor(config))
faults()
print(faults())
core.shutdown()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_what_an_engine_frees_is_not_faulted_in_again():
    found = subprocess.run(
        [sys.executable, "-c", COUNT, model_folder("llama-gqa")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(found.stdout) < 50 * 20  # of 6,144 a round

"""What a pool's replica does when its engine ends."""

import subprocess
import sys

import pytest

ENGINE_ENDS = """
import threading, types
from cluster.lifecycle.deployments import PoolReplica
replica = PoolReplica.__new__(PoolReplica)
replica._role, replica._is_serving = "decode", True
replica._engine = types.SimpleNamespace(failure=None)
watch = threading.Thread(target=replica._on_engine_exit, args=(-9,))
watch.start()
watch.join()
"""


@pytest.mark.process
@pytest.mark.parametrize("log", ["/dev/null", "/dev/full"])
def test_a_replica_ends_with_its_engine_even_if_it_cannot_say_why(log):
    with open(log, "wb") as standard_error:
        done = subprocess.run(
            [sys.executable, "-c", ENGINE_ENDS], stderr=standard_error, timeout=120, check=False
        )
    assert done.returncode == 1

"""What a replica does when its engine ends, and when its log is full."""

import subprocess
import sys

import pytest

ENGINE_ENDS = """
import threading, types
from cluster.lifecycle.deployments import PoolReplica
from replicas.life import Life, LifeState
replica = PoolReplica.__new__(PoolReplica)
replica._role, replica._life = "decode", Life()
replica._life.become(LifeState.READY)
replica._engine = types.SimpleNamespace(failure=None)
watch = threading.Thread(target=replica._on_engine_exit, args=(-9,))
watch.start()
watch.join()
"""


@pytest.mark.process
@pytest.mark.parametrize("log", ["/dev/null", "/dev/full"])
def test_a_replica_ends_with_its_engine_even_if_it_cannot_log_the_reason(log):
    with open(log, "wb") as standard_error:
        done = subprocess.run(
            [sys.executable, "-c", ENGINE_ENDS], stderr=standard_error, timeout=120, check=False
        )
    assert done.returncode == 1


LOG_IS_FULL = """
import logging, os, sys
from ray.serve._private.logging_utils import StreamToLogger
from cluster.lifecycle.deployments import suppress_logging_errors
of_serve = logging.getLogger("ray.serve")
of_serve.setLevel(logging.INFO)
of_serve.addHandler(logging.FileHandler("/dev/full"))
sys.stderr = StreamToLogger(of_serve, logging.INFO, sys.stderr)
suppress_logging_errors()
logging.getLogger("cluster.routing.fleet").warning("lost a replica")
os._exit(7)
"""


@pytest.mark.process
def test_a_replica_continues_on_a_full_disk():
    """With the stream and the logger that Serve gives a replica."""
    done = subprocess.run([sys.executable, "-c", LOG_IS_FULL], timeout=120, check=False)
    assert done.returncode == 7

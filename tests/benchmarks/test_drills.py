"""Engines that stop, hang or are cut off under streams: clients' results, and leaks."""

import json
import subprocess
import sys

import pytest

from benchmarks.drills import drill

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

STREAMS = 8
SOON_S = 60.0
"""Allowance for a busy machine."""


def check(result, victim):
    """Every token was right, every error typed, and nothing is held any more."""
    endings = result["endings"]
    assert endings.pop("ok") > STREAMS
    if victim == "prefill":
        assert endings == {}, "another one computes its prompts"
        assert result["longest_first_token_s"] < SOON_S
    else:
        assert endings == {}, "the other one goes on with its streams"
    assert result["avoided_after_s"] < SOON_S
    assert result["leaked"] == 0


@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("kind", ["stop", "hang"])
def test_an_engine_that_does_not_move_costs_nobody_but_its_own_streams(kind, victim):
    check(drill(kind, victim, STREAMS, step_timeout_s=20.0), victim)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_an_engine_behind_a_pulled_cable_costs_nobody_but_its_own_streams(victim):
    command = ["-m", "benchmarks.drills", "--trouble", "cut", "--victim", victim]
    done = subprocess.run(
        [sys.executable, *command, "--streams", str(STREAMS)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "network namespaces need root" in done.stderr:
        pytest.skip("network namespaces need root")
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout), victim)

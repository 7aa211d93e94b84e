"""What holds for all tests: one thread for arithmetic, coroutine tests, two profiles.

The profiles are Hypothesis's: `dev` is quick; `ci` searches longer and always the same examples.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os

import pytest
from hypothesis import settings

from replicas import async_client, client, launch
from replicas.generators.torch import build_kernels
from tests import warm_engines

# Read when torch is imported, here and in every process that a test starts: operations this small
# only lose time to a second thread, and two test processes to each other's.
os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_configure(config):
    """Build the torch generator's kernels where a C file has changed since; needs a C compiler."""
    if not hasattr(config, "workerinput") and not build_kernels.is_current():
        with contextlib.suppress(build_kernels.BuildError):
            build_kernels.build()


def pytest_collection_finish():
    """Keep what was imported out of garbage collections, which otherwise go through all of it."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """Print what tests have recorded as `summary`; output of xdist's workers is not shown."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, text in getattr(report, "user_properties", ()):
                if name == "summary" and report.when == "call":
                    terminalreporter.write_line(text)


@pytest.fixture(scope="session", autouse=True)
def _warm_engines():
    """Start engines as forks of an interpreter that has imported PyTorch; see `warm_engines`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "start_process", warm_engines.WarmInterpreter().start_process)
        yield


@pytest.fixture(autouse=True)
def _patience(request, monkeypatch):
    """Let a pause of the whole host, which CI machines have, take no engine's requests away.

    The tests of what silence leads to have the marker `silence`, or limits of their own.
    """
    if request.node.get_closest_marker("silence") is None:
        monkeypatch.setattr(async_client, "QUIET_S", 30.0)
        monkeypatch.setattr(async_client, "SILENCE_S", 60.0)
        monkeypatch.setattr(client, "SILENCE_S", 60.0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a coroutine test to its end in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True

"""Bugs in the freeing of windows' blocks, planted one at a time, are found by random requests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from replicas.engine import kv_cache
from replicas.engine.kv_cache import KVCacheManager
from replicas.kv_groups import KVGroup
from tests.replicas.engine.test_scheduler_properties import WindowsMachine

FIRST_SEEN = KVGroup.first_block_seen
BUGS = {
    "freed too early": (KVGroup, "first_block_seen", lambda g, p: FIRST_SEEN(g, p + 1)),
    "never freed": (
        KVCacheManager,
        "settle",
        lambda kv, seq, num, *_: kv.index_full_blocks(seq, num),
    ),
    "hit without its window": (kv_cache, "served_by_windows", lambda *args: args[1]),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(monkeypatch, bug):
    monkeypatch.setattr(*BUGS[bug])
    # The same examples in every run, and no search for a shorter one.
    few = settings(
        max_examples=2000,
        stateful_step_count=40,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, IndexError)):
        run_state_machine_as_test(WindowsMachine, settings=few)

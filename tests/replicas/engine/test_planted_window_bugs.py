"""Bugs in windows and states, planted one at a time, are found by random requests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from replicas.engine import kv_cache
from replicas.engine.block_pool import BlockPool
from replicas.engine.kv_cache import KVCacheManager
from replicas.kv_groups import KVGroup
from tests.replicas.engine.test_scheduler_properties import StatesMachine, WindowsMachine

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
STATE_BUGS = {
    "freed too early": (KVGroup, "first_block_seen", lambda g, p: p // g.block_size),
    "overwritten state found": (kv_cache, "_keeps_state", lambda table, entry: True),
    "checkpoint written to": (BlockPool, "is_private", lambda pool, block_id: True),
    "never freed": BUGS["never freed"],
    "hit without its state": BUGS["hit without its window"],
}
CASES = [
    *((WindowsMachine, *bug) for bug in BUGS.values()),
    *((StatesMachine, *bug) for bug in STATE_BUGS.values()),
]
IDS = [*(f"window {bug}" for bug in BUGS), *(f"state {bug}" for bug in STATE_BUGS)]


@pytest.mark.parametrize(("machine", "owner", "name", "planted"), CASES, ids=IDS)
def test_a_planted_bug_is_found(monkeypatch, machine, owner, name, planted):
    monkeypatch.setattr(owner, name, planted)
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
        run_state_machine_as_test(machine, settings=few)

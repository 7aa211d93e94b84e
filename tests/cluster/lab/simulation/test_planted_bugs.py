"""Bugs planted into the production's cores, one at a time: chaos has to find every one of them.

Each was found from seed 0 on within some ten thousand events, a few of them later (docs/chaos.md);
the code as it is passes the scenario that finds it, and a shrunk one.
"""

import asyncio
import contextlib
import heapq
import itertools
from unittest import mock

import pytest

import kv_transfer.consumer
import replicas.engine.sequence
import replicas.simulation.virtual_worker
from cluster.errors import SaturatedError
from cluster.lab.simulation.adversarial_scenarios import plain_scenario, random_scenario
from cluster.lab.simulation.chaos import investigate
from cluster.lab.simulation.host import VirtualHost
from cluster.lab.simulation.inbox import VirtualInbox
from cluster.lab.simulation.loop import UNIX_S
from cluster.lab.simulation.parent import VirtualParent
from cluster.lab.simulation.scenario import Scenario, run_scenario
from cluster.routing.breaker import Breaker, Breakers
from cluster.routing.hand_over import HandOver
from cluster.routing.leg import Leg, Legs
from cluster.routing.lending import Lending
from cluster.routing.pools import PoolState
from cluster.routing.router import Run
from cluster.routing.slot_queue import SlotQueue
from cluster.routing.slot_waits import SlotWaits
from cluster.routing.stalls import Stalls
from kv_transfer.connector import Failure
from kv_transfer.errors import FailureReason
from kv_transfer.lease import LeaseTable
from kv_transfer.p2p_loads import P2PLoads
from kv_transfer.sessions import TransferSessions
from replicas.columns import ColumnReader
from replicas.engine.block_pool import BlockPool
from replicas.engine.core import EngineCore
from replicas.engine.kv_cache import KVCacheManager, SlotTable
from replicas.engine.outputs import EndRules
from replicas.engine.partial_prefills import PartialPrefillLimits
from replicas.engine.pause import Pause
from replicas.engine.preparations import Preparations
from replicas.engine.scheduler import Scheduler
from replicas.engine.step_plan import StepPlan
from replicas.kv_groups import KVGroup
from replicas.launch import HangWatch
from replicas.messages import NO_ALLOWED_TOKEN, Accepted, Activate, TokenOutput
from replicas.streams import StreamTable
from replicas.watchdog import Watchdog

MOST_EVENTS = 300_000
SHRINK_S = 0.5


BUGS = {}
"""By name: the object and its attribute, what takes its place, and the first seed that shows it.

The search begins at that seed: what came before takes a minute for some. Where scenarios are drawn
otherwise, another one shows it, a little later.
"""


def plant(owner, name, seed=0):
    """Put a bug in the place of a function, which the bug gets as its first argument."""

    def record(bug):
        BUGS[bug.__name__] = (owner, name, bug, seed)
        return bug

    return record


@plant(BlockPool, "free")
def block_pool_loses_a_block(free, self, ids):
    return free(self, ids[:-1])


@plant(SlotTable, "take")
def slot_is_granted_twice(take, self, group):
    slot = take(self, group)
    heapq.heappush(self._empty[group], slot)
    return slot


@plant(PoolState, "take_snapshot")
def older_snapshot_is_believed(_, self, incarnation, snapshot):
    replica = self._replicas.get(incarnation)
    if replica is None or (replica.snapshot and snapshot.seq > replica.snapshot.seq + 1):
        return
    replica.snapshot = snapshot
    self.num_snapshots += 1
    self._relist()


@plant(PoolState, "release")
def hold_is_not_dropped(release, self, request_id, incarnation):
    if not request_id.endswith("5"):
        release(self, request_id, incarnation)


@plant(Scheduler, "_retire")
def blocks_are_freed_under_a_transfer(retire, self, seq, hold):
    return retire(self, seq, hold=False)


@plant(LeaseTable, "is_live", seed=42)
def expired_lease_is_served(_, self, transfer_id, _now_s):
    return transfer_id in self._live


@plant(kv_transfer.consumer, "chunk_checksum", seed=25)
def wrong_checksum_is_accepted(_, *_chunk):
    class Anything:
        def __ne__(self, other):
            return False

        __hash__ = None

    return Anything()


@plant(KVCacheManager, "admit")
def block_is_indexed_before_it_is_computed(admit, self, seq, place, num_tokens):
    num_computed = admit(self, seq, place, num_tokens)
    self.index_full_blocks(seq, seq.num_tokens)
    return num_computed


@plant(Leg, "_send")
def request_is_activated_twice(send, self, message):
    send(self, message)
    if isinstance(message, Activate):
        send(self, message)


@plant(Run, "close")
def departed_client_is_not_reported(_, self):
    self._legs.drop_decode(abort=False)
    self._legs.drop_prefill(abort=False)


@plant(Leg, "close", seed=8)
def prefill_that_waits_for_a_slot_is_not_aborted(close, self, *, abort, reason="abort"):
    close(self, abort=abort and not self.offer, reason=reason)


@plant(Run, "deliver")
async def first_token_is_delivered_twice(deliver, self, outputs):
    await deliver(self, outputs)
    if self.has_tokens:
        await deliver(self, [TokenOutput(self._request.request_id, 0, self.progress.tokens[0][:1])])


@plant(SlotWaits, "capacity_changed")
def wake_up_is_lost(wake, self):
    if len(self._queue) != 2:
        wake(self)


@plant(P2PLoads, "cancel", seed=25)
def cancelled_load_still_writes(cancel, self, request_id):
    failed = self._context.ended.failed
    if request_id in self._ids and request_id not in failed:
        failed[request_id] = Failure(FailureReason.CANCELLED)
        return True
    return cancel(self, request_id)


@plant(StreamTable, "fail", seed=4)
def dead_engine_is_not_reported(_, self, _reason):
    self._streams.clear()


@plant(Leg, "_wait_for_answer", seed=15)
def unanswered_request_waits_for_ever(_, _leg):
    return asyncio.get_running_loop().call_later(1e9, lambda: None)


@plant(VirtualInbox, "receive", seed=1)
def full_inbox_loses_messages(receive, self, client, message, *, is_backpressured):
    if not is_backpressured:
        receive(self, client, message, is_backpressured=False)


@plant(Scheduler, "add", seed=38)
def full_engine_queue_loses_requests(add, self, seq, now_s, siblings):
    refusal = add(self, seq, now_s, siblings)
    return None if refusal == "queue_full" else refusal


@plant(SlotQueue, "enter", seed=19)
def full_slot_queue_loses_requests(enter, self, waiter, now_s):
    try:
        return enter(self, waiter, now_s)
    except SaturatedError:
        return None


@plant(VirtualHost, "_unix_now_s", seed=68)
def wall_clock_is_read_once(_, self):
    return UNIX_S + self._loop.time() + self._faults.clock_shift_s(self.started_s)


@plant(VirtualParent, "_await_end", seed=21)
def engine_that_does_not_end_is_not_killed(await_end, self, _s):
    return await_end(self, float("inf"))


@plant(VirtualParent, "_await_idle", seed=45)
def replaced_engine_is_ended_with_requests(await_idle, self, _s):
    return await_idle(self, float("-inf"))


@plant(PoolState, "succeeded", seed=66)
def closing_of_a_breaker_is_not_reported(_, self, incarnation):
    if self.breakers.succeeded(incarnation):
        self._relist()


@plant(Legs, "drop_heir", seed=15)
def successor_s_slot_is_leaked(_, self):
    if self.heir is not None:
        self.heir.close(abort=False)
        self.heir = None


@plant(HandOver, "stop", seed=15)
def successor_is_forgotten_when_its_request_migrates(stop, self):
    self._legs.heir, heir = None, self._legs.heir
    stop(self)
    self._legs.heir = heir


@plant(Run, "_leave_decode", seed=6)
def both_engines_of_a_hand_over_continue(leave, self, reason, error):
    if reason == "leaving":
        self._legs.decode.close(abort=False)
    leave(self, reason, error)


@plant(HandOver, "hear", seed=1)
def accepted_successor_is_not_used(hear, self, event):
    if not isinstance(event, Accepted):
        hear(self, event)


@plant(Legs, "_check_away", seed=16)
def request_stays_on_a_stalled_engine(check, self, leg, wanted):
    if leg is not self.decode or leg.stream.leaving is not None:
        check(self, leg, wanted)


@plant(KVCacheManager, "fork")
def sibling_shares_a_block_that_is_still_written(fork, self, seq, parent, *args):
    place = fork(self, seq, parent, *args)
    if place is None or len(parent.place.block_ids[0]) == len(place.hits[0]):
        return place
    return place._replace(hits=[parent.place.block_ids[0][: len(place.hits[0]) + 1]])


@plant(ColumnReader, "drop_choice")
def end_of_a_choice_drops_all_handles(_, self, request_id, _choice):
    self.drop_request(request_id)


@plant(replicas.engine.sequence, "choice_params")
def choices_draw_with_one_seed(params, sampling, _choice):
    return params(sampling, 0)


@plant(Scheduler, "abort_choice")
def stopped_choice_goes_on(_, _self, _request_id, _choice, _reason):
    pass


@plant(Scheduler, "_is_undecided", seed=54)
def choice_runs_before_its_activation(is_undecided, self, seq):
    not_activated, self.loads.not_activated = self.loads.not_activated, {}
    result = is_undecided(self, seq)
    self.loads.not_activated = not_activated
    return result


@plant(Scheduler, "_append_runs", seed=1)
def progress_of_rejected_drafts_is_not_given_back(take, self, plan, token_ids, counts):
    outputs = take(self, plan, token_ids, counts)
    if plan.progress and counts:
        rows = zip(plan.decodes.sequences, plan.progress, counts, strict=True)
        for seq, wanted, count in rows:
            seq.num_computed_tokens += (wanted - count) * seq.is_running
    return outputs


@plant(replicas.simulation.virtual_worker, "accepted_runs", seed=1)
def rejected_draft_is_kept(_, _drawn, _drafts, counts):
    return counts


@plant(EndRules, "cut", seed=1)
def run_is_not_cut_at_its_end(cut, self, seq, run):
    return run, cut(self, seq, run)[1]


@plant(Scheduler, "_fail_rows", seed=18)
def failed_row_is_not_reported(fail, self, plan, failures):
    fail(self, plan, failures)
    return ()


@plant(Scheduler, "_fail_rows", seed=18)
def row_of_a_failed_request_fails_again(_, self, plan, failures):
    rows = [*plan.decodes.sequences, *plan.sequences]
    for failure in failures:
        self._finish(rows[failure.row], "error")
    return tuple((rows[failure.row], NO_ALLOWED_TOKEN) for failure in failures)


@plant(Scheduler, "_append_runs", seed=35)
def progress_of_failed_passes_is_not_given_back(take, self, plan, token_ids, counts):
    outputs = take(self, plan, token_ids, counts)
    if plan.num_passes > 1 and counts:
        for seq, count in zip(plan.decodes.sequences, counts, strict=True):
            seq.num_computed_tokens += (plan.num_passes - count) * seq.is_running
    return outputs


@plant(Scheduler, "schedule", seed=14)
def frozen_rows_are_computed(schedule, self):
    is_frozen, self.pause.is_frozen = self.pause.is_frozen, False
    batch = schedule(self)
    self.pause.is_frozen = is_frozen
    return batch


@plant(Scheduler, "abort_all", seed=2)
def requests_that_a_pause_ends_are_not_reported(abort_all, self):
    abort_all(self)
    return []


@plant(PartialPrefillLimits, "admit", seed=41)
def long_prompts_are_not_limited(admit, self, num_new_tokens, planned):
    return True


@plant(PartialPrefillLimits, "admit", seed=3)
def long_prompt_is_never_computed(admit, self, num_new_tokens, planned):
    return num_new_tokens <= self.threshold and admit(self, num_new_tokens, planned)


@plant(Scheduler, "_new_plan", seed=34)
def long_prompt_takes_a_whole_step_from_others(new_plan, self, kind):
    plan = new_plan(self, kind)
    plan.max_chunk = plan.budget
    return plan


@plant(Scheduler, "_allocate_passes", seed=1)
def passes_of_a_step_have_no_blocks(allocate, self, plan, most):
    with mock.patch.object(self, "_grow", return_value=True):
        return allocate(self, plan, most)


@plant(Preparations, "take_orders", seed=7)
def preparation_is_lost(take, self, now_s):
    return take(self, now_s)[1:]


@plant(Preparations, "remove")
def grammar_is_dropped_while_it_is_used(remove, self, seq):
    remove(self, seq)
    grammar = seq.request.sampling.structured_outputs
    if grammar in self._grammars and self._grammars[grammar].is_ready:
        self._drop(grammar)


@plant(Preparations, "end")
def late_grammar_is_waited_for(end, self, results, _now_s):
    return end(self, results, float("-inf"))


@plant(KVGroup, "first_block_seen", seed=125)
def block_that_a_window_still_sees_is_freed(first_block_seen, self, position):
    return first_block_seen(self, position + 1)


DOES_NOTHING = {
    "preempted_row_is_computed": (StepPlan, "drop", None, 1),
    "pause_is_not_ended": (Pause, "end", [], 31),
    "stall_is_not_reported": (Watchdog, "stalled_s", 0.0, 5),
    "stalled_engine_is_given_requests": (PoolState, "set_moves", None, 5),
    "hang_is_not_ended": (HangWatch, "look", None, 7),
    "requests_of_a_dead_ingress_continue": (EngineCore, "client_gone", 0, 11),
    "wait_for_a_slot_has_no_timeout": (SlotQueue, "expire", [], 5),
    "hand_over_has_no_deadline": (TransferSessions, "next_deadline_s", None, 0),
    "breaker_never_trips": (Breaker, "failed", None, 4),
    "breaker_never_reopens": (Breakers, "expire", False, 4),
    "wait_for_a_probe_has_no_timeout": (Breakers, "ended", False, 18),
    "end_of_a_transfer_is_not_noticed": (Lending, "ended", False, 6),
    "staying_stream_misses_free_room": (Stalls, "stay", None, 16),
}
"""Bugs of which the function only returns this value."""

for bug_name, (owner, attribute, value, first_seed) in DOES_NOTHING.items():
    BUGS[bug_name] = (owner, attribute, lambda *_, value=value: value, first_seed)


@contextlib.contextmanager
def planted(name):
    """Run with a bug; return the first scenario that shows it."""
    owner, attribute, bug, first_seed = BUGS[name]
    function = getattr(owner, attribute)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, attribute, lambda *args, **named: bug(function, *args, **named))
        num_events = 0
        # Some are rare, and were first found by this scenario without choices, drafts and grammars.
        others = map(random_scenario, itertools.count(first_seed))
        for scenario in itertools.chain([plain_scenario(first_seed)], others):
            outcome = run_scenario(scenario)
            if outcome.failure is not None:
                assert not outcome.failure.startswith("TypeError"), "the bug does not fit its place"
                break
            num_events += outcome.num_events
            assert num_events <= MOST_EVENTS, f"not found in {num_events} events"
        yield scenario


@pytest.mark.timeout(1500)  # A slow host takes minutes for the events that the rarest need.
@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found_and_only_by_itself(name):
    with planted(name) as scenario:
        pass
    assert run_scenario(scenario).failure is None


def test_a_shrunk_find_shows_its_bug_and_nothing_else():
    with planted("hold_is_not_dropped") as scenario:
        find = investigate(scenario, SHRINK_S)
        assert find is not None, "a failure that does not come back"
        assert find.outcome.failure is not None
        assert len(find.shrunk.requests) < len(scenario.requests)
        kept = Scenario.from_json(find.shrunk.to_json())
        assert run_scenario(kept).failure is not None
    assert run_scenario(kept).failure is None

"""Several KV groups: in the pure engine parts, and refusals at start."""

from __future__ import annotations

import msgspec
import pytest

from replicas.errors import ConfigError
from replicas.kv_sizing import derive_max_model_len
from tests.kv_groups import one_kv_group
from tests.replicas.engine.fakes import (
    make_config,
    make_sequence,
    make_siblings,
    result_of,
    scheduler_of,
)


def make_scheduler(small, large, **changes):
    """Make the scheduler of a model with KV groups of two-token and of four-token blocks."""
    kv_groups = (*one_kv_group(1 + small, 2), *one_kv_group(1 + large, 4))
    return scheduler_of(kv_groups=kv_groups, **changes)


def add(scheduler, request_id, prompt, **sampling):
    seq = make_sequence(request_id, prompt, ignore_eos=True, **sampling)
    assert scheduler.add(seq, 0.0) is None
    return seq


def step(scheduler, token=1):
    batch = scheduler.schedule()
    tokens = [token] * len(batch.slots)
    scheduler.update(batch, result_of(tokens))
    scheduler.check_invariants()
    return batch


def free(scheduler):
    [group] = scheduler.group_snapshots()
    return group.num_free_blocks


def test_a_sequence_has_the_blocks_of_its_tokens_in_every_kv_group():
    scheduler = make_scheduler(12, 8)
    seq = add(scheduler, "a", [1, 2, 3, 4, 5], max_tokens=5)
    [new] = step(scheduler).new
    assert [len(block_ids) for block_ids in new.block_ids] == [3, 2]
    assert new.block_ids == seq.place.block_ids
    assert free(scheduler) == [9, 6]
    # Tokens 5 to 8: the sixth is in the third block of two; the ninth begins a block in each.
    appended = [step(scheduler).appended_blocks for _ in range(4)]
    assert [[len(ids) for ids in a[0][1]] if a else [] for a in appended] == [
        [],
        [1, 0],
        [],
        [1, 1],
    ]
    assert free(scheduler) == [12, 8]
    [counters] = scheduler.group_counters()
    assert (counters.num_blocks, counters.num_free_blocks) == ([12, 8], [12, 8])


@pytest.mark.parametrize(("small", "large"), [(3, 8), (8, 1)])
def test_one_kv_group_without_room_is_enough_to_wait(small, large):
    scheduler = make_scheduler(small, large)
    add(scheduler, "a", [1, 2, 3, 4], max_tokens=1)
    add(scheduler, "b", [5, 6, 7, 8], max_tokens=1)
    assert sum(step(scheduler).num_scheduled_tokens) == 4
    assert sum(step(scheduler).num_scheduled_tokens) == 4
    assert free(scheduler) == [small, large]


def test_a_sequence_that_cannot_grow_in_one_kv_group_takes_nothing_in_the_other():
    scheduler = make_scheduler(20, 2, enable_prefix_caching=False)
    first, second = (add(scheduler, name, [1, 2, 3, 4], max_tokens=4) for name in "ab")
    step(scheduler)
    assert free(scheduler) == [16, 0]
    step(scheduler)
    # The first one's fifth token took the second one's blocks, of both kinds.
    assert (second.num_preemptions, second.place.block_ids, second.place.slot) == (1, [], -1)
    assert [len(block_ids) for block_ids in first.place.block_ids] == [3, 2]
    assert free(scheduler) == [17, 0]


def test_a_prefix_is_as_long_as_every_kv_group_has_it():
    scheduler = make_scheduler(20, 20, max_num_batched_tokens=32)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    add(scheduler, "first", prompt, max_tokens=1)
    step(scheduler)
    again = add(scheduler, "again", [*prompt[:7], 0, 0, 0], max_tokens=9)
    # Six tokens are there in blocks of two, four in blocks of four.
    assert sum(step(scheduler).num_scheduled_tokens) == 10 - 4
    assert again.place.num_cached_tokens == 4
    assert [len(block_ids) for block_ids in again.place.block_ids] == [5, 3]
    scheduler.abort("again")
    # One KV group has lost the prefix, the other one alone is of no use.
    scheduler._kv._pools[0][1].reset_prefix_cache()
    lost = add(scheduler, "lost", prompt, max_tokens=9)
    assert sum(step(scheduler).num_scheduled_tokens) == 10
    assert lost.place.num_cached_tokens == 0


def windowed(full, *windows, **changes):
    """Make the scheduler of a model with a full group and groups with windows, blocks of two."""
    groups = one_kv_group(1 + full, 2)
    for window in windows:
        groups += one_kv_group(1 + full, 2, window=window)
    return scheduler_of(kv_groups=groups, **changes)


def test_blocks_behind_a_window_are_freed_as_the_sequence_advances():
    scheduler = windowed(12, 3)
    seq = add(scheduler, "a", [1, 2, 3, 4, 5], max_tokens=6)
    step(scheduler)
    # The next token, at position 5, sees 3 to 5: blocks 1 and 2.
    assert [table[:1] for table in seq.place.block_ids] == [[seq.place.block_ids[0][0]], [0]]
    assert free(scheduler) == [9, 10]
    for _ in range(4):
        step(scheduler)
    # Position 9 sees 7 to 9: blocks 3 and 4 of five.
    assert [len(set(table) - {0}) for table in seq.place.block_ids] == [5, 2]
    [counters] = scheduler.group_counters()
    assert counters.window_blocks_freed == 3
    step(scheduler)
    assert free(scheduler) == [12, 12]


def test_a_long_prompt_takes_the_blocks_of_a_window_as_it_gets_there():
    groups = (*one_kv_group(13, 2), *one_kv_group(13, 2, window=3))
    scheduler = scheduler_of(kv_groups=groups, max_num_batched_tokens=6)
    add(scheduler, "a", [*range(1, 21)], max_tokens=2)
    most, rooms = [], []
    for run in ([], [], [], [1]):
        batch = scheduler.schedule()
        most.append(free(scheduler))
        scheduler.update(batch, result_of([run]))
        scheduler.check_invariants()
        rooms.append(free(scheduler))
    # The full group takes all ten blocks at once. The window takes three for each chunk of six, of
    # which the next token sees one; the last chunk has two tokens.
    assert most == [[2, 9], [2, 8], [2, 8], [2, 10]]
    assert rooms == [[2, 11], [2, 11], [2, 11], [2, 11]]


def test_the_last_blocks_of_a_window_serve_a_prefix():
    scheduler = windowed(12, 3)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    first = add(scheduler, "first", prompt, max_tokens=1)
    step(scheduler)
    # Cached blocks are taken oldest first: those of the prefix's beginning are lost in one group.
    windows = scheduler._kv._pools[0][1]
    windows.forget([windows.find(h) for h in first.place.block_hashes[1][:3]])
    again = add(scheduler, "again", prompt, max_tokens=3)
    assert sum(step(scheduler).num_scheduled_tokens) == 1
    assert again.place.num_cached_tokens == 8
    assert [len(set(table) - {0}) for table in again.place.block_ids] == [5, 2]


def test_a_prefix_is_cut_to_what_every_window_serves():
    scheduler = windowed(12, 3, 5)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    first = add(scheduler, "first", prompt, max_tokens=1)
    step(scheduler)
    # Without block 2 the wide window serves four tokens; for these the narrow one lacks block 1.
    for index, number in ((2, 2), (1, 1)):
        pool = scheduler._kv._pools[0][index]
        pool.forget([pool.find(first.place.block_hashes[index][number])])
    again = add(scheduler, "again", prompt, max_tokens=3)
    step(scheduler)
    assert again.place.num_cached_tokens == 2


def test_a_choice_does_not_share_blocks_that_its_parent_has_left_behind():
    scheduler = windowed(20, 2, enable_prefix_caching=False)
    parent = make_sequence("a", [1, 2, 3, 4], max_tokens=9, ignore_eos=True, n=2)
    assert scheduler.add(parent, 0.0) is None
    step(scheduler)
    [sibling] = make_siblings(parent)
    assert scheduler._kv.fork(sibling, parent, 4) is not None
    for _ in range(3):
        step(scheduler)
    assert scheduler._kv.fork(sibling, parent, 4) is None


def test_the_smallest_kv_group_limits_the_longest_sequence():
    groups = (*one_kv_group(9, 4), *one_kv_group(4, 8))
    config = make_config(max_model_len=24)
    assert derive_max_model_len(config, 100, groups) == 24
    longer = msgspec.structs.replace(config, max_model_len=25)
    with pytest.raises(
        ConfigError, match=r"max_model_len 25 .* 24 tokens per lane \(3 blocks of 8"
    ):
        derive_max_model_len(longer, 100, groups)

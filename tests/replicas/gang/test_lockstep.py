"""Waves: for every order of messages all ranks take the same turns, and none waits for ever."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replicas.gang.lockstep import (
    Declaration,
    LockstepError,
    Loss,
    Rank,
    SilenceWatch,
    Turn,
    Waves,
)


class Gang(RuleBasedStateMachine):
    """Ranks, a hub, and channels that keep each pair's order and nothing else."""

    @initialize(size=st.integers(1, 4))
    def start(self, size):
        self.waves = Waves(size)
        self.ranks = [Rank(i) for i in range(size)]
        self.up = [deque() for _ in range(size)]
        self.down = [deque() for _ in range(size)]
        # Batches that a rank has yet to compute, and the tokens of one that it has declared.
        self.waiting = [0] * size
        self.holds = [0] * size
        self.is_computing = [False] * size
        self.steps = [[] for _ in range(size)]
        self.ended = [None] * size
        self.heard = [None] * size
        self.gone = set()
        self.num_asked = 0

    def live(self):
        return [i for i in range(len(self.ranks)) if i not in self.gone and not self.ended[i]]

    @rule(data=st.data())
    def request(self, data):
        """A request comes to some rank, whatever that is doing."""
        if ranks := self.live():
            self.waiting[data.draw(st.sampled_from(ranks))] += 1
            self.num_asked += 1

    @rule(data=st.data())
    def speak(self, data):
        """Let a rank at the top of its loop take a batch, if it has one, and declare it."""
        ranks = [i for i in self.live() if not self.is_computing[i]]
        if not ranks:
            return
        i = data.draw(st.sampled_from(ranks))
        if self.waiting[i] and not self.holds[i]:
            self.holds[i] = data.draw(st.integers(1, 3))
        said = self.ranks[i].declare(self.holds[i])
        if said is not None:
            self.up[i].append(said)

    @rule(data=st.data())
    def hear_up(self, data):
        """Deliver a rank's message to the hub."""
        ranks = [i for i, channel in enumerate(self.up) if channel]
        if not ranks:
            return
        i = data.draw(st.sampled_from(ranks))
        said = self.up[i].popleft()
        self.hear(i, said)

    def hear(self, i, said):
        turn = self.waves.declare(i, said)
        if said.number >= self.waves.number - (turn is not None):
            self.heard[i] = said
        if turn is not None:
            # Each rank has declared its part of the turn, and one of them has a batch.
            assert self.heard == [Declaration(turn.number, count) for count in turn.num_tokens]
            assert turn.largest == max(said.num_tokens for said in self.heard) > 0
            for channel in self.down:
                channel.append(turn)

    @rule(data=st.data())
    def hear_down(self, data):
        """Deliver a turn, or the end, to a rank, which begins to compute."""
        ranks = [i for i in self.live() if self.down[i] and not self.is_computing[i]]
        if not ranks:
            return
        i = data.draw(st.sampled_from(ranks))
        self.take(i, self.down[i].popleft())

    def take(self, i, said):
        if isinstance(said, Loss):
            self.ended[i] = said
            return
        is_own = self.ranks[i].enter_turn(said)
        assert not is_own or self.holds[i]
        self.steps[i].append((said.number, is_own))
        self.is_computing[i] = True

    @rule()
    def compute(self):
        """End a collective that all ranks have entered."""
        ranks = range(len(self.ranks))
        if self.gone or not all(self.is_computing) or len({len(s) for s in self.steps}) > 1:
            return
        for i in ranks:
            self.is_computing[i] = False
            if self.steps[i][-1][1]:
                self.holds[i] = 0
                self.waiting[i] -= 1

    @precondition(lambda self: len(getattr(self, "ranks", ())) > 1 and not self.gone)
    @rule(data=st.data())
    def kill(self, data):
        """Kill a rank; the hub detects it and informs the others."""
        i = data.draw(st.sampled_from(range(len(self.ranks))))
        self.gone.add(i)
        loss = self.waves.lose(i, "killed")
        assert loss == Loss(i, "killed")
        assert self.waves.lose((i + 1) % len(self.ranks), "and then") is None
        for channel in self.down:
            channel.append(loss)

    @invariant()
    def all_take_the_same_turns(self):
        if not hasattr(self, "ranks"):
            return
        longest = max(self.steps, key=len)
        assert [number for number, _ in longest] == list(range(len(longest)))
        for number in range(len(longest)):
            parts = [steps[number][1] for steps in self.steps if len(steps) > number]
            # No rank begins a turn before all have ended the last; and each turn has a batch.
            assert len(parts) < len(self.ranks) or any(parts)
        assert max(map(len, self.steps)) - min(map(len, self.steps)) <= 1

    def teardown(self):
        """Run all that is possible: no batch is left over, or all ranks know of the end."""
        if not hasattr(self, "ranks"):
            return
        for _ in range(20 * (self.num_asked + len(self.ranks) + 1)):
            self.settle()
        if self.gone:
            # The failed collective informs ranks inside it; all other ranks know by now.
            assert all(
                self.ended[i] or self.is_computing[i] for i in range(len(self.ranks))
                if i not in self.gone
            )  # fmt: skip
            return
        assert not any(self.waiting), (self.waiting, self.holds, self.waves.__dict__)
        assert self.waves.is_paused
        assert not any(self.is_computing)
        done = sum(is_own for steps in self.steps for _, is_own in steps)
        assert done == self.num_asked
        # No turn without a purpose: an idle gang costs nothing.
        assert len(self.steps[0]) <= self.num_asked

    def settle(self):
        for i in self.live():
            if not self.is_computing[i]:
                self.holds[i] = self.holds[i] or int(self.waiting[i] > 0)
                said = self.ranks[i].declare(self.holds[i])
                self.up[i].extend([said] if said is not None else [])
        for i, channel in enumerate(self.up):
            while channel:
                self.hear(i, channel.popleft())
        for i in self.live():
            if self.down[i] and not self.is_computing[i]:
                self.take(i, self.down[i].popleft())
        self.compute()


TestGang = Gang.TestCase
TestGang.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def test_a_wave_begins_with_the_first_batch_after_a_pause():
    waves, ranks = Waves(2), [Rank(0), Rank(1)]

    def declare(rank, num_tokens):
        return waves.declare(rank, ranks[rank].declare(num_tokens))

    def take(turn):
        return [rank.enter_turn(turn) for rank in ranks]

    declare(0, 0)
    assert not waves.is_paused
    assert declare(1, 0) is None
    assert (waves.is_paused, waves.num_waves) == (True, 0)
    assert take(declare(1, 5)) == [False, True]
    declare(1, 5)
    assert take(declare(0, 5)) == [True, True]
    assert waves.num_waves == 1
    declare(0, 0)
    declare(1, 0)
    assert waves.is_paused
    assert take(declare(0, 5)) == [True, False]
    assert waves.num_waves == 2


def test_disagreeing_ranks_get_an_error():
    waves, rank = Waves(2), Rank(0)
    with pytest.raises(LockstepError, match="turn 0"):
        waves.declare(1, Declaration(3, 5))
    waves.declare(1, Declaration(0, 5))
    with pytest.raises(LockstepError):
        waves.declare(1, Declaration(0, 0))
    with pytest.raises(LockstepError, match="expects turn 0"):
        rank.enter_turn(Turn(1, (0, 5)))
    rank.declare(0)
    with pytest.raises(LockstepError):
        rank.enter_turn(Turn(0, (5, 0)))


def test_after_a_loss_no_turn_starts():
    waves = Waves(2)
    waves.declare(0, Declaration(0, 5))
    waves.lose(1, "killed")
    assert waves.declare(1, Declaration(0, 5)) is None


def test_a_gang_is_drained_when_its_last_rank_is():
    waves = Waves(2)
    assert [waves.drain(rank) for rank in (1, 1, 0, 0)] == [False, False, True, False]
    assert waves.lose(1, "it has ended") is None


def test_a_rank_is_silent_after_several_checks_and_a_late_check_accuses_none():
    watch = SilenceWatch(2, max_looks=3)
    assert [watch.look(), watch.look()] == [[], []]
    watch.record_message(1)
    assert watch.look() == [0]
    watch.record_message(0)
    assert watch.look() == []

"""The prefix index against plain sets, for batches that come in order, late, twice or never."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.routing.placement import Placement
from cluster.routing.prefix_index import ASK_AGAIN, PrefixIndex
from replicas.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from tests.kv_groups import one_kv_group

GROUPS = [Placement(engine, group) for engine in ("a", "b", "c") for group in (0, 1)]
A, B = GROUPS[:2]
NAMES = range(8)
SHAPE = one_kv_group(2, block_size=1)
ENGINES = ("a", "b", "c")


def stored(seq, *names, listing=False, rank=0):
    return KVEventBatch(seq, rank, [BlockStored(list(names))], listing)


def removed(seq, *names):
    return KVEventBatch(seq, 0, [BlockRemoved(list(names))])


def naive(held, names):
    """Return for each holder of the first name how many leading names it holds."""
    found = {}
    for placement, has in held.items():
        depth = 0
        while depth < len(names) and names[depth] in has:
            depth += 1
        if depth:
            found[placement] = depth
    return found


class Engine:
    """A DP group with its blocks, and every batch that it ever sent."""

    def __init__(self):
        self.holds = {}
        self.sent = []

    def say(self, events):
        for event in events:
            if isinstance(event, BlockStored):
                self.holds.update(dict.fromkeys(event.block_hashes))
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    self.holds.pop(name, None)
            else:
                self.holds = {}
        self.sent.append((KVEventBatch(len(self.sent) + 1, 0, events), set(self.holds)))

    def listing(self):
        return KVEventBatch(len(self.sent), 0, [BlockStored(list(self.holds))], True)


some = st.lists(st.sampled_from(NAMES), max_size=4)
events = st.lists(
    st.one_of(
        some.map(BlockStored), some.map(BlockRemoved), st.builds(AllBlocksCleared)
    ),
    min_size=1, max_size=3,
)  # fmt: skip


class Machine(RuleBasedStateMachine):
    """Batches in order, late, twice or never; listings; guesses; deaths; restarts.

    The index believes reports up to the last batch in order, or nothing.
    """

    @initialize()
    def begin(self):
        self.index = PrefixIndex(SHAPE)
        self.engines = {placement: Engine() for placement in GROUPS}
        # The expected state: reported names, and guesses with their ends.
        self.told = {placement: set() for placement in GROUPS}
        self.routed = {placement: {} for placement in GROUPS}
        # The batch that it is at, the newest that it has seen, and whether it misses none.
        self.at = dict.fromkeys(GROUPS, -1)
        self.listed = dict.fromkeys(GROUPS, False)
        self.now_s = 0.0

    def deliver(self, placement, batch, holds):
        asks = self.index.take(placement, batch)
        if batch.is_listing and batch.seq >= self.at[placement]:
            self.listed[placement] = True
            self.told[placement], self.routed[placement] = set(holds), {}
            self.at[placement] = batch.seq
        elif batch.seq > self.at[placement]:
            in_order = self.listed[placement] and batch.seq == self.at[placement] + 1
            if self.listed[placement] and not in_order:
                assert asks, "a gap is noticed at once"
            self.listed[placement] = in_order
            self.told[placement] = set(holds) if in_order else set()
            self.at[placement] = batch.seq
        if self.listed[placement]:
            assert not asks
            kept = self.routed[placement].items()
            self.routed[placement] = {n: s for n, s in kept if n not in self.ever(placement, batch)}

    def ever(self, placement, batch):
        """Names that a batch reported: from then on they are no guesses."""
        if batch.seq != self.at[placement]:
            return set()
        return {n for e in batch.events if isinstance(e, BlockStored) for n in e.block_hashes}

    @rule(placement=st.sampled_from(GROUPS), events=events)
    def tell(self, placement, events):
        self.engines[placement].say(events)
        self.deliver(placement, *self.engines[placement].sent[-1])

    @rule(placement=st.sampled_from(GROUPS), events=events)
    def lose_a_batch(self, placement, events):
        self.engines[placement].say(events)

    @rule(placement=st.sampled_from(GROUPS), back=st.integers(1, 4))
    def tell_late_or_again(self, placement, back):
        sent = self.engines[placement].sent
        if len(sent) >= back:
            batch, holds = sent[-back]
            if batch.seq <= self.at[placement] or not self.listed[placement]:
                self.deliver(placement, batch, holds)

    @rule(placement=st.sampled_from(GROUPS))
    def list_all(self, placement):
        engine = self.engines[placement]
        self.deliver(placement, engine.listing(), engine.holds)

    @rule(placement=st.sampled_from(GROUPS), names=some.map(tuple), for_s=st.just(5.0))
    def route(self, placement, names, for_s):
        self.index.route(placement, [names], self.now_s + for_s)
        for name in names:
            if name not in self.told[placement]:
                self.routed[placement][name] = self.now_s + for_s

    @rule(by_s=st.sampled_from([1.0, 4.0, 6.0]))
    def let_time_pass(self, by_s):
        self.now_s += by_s
        self.index.expire(self.now_s)
        for placement, routed in self.routed.items():
            self.routed[placement] = {n: s for n, s in routed.items() if s > self.now_s}

    @rule(engine=st.sampled_from(ENGINES))
    def die_and_come_back(self, engine):
        self.index.forget(engine)
        for placement in GROUPS:
            if placement.incarnation == engine:
                self.engines[placement] = Engine()
                self.told[placement], self.routed[placement] = set(), {}
                self.at[placement], self.listed[placement] = -1, False

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=6, unique=True))
    def ask(self, names):
        held = {p: self.told[p] | self.routed[p].keys() for p in GROUPS}
        assert self.index.look_up([names]) == naive(held, names)

    @invariant()
    def is_whole(self):
        self.index.check_invariants()
        for placement in GROUPS:
            assert self.index.is_listed(placement) == self.listed[placement]


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from(GROUPS), events), max_size=20),
    st.lists(st.sampled_from(NAMES), max_size=6, unique=True),
)
def test_forgetting_only_shortens_prefixes(max_entries, said, names):
    index, engines = PrefixIndex(SHAPE, max_entries), {placement: Engine() for placement in GROUPS}
    for placement in GROUPS:
        index.take(placement, engines[placement].listing())
    for placement, told in said:
        engines[placement].say(told)
        assert not index.take(placement, engines[placement].sent[-1][0])
        index.check_invariants()
    truth = naive({p: engine.holds for p, engine in engines.items()}, names)
    for placement, depth in index.look_up([names]).items():
        assert depth <= truth[placement]


def test_the_limit_drops_ends_of_the_fullest_holder_only():
    index = PrefixIndex(SHAPE, 12)
    index.take(A, stored(0, *range(10), listing=True))
    index.take(B, stored(0, *range(4), listing=True))
    assert index.look_up([range(10)]) == {A: 8, B: 4}


def test_after_a_missed_batch_a_listing_is_requested_repeatedly():
    index = PrefixIndex(SHAPE)
    index.take(A, stored(3, 1, listing=True))
    asks = [index.take(A, stored(seq, seq)) for seq in range(5, 6 + ASK_AGAIN)]
    assert [i for i, asked in enumerate(asks) if asked] == [0, ASK_AGAIN]
    assert not index.is_listed(A)
    assert index.look_up([[1]]) == {}
    assert not index.take(A, stored(5 + ASK_AGAIN, 7, listing=True))
    assert index.look_up([[7]]) == {A: 1}


def test_an_old_listing_does_not_restore_removed_blocks():
    index = PrefixIndex(SHAPE)
    index.take(A, stored(1, 1, listing=True))
    index.take(A, removed(2, 1))
    index.take(A, stored(1, 1, listing=True))
    assert index.look_up([[1]]) == {}

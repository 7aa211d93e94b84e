"""Whatever happens to messages: right bytes or an error, one end for each side, in time."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.config import TransferConfig
from kv_transfer.messages import (
    Cancel,
    Credit,
    Data,
    Done,
    Fail,
    Fetch,
    LeaseInfo,
    Mapped,
    Renew,
)
from tests.kv_transfer.fakes import Fate
from tests.kv_transfer.worlds import World

PRODUCTION = TransferConfig()
NUM_TOKENS = 6 * 32 - 3
FATES = {
    "lost": [],
    "twice": [0.0, 0.0],
    "late": [2.0],
    "twice, once very late": [0.0, 40.0],
}


def play(world: World, abort: str = "") -> None:
    """Run a transfer whose prefill takes three steps, ended by one side in the middle of it."""
    world.start()
    for step, num_tokens in enumerate((0, 70, 70, NUM_TOKENS)):
        if num_tokens:
            world.prefill(num_tokens)
        if abort and step == 3:
            {"P": world.producer, "D": world.consumer}[abort].scheduler.cancel("r")
        world.steps(1, 0.1)
    world.run(0.5, PRODUCTION.rendezvous_s + PRODUCTION.lease_s + 2)


def counting(fate_of: Callable[[int], list[float]]) -> Fate:
    count: Iterator[int] = iter(range(1 << 30))
    return lambda _message: fate_of(next(count))


@pytest.mark.parametrize("abort", ["", "P", "D"])
@pytest.mark.parametrize("path", ["inline", "shared"])
def test_no_single_message_matters(path: str, abort: str) -> None:
    whole = World(path, num_tokens=NUM_TOKENS)
    play(whole, abort)
    kinds = set()
    for position, message in enumerate(whole.network.sent):
        kinds.add(type(message))
        for name, delays in FATES.items():
            told = f"message {position} ({type(message).__name__}) {name}"
            world = World(
                path,
                counting(lambda n, at=position, delays=delays: delays if n == at else [0.0]),
                num_tokens=NUM_TOKENS,
            )
            play(world, abort)
            if not abort:
                assert world.consumer.received == world.producer.sent == {"r"}, told
            took_s = max(world.ended_s.values()) - world.began_s
            assert took_s <= 3 * PRODUCTION.probe_s + max(delays[:1], default=0.0), told
            world.steps(9, 5.0)
            world.assert_over()
    moved = {Data, Credit} if path == "inline" else {Mapped}
    assert kinds >= {Fetch, LeaseInfo, *moved, Cancel if abort else Done}


@pytest.mark.parametrize("path", ["inline", "shared"])
def test_no_two_lost_messages_matter(path: str) -> None:
    whole = World(path, num_tokens=NUM_TOKENS)
    play(whole)
    num = len(whole.network.sent)
    for one in range(num):
        for other in range(one + 1, num + 4):
            lost = {one, other}
            fate = counting(lambda n, lost=lost: [] if n in lost else [0.0])
            world = World(path, fate, num_tokens=NUM_TOKENS)
            play(world)
            assert world.consumer.received == world.producer.sent == {"r"}, lost


@pytest.mark.parametrize("abort", ["", "P", "D"])
@pytest.mark.parametrize("path", ["inline", "shared"])
@pytest.mark.parametrize(
    "kind", [Fetch, Credit, Renew, Done, Cancel, Data, Mapped, LeaseInfo, Fail]
)
def test_a_kind_of_message_that_never_arrives_ends_in_time(
    kind: type, path: str, abort: str
) -> None:
    world = World(
        path, lambda message: [] if isinstance(message, kind) else [0.0], num_tokens=NUM_TOKENS
    )
    play(world, abort)
    world.steps(int(PRODUCTION.closing_s) + 1, 1.0)
    world.assert_over()
    if not any(isinstance(message, kind) for message in world.network.sent):
        assert abort or world.consumer.received == {"r"}


class Machine(RuleBasedStateMachine):
    """Every message waits until a rule decides what becomes of it."""

    @initialize(
        path=st.sampled_from(["inline", "shared", "mixed"]),
        num_cached=st.sampled_from([0, 64]),
        num_steps=st.integers(0, 3),
    )
    def begin(self, path: str, num_cached: int, num_steps: int) -> None:
        self.world = World(path, lambda _message: [float("inf")], num_tokens=NUM_TOKENS)
        self.num_computed = self.num_rules = 0
        self.world.start(num_cached=num_cached)
        for _ in range(num_steps):
            self.go_on()

    @property
    def wires(self) -> list:
        return self.world.network._wires

    @property
    def nodes(self) -> list:
        return [self.world.node(engine) for engine in self.world.engines]

    @precondition(lambda self: self.num_rules > 12)
    @rule(seconds=st.sampled_from([6.0, 31.0]))
    def much_time_passes(self, seconds: float) -> None:
        self.time_passes(seconds)

    @rule(which=st.integers(0, 1))
    def step(self, which: int) -> None:
        self.world.step(self.world.engines[which])

    @rule(num_tokens=st.integers(1, 100))
    def prefill(self, num_tokens: int) -> None:
        self.num_computed = min(NUM_TOKENS, self.num_computed + num_tokens)
        self.world.prefill(self.num_computed)

    @rule(num_tokens=st.integers(32, 150))
    def prefill_and_go_on(self, num_tokens: int) -> None:
        self.prefill(num_tokens)
        self.go_on()

    @precondition(lambda self: self.wires)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        # One of the first few: mostly in order, so that a transfer gets somewhere.
        position = data.draw(st.integers(0, min(3, len(self.wires) - 1)))
        _, _, node, deliver = self.wires[position]
        if node is None or not node.is_frozen:
            del self.wires[position]
            deliver()
            self.world.check()

    @rule()
    def go_on(self) -> None:
        for engine in self.world.engines:
            self.world.step(engine)
        self.deliver_all()

    @precondition(lambda self: self.wires)
    @rule()
    def deliver_all(self) -> None:
        for wire in [wire for wire in self.wires if wire[2] is None or not wire[2].is_frozen]:
            self.wires.remove(wire)
            wire[3]()
            self.world.check()

    @precondition(lambda self: self.wires)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        del self.wires[data.draw(st.integers(0, len(self.wires) - 1))]

    @precondition(lambda self: self.wires)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.wires.append(self.wires[data.draw(st.integers(0, len(self.wires) - 1))])

    @precondition(lambda self: len(self.wires) > 1)
    @rule(data=st.data())
    def overtake(self, data: st.DataObject) -> None:
        self.wires.append(self.wires.pop(data.draw(st.integers(0, len(self.wires) - 2))))

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.network.now_s += seconds
        for node in self.nodes:
            node.tick()
        self.world.check()

    @precondition(lambda self: not any(node.is_frozen for node in self.nodes))
    @rule(which=st.integers(0, 1))
    def freeze(self, which: int) -> None:
        self.nodes[which].is_frozen = True

    @precondition(lambda self: any(node.is_frozen for node in self.nodes))
    @rule()
    def thaw(self) -> None:
        for node in self.nodes:
            node.is_frozen = False

    @precondition(lambda self: "P" not in self.world.ended_s)
    @rule()
    def preempt(self) -> None:
        self.num_computed = 0
        self.world.preempt()

    @rule()
    def corrupt(self) -> None:
        self.nodes[0].corrupt = 1

    @precondition(lambda self: self.num_rules > 12)
    @rule(which=st.integers(0, 1))
    def abort(self, which: int) -> None:
        self.world.engines[which].scheduler.cancel("r")

    @invariant()
    def nothing_is_wrong(self) -> None:
        if hasattr(self, "world"):
            self.num_rules += 1
            self.world.check()

    def teardown(self) -> None:
        """Deliver all messages from now on, after which every transfer must end."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.network.fate = lambda _message: [0.0]
        world.network._wires = [(0.0, *wire[1:]) for wire in self.wires]
        for node in self.nodes:
            node.is_frozen = False
        world.prefill()
        world.run(1.0, PRODUCTION.rendezvous_s + PRODUCTION.lease_s + 2)
        world.steps(int(PRODUCTION.closing_s) + 1, 1.0)
        world.assert_over()


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=40)

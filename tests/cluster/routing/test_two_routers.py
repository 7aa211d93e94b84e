"""Two ingresses and three replicas that die and return: no slot is taken twice.

Queues, views and holds are the routers' own, and slots belong to the engines' own schedulers.
Simulated are the network, which keeps answers in order and delays others, and the clients.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.errors import NotReadyError, SaturatedError
from cluster.routing.cost import make_policies
from cluster.routing.demand import Demand
from cluster.routing.placement import Placement
from cluster.routing.pools import PoolState
from cluster.routing.slot_queue import SlotQueue, Waiter
from replicas.engine.scheduler import Scheduler
from replicas.engine.step import StepResult
from replicas.messages import EngineSnapshot
from tests.cluster.engines import make_member
from tests.kv_groups import one_kv_group
from tests.replicas.engine.fakes import (
    EOS,
    PREFIX_CACHE_KEY,
    events_of,
    make_config,
    make_sequence,
)

BLOCK_SIZE = 4
NUM_BLOCKS = 7
MOST_LIVES = 8
INGRESSES = ("north", "south")
PLACES = (0, 1, 2)

ingresses = st.sampled_from(INGRESSES)
places = st.sampled_from(PLACES)


class Replica:
    """One incarnation of an engine: its scheduler, and which request has which slot."""

    def __init__(self, incarnation: str, num_groups: int, slots_per_group: int) -> None:
        self.incarnation = incarnation
        self.config = make_config(
            max_batch_size=num_groups * slots_per_group,
            tt_data_parallel=num_groups,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=False,
            reservation_timeout_s=2.0,
        )
        self.kv_groups = one_kv_group(NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.config,
            kv_groups=self.kv_groups,
            prefix_cache_key=PREFIX_CACHE_KEY,
            max_model_len=4 * BLOCK_SIZE,
            eos_token_ids=frozenset({EOS}),
        )
        self.role = "decode"
        self.is_dead = False
        self.seq = 0
        self.now_s = 0.0
        self.slots: dict[int, str] = {}
        self.owners: dict[str, str] = {}

    def snapshot(self) -> EngineSnapshot:
        self.seq += 1
        groups, waiting = self.scheduler.group_snapshots(), self.scheduler.num_waiting
        return EngineSnapshot(self.seq, False, waiting, 0, 0, groups, self.role)

    def reserve(self, ingress: str, demand: Demand, dp_group: int) -> str | None:
        sequence = make_sequence(
            demand.request_id,
            demand.prompt_token_ids,
            mode="decode",
            dp_group=dp_group,
            client=ingress.encode(),
            max_tokens=2,
        )
        refusal = self.scheduler.reserve(sequence, self.now_s)
        if refusal is None:
            assert sequence.slot not in self.slots, "two requests in one slot"
            self.slots[sequence.slot] = demand.request_id
            self.owners[demand.request_id] = ingress
        return refusal

    def step(self) -> list[str]:
        """Run a step; return the requests that ended."""
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        running = {seq.slot: seq for seq in self.scheduler._running}
        for slot, seq in running.items():
            assert self.slots[slot] == seq.request_id
        sequences = [running[slot] for slot in batch.slots]
        has_token = [seq.num_computed_tokens == seq.num_tokens for seq in sequences]
        result = StepResult([EOS + 1 if it_has else -1 for it_has in has_token], 0.0)
        outputs = events_of(self.scheduler.update(batch, result))
        return self.free(seq.request_id for seq, output in outputs if output.finish_reason)

    def free(self, ended) -> list[str]:
        """Forget requests that have ended, and return them."""
        ended = list(ended)
        self.slots = {slot: r for slot, r in self.slots.items() if r not in ended}
        return ended

    def check(self) -> None:
        self.scheduler.check_invariants()
        groups = self.scheduler.group_snapshots()
        num_empty = sum(group.num_empty_slots for group in groups)
        assert num_empty + len(self.slots) == self.config.max_batch_size
        if not self.slots:
            assert all(group.num_free_blocks == [NUM_BLOCKS - 1] for group in groups)


@dataclass(eq=False)
class Request:
    """A request of a client at its ingress."""

    demand: Demand
    waiter: Waiter
    state: str = "waiting"
    incarnation: str = ""
    dp_group: int = -1
    num_endings: int = 0


@dataclass
class Link:
    """The connection between an ingress and one incarnation of an engine."""

    replica: Replica
    to_engine: deque = field(default_factory=deque)
    to_ingress: deque = field(default_factory=deque)
    snapshots: list[EngineSnapshot] = field(default_factory=list)


class Ingress:
    """The pure parts of a router."""

    def __init__(self, name: str, policy: str) -> None:
        self.name = name
        self.pools = PoolState()
        self.queue = SlotQueue(self.pools, make_policies(policy).decode, 3, 10.0)
        self.requests: dict[str, Request] = {}
        self.links: dict[str, Link] = {}

    def live(self, *states: str) -> list[Request]:
        return [r for r in self.requests.values() if r.state in states]

    def find(self, replica: Replica) -> None:
        if replica.incarnation not in self.links:
            member = make_member(
                "decode",
                replica.incarnation,
                kv_groups=replica.kv_groups,
                dp_groups=replica.config.tt_data_parallel,
                slots_per_group=replica.config.slots_per_group,
            )
            self.pools.add(member)
            self.links[replica.incarnation] = Link(replica)

    def enter(self, request: Request, now_s: float) -> None:
        request.state = "waiting"
        try:
            placement = self.queue.enter(request.waiter, now_s)
        except (NotReadyError, SaturatedError):
            self.end(request)
        else:
            if placement is not None:
                self.ask(request, placement)

    def ask(self, request: Request, placement: Placement) -> None:
        request.state = "asked"
        request.incarnation, request.dp_group = placement
        self.send(request, "reserve")

    def send(self, request: Request, word: str) -> None:
        link = self.links.get(request.incarnation)
        if link is not None and not link.replica.is_dead:
            link.to_engine.append((word, request))

    def settle(self) -> None:
        """Do what `SlotWaits` does when something has changed."""
        if self.queue.is_stranded:
            for waiter in self.queue.clear():
                self.end(self.requests[waiter.demand.request_id])
        for waiter, placement in self.queue.assign():
            self.ask(self.requests[waiter.demand.request_id], placement)

    def end(self, request: Request) -> None:
        request.state = "over"
        request.num_endings += 1

    def leave(self, request: Request) -> None:
        """Let a client leave."""
        if request.state == "waiting":
            self.queue.leave(request.waiter)
        else:
            self.pools.release(request.demand.request_id, request.incarnation)
            self.send(request, "abort")
        self.end(request)

    def hear(self, link: Link, now_s: float) -> None:
        word, request_id, reason = link.to_ingress.popleft()
        if word == "dead":
            self.lose(link, now_s)
            return
        request = self.requests[request_id]
        if request.state not in ("asked", "open"):
            return  # Its client left while this was on its way.
        assert request.incarnation == link.replica.incarnation
        if word == "accepted":
            self.pools.release(request_id, request.incarnation)
            request.state = "open"
            self.send(request, "activate")
        elif word == "refused":
            assert reason in ("no_slot", "no_blocks")
            self.pools.release(request_id, request.incarnation)
            self.back(request, now_s)
        else:
            self.end(request)

    def back(self, request: Request, now_s: float) -> None:
        self.queue.refuse(request.waiter, Placement(request.incarnation, request.dp_group))
        self.enter(request, now_s)

    def lose(self, link: Link, now_s: float) -> None:
        incarnation = link.replica.incarnation
        self.pools.remove(incarnation)
        for request in self.live("asked", "open"):
            if request.incarnation == incarnation:
                if request.state == "open":
                    # The story begins again.
                    request.waiter = self.queue.new_waiter(request.demand, is_promised=True)
                self.back(request, now_s)


class TwoRouters(RuleBasedStateMachine):
    """Two ingresses, three replicas, and a network in between."""

    @initialize(
        policy=st.sampled_from(["most_empty_slots", "round_robin", "least_delay"]),
        shape=st.sampled_from([(1, 1), (1, 2), (2, 1)]),
    )
    def start(self, policy, shape):
        self.shape = shape
        self.now_s = 0.0
        self.num_lives = self.num_requests = 0
        self.replicas = {}
        self.ingresses = {name: Ingress(name, policy) for name in INGRESSES}
        for place in PLACES:
            self.begin(place)
            for ingress in self.ingresses.values():
                ingress.find(self.replicas[place])
                ingress.pools.take_snapshot(
                    self.replicas[place].incarnation, self.replicas[place].snapshot()
                )

    def begin(self, place):
        self.num_lives += 1
        self.replicas[place] = Replica(f"{place}-{self.num_lives}", *self.shape)
        self.replicas[place].now_s = self.now_s

    def link(self, name, place):
        return self.ingresses[name].links.get(self.replicas[place].incarnation)

    # --- clients ----------------------------------------------------------------------------------

    @rule(
        name=ingresses,
        priority=st.integers(0, 1),
        num_blocks=st.integers(1, 3),
        is_early=st.booleans(),
    )
    def arrive(self, name, priority, num_blocks, is_early):
        """Let a request arrive, due at once or only when its prompt is almost computed."""
        self.num_requests += 1
        demand = Demand(
            f"r{self.num_requests}", [7] * (num_blocks * BLOCK_SIZE - 2), priority=priority
        )
        ingress = self.ingresses[name]
        waiter = ingress.queue.new_waiter(demand, is_promised=is_early, is_due=not is_early)
        request = Request(demand, waiter)
        ingress.requests[demand.request_id] = request
        ingress.enter(request, self.now_s)
        ingress.settle()

    @rule(name=ingresses, data=st.data())
    def moment_comes(self, name, data):
        ingress = self.ingresses[name]
        early = [r for r in ingress.live("waiting") if not r.waiter.is_due]
        if early:
            ingress.queue.set_due(data.draw(st.sampled_from(early)).waiter, self.now_s)
            ingress.settle()

    @rule(name=ingresses, data=st.data())
    def client_leaves(self, name, data):
        ingress = self.ingresses[name]
        live = ingress.live("waiting", "asked", "open")
        if live:
            ingress.leave(data.draw(st.sampled_from(live)))
            ingress.settle()

    # --- engines ----------------------------------------------------------------------------------

    @rule(name=ingresses, place=places)
    def engine_hears(self, name, place):
        link = self.link(name, place)
        if link is not None and link.to_engine:
            self.take(self.ingresses[name], link)

    def take(self, ingress, link):
        word, request = link.to_engine.popleft()
        replica, demand = link.replica, request.demand
        if word == "reserve":
            # The group that the ingress asked for at that time.
            reason = replica.reserve(ingress.name, demand, request.dp_group)
            answer = "accepted" if reason is None else "refused"
            link.to_ingress.append((answer, demand.request_id, reason))
        elif word == "activate":
            replica.scheduler.activate(demand.request_id, [], self.now_s)
        else:
            replica.scheduler.abort(demand.request_id)
            replica.free([demand.request_id])

    @rule(place=places)
    def engine_steps(self, place):
        replica = self.replicas[place]
        self.tell(replica, replica.step())

    def tell(self, replica, ended):
        for request_id in ended:
            link = self.ingresses[replica.owners[request_id]].links[replica.incarnation]
            link.to_ingress.append(("ended", request_id, None))

    @rule(place=places)
    def engine_says_what_is_left(self, place):
        snapshot = self.replicas[place].snapshot()
        for name in INGRESSES:
            link = self.link(name, place)
            if link is not None:
                link.snapshots.append(snapshot)

    @rule(place=places)
    def flip(self, place):
        replica = self.replicas[place]
        replica.role = "prefill" if replica.role == "decode" else "decode"

    @precondition(lambda self: self.num_lives < MOST_LIVES)
    @rule(place=places, num_heard=st.integers(0, 3))
    def kill(self, place, num_heard):
        """Kill a replica: its last messages may be lost, its successor may be found late."""
        replica = self.replicas[place]
        replica.is_dead = True
        for ingress in self.ingresses.values():
            link = ingress.links.get(replica.incarnation)
            if link is not None:
                link.to_engine.clear()
                said = list(link.to_ingress)[:num_heard]
                link.to_ingress = deque([*said, ("dead", "", None)])
        self.begin(place)

    # --- ingresses --------------------------------------------------------------------------------

    @rule(name=ingresses, data=st.data())
    def ingress_hears(self, name, data):
        ingress = self.ingresses[name]
        links = [link for link in ingress.links.values() if link.to_ingress]
        if links:
            ingress.hear(data.draw(st.sampled_from(links)), self.now_s)
            ingress.settle()

    @rule(name=ingresses, place=places, data=st.data())
    def ingress_hears_what_is_left(self, name, place, data):
        """Deliver remaining messages out of order, some of them twice."""
        link = self.link(name, place)
        if link is not None and link.snapshots:
            snapshot = data.draw(st.sampled_from(link.snapshots))
            self.ingresses[name].pools.take_snapshot(link.replica.incarnation, snapshot)
            self.ingresses[name].settle()

    @rule(name=ingresses, place=places)
    def discover(self, name, place):
        self.ingresses[name].find(self.replicas[place])

    @rule(seconds=st.integers(1, 6))
    def time_passes(self, seconds):
        self.now_s += seconds
        for replica in self.replicas.values():
            replica.now_s = self.now_s
            lapsed = [seq.request_id for seq in replica.scheduler.expire(self.now_s)]
            self.tell(replica, replica.free(lapsed))
        for ingress in self.ingresses.values():
            for waiter in ingress.queue.expire(self.now_s):
                ingress.end(ingress.requests[waiter.demand.request_id])
            ingress.settle()

    # --- always -----------------------------------------------------------------------------------

    @invariant()
    def holds(self):
        if not hasattr(self, "ingresses"):
            return
        for replica in self.replicas.values():
            replica.check()
            for request_id in replica.slots.values():
                self.check_owner(replica, request_id)
        for ingress in self.ingresses.values():
            ingress.pools.check_invariants()
            ingress.queue.check_invariants()
            asked = {(r.incarnation, r.demand.request_id) for r in ingress.live("asked")}
            assert set(ingress.pools.holds()) == asked
            assert len(ingress.queue) == len(ingress.live("waiting"))
            for request in ingress.requests.values():
                assert request.num_endings == (request.state == "over")

    def check_owner(self, replica, request_id):
        """Each slot has a request that will use it or release it."""
        ingress = self.ingresses[replica.owners[request_id]]
        request, link = ingress.requests[request_id], ingress.links[replica.incarnation]
        is_used = request.state in ("asked", "open") and (
            request.incarnation == replica.incarnation
        )
        assert is_used or ("abort", request) in link.to_engine, f"{request} has lost its slot"

    def teardown(self):
        """Deliver and step until every request has ended and every slot is seen free."""
        if not hasattr(self, "ingresses"):
            return
        for replica in self.replicas.values():
            replica.role = "decode"
        for ingress in self.ingresses.values():
            for request in ingress.live("waiting"):
                ingress.queue.set_due(request.waiter, self.now_s)
            ingress.settle()
        for _ in range(20 + 10 * self.num_requests):
            self.deliver()
            self.holds()
            if not any(i.live("waiting", "asked", "open") for i in self.ingresses.values()):
                break
        self.deliver()
        for ingress in self.ingresses.values():
            assert {r.num_endings for r in ingress.requests.values()} <= {1}
            assert not ingress.pools.holds()
            views = ingress.pools.decode_views()
            assert len(views) == len(PLACES) * self.shape[0]
            assert {view.num_empty_slots for view in views} == {self.shape[1]}
            assert {view.num_free_blocks[0] for view in views} == {NUM_BLOCKS - 1}

    def deliver(self):
        """Deliver all messages under way, and run a few steps."""
        for ingress in self.ingresses.values():
            for replica in self.replicas.values():
                ingress.find(replica)
            for link in ingress.links.values():
                while link.to_engine:
                    self.take(ingress, link)
        for replica in self.replicas.values():
            while ended := replica.step():
                self.tell(replica, ended)
            replica.check()
        for ingress in self.ingresses.values():
            self.hear_everything(ingress)

    def hear_everything(self, ingress):
        for link in ingress.links.values():
            while link.to_ingress:
                ingress.hear(link, self.now_s)
        for replica in self.replicas.values():
            # The latest comes first.
            late = ingress.links[replica.incarnation].snapshots
            for snapshot in (replica.snapshot(), *late):
                ingress.pools.take_snapshot(replica.incarnation, snapshot)
        ingress.settle()


TestTwoRouters = TwoRouters.TestCase

"""A whole cluster under a virtual clock: workload in, records out, the same for the same seed.

Owner of the run: hosts and their restarts, ingresses and what they have found, the requests under
way, the chance that the seed gives. The code that decides is the production's: router, slot queue,
placement and pool state, engine server and core, scheduler, block pool, KV transfer. Modelled are
the device's time (`replicas.generators.simulated`), the network (`cluster.simulation.network`),
discovery and restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from cluster.config.schema import RouterConfig
from cluster.errors import BadRequestError, ServingError
from cluster.simulation.client import SILENCE_S
from cluster.simulation.host import VirtualHost
from cluster.simulation.ingress import VirtualIngress
from cluster.simulation.invariants import Expectations, Invariants, check_tokens, waits_for
from cluster.simulation.loop import VirtualLoop
from cluster.simulation.monitors import LeaseMonitor
from cluster.simulation.network import Network, NetworkConfig
from cluster.simulation.recorder import Recorder
from cluster.simulation.records import ABORTED, OK, SimulationResult
from cluster.tickets import TicketOffice
from kv_transfer.config import TransferConfig
from kv_transfer.ticket import KeyRing
from replicas.faults import FaultPlan
from replicas.messages import EngineRequest
from replicas.sampling_params import SamplingParams
from replicas.virtual_engine import VirtualDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cluster.config.schema import Role
    from cluster.workloads.request import Workload
    from replicas.config import EngineConfig
    from replicas.generators.simulated.timing import StepTiming
    from replicas.virtual_engine import ModelFacts

DISCOVERY_S = 0.5
"""An ingress looks for replicas that it misses this often."""
_SETTLE_S = 1.0
"""Virtual time before zero in which ingresses and engines meet."""
_KEYS = KeyRing((b"one secret for all that is virtual",))
_DRAIN_S = 300.0
"""After the last request, what is still held must be free within this virtual time."""


class PoolSpec(NamedTuple):
    """Equal replicas of one role.

    Attributes:
        role: What they do.
        replicas: How many.
        engine: Configuration of each.
        timing: What their steps cost.
        facts: What the modelled device and the served model are.
        transfer: Deadlines and sizes of its KV transfers.
    """

    role: Role
    replicas: int
    engine: EngineConfig
    timing: StepTiming
    facts: ModelFacts
    transfer: TransferConfig = TransferConfig()


class SimulationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is told besides its cluster and its workload.

    Attributes:
        seed: Of every draw.
        router: How requests are placed.
        ingresses: How many there are; request i goes to number i modulo this.
        network: How messages travel.
        faults: What goes wrong, in virtual seconds.
        restart_s: From the death of a replica to the start of its successor's warm-up.
        models_kv: Whether KV is written, moved and read, so that every token proves it.
        run_ahead: Whether stretches of plain decode steps are passed over at once; the results are
            the same, but for how many tokens an aborted request had seen. Never with faults or
            jitter.
        checks: Whether everything is checked: the cores after every event, what is left over at
            the end, and what every request came to. See `cluster.simulation.invariants`.
        deadline_s: With checks: a request that lasts longer than this hangs.
        keeps_events: Whether the result has an event log.
        aborts: For requests (by number) whose client leaves: after how many seconds.
    """

    seed: int = 0
    router: RouterConfig = RouterConfig()
    ingresses: int = 1
    network: NetworkConfig = NetworkConfig()
    faults: FaultPlan = FaultPlan()
    restart_s: float = 3.0
    models_kv: bool = False
    run_ahead: bool = True
    checks: bool = False
    deadline_s: float = 600.0
    keeps_events: bool = False
    aborts: dict[int, float] = {}


class _Replica:
    """A place in a pool, whoever fills it now."""

    def __init__(self, name: str, spec: PoolSpec) -> None:
        self.name = name
        self.spec = spec
        # What waits until its frozen process goes on.
        self.at_thaw: list[Callable[[_Replica], None]] = []
        self.host: VirtualHost | None = None
        self.silent_since_s: float | None = None


class Simulation:
    """One run; see the module docstring.

    Args:
        pools: The cluster.
        workload: What arrives.
        options: Everything else.
        progress: Called with (virtual seconds, requests done, events) now and then.
    """

    def __init__(
        self,
        pools: Sequence[PoolSpec],
        workload: Workload,
        options: SimulationOptions,
        progress: Callable[[float, int, int], None] = lambda _now_s, _done, _events: None,
    ) -> None:
        self._pools = list(pools)
        self._workload = workload
        self._options = options
        self._progress = progress
        self.loop = VirtualLoop(-_SETTLE_S)  # type: ignore[abstract]
        self._rng = np.random.Generator(np.random.Philox(options.seed))
        self.network = Network(self.loop, options.network, self._rng)
        self.recorder = Recorder(self.loop, keeps_events=options.keeps_events)
        self.hosts: list[VirtualHost] = []
        self._invariants: Invariants | None = None
        if options.checks:
            lease_s = max(spec.transfer.lease_s for spec in self._pools)
            self._invariants = Invariants(
                self.network, self.hosts, self.recorder, LeaseMonitor(self.loop, lease_s, _KEYS)
            )
        self._incarnations = itertools.count(1)
        self._transfer_ids = itertools.count(1)
        # The longest of any pool's: a ticket must not be too old for a producer that still waits.
        longest = max((s.transfer for s in self._pools), key=lambda t: t.rendezvous_s + t.lease_s)
        # The wall clock here is the virtual one, which the engines' `unix_epoch_s` of 0 says too.
        tickets = TicketOffice(_KEYS, longest, self._new_transfer_id, self.loop.time)
        self._replicas = [
            _Replica(f"{spec.role}/{rank}", spec)
            for spec in self._pools
            for rank in range(spec.replicas)
        ]
        self.ingresses = [
            VirtualIngress(
                f"ingress/{i}",
                options.router,
                self.network,
                self._invariants.monitor(f"ingress/{i}") if self._invariants else self.recorder,
                tickets=tickets,
                on_lost=self._on_lost,
            )
            for i in range(options.ingresses)
        ]
        self._vocab_size = min(spec.facts.vocab_size for spec in self._pools)
        self._max_model_len = 0
        if self._invariants is not None:
            for ingress in self.ingresses:
                self._invariants.watch(ingress)
        self._num_done = 0
        # What a process does itself, and a frozen one does later.
        self._own_doing = (self._drop_link, self._heal)

    # --- the run -------------------------------------------------------------------------------

    def run(self) -> SimulationResult:
        """Run the workload to its end.

        Raises:
            AssertionError: An invariant is broken.
        """
        started = time.perf_counter()
        try:
            end_s = self.loop.run(self._main())
        except BaseException:
            self._invariants = None
            self.recorder.stop()
            self.loop.abandon()
            raise
        options = self._options
        return SimulationResult(
            workload=self._workload.name,
            policy=options.router.policy,
            num_replicas=len(self._replicas),
            seed=options.seed,
            duration_s=end_s,
            records=self.recorder.records(),
            replicas=[self.recorder.replica_record(host) for host in self.hosts],
            events=self.recorder.events,
            num_events=self.loop.num_events,
            wall_s=time.perf_counter() - started,
        )

    async def _main(self) -> float:
        for replica in self._replicas:
            self._start(replica)
        self._max_model_len = min(h.engine.description.max_model_len for h in self.hosts)
        for ingress in self.ingresses:
            for host in self.hosts:
                ingress.add(host)
        await asyncio.sleep(-self.loop.time())
        self._schedule_faults()
        tasks: list[asyncio.Task[None]] = []
        for i, request in enumerate(self._workload.requests):
            await asyncio.sleep(request.arrival_s - self.loop.time())
            task = self.loop.create_task(self._request(i))
            task.add_done_callback(_raise_failure)
            if self._invariants is not None:
                self._watch_deadline(i, task)
            abort_s = self._options.aborts.get(i)
            if abort_s is not None:
                self.loop.call_later(abort_s, task.cancel)
            tasks.append(task)
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        end_s = self.loop.time()
        if self._invariants is not None:
            await self._drain()
            self._invariants.check_end()
            self._check_requests()
        for host in self.hosts:
            host.finish()
        return end_s

    async def _drain(self) -> None:
        """Let every fault pass, and wait until every engine that runs has given everything back."""
        ends_s = [end_s for fault in self._options.faults.faults for end_s in fault.window]
        await self._sleep_until(max((s for s in ends_s if s != float("inf")), default=0.0))
        warm_up_s = max(spec.timing.warm_up_s() for spec in self._pools)
        await asyncio.sleep(SILENCE_S + self._options.restart_s + warm_up_s + _SETTLE_S)
        deadline_s = self.loop.time() + _DRAIN_S
        while held := self._held():
            assert self.loop.time() < deadline_s, f"still held after {_DRAIN_S:g} s: {held}"
            await asyncio.sleep(_SETTLE_S)
        await asyncio.sleep(_SETTLE_S)

    async def _sleep_until(self, when_s: float) -> None:
        await asyncio.sleep(when_s - self.loop.time())

    def _held(self) -> list[VirtualHost]:
        running = [h for h in self.hosts if h.is_alive and not h.is_frozen]
        return [h for h in running if h.engine.num_live or h.num_open_transfers]

    # --- checks --------------------------------------------------------------------------------

    def _watch_deadline(self, i: int, task: asyncio.Task[None]) -> None:
        timer = self.loop.call_later(self._options.deadline_s, self._hang, i, task)
        task.add_done_callback(lambda _task: timer.cancel())

    def _hang(self, i: int, task: asyncio.Task[None]) -> None:
        """A request has lasted too long: tell who waits for what."""
        assert self._invariants is not None
        ingress = self.ingresses[i % len(self.ingresses)]
        raise AssertionError(
            f"r{i} has lasted {self._options.deadline_s:g} s and waits in {waits_for(task)}; "
            f"it is on {self._invariants.monitor(ingress.name).waits_for(f'r{i}')}; "
            f"{ingress.name} has {ingress.router.num_queued} in its queue and {ingress.pools!r}"
        )

    def _check_requests(self) -> None:
        """Every request ended once, rightly, and with the right tokens."""
        options = self._options
        expectations = Expectations(
            options.router,
            options.faults,
            [r.name for r in self._replicas if r.spec.role != "prefill"],
            min(spec.engine.reservation_timeout_s for spec in self._pools),
            options.aborts,
        )
        records = self.recorder.records()
        assert len(records) == len(self._workload.requests)
        facts = self._pools[0].facts
        for i, record in enumerate(records):
            room = self._max_model_len - record.num_prompt_tokens
            expectations.check(i, record, records, has_room=room > 0)
            if options.models_kv:
                check_tokens(
                    record,
                    self.recorder.outputs[record.request_id],
                    self._workload.prompt(i, self._vocab_size),
                    room,
                    (facts.vocab_size, facts.eos_token_ids),
                )

    # --- requests ------------------------------------------------------------------------------

    async def _request(self, i: int) -> None:
        """One request, from its arrival to its one end."""
        asked = self._workload.requests[i]
        prompt = self._workload.prompt(i, self._vocab_size)
        entry = self.recorder.arrive(i, asked)
        ingress = self.ingresses[i % len(self.ingresses)]
        try:
            room = self._max_model_len - len(prompt)
            if room <= 0:
                raise BadRequestError(
                    f"{len(prompt)} tokens leave no room in {self._max_model_len}", param="prompt"
                )
            request = EngineRequest(
                entry.request_id,
                prompt,
                SamplingParams(
                    max_tokens=min(asked.num_output_tokens, room),
                    temperature=0.0,
                    seed=(i * 0x9E3779B97F4A7C15) & (2**62 - 1),
                    ignore_eos=True,
                ),
            )
            async with contextlib.aclosing(ingress.router.generate(request)) as outputs:
                async for output in outputs:
                    times_s = ingress.client.token_times_s.pop(entry.request_id, None)
                    latency_s = self._options.network.latency_s
                    self.recorder.tokens(entry, output, times_s, latency_s)
        except ServingError as error:
            self.recorder.end(entry, type(error).__name__)
        except asyncio.CancelledError:
            self.recorder.end(entry, ABORTED)
            raise
        else:
            self.recorder.end(entry, OK)
        finally:
            ingress.client.token_times_s.pop(entry.request_id, None)
            if self._invariants is not None:
                self._invariants.monitor(ingress.name).ended(entry.request_id)
            self._num_done += 1
            if not self._num_done % 64:
                self._progress(self.loop.time(), self._num_done, self.loop.num_events)

    def _new_transfer_id(self) -> bytes:
        return next(self._transfer_ids).to_bytes(16, "little")

    # --- replicas ------------------------------------------------------------------------------

    def _start(self, replica: _Replica) -> VirtualHost:
        """Bring up an engine in a replica's place; it is ready at once."""
        spec, options = replica.spec, self._options
        faults = options.faults.for_target(replica.name)
        run_ahead = options.run_ahead and not options.faults.faults and not options.network.jitter_s
        host = VirtualHost(
            name=replica.name,
            role=spec.role,
            incarnation=f"{replica.name.replace('/', '-')}.{next(self._incarnations)}",
            config=msgspec.structs.replace(spec.engine, kv_keys=_KEYS),
            device=VirtualDevice(
                timing=spec.timing,
                facts=spec.facts,
                faults=faults,
                models_kv=options.models_kv,
                run_ahead=run_ahead,
                transfer=spec.transfer,
                seed=options.seed,
            ),
            faults=faults,
            network=self.network,
        )
        replica.host = host
        replica.silent_since_s = None
        replica.at_thaw.clear()
        if faults.is_frozen(self.loop.time()):
            # A freeze that has begun and not ended holds from the start.
            host.freeze()
        self.hosts.append(host)
        self.network.attach(host)
        self.recorder.event("start", replica.name, host.incarnation)
        return host

    def _restart(self, replica: _Replica) -> None:
        self._start(replica)
        for ingress in self.ingresses:
            self.loop.call_later(DISCOVERY_S * self._rng.random(), self._discover, ingress, replica)

    def _discover(self, ingress: VirtualIngress, replica: _Replica) -> None:
        """An ingress looks whether a replica is there."""
        host = replica.host
        if host is None or ingress.client.is_connected(host):
            return
        if host.is_answering:
            ingress.add(host)
        elif host.is_alive:
            self.loop.call_later(DISCOVERY_S, self._discover, ingress, replica)

    def _on_lost(self, ingress: VirtualIngress, incarnation: str) -> None:
        self.recorder.event("lost", ingress.name, incarnation)
        if self._invariants is not None:
            self._invariants.monitor(ingress.name).lost(incarnation)
        for replica in self._replicas:
            if replica.host is not None and replica.host.incarnation == incarnation:
                self.loop.call_later(DISCOVERY_S, self._discover, ingress, replica)

    # --- faults --------------------------------------------------------------------------------

    def _schedule_faults(self) -> None:
        for replica in self._replicas:
            faults = self._options.faults.for_target(replica.name)
            at = functools.partial(self._at, replica)
            for kill_s in faults.kills():
                at(kill_s, self._kill)
            for drop_s in faults.link_drops():
                at(drop_s, self._drop_link)
            for window in faults.freezes():
                at(window.start_s, self._freeze)
                at(window.end_s, self._thaw)
            for window in faults.partitions():
                at(window.start_s, self._fall_silent)
                at(window.end_s, self._heal)

    def _at(self, replica: _Replica, when_s: float, action: Callable[[_Replica], None]) -> None:
        if when_s != float("inf"):
            self.loop.call_at(when_s, self._act, replica, action)

    def _act(self, replica: _Replica, action: Callable[[_Replica], None]) -> None:
        self.recorder.event(action.__name__.strip("_"), replica.name)
        if replica.host is not None and replica.host.is_frozen and action in self._own_doing:
            replica.at_thaw.append(action)
        else:
            action(replica)

    def _kill(self, replica: _Replica) -> None:
        host = replica.host
        if host is None or not host.is_alive:
            return
        host.kill()
        self.network.detach(host)
        replica.host = None
        for ingress in self.ingresses:
            self.loop.call_later(
                self._options.network.latency_s,
                ingress.client.lose,
                host.incarnation,
                "its connection broke",
            )
        self.loop.call_later(
            self._options.restart_s + replica.spec.timing.warm_up_s(), self._restart, replica
        )

    def _drop_link(self, replica: _Replica) -> None:
        if replica.host is not None:
            self.network.break_kv_connections(replica.host)

    def _freeze(self, replica: _Replica) -> None:
        if replica.host is not None:
            replica.host.freeze()
            self._fall_silent(replica)

    def _thaw(self, replica: _Replica) -> None:
        if replica.host is not None:
            replica.host.thaw()
            waiting, replica.at_thaw = replica.at_thaw, []
            for action in waiting:
                action(replica)
            self._speak_again(replica)

    def _heal(self, replica: _Replica) -> None:
        """A partition is over: connections that lived through it break, for frames are missing."""
        if replica.host is not None:
            self._lose_everywhere(replica.host, "its connection broke")
            self._speak_again(replica)

    def _fall_silent(self, replica: _Replica) -> None:
        """From now on nobody hears of it; after a while they give it up."""
        host = replica.host
        if host is not None and replica.silent_since_s is None:
            replica.silent_since_s = self.loop.time()
            self.loop.call_later(SILENCE_S, self._give_up, replica, host, replica.silent_since_s)

    def _speak_again(self, replica: _Replica) -> None:
        if replica.host is not None and replica.host.is_answering:
            replica.silent_since_s = None

    def _give_up(self, replica: _Replica, host: VirtualHost, since_s: float) -> None:
        if replica.host is not host or replica.silent_since_s != since_s:
            return
        self._lose_everywhere(host, f"it sent nothing for {SILENCE_S:g} s")
        if host.is_frozen:
            # The heartbeats of its KV connections have stopped as well.
            self.network.break_kv_connections(host)

    def _lose_everywhere(self, host: VirtualHost, reason: str) -> None:
        for ingress in self.ingresses:
            ingress.client.lose(host.incarnation, reason)


def _raise_failure(task: asyncio.Task[None]) -> None:
    """Let what a request raised by mistake end the run at once, not when it is awaited."""
    if not task.cancelled():
        task.result()

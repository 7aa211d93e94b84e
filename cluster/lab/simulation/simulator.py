"""A whole cluster under a virtual clock: workload in, records out, the same for the same seed.

Owns the run: its requests and its random numbers. The deciding code is the production's: fleet,
router, slot queue, placement and pool state, engine server and core, scheduler, block pool, KV
transfer. The simulator models the device's time (`replicas.generators.simulated`), the network
(`network`), and Ray Serve's restarts and discovery (`simulated_replicas`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import TYPE_CHECKING

import numpy as np

from cluster.errors import BadRequestError, ServingError
from cluster.lab.simulation.clocks import WallClocks
from cluster.lab.simulation.ingresses import Ingresses, raise_failure
from cluster.lab.simulation.invariants import Expectations, Invariants, check_tokens, describe_wait
from cluster.lab.simulation.loop import VirtualLoop
from cluster.lab.simulation.monitors import LeaseMonitor
from cluster.lab.simulation.network import Network
from cluster.lab.simulation.options import PLAIN
from cluster.lab.simulation.recorder import Recorder
from cluster.lab.simulation.records import ABORTED, INGRESS_LOST, NO_INGRESS, OK, SimulationResult
from cluster.lab.simulation.scaling import ScalingLoop
from cluster.lab.simulation.simulated_replicas import KEYS, SimulatedReplicas
from cluster.lab.simulation.waits import wait_limits
from replicas.dealer import SILENCE_S
from replicas.faults import INGRESS
from replicas.messages import EngineRequest, TokenOutput, Utility
from replicas.sampling_params import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from cluster.lab.simulation.host import VirtualHost
    from cluster.lab.simulation.ingress import VirtualIngress
    from cluster.lab.simulation.options import PlannedPause, PoolSpec, SimulationOptions
    from cluster.lab.simulation.scaling import Scaler
    from cluster.lab.workloads.request import Workload

_SETTLE_S = 1.0
"""Virtual time before zero in which ingresses connect to engines."""
_RESUME_S = 1.0
"""Virtual time between two attempts to end a pause."""
_DRAIN_S = 300.0
"""Virtual time after the last request within which all slots, blocks and transfers must be free."""


class Simulation:
    """One run of a simulated cluster.

    Args:
        progress: Called now and then with (virtual seconds, requests done, events).
        scaler: Decides the numbers of replicas; None keeps the pools' own.
    """

    def __init__(
        self,
        pools: Sequence[PoolSpec],
        workload: Workload,
        options: SimulationOptions,
        progress: Callable[[float, int, int], None] = lambda _now_s, _done, _events: None,
        scaler: Scaler | None = None,
    ) -> None:
        self._pools = list(pools)
        self._workload = workload
        self._options = options
        self._progress = progress
        self.loop = VirtualLoop(-_SETTLE_S)  # type: ignore[abstract]
        self._rng = np.random.Generator(np.random.Philox(options.seed))
        self.network = Network(self.loop, options.network, self._rng)
        self.recorder = Recorder(self.loop, keeps_events=options.keeps_events)
        self.replicas = SimulatedReplicas(
            self._pools,
            options,
            self.network,
            self.recorder,
            lambda incarnation, reason: self.ingresses.lose(incarnation, reason),  # noqa: PLW0108
            lambda incarnation: self.ingresses.mark_unresponsive(incarnation),  # noqa: PLW0108 - not made yet
        )
        # Use the longest of all pools: a ticket must be valid while its producer still waits.
        longest = max((s.transfer for s in self._pools), key=lambda t: t.rendezvous_s + t.lease_s)
        self._wait_limits = wait_limits(options.router, self._pools)
        self._invariants: Invariants | None = None
        if options.checks:
            lease_s = max(spec.transfer.lease_s for spec in self._pools)
            self._invariants = Invariants(
                self.network,
                self.replicas.hosts,
                self.recorder,
                LeaseMonitor(self.loop, lease_s, KEYS),
                self._wait_limits,
                WallClocks(options.faults, self._names, longest.rendezvous_s + longest.lease_s),
            )
        self.ingresses = Ingresses(
            options, self.network, self.recorder, self.replicas, longest, self._invariants
        )
        self._scaling: ScalingLoop | None = None
        if scaler is not None:
            self._scaling = ScalingLoop(scaler, self.replicas, self.ingresses, self.loop)
        self._vocab_size = min(spec.facts.vocab_size for spec in self._pools)
        self._max_model_len = 0
        # The ingress of each request, by the request's number.
        self._taken: dict[int, VirtualIngress] = {}
        self._num_done = 0
        self._call_ids = itertools.count(1)

    @property
    def _names(self) -> list[str]:
        """Every replica and ingress, as in a fault plan."""
        return [*self.replicas.names, *(f"{INGRESS}/{i}" for i in range(self._options.ingresses))]

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
            num_replicas=len(self.replicas.names),
            replica_seconds=self.replicas.replica_seconds(end_s),
            seed=options.seed,
            duration_s=end_s,
            records=self.recorder.records(),
            replicas=[self.recorder.replica_record(host) for host in self.replicas.hosts],
            events=self.recorder.events,
            num_events=self.loop.num_events,
            wall_s=time.perf_counter() - started,
        )

    async def _main(self) -> float:
        self.replicas.start()
        hosts = self.replicas.hosts
        self._max_model_len = min(h.engine.description.max_model_len for h in hosts)
        self.ingresses.start()
        await asyncio.sleep(-self.loop.time())
        self.replicas.schedule_faults()
        self.ingresses.schedule_faults()
        if self._scaling is not None:
            self._scaling.start()
        operators = [self._start(self._pause(pause)) for pause in self._options.pauses]
        tasks: list[asyncio.Task[None]] = []
        for i, request in enumerate(self._workload.requests):
            await asyncio.sleep(request.arrival_s - self.loop.time())
            task = self._start(self._request(i))
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
        for operator in operators:
            operator.cancel()
        for host in hosts:
            host.finish()
        alive = self.ingresses.alive
        left = [task for ingress in alive for task in ingress.tasks]
        for ingress in alive:
            ingress.die()
        await asyncio.gather(*left, return_exceptions=True)
        return end_s

    def _start(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start a task whose unexpected exception ends the run."""
        task = self.loop.create_task(coroutine)
        task.add_done_callback(raise_failure)
        return task

    async def _drain(self) -> None:
        """Wait until all faults are over, engines hold nothing, and every place has a replica."""
        ends_s = [end_s for fault in self._options.faults.faults for end_s in fault.window]
        ends_s += [pause.at_s + pause.duration_s for pause in self._options.pauses]
        last_s = max((s for s in ends_s if s != float("inf")), default=0.0)
        await asyncio.sleep(last_s - self.loop.time())
        warm_up_s = max(spec.timing.warm_up_s() for spec in self._pools)
        await asyncio.sleep(SILENCE_S + self._options.restart_s + warm_up_s + _SETTLE_S)
        # A hung engine holds its resources until its parent ends it.
        drain_s = _DRAIN_S + max(spec.step_timeout_s for spec in self._pools)
        deadline_s = self.loop.time() + drain_s
        while (held := self._held()) or self.replicas.unsettled:
            assert self.loop.time() < deadline_s, (
                f"after {drain_s:g} s, engines that still hold something: {held}; "
                f"places without a replica: {self.replicas.unsettled}"
            )
            await asyncio.sleep(_SETTLE_S)
        await asyncio.sleep(_SETTLE_S)

    def _held(self) -> list[VirtualHost]:
        running = [h for h in self.replicas.hosts if h.is_alive and not h.is_frozen]
        # A hung engine has not read its inbox yet.
        return [
            h for h in running if h.engine.num_live or h.num_open_transfers or not h.inbox.is_empty
        ]

    # --- checks --------------------------------------------------------------------------------

    def _watch_deadline(self, i: int, task: asyncio.Task[None]) -> None:
        timer = self.loop.call_later(self._options.deadline_s, self._hang, i, task)
        task.add_done_callback(lambda _task: timer.cancel())

    def _hang(self, i: int, task: asyncio.Task[None]) -> None:
        """Fail the run because a request lasts too long; report its state."""
        assert self._invariants is not None
        ingress = self._taken[i]
        raise AssertionError(
            f"r{i} has lasted {self._options.deadline_s:g} s and waits in {describe_wait(task)}; "
            f"it is on {self._invariants.monitor(ingress.name).describe_wait(f'r{i}')}; "
            f"{ingress.name} has {ingress.router.queue!r} and {ingress.fleet!r}"
        )

    def _check_requests(self) -> None:
        """Check that every request ended once, with an allowed outcome and the right tokens."""
        options = self._options
        expectations = Expectations(options, self._pools, self._wait_limits)
        records = self.recorder.records()
        assert len(records) == len(self._workload.requests)
        facts = self._pools[0].facts
        for i, record in enumerate(records):
            variant = options.variants.get(i, PLAIN)
            room = self._max_model_len - record.num_prompt_tokens
            expectations.check(i, record, records, has_room=room > 0)
            if options.models_kv:
                check_tokens(
                    record,
                    self.recorder.outputs[record.request_id],
                    self._workload.prompt(i, self._vocab_size),
                    room,
                    (facts.vocab_size, facts.eos_token_ids),
                    variant,
                    _seed(i),
                    is_cut=record.request_id in self.recorder.cut,
                )

    # --- pauses --------------------------------------------------------------------------------

    async def _pause(self, pause: PlannedPause) -> None:
        """Pause an engine for a while; then resume it until the end of the run.

        Once is not enough: the engine may read the pause late, as when it is frozen.
        """
        await asyncio.sleep(pause.at_s - self.loop.time())
        hosts = [h for h in self.replicas.hosts if h.name == pause.target and h.is_alive]
        for host in hosts:
            self._call(host, "pause", pause.mode)
        await asyncio.sleep(pause.duration_s)
        while hosts := [host for host in hosts if host.is_alive]:
            for host in hosts:
                if host.engine.is_paused:
                    self._call(host, "resume")
            await asyncio.sleep(_RESUME_S)

    def _call(self, host: VirtualHost, method: str, *args: object) -> None:
        """Call an engine through the first ingress that is connected to it."""
        self.recorder.event(method, host.name, *map(str, args))
        for ingress in self.ingresses.alive:
            if host.incarnation in ingress.fleet.client.incarnations:
                message = Utility(next(self._call_ids), method, [*args])
                ingress.fleet.client.send(host.incarnation, message)
                return

    # --- requests ------------------------------------------------------------------------------

    async def _request(self, i: int) -> None:
        """Run one request from its arrival to its end."""
        variant = self._options.variants.get(i, PLAIN)
        entry = self.recorder.arrive(i, self._workload.requests[i], variant)
        ingress = self.ingresses.take(i)
        if ingress is None:
            self.recorder.end(entry, NO_INGRESS)
            return
        self._taken[i] = ingress
        task = asyncio.current_task()
        assert task is not None
        ingress.run(task)
        if self._invariants is not None:
            self._invariants.monitor(ingress.name).began(entry.request_id)
        try:
            request = self._engine_request(i, entry.request_id)

            async def emit(output: TokenOutput) -> bool:
                choice = entry.request_id, output.choice
                times_s = ingress.fleet.client.token_times_s.pop(choice, None)
                latency_s = self._options.network.latency_s
                return self.recorder.tokens(entry, output, times_s, latency_s)

            await ingress.router.run(request, emit)
        except ServingError as error:
            self.recorder.end(entry, type(error).__name__)
        except asyncio.CancelledError:
            self.recorder.end(entry, ABORTED if ingress.is_alive else INGRESS_LOST)
            raise
        else:
            self.recorder.end(entry, OK)
        finally:
            for number in range(variant.num_choices):
                ingress.fleet.client.token_times_s.pop((entry.request_id, number), None)
            if self._invariants is not None:
                self._invariants.monitor(ingress.name).ended(entry.request_id)
            self._num_done += 1
            if not self._num_done % 64:
                self._progress(self.loop.time(), self._num_done, self.loop.num_events)

    def _engine_request(self, i: int, request_id: str) -> EngineRequest:
        prompt = self._workload.prompt(i, self._vocab_size)
        room = self._max_model_len - len(prompt)
        if room <= 0:
            raise BadRequestError(
                f"{len(prompt)} tokens leave no room in {self._max_model_len}", param="prompt"
            )
        variant, grammar = self._options.variants.get(i, PLAIN), None
        if variant.grammar is not None:
            grammar = StructuredOutputs(regex=f"[a-z]{{{variant.grammar}}}")
        sampling = SamplingParams(
            max_tokens=min(self._workload.requests[i].num_output_tokens, room),
            temperature=0.0 if variant.num_choices == 1 else 1.0,
            seed=_seed(i),
            ignore_eos=True,
            stop_token_ids=frozenset(variant.stop_token_ids),
            n=variant.num_choices,
            structured_outputs=grammar,
        )
        return EngineRequest(
            request_id,
            prompt,
            sampling,
            priority=variant.priority,
            tenant=self._workload.requests[i].tenant,
        )


def _seed(number: int) -> int:
    """Return the seed of the request of a number."""
    return (number * 0x9E3779B97F4A7C15) & (2**62 - 1)

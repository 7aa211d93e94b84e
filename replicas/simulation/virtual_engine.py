"""Engine under a virtual clock: the production core and server on a modelled device.

For simulators. It starts no thread, opens no socket and never sleeps: the simulator advances the
time, delivers messages and collects frames. A turn is one iteration of the engine process's loop:
`begin_turn` computes when it will be over, `end_turn` returns its frames. A turn that serves KV
transfers has two halves: after the forward pass `continue_turn` returns the frames with its tokens,
and only then KV is copied.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kv_transfer.config import TransferConfig
from replicas.engine.core import EngineCore
from replicas.engine.facts import connector_settings, model_facts
from replicas.engine.step import ModelFacts as ModelFacts  # noqa: TC001 - part of the surface
from replicas.engine_process.server import EngineServer, describe, gather_s
from replicas.generators.model_config import load_hf_config
from replicas.generators.simulated.profiles import CAPABILITIES
from replicas.messages import EngineFrame
from replicas.simulation.virtual_worker import MIN_TURN_S, StepClock, VirtualWorker
from replicas.simulation.virtual_worker import Chances as Chances  # part of the surface

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.connector import TransportFactory
    from replicas.config import EngineConfig, Role
    from replicas.engine.core import StepUnderWay
    from replicas.engine_process.server import Frames
    from replicas.generators.simulated.device import Slowdown
    from replicas.generators.simulated.timing import StepTiming
    from replicas.messages import ClientMessage, EngineMetrics, EngineSnapshot, KVEventBatch


class VirtualTurn(NamedTuple):
    """A turn that has begun.

    Attributes:
        started_s: Time at which it began.
        end_times_s: Times at which its passes end; empty if there was nothing to do.
        step: The step that it computes, with a pass for each end time; None once collected.
        spent_s: Seconds of the turn before its step began.
    """

    started_s: float
    end_times_s: list[float]
    step: StepUnderWay | None = None
    spent_s: float = 0.0

    @property
    def is_half(self) -> bool:
        """Whether this is the first half of a step with transfers; `continue_turn` follows."""
        return self.step is not None and self.step.meta is not None


@dataclass(frozen=True, kw_only=True)
class VirtualDevice:
    """Model of the device that a virtual engine runs on.

    Attributes:
        timing: Durations of steps.
        facts: Properties of the modelled device and the served model.
        faults: Its faults over time.
        models_kv: Whether KV rows are stored and read, see `VirtualWorker`.
        run_ahead: Whether decode steps without a decision between them form one turn: the same
            results in less time. Not for a device whose faults change.
        transfer: Deadlines and sizes of KV transfers.
        seed: Seed of the jitter, and of what has `chances`.
        chances: See `VirtualWorker`.
    """

    timing: StepTiming
    facts: ModelFacts
    faults: Slowdown
    models_kv: bool
    run_ahead: bool
    transfer: TransferConfig = field(default_factory=TransferConfig)
    seed: int = 0
    chances: Chances = field(default_factory=Chances)


def simulated_facts(config: EngineConfig) -> ModelFacts:
    """Return the facts that a real engine on this simulated mesh would start with.

    Raises:
        ConfigError: The model folder is unusable or the mesh is impossible; gives the numbers.
    """
    assert config.simulated_mesh is not None
    return model_facts(config, load_hf_config(config.model), CAPABILITIES)


class VirtualEngine:
    """Engine core and server driven by a simulator's clock.

    Args:
        config: The engine's configuration.
        device: Model of its device.
        incarnation: Id of this start of the engine.
        make_transport: Factory of its KV transport.
        notify: Called when a turn is due without a message.
        unix_now_s: Wall clock for the expiry of tickets.

    Raises:
        ConfigError: The configuration and the device do not fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: VirtualDevice,
        incarnation: str,
        make_transport: TransportFactory,
        notify: Callable[[], None],
        unix_now_s: Callable[[], float],
    ) -> None:
        clock = self._clock = StepClock()
        settings = msgspec.structs.replace(
            connector_settings(config, incarnation, unix_now_s, clock.now_s), config=device.transfer
        )
        self._timing = device.timing
        mesh = config.simulated_mesh
        # A step of several passes is one turn then; otherwise a turn may end after any pass.
        self._has_long_steps = config.num_scheduler_steps > 1
        # Whether a message since the last turn may require a new snapshot for clients.
        self._has_changed = False
        self._worker = VirtualWorker(
            config=config,
            timing=device.timing,
            facts=device.facts,
            clock=clock,
            faults=device.faults,
            models_kv=device.models_kv,
            seed=device.seed,
            chances=device.chances,
            settings=settings,
            make_transport=make_transport,
            notify=notify,
        )
        # A turn of many passes is planned before it is known whether a row fails in one of them.
        is_certain = not (mesh and mesh.jitter) and not device.chances.failed_row
        max_passes = sys.maxsize if device.run_ahead and is_certain else 1
        self._core = EngineCore(
            config, _OneWorker(self._worker), incarnation, unix_now_s, max_passes=max_passes
        )
        self._incarnation = incarnation
        self._server = EngineServer(self._core, incarnation)
        self.description = describe(self._core, incarnation, "", "", 0)

    def __repr__(self) -> str:
        return f"VirtualEngine({self._core!r})"

    def handle_message(self, client: bytes, message: ClientMessage, now_s: float) -> None:
        """Process one client message."""
        self._has_changed = True
        self._server.take(client, message, now_s)

    def client_gone(self, client: bytes) -> None:
        """Drop a client and all of its requests."""
        self._has_changed = True
        self._server.client_gone(client)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._has_changed = True
        self._core.role_state.end()

    def change_role(self, role: Role) -> None:
        """Change the role once the present requests are done."""
        self._has_changed = True
        self._core.role_state.change(role)

    def hand_over(self) -> None:
        """Ask clients to move their requests to other engines."""
        self._has_changed = True
        self._core.role_state.hand_over()

    def gather_s(self, message: ClientMessage) -> float:
        """Return how long an idle engine waits for more messages after this one."""
        return gather_s(self._core.config, message)

    @property
    def is_drained(self) -> bool:
        """Whether the engine is draining and has no requests left."""
        return self._server.is_drained

    def begin_turn(self, now_s: float) -> VirtualTurn:
        """Begin a turn; until its `end_turn`, only calls that change nothing are allowed."""
        self._clock.start(now_s)
        self._core.watchdog.work(now_s)
        step = self._core.begin_step(now_s)
        has_changed, self._has_changed = self._has_changed, False
        batch, spent_s = step.batch, self._clock.spent_s
        if batch is None:
            if step.meta is not None and spent_s:
                return VirtualTurn(now_s, [self._end_s(now_s, spent_s, 0)], step, spent_s)
            # Moving KV takes time even if nothing runs and no transfer ends.
            if not self._core.end_step(step, now_s) and not self._clock.spent_s:
                return VirtualTurn(now_s, [])
            return VirtualTurn(now_s, [self._end_s(now_s, self._clock.spent_s, 0)])
        # After a change, clients get a snapshot after the first pass, as from an engine process: do
        # not make others then.
        has_turns = batch.num_passes > 1 and not self._has_long_steps
        if has_turns and step.brings_tokens_alone and not has_changed:
            host_s = self._host_s(len(batch.slots))
            ends_s = self._worker.plan_turns(host_s, is_ahead=self._core.runs_ahead)
        else:
            ends_s = [self._end_s(now_s, spent_s + self._worker.wait_s(), len(batch.slots))]
        return VirtualTurn(now_s, ends_s, step, spent_s)

    def continue_turn(self, turn: VirtualTurn, now_s: float) -> tuple[VirtualTurn, Frames]:
        """Begin the second half of a turn whose first half is over.

        Returns:
            The second half, and the frames to send before it.
        """
        assert turn.step is not None
        self._collect(turn, 1)
        frames = self._server.frames(now_s)
        # Messages that arrive while the device works are handled right after it.
        self._clock.start(now_s)
        self._core.end_step(turn.step, now_s)
        return VirtualTurn(now_s, [now_s + self._clock.spent_s]), frames

    def end_turn(self, turn: VirtualTurn, num_passes: int, now_s: float) -> Frames:
        """End a turn after `num_passes` of its passes; return the frames to send now."""
        if turn.step is not None:
            self._collect(turn, num_passes)
        self._core.watchdog.rest(now_s)
        return self._server.frames(now_s)

    def present_s(self) -> float:
        """Return the virtual time inside a running `begin_turn`."""
        return self._clock.now_s()

    def next_deadline_s(self) -> float | None:
        """Return the time of the next turn that is due without a message, or None.

        A worker process that has compiled a grammar wakes its engine.
        """
        moments_s = (self._server.next_deadline_s(), self._worker.next_prepared_s)
        return min((at_s for at_s in moments_s if at_s is not None), default=None)

    def stalls_at_s(self) -> float | None:
        """Return when the current turn will count as stalled, or None; see `Watchdog`."""
        return self._core.watchdog.stalls_at_s()

    def heartbeat(self, now_s: float) -> EngineFrame:
        """Return the heartbeat that an engine process would send now, even during a step."""
        return EngineFrame(self._incarnation, stalled_s=self._core.watchdog.stalled_s(now_s))

    def snapshot(self) -> EngineSnapshot:
        """Return a snapshot of the engine's free capacity."""
        return self._core.snapshot(0)

    def listing(self) -> list[KVEventBatch]:
        """Return a listing of the engine's prefix caches."""
        return self._core.prefix_feed.listing()

    def metrics(self, now_s: float) -> EngineMetrics:
        """Return every counter of the engine."""
        return self._core.metrics(now_s)

    @property
    def clients(self) -> list[bytes]:
        """Connected clients, and others that still have requests here."""
        return self._server.clients

    @property
    def role(self) -> Role:
        """Its role; during a change still the old one."""
        return self._core.role_state.role

    @property
    def is_paused(self) -> bool:
        """Whether it admits no queued request until it is resumed."""
        return self._core.is_paused

    @property
    def num_live(self) -> int:
        """Number of requests that run, wait, or still have blocks lent to another engine."""
        return self._core.num_live

    def choices(self, client: bytes, request_id: str) -> list[int]:
        """Return the choices of a client's request that have not ended."""
        return self._core.choices(client, request_id)

    def check_invariants(self) -> None:
        """Check the core's invariants; see `EngineCore.check_invariants`."""
        self._core.check_invariants()

    def _collect(self, turn: VirtualTurn, num_passes: int) -> None:
        """Collect a step after so many passes, as if the host had just begun to wait for it."""
        assert turn.step is not None
        if num_passes == 1:
            self._clock.start(turn.started_s)
            self._clock.spend(turn.spent_s)
        else:
            # The host may submit the next step when it begins to wait for the last of these.
            self._clock.start(turn.end_times_s[num_passes - 2])
        self._worker.stop_after(num_passes)
        self._core.collect_step(turn.step, None if self._has_long_steps else num_passes)

    def _end_s(self, now_s: float, spent_s: float, num_rows: int) -> float:
        """Return the end of a turn of one step that begins now."""
        return now_s + max(spent_s + self._host_s(num_rows), MIN_TURN_S)

    def _host_s(self, num_rows: int) -> float:
        return self._timing.host_s + num_rows * self._timing.host_row_s


class _OneWorker:
    """`Executor` of one existing worker."""

    def __init__(self, worker: VirtualWorker) -> None:
        self._worker = worker

    def collective_rpc(self, method: str, *args: object) -> list[Any]:
        """Call a method of the worker; return its result in a list of one."""
        return [getattr(self._worker, method)(*args)]

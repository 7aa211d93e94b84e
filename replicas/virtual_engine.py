"""One engine under a virtual clock: the production core and server on a device that is a model.

For simulators. It starts no thread, opens no socket and sleeps for nobody: whoever drives it says
what time it is, brings messages and takes frames. A turn is one step of the engine process's loop:
`begin` tells when it will be over, `end` what came of it. One that serves KV transfers has two
halves: after the forward pass `go_on` gives the frames with its tokens, and only then KV is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kv_transfer.config import TransferConfig
from replicas.engine.core import EngineCore
from replicas.engine.facts import connector_settings, model_facts
from replicas.engine.inbox import gather_s
from replicas.engine.server import EngineServer, describe
from replicas.engine.step import ModelFacts as ModelFacts  # noqa: TC001 - part of the surface
from replicas.engine.virtual_worker import MIN_TURN_S, StepClock, VirtualWorker
from replicas.generators.model_config import load_hf_config
from replicas.generators.simulated.profiles import CAPABILITIES
from replicas.messages import EngineFrame

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.connector import TransportFactory
    from replicas.config import EngineConfig, Role
    from replicas.engine.core import StepUnderWay
    from replicas.engine.server import Frames
    from replicas.generators.simulated.device import Slowdown
    from replicas.generators.simulated.timing import StepTiming
    from replicas.messages import ClientMessage, EngineMetrics, EngineSnapshot, KVEventBatch


class Turn(NamedTuple):
    """A turn that has begun.

    Attributes:
        started_s: When it began.
        end_times_s: When each of its steps is over; empty: there was nothing to do.
        step: What it computes, and repeats if it has several steps; None where it is collected.
        spent_s: What of the turn was over when its step had begun.
    """

    started_s: float
    end_times_s: list[float]
    step: StepUnderWay | None = None
    spent_s: float = 0.0

    @property
    def is_half(self) -> bool:
        """Whether this is the first half of a step with transfers: `go_on` when it is over."""
        return self.step is not None and self.step.meta is not None


@dataclass(frozen=True, kw_only=True)
class VirtualDevice:
    """What an engine runs on.

    Attributes:
        timing: What steps cost.
        facts: What the modelled device and the served model are.
        faults: What is wrong with it, and when.
        models_kv: Whether KV rows are kept and read, see `VirtualWorker`.
        run_ahead: Whether decode steps without a decision between them make one turn. The same
            results, sooner; not for a device whose faults change.
        transfer: Deadlines and sizes of KV transfers.
        seed: Of the jitter.
    """

    timing: StepTiming
    facts: ModelFacts
    faults: Slowdown
    models_kv: bool
    run_ahead: bool
    transfer: TransferConfig = field(default_factory=TransferConfig)
    seed: int = 0


def simulated_facts(config: EngineConfig) -> ModelFacts:
    """What the core of a real engine on this simulated mesh would be told at its start.

    Raises:
        ConfigError: The model folder is not usable, or the mesh cannot be; says the numbers.
    """
    assert config.simulated_mesh is not None
    return model_facts(config, load_hf_config(config.model), CAPABILITIES)


class VirtualEngine:
    """See the module docstring.

    Args:
        config: The engine's configuration.
        device: What it runs on.
        incarnation: Id of this start.
        make_transport: Makes its KV transport.
        notify: Called when a turn is due although no message came.
        unix_now_s: The wall clock that tickets expire by.

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
        self._run_ahead = device.run_ahead and not (mesh is not None and mesh.jitter)
        # Whether a client's message may have changed what clients are to be told.
        self._has_changed = False
        self._worker = VirtualWorker(
            config=config,
            timing=device.timing,
            facts=device.facts,
            clock=clock,
            faults=device.faults,
            models_kv=device.models_kv,
            seed=device.seed,
            settings=settings,
            make_transport=make_transport,
            notify=notify,
        )
        self._core = EngineCore(config, _OneWorker(self._worker), incarnation, unix_now_s)
        self._incarnation = incarnation
        self._server = EngineServer(self._core, incarnation)
        self.description = describe(self._core, incarnation, "", "", 0)

    def __repr__(self) -> str:
        return f"VirtualEngine({self._core!r})"

    def take(self, client: bytes, message: ClientMessage, now_s: float) -> None:
        """Take one client message."""
        self._has_changed = True
        self._server.take(client, message, now_s)

    def client_gone(self, client: bytes) -> None:
        """Drop a client and all that it asked for."""
        self._has_changed = True
        self._server.client_gone(client)

    def drain(self) -> None:
        """Take nothing new from now on."""
        self._has_changed = True
        self._server.drain()

    def change_role(self, role: Role) -> None:
        """Take another role once nothing is left of this one."""
        self._has_changed = True
        self._server.change_role(role)

    def hand_over(self) -> None:
        """Ask clients to go elsewhere with what they have here."""
        self._has_changed = True
        self._server.hand_over()

    def gather_s(self, message: ClientMessage) -> float:
        """How long it waits, when idle, for more messages like this one."""
        return gather_s(self._core.config, message)

    @property
    def is_drained(self) -> bool:
        """See `EngineServer.is_drained`."""
        return self._server.is_drained

    def begin(self, now_s: float) -> Turn:
        """Begin a turn; no other call but views until its `end`."""
        self._clock.start(now_s)
        self._core.pulse.work(now_s)
        step = self._core.begin_step(now_s)
        has_changed, self._has_changed = self._has_changed, False
        batch, spent_s = step.batch, self._clock.spent_s
        if batch is None:
            if step.meta is not None and spent_s:
                return Turn(now_s, [self._end_s(now_s, spent_s, 0)], step, spent_s)
            # Moving KV takes time, even where nothing runs and no transfer ends.
            if not self._core.end_step(step, now_s) and not self._clock.spent_s:
                return Turn(now_s, [])
            return Turn(now_s, [self._end_s(now_s, self._clock.spent_s, 0)])
        # What has changed must be told after the first step, as an engine process does.
        is_told = not (has_changed or batch.new or batch.appended_blocks)
        num_steps = self._core.num_repeats(step) if self._run_ahead and is_told else 1
        if num_steps > 1:
            host_s, is_ahead = self._host_s(len(batch.slots)), self._core.runs_ahead
            ends_s = self._worker.end_times_s(batch, num_steps, host_s, is_ahead=is_ahead)
        else:
            ends_s = [self._end_s(now_s, spent_s + self._worker.wait_s(), len(batch.slots))]
        return Turn(now_s, ends_s, step, spent_s)

    def go_on(self, turn: Turn, now_s: float) -> tuple[Turn, Frames]:
        """Begin the second half of a turn whose first half is over.

        Returns:
            The second half, and the frames that are to be sent before it.
        """
        assert turn.step is not None
        self._collect(turn, 1)
        frames = self._server.frames(now_s)
        # What arrives while the device works is seen right after it.
        self._clock.start(now_s)
        self._core.end_step(turn.step, now_s)
        return Turn(now_s, [now_s + self._clock.spent_s]), frames

    def end(self, turn: Turn, num_steps: int, now_s: float) -> Frames:
        """End a turn after `num_steps` of its steps; the frames that are to be sent now."""
        if turn.step is not None:
            self._collect(turn, num_steps)
        self._core.pulse.rest(now_s)
        return self._server.frames(now_s)

    def present_s(self) -> float:
        """Virtual time while `begin` runs, some way into the turn."""
        return self._clock.now_s()

    def next_deadline_s(self) -> float | None:
        """When a turn is due although nothing comes."""
        return self._server.next_deadline_s()

    def stalls_at_s(self) -> float | None:
        """When the turn that has begun counts as stalled, if it does not end; see `Pulse`."""
        return self._core.pulse.stalls_at_s()

    def heartbeat(self, now_s: float) -> EngineFrame:
        """The heartbeat that an engine sends now, whatever its core does."""
        return EngineFrame(self._incarnation, stalled_s=self._core.pulse.stalled_s(now_s))

    def snapshot(self) -> EngineSnapshot:
        """What it has left now."""
        return self._core.snapshot(0)

    def listing(self) -> list[KVEventBatch]:
        """What its prefix caches hold now."""
        return self._core.prefix_feed.listing()

    def metrics(self, now_s: float) -> EngineMetrics:
        """Every counter."""
        return self._core.metrics(now_s)

    @property
    def clients(self) -> list[bytes]:
        """Whoever it serves, and whoever it still has a request of."""
        return self._server.clients

    @property
    def role(self) -> Role:
        """What it takes; while it changes that, what it took."""
        return self._core.duty.role

    @property
    def num_live(self) -> int:
        """Requests that run, wait, or still have blocks lent to another engine."""
        return self._core.num_live

    def check_invariants(self) -> None:
        """See `EngineCore.check_invariants`."""
        self._core.check_invariants()

    def _collect(self, turn: Turn, num_steps: int) -> None:
        """Collect a turn's step after so many times, as if its host had begun to wait just now."""
        assert turn.step is not None
        if num_steps == 1:
            self._clock.start(turn.started_s)
            self._clock.spend(turn.spent_s)
        else:
            assert turn.step.batch is not None
            # The next step may be submitted as early as the last of these was waited for.
            self._clock.start(turn.end_times_s[num_steps - 2])
            self._worker.repeat(turn.step.batch, num_steps - 1)
        self._core.collect_step(turn.step, num_steps)

    def _end_s(self, now_s: float, spent_s: float, num_rows: int) -> float:
        """When a turn of one step is over that began now."""
        return now_s + max(spent_s + self._host_s(num_rows), MIN_TURN_S)

    def _host_s(self, num_rows: int) -> float:
        return self._timing.host_s + num_rows * self._timing.host_row_s


class _OneWorker:
    """An `Executor` of one worker that exists already."""

    def __init__(self, worker: VirtualWorker) -> None:
        self._worker = worker

    def collective_rpc(self, method: str, *args: object) -> list[Any]:
        """See `Executor`."""
        return [getattr(self._worker, method)(*args)]

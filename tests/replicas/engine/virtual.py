"""Engine cores over a real and over a virtual worker, both on a clock that only counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from kv_transfer.p2p import P2PConnector
from kv_transfer.p2p_worker import P2PConnectorWorker
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.engine.facts import connector_settings
from replicas.faults import NO_FAULTS
from replicas.generators.simulated.profiles import engine_timing
from replicas.messages import (
    Abort,
    Accepted,
    Activate,
    AddRequest,
    EngineRequest,
    KVLoaded,
    LoadKV,
    TokenOutput,
)
from replicas.platforms import simulated
from replicas.simulation.virtual_engine import simulated_facts
from replicas.simulation.virtual_worker import DEFAULT_CHANCES, Chances, VirtualWorker
from tests.engines import take_events
from tests.kv_transfer.virtual_wire import Net, Wire
from tests.replicas.engine.fakes import KEYS
from tests.replicas.engine.pair import seal_ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from kv_transfer.connector import ConnectorSettings
    from replicas.config import EngineConfig
    from replicas.engine.step import ModelFacts
    from replicas.faults import ReplicaFaults
    from replicas.generators.simulated.timing import StepTiming
    from replicas.sampling_params import SamplingParams

CLIENT = b"client"


class CountingClock:
    """A device clock without waits, which adds up the spent time."""

    def __init__(self) -> None:
        self.spent: list[float] = []
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def spend(self, seconds: float) -> None:
        if seconds:
            self.spent.append(seconds)
            self._now_s += seconds


class OneWorker:
    """An executor of a worker that exists."""

    def __init__(self, worker: VirtualWorker) -> None:
        self.worker = worker

    def collective_rpc(self, method: str, *args: object) -> list[Any]:
        return [getattr(self.worker, method)(*args)]


class LoopConnector(P2PConnector):
    """The production's connector over a test's network instead of sockets."""

    net: ClassVar[Net]

    def create_worker(
        self, settings: ConnectorSettings, notify: Callable[[], None]
    ) -> P2PConnectorWorker:
        return P2PConnectorWorker(settings, notify, Wire(self.net, settings.incarnation).make)


LOOP = f"{__name__}:LoopConnector"


def virtual_worker(
    config: EngineConfig,
    clock: Any,
    *,
    timing: StepTiming | None = None,
    facts: ModelFacts | None = None,
    models_kv: bool = True,
    faults: ReplicaFaults = NO_FAULTS,
    net: Net | None = None,
    name: str = "engine",
    chances: Chances = DEFAULT_CHANCES,
) -> VirtualWorker:
    """A virtual worker; of the mesh that `config` asks for unless told otherwise."""
    mesh = config.simulated_mesh
    if timing is None:
        assert mesh is not None
        timing = engine_timing(config, mesh, 0.0)
    return VirtualWorker(
        config=config,
        timing=timing,
        facts=facts or simulated_facts(config),
        clock=clock,
        faults=faults,
        models_kv=models_kv,
        chances=chances,
        settings=connector_settings(config, name, lambda: 0.0, clock.now_s),
        make_transport=Wire(net or Net(), name).make,
        notify=lambda: None,
    )


class Side:
    """One engine core and what its device has spent."""

    def __init__(self, core: EngineCore, clock: CountingClock) -> None:
        self.core = core
        self.clock = clock


def real_side(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, net: Net | None = None, name: str = "e"
) -> Side:
    """The worker of a real replica on a simulated mesh."""
    clock = CountingClock()
    monkeypatch.setattr(simulated, "WallClock", lambda: clock)
    if net is not None:
        LoopConnector.net = net
        config = msgspec.structs.replace(config, kv_connector=LOOP, keys=KEYS)
    return Side(EngineCore(config, UniProcExecutor(config, name), name), clock)


def virtual_side(config: EngineConfig, net: Net | None = None, name: str = "e") -> Side:
    """The simulator's worker for the same mesh."""
    clock = CountingClock()
    if net is not None:
        config = msgspec.structs.replace(config, kv_connector=LOOP, keys=KEYS)
    worker = virtual_worker(config, clock, net=net, name=name)
    return Side(EngineCore(config, OneWorker(worker), name), clock)


class LoopPair:
    """A prefill and a decode core that take turns, and the client of both.

    Attributes:
        outputs: Tokens of each request at its client.
        loaded: How the transfer of each request ended.
    """

    def __init__(self, prefill: Side, decode: Side, net: Net) -> None:
        self.prefill, self.decode, self.net = prefill, decode, net
        self.outputs: dict[str, list[int]] = {}
        self.loaded: dict[str, str | None] = {}
        self._num_open = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[list[int]]:
        """Output tokens of each prompt, all sent together."""
        for prompt in prompts:
            request = EngineRequest(f"r{len(self.outputs)}", list(prompt), sampling)
            self.outputs[request.request_id] = []
            self._num_open += 1
            ticket = seal_ticket(self.prefill.core, request.request_id, len(prompt))
            self.decode.core.handle(CLIENT, AddRequest(request, "decode"), 0.0)
            self.prefill.core.handle(CLIENT, AddRequest(request, "prefill", ticket=ticket), 0.0)
            self.decode.core.handle(CLIENT, LoadKV(request.request_id, ticket, 0), 0.0)
        for _ in range(10_000):
            for side in (self.prefill, self.decode):
                side.core.step(0.0)
                side.core.check_invariants()
                self.net.run()
                for event in take_events(side.core).get(CLIENT, []):
                    self._take(side, event)
            if not self._num_open and not any(
                side.core.num_live for side in (self.prefill, self.decode)
            ):
                return list(self.outputs.values())
        raise AssertionError(f"{self._num_open} requests did not end")

    def _take(self, side: Side, event: object) -> None:
        if isinstance(event, KVLoaded):
            self.loaded[event.request_id] = event.failure
        elif isinstance(event, TokenOutput):
            known = self.outputs[event.request_id]
            assert event.index == len(known)
            known.extend(event.token_ids)
            if event.finish_reason is not None:
                self._num_open -= 1
                if side is self.prefill:
                    self.decode.core.handle(CLIENT, Abort([event.request_id]), 0.0)
            elif side is self.prefill:
                message = Activate(event.request_id, [event.token_ids])
                self.decode.core.handle(CLIENT, message, 0.0)
        else:
            assert isinstance(event, Accepted), event

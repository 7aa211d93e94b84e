"""Drills: an engine stops, hangs or is cut off under streams; clients' errors, and leaks.

Two prefill and two decode engines, real processes on simulated meshes, behind the production's
router, without Ray. One of them gets into trouble while streams run:

stop: SIGSTOP, later SIGCONT. hang: a device call that does not return, until the engine's parent
ends it. cut: a cable that is pulled, later plugged in again; needs root, for network namespaces.

    python -m benchmarks.drills [--trouble stop hang cut] [--victim prefill decode] [--streams 32]

One JSON line a drill: after how many seconds nothing was placed on the engine any more, how the
requests ended, the longest waits for a first and for a next token, and leaked resources.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import ctypes
import functools
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from cluster.config.resolve import demo_model_folder
from cluster.config.schema import RouterConfig
from cluster.errors import ServingError
from cluster.routing.fleet import Fleet
from cluster.routing.metrics import RouterMetrics
from cluster.routing.pools import Member
from cluster.routing.router import Router
from cluster.routing.tickets import TicketOffice
from kv_transfer.keys import KeyRing
from replicas.async_client import AsyncMPClient
from replicas.config import EngineConfig, SimulatedMeshConfig
from replicas.errors import EngineDeadError
from replicas.faults import Fault
from replicas.generators.simulated.tokens import expected_tokens
from replicas.launch import start_engine
from replicas.messages import EngineDescription, EngineRequest
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from replicas.config import Role
    from replicas.messages import EngineMetrics, TokenOutput

KEYS = KeyRing((b"one secret for every drill",))
ROLES: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")
PROMPT_TOKENS, OUTPUT_TOKENS = 70, 150
BEFORE_S, AFTER_S = 3.0, 12.0
"""Streams run so long before the trouble, and after nothing is placed on the engine any more."""
START_S = 60.0
"""Four engines have started by then; a hang is due at a moment that is fixed before."""
DEADLINE_S = 120.0
"""Anything that has not happened by then counts as never."""
OURS, ITS = "192.0.2.1", "192.0.2.2"
"""The two ends of the cable, of a network that is reserved for examples."""
_CLONE_NEWNET = 0x40000000


def engine_config(
    role: Role, host: str = "127.0.0.1", *, hangs_at_unix_s: float = math.inf, **changes: object
) -> EngineConfig:
    """An engine on a simulated mesh, whose device hangs at some time."""
    # The first step that begins takes days, however long it is until one begins.
    hang = Fault(at_s=0.0, target=f"{role}/0", kind="slow", duration_s=DEADLINE_S, factor=1e7)
    is_to_hang = hangs_at_unix_s < math.inf
    mesh = SimulatedMeshConfig(
        model="Llama-3.2-1B",
        board="n150",
        faults=(hang,) if is_to_hang else (),
        fault_epoch_unix_s=hangs_at_unix_s if is_to_hang else 0.0,
    )
    fields: dict[str, object] = {
        "model": str(demo_model_folder()),
        "role": role,
        "simulated_mesh": mesh,
        "max_model_len": 1024,
        "max_batch_size": 32,
        "max_num_waiting": 64 if role == "prefill" else 0,
        "block_size": 64,
        "num_blocks": 400,
        "kv_connector": "p2p",
        "kv_endpoint": f"tcp://{host}:*",
        "keys": KEYS,
    }
    return EngineConfig(**{**fields, **changes})  # type: ignore[arg-type]


class Engine(Protocol):
    """A started engine, wherever it runs."""

    description: EngineDescription

    def is_alive(self) -> bool:
        """Return whether its process is there and does not hang."""

    def stop(self) -> None:
        """End it."""


class NearEngine:
    """An engine in this network."""

    def __init__(self, config: EngineConfig, host: str) -> None:
        self._handle = start_engine(config, host=host)
        self.description = self._handle.description

    def is_alive(self) -> bool:
        """See `Engine`."""
        return self._handle.is_alive

    def stop(self) -> None:
        """See `Engine`."""
        self._handle.stop()


class FarEngine:
    """An engine in a network of its own, at the other end of a cable."""

    def __init__(self, config: EngineConfig, host: str) -> None:
        self._keeper = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-m", "benchmarks.drills", "--keep", host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdout.readline()  # It is in its network.
        pid = str(self._keeper.pid)
        self._in_its = ("nsenter", "-t", pid, "-n", "ip")
        _run("ip", "link", "add", "ours", "type", "veth", "peer", "name", "its", "netns", pid)
        _run("ip", "addr", "add", f"{OURS}/24", "dev", "ours")
        _run(*self._in_its, "addr", "add", f"{ITS}/24", "dev", "its")
        _run(*self._in_its, "link", "set", "lo", "up")
        _run("ip", "link", "set", "ours", "up")
        self.plug(is_in=True)
        self._keeper.stdin.write(msgspec.json.encode(config) + b"\n")
        self._keeper.stdin.flush()
        line = self._keeper.stdout.readline()
        self.description = msgspec.json.decode(line, type=EngineDescription)

    def plug(self, *, is_in: bool) -> None:
        """Plug the cable in, or pull it, so that packets are lost silently."""
        _run(*self._in_its, "link", "set", "its", "up" if is_in else "down")

    def is_alive(self) -> bool:
        """See `Engine`."""
        return self._keeper.poll() is None

    def stop(self) -> None:
        """See `Engine`."""
        self._keeper.communicate(timeout=DEADLINE_S)


def keep(host: str) -> None:
    """Be the parent of an engine in this process's network until standard input ends."""
    print("here", flush=True)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    handle = start_engine(config, host=host)
    print(msgspec.json.encode(handle.description).decode(), flush=True)
    sys.stdin.buffer.read()
    handle.stop()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


def enter_own_network() -> None:
    """Give this thread, and its children, a network of their own.

    Raises:
        PermissionError: This process may not.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise PermissionError("network namespaces need root")
    _run("ip", "link", "set", "lo", "up")


@dataclass
class Trouble:
    """A fault of the victim.

    Attributes:
        begin: Injects it.
        end: Undoes it; None where the engine's parent has to end the engine.
        at_unix_s: When it begins by itself; None: when `begin` is called.
    """

    begin: Callable[[], object]
    end: Callable[[], object] | None
    at_unix_s: float | None = None


@contextlib.contextmanager
def cluster(
    kind: str, role: Role, **changes: object
) -> Iterator[tuple[list[Engine], int, Trouble]]:
    """Start the engines; yield them, the victim's index, and its fault."""
    victim = ROLES.index(role)
    is_cut = kind == "cut"
    at_s = time.time() + START_S if kind == "hang" else math.inf

    def start(i: int) -> Engine:
        is_far = is_cut and i == victim
        host = (ITS if is_far else OURS) if is_cut else "127.0.0.1"
        config = engine_config(
            ROLES[i], host, hangs_at_unix_s=at_s if i == victim else math.inf, **changes
        )
        return (FarEngine if is_far else NearEngine)(config, host)

    engines: list[Engine] = [start(victim)] if is_cut else []
    with ThreadPoolExecutor(len(ROLES)) as threads:
        others = [i for i in range(len(ROLES)) if not (is_cut and i == victim)]
        started = dict(zip(others, threads.map(start, others), strict=True))
    engines = [engines[0] if i not in started else started[i] for i in range(len(ROLES))]
    hit = engines[victim]
    pid = hit.description.pid
    troubles = {
        "stop": lambda: Trouble(
            functools.partial(os.kill, pid, signal.SIGSTOP),
            functools.partial(os.kill, pid, signal.SIGCONT),
        ),
        "hang": lambda: Trouble(lambda: None, None, at_s),
        "cut": lambda: Trouble(
            functools.partial(cast("FarEngine", hit).plug, is_in=False),
            functools.partial(cast("FarEngine", hit).plug, is_in=True),
        ),
    }
    try:
        yield engines, victim, troubles[kind]()
    finally:
        with ThreadPoolExecutor(len(engines)) as threads:
            list(threads.map(lambda engine: engine.stop(), engines))


@dataclass
class Seen:
    """The clients' measurements.

    Attributes:
        endings: How requests ended: "ok", "wrong", or the kind of the error.
        first_s: Waits for first tokens.
        gap_s: The longest wait for a next one, of each request.
    """

    endings: collections.Counter[str] = field(default_factory=collections.Counter)
    first_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)


class Clients:
    """Streams that send a request, read it to its end and repeat.

    Args:
        router: Where requests are sent.
        description: An engine's, from which the right tokens follow.
    """

    def __init__(self, router: Router, description: EngineDescription) -> None:
        self._router = router
        self._description = description
        self._ids = itertools.count()
        self.seen = Seen()
        self.is_over = False

    async def run(self) -> None:
        """One stream, until it is over."""
        while not self.is_over:
            ending = await self._ask(next(self._ids))
            self.seen.endings[ending] += 1
            if ending not in {"ok", "wrong"}:
                await asyncio.sleep(1.0)  # As a client does after "Retry-After".

    async def _ask(self, number: int) -> str:
        prompt = [20 + (7 * number + 11 * i) % 100 for i in range(PROMPT_TOKENS)]
        params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, seed=0, ignore_eos=True)
        tokens: list[int] = []
        asked_s = last_s = time.monotonic()
        gap_s, is_whole = 0.0, True

        async def emit(output: TokenOutput) -> bool:
            nonlocal last_s, gap_s, is_whole
            now_s = time.monotonic()
            if tokens:
                gap_s = max(gap_s, now_s - last_s)
            elif output.token_ids:
                self.seen.first_s.append(now_s - asked_s)
            last_s = now_s
            is_whole &= output.index == len(tokens)
            tokens.extend(output.token_ids)
            return True

        ending = ""
        try:
            await self._router.run(EngineRequest(f"r{number}", prompt, params), emit)
        except ServingError as error:
            ending = type(error).__name__
        self.seen.gap_s.append(max(gap_s, time.monotonic() - last_s) if tokens else 0.0)
        facts = self._description
        right = expected_tokens(prompt, len(tokens), facts.vocab_size, facts.eos_token_ids)
        if tokens != right or not is_whole:
            return "wrong"
        return ending or "ok"


class Drill:
    """One drill on engines that run.

    Args:
        engines: All of them.
        victim: Index of the one that gets into trouble.
        trouble: Which.
    """

    def __init__(self, engines: Sequence[Engine], victim: int, trouble: Trouble) -> None:
        self._engines = engines
        self._victim = engines[victim]
        self._trouble = trouble
        self._fleet = Fleet(functools.partial(AsyncMPClient, KEYS), KEYS)
        self._metrics = RouterMetrics("drills")
        self._router = Router(
            self._fleet,
            RouterConfig(min_remote_prefill_tokens=0),
            self._metrics,
            TicketOffice(KEYS),
        )
        self._members = [
            Member(role, f"{role}-{i}", engine.description)
            for i, (role, engine) in enumerate(zip(ROLES, engines, strict=True))
        ]

    async def run(self, num_streams: int) -> dict[str, object]:
        """Run it to its end; return the result."""
        clients = Clients(self._router, self._victim.description)
        async with self._following():
            await _until(lambda: self._fleet.pools.num_open == len(ROLES), "all are connected")
            streams = [asyncio.ensure_future(clients.run()) for _ in range(num_streams)]
            avoided_s = await self._get_into_trouble()
            await asyncio.sleep(AFTER_S)
            if self._trouble.end is not None:
                self._trouble.end()
            else:
                await _until(lambda: not self._victim.is_alive(), "its parent has ended it")
            clients.is_over = True
            await asyncio.wait_for(asyncio.gather(*streams), DEADLINE_S)
            living = [m for m, e in zip(self._members, self._engines, strict=True) if e.is_alive()]
            await _until(
                lambda: (
                    self._fleet.client.incarnations == {m.description.incarnation for m in living}
                ),
                "whoever lives is connected",
            )
            leaked = await self._leaked(living)
        seen = clients.seen
        return {
            "avoided_after_s": round(avoided_s, 2),
            "endings": dict(seen.endings),
            "longest_first_token_s": round(max(seen.first_s), 2),
            "longest_gap_s": round(max(seen.gap_s), 2),
            "leaked": leaked,
        }

    async def _get_into_trouble(self) -> float:
        """Inject the fault; return the seconds until nothing is placed on the victim any more."""
        at_s = self._trouble.at_unix_s
        await asyncio.sleep(BEFORE_S if at_s is None else max(at_s - time.time(), 0.0))
        began_s = time.monotonic()
        self._trouble.begin()
        await _until(lambda: not self._is_placed_on(), "nothing is placed on it")
        return time.monotonic() - began_s

    def _is_placed_on(self) -> bool:
        pools, incarnation = self._fleet.pools, self._victim.description.incarnation
        views = pools.prefill_views(), pools.decode_views()
        return any(incarnation in side.engines for side in views)

    @contextlib.asynccontextmanager
    async def _following(self) -> AsyncIterator[None]:
        following = asyncio.ensure_future(self._fleet.follow(self))
        try:
            yield
        finally:
            following.cancel()
            self._fleet.close()
            await self._fleet.client.close()

    async def find(self) -> list[Member]:
        """See `Discovery`: an actor answers for its engine whatever that does."""
        return [m for m, e in zip(self._members, self._engines, strict=True) if e.is_alive()]

    async def num_wanted(self) -> int:
        """See `Discovery`."""
        return len(ROLES)

    async def _leaked(self, living: Sequence[Member]) -> int:
        """Return what idle engines still hold, after time to release it."""
        end_s = time.monotonic() + DEADLINE_S
        while True:
            held = 0
            for member in living:
                with contextlib.suppress(EngineDeadError):
                    metrics = await self._fleet.client.metrics(member.description.incarnation)
                    held += num_held(metrics)
            if not held or time.monotonic() > end_s:
                return held + len(self._fleet.pools.holds())
            await asyncio.sleep(0.2)


def num_held(metrics: EngineMetrics) -> int:
    """Count the requests, slots, blocks, leases and transfers that an engine still holds."""
    transfer = metrics.transfer
    return (
        metrics.num_waiting
        + transfer.num_inflight_sends
        + transfer.num_inflight_loads
        + transfer.num_leased_blocks
        + transfer.num_reserved_blocks
        + transfer.num_quarantined_blocks
        + sum(g.num_slots - g.num_empty_slots for g in metrics.groups)
        + sum(sum(g.num_blocks) - sum(g.num_free_blocks) for g in metrics.groups)
    )


async def _until(predicate: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not predicate():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {DEADLINE_S:g} s: {what}")
        await asyncio.sleep(0.01)


def drill(kind: str, role: Role, num_streams: int, **changes: object) -> dict[str, object]:
    """Start a cluster, drill it, end it; return the result."""
    with cluster(kind, role, **changes) as (engines, victim, trouble):
        result = asyncio.run(Drill(engines, victim, trouble).run(num_streams))
    return {"trouble": kind, "victim": role, "streams": num_streams, **result}


def main() -> None:
    """Run the drills that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trouble", nargs="+", default=["stop", "hang", "cut"])
    parser.add_argument("--victim", nargs="+", default=["prefill", "decode"])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--keep", metavar="HOST", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.keep is not None:
        keep(args.keep)
        return
    if "cut" in args.trouble:
        enter_own_network()
    for kind, role in itertools.product(args.trouble, args.victim):
        print(json.dumps(drill(kind, role, args.streams)), flush=True)


if __name__ == "__main__":
    main()

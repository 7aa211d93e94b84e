"""Move the same blocks by several means in turn, and compare.

Each contestant is a pair of processes that stay for all rounds and sleep between them. A round
clears the target, then times from the first command to the end of the last process that has
something to do, hashes included; what arrived is compared with the source outside the timer.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np

from benchmarks.kv.connector_process import KEYS, EndArguments
from kv_transfer.config import KVNetwork, TransferConfig
from kv_transfer.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.layout import KVLayout

SEED = 1
PEER_PROCESS = Path(__file__).with_name("peer_process.py")
PEER_ENVIRONMENT = {
    "UCX_TLS": "tcp",
    "UCX_NET_DEVICES": "lo",
    "NIXL_LOG_LEVEL": "ERROR",
    "MC_LOG_LEVEL": "ERROR",
}
DEBIAN_LIBS = "x86_64-linux-gnu"
LIFETIME_MS = 3_600_000


class Blocks(NamedTuple):
    """The payload of a contest.

    Attributes:
        layout: KV whose pieces are the blocks.
        num_blocks: KV blocks, each of ``layout.num_pieces`` pieces.
    """

    layout: KVLayout
    num_blocks: int

    @property
    def num_pieces(self) -> int:
        """Stretches of memory that are moved."""
        return self.num_blocks * self.layout.num_pieces

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return self.num_blocks * self.layout.bytes_per_block

    @classmethod
    def about(cls, layout: KVLayout, mebibytes: int) -> Blocks:
        """Take as many blocks as make about this much."""
        return cls(layout, max(1, (mebibytes << 20) // layout.bytes_per_block))


class Round(NamedTuple):
    """Duration of one round, and the CPU time of both processes."""

    seconds: float
    cpu_s: float


class Contestant(Protocol):
    """A way to move blocks."""

    name: str

    def measure(self) -> Round:
        """Move all blocks once and check them."""

    def close(self) -> None:
        """End its processes."""


class Rates(NamedTuple):
    """A contestant's results.

    Attributes:
        median: 10^9 bytes per second.
        best: The same, of its best round.
        cpu_s: CPU seconds per 10^9 bytes, both processes, median.
    """

    median: float
    best: float
    cpu_s: float


class MemoryCopy:
    """Copies in this process, one thread: what the machine's memory can do.

    The baseline of every other contestant.
    """

    def __init__(self, name: str, blocks: Blocks) -> None:
        self.name = name
        shape = blocks.num_pieces, blocks.layout.piece_bytes
        random = np.random.default_rng(SEED)
        self._source = random.integers(0, 256, shape, np.uint8)
        self._target = np.ones(shape, np.uint8)
        self._order: list[int] = random.permutation(blocks.num_pieces).tolist()

    def measure(self) -> Round:
        """Copy every block with one slice assignment."""
        source, target = self._source, self._target
        target.fill(0)
        start_s, cpu_s = time.monotonic(), time.process_time()
        for block in self._order:
            target[block] = source[block]
        done = Round(time.monotonic() - start_s, time.process_time() - cpu_s)
        if not np.array_equal(source, target):
            raise SystemExit(f"{self.name}: the copy differs")
        return done

    def close(self) -> None:
        """Do nothing: there is no process."""


class End:
    """A process that answers JSON lines."""

    def __init__(
        self, command: Sequence[str], env: dict[str, str] | None = None, *, is_quiet: bool = False
    ) -> None:
        """Start it.

        Args:
            command: Program and arguments.
            env: On top of this process's environment.
            is_quiet: Discard its standard error.
        """
        self._name = " ".join(command)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL if is_quiet else None, env={**os.environ, **(env or {})},
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def tell(self, do: str, **fields: object) -> None:
        """Give a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """Wait for an answer.

        Raises:
            EOFError: The process ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"{self._name} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **fields: object) -> dict[str, Any]:
        """Give a command and wait for its answer."""
        self.tell(do, **fields)
        return self.read()

    def kill(self) -> None:
        """End the process, whatever state it is in."""
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        """Let the process end, which it does when its standard input closes."""
        try:
            self._process.communicate(timeout=10.0)
        except subprocess.TimeoutExpired:
            self.kill()


class ConnectorPair:
    """This project's connector, end to end."""

    _numbers = itertools.count()

    def __init__(
        self,
        name: str,
        blocks: Blocks,
        *,
        schemes: str,
        config: TransferConfig | None = None,
        network: KVNetwork = "plain",
    ) -> None:
        """Start both ends.

        Args:
            name: Of the row.
            blocks: The payload.
            schemes: Of the endpoints that tickets name, as "tcp" or "tcp ipc shm".
            config: Sizes, and whether shared memory is verified.
            network: Whether TCP traffic is encrypted.
        """
        self.name = name
        self._blocks = blocks
        self._path = "shared" if "shm" in schemes.split() else "inline"
        number = next(self._numbers)
        self._names = {role: f"{role}-{number}" for role in ("source", "target")}
        self.source, self.target = (
            start_end(self._names[role], role, blocks, config or TransferConfig(), network)
            for role in ("source", "target")
        )
        endpoints: list[str] = self.source.read()["endpoints"]
        self._endpoints = tuple(x for x in endpoints if x.partition(":")[0] in schemes.split())
        if len({x.partition(":")[0] for x in self._endpoints}) < len(schemes.split()):
            raise SystemExit(f"{name}: no {schemes} among the endpoints {endpoints}")
        self.target.read()
        self._digests = self.source.ask("digests")["digests"]

    def start(self, request_id: str) -> None:
        """Begin a transfer of all blocks on both sides."""
        ticket = Ticket(
            transfer_id=secrets.token_bytes(16),
            request_id=request_id,
            epoch=1,
            producer_endpoints=self._endpoints,
            producer_incarnation=self._names["source"],
            consumer=self._names["target"],
            num_tokens=self._blocks.num_blocks * self._blocks.layout.block_size,
            layout_hash=self._blocks.layout.content_hash(),
            expires_ms=int(1000 * time.time()) + LIFETIME_MS,
        )
        sealed = base64.b64encode(KEYS.seal(ticket)).decode()
        for end in (self.source, self.target):
            end.tell("run", request=request_id, ticket=sealed)

    def measure(self) -> Round:
        """Load one request.

        Raises:
            SystemExit: Other bytes arrived, or they came another way than this row is about.
        """
        self.target.ask("clear")
        self.start(secrets.token_hex(8))
        arrived, sent = self.target.read(), self.source.read()
        if self.target.ask("digests")["digests"] != self._digests:
            raise SystemExit(f"{self.name}: what arrived is not what was sent")
        paths = self.target.ask("paths")["paths"]
        if paths != [self._path]:
            raise SystemExit(f"{self.name}: came over {paths}, not over {self._path}")
        seconds = arrived["end_s"] - min(arrived["start_s"], sent["start_s"])
        return Round(seconds, arrived["cpu_s"] + sent["cpu_s"])

    def close(self) -> None:
        """End both processes."""
        self.source.close()
        self.target.close()

    def kill(self) -> None:
        """End both processes, whatever state they are in."""
        self.source.kill()
        self.target.kill()


def start_end(
    name: str, role: str, blocks: Blocks, config: TransferConfig, network: KVNetwork
) -> End:
    """Start one end of this project's connector; its first answer is its hello."""
    arguments = EndArguments(name, role, blocks.layout, blocks.num_blocks, SEED, config, network)
    encoded = msgspec.json.encode(arguments).decode()
    return End([sys.executable, "-m", "benchmarks.kv.connector_process", encoded])


class PeerPair:
    """Another project's transfer engine over TCP."""

    def __init__(self, name: str, operation: str, source: End, target: End) -> None:
        """Take over two ends that know each other; use ``start``."""
        self.name = name
        self._operation = operation
        self._source = source
        self._target = target

    @classmethod
    def start(
        cls, peer: str, operation: str, blocks: Blocks, python: Path, libs: Path | None
    ) -> PeerPair | None:
        """Start both ends.

        Args:
            peer: "mooncake" or "nixl".
            operation: "read" (the target starts it) or "write" (the source does).
            blocks: The payload; the peer sees blocks of ``piece_bytes``.
            python: Interpreter that has the peer.
            libs: Folder into which Debian packages with the peer's libraries were unpacked.

        Returns:
            None if the peer is not there, or does not start.
        """
        sizes = (str(blocks.layout.piece_bytes), str(blocks.num_pieces), str(SEED))
        env = dict(PEER_ENVIRONMENT)
        if libs is not None:
            folders = (libs, libs / "usr/lib" / DEBIAN_LIBS, libs / "lib" / DEBIAN_LIBS)
            env["LD_LIBRARY_PATH"] = ":".join(str(folder) for folder in folders)
        source, target = (
            End([str(python), str(PEER_PROCESS), peer, operation, role, *sizes], env, is_quiet=True)
            for role in ("source", "target")
        )
        try:
            hellos = source.read(), target.read()
            source.ask("connect", hello=hellos[1])
            target.ask("connect", hello=hellos[0])
        except (EOFError, BrokenPipeError):
            source.kill()
            target.kill()
            return None
        return cls(f"{peer} {operation}", operation, source, target)

    def measure(self) -> Round:
        """Move all blocks once."""
        self._target.ask("clear")
        self._source.tell("run")
        self._target.tell("run")
        sent, arrived = self._source.read(), self._target.read()
        answers = [sent, arrived]
        if self._operation == "write":
            # The target of a write learns of its end from outside, and hashes then.
            arrived = self._target.ask("digests")
            answers.append(arrived)
        if sent["digests"] != arrived["digests"]:
            raise SystemExit(f"{self.name}: what arrived is not what was sent")
        seconds = max(x["end_s"] for x in answers) - min(x["start_s"] for x in answers)
        return Round(seconds, sum(x["cpu_s"] for x in answers))

    def close(self) -> None:
        """End both processes."""
        self._source.close()
        self._target.close()


def contest(contestants: Sequence[Contestant], num_bytes: int, num_rounds: int) -> dict[str, Rates]:
    """Run the contestants by turns; the first round of each does not count."""
    rounds: dict[str, list[Round]] = {contestant.name: [] for contestant in contestants}
    for _ in range(1 + num_rounds):
        for contestant in contestants:
            rounds[contestant.name].append(contestant.measure())
    return {name: summary(done[1:], num_bytes) for name, done in rounds.items()}


def summary(rounds: Sequence[Round], num_bytes: int) -> Rates:
    """Make rates of rounds."""
    seconds = [done.seconds for done in rounds]
    gigabytes = num_bytes / 1e9
    return Rates(
        median=gigabytes / statistics.median(seconds),
        best=gigabytes / min(seconds),
        cpu_s=statistics.median(done.cpu_s for done in rounds) / gigabytes,
    )

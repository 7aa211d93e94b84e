"""A real cluster under load while its processes are killed and stopped: what its clients see.

Starts `ttserve serve` with two prefill and two decode engines of the demo model and two ingresses,
asks every request twice undisturbed, then sends them again at random times. Clients leave, engines,
their actors and ingresses get SIGKILL, or SIGSTOP and later SIGCONT, at moments drawn from a seed,
as long as another one of their pool serves. Every token that comes has to be that of the
undisturbed run, every request has to end, and once all is over nothing may be held.

In float64: in float32 one draw in some ten thousand is so near to another token that it goes by
what else is in the batch, and would look like an answer from another request's KV.

    python -m benchmarks.chaos [--quick] [--requests 10000] [--seed 0] [--log serve.log]

The last line is JSON. `typed_errors` are requests that ended with a documented error. Requests that
their client left, or that a faulty ingress cut, are printed before that line.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import functools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.breaking.clients import Clients, Tally, answers_of, make_asks
from benchmarks.breaking.troubles import Trouble, Troublemaker
from benchmarks.ready import wait_ready
from benchmarks.soaking.leaks import held
from benchmarks.soaking.processes import ProcessSampler
from cluster.lifecycle.supervisor import free_port

MODEL = "demo"
NUM_ENGINES = {"prefill": 2, "decode": 2}
NUM_INGRESSES = 2
REQUEST_TIMEOUT_S = 30.0
DEADLINE_S = REQUEST_TIMEOUT_S + 30.0
"""Beyond its own time a request may wait for an ingress that is stopped."""
RECOVER_S = 180.0
"""How long the cluster may take to recover all members, and to release everything."""
QUICK_REQUESTS, QUICK_RATE, QUICK_ASKS, QUICK_TROUBLE_S = 300, 8.0, 24, 4.0
REQUESTS, RATE, ASKS, TROUBLE_S = 10_000, 10.0, 120, 6.0
_LOOKS = 4
"""Questions of one kind through HAProxy, by each of which either ingress may be met."""
_STOP_S = 60.0


def serve_file(port: int) -> dict[str, Any]:
    """The Serve config of the cluster."""
    engine = {"block_size": 32, "dtype": "float64", "num_threads": 1, "num_blocks": 400}
    args = {
        "model": MODEL,
        "engine": engine,
        "ingress": {"replicas": NUM_INGRESSES, "request_timeout_s": REQUEST_TIMEOUT_S},
        "router": {"min_remote_prefill_tokens": 0},  # every request a transfer
        "pools": {
            "prefill": {"replicas": NUM_ENGINES["prefill"], "engine": {"max_batch_size": 16}},
            "decode": {
                "replicas": NUM_ENGINES["decode"],
                "engine": {"max_batch_size": 32, "tt_data_parallel": 2},
            },
        },
    }
    application = {"name": "ttserve", "import_path": "cluster.app:build", "args": args}
    return {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}


class Left(msgspec.Struct, frozen=True):
    """Resources that an idle cluster still holds.

    Attributes:
        slots: Slots that are not empty, and requests queued for one.
        blocks: KV blocks that are not free.
        leases: Blocks that are kept for transfers, and transfers.
        is_whole: Whether every engine and ingress has answered.
    """

    slots: int
    blocks: int
    leases: int
    is_whole: bool

    @property
    def is_nothing(self) -> bool:
        """Return whether all members have answered and hold nothing."""
        return self.is_whole and not (self.slots or self.blocks or self.leases)


class Outcome(msgspec.Struct, frozen=True):
    """Result of a run."""

    tally: Tally
    left: Left
    troubles: list[Trouble]

    def summary(self) -> dict[str, int]:
        """The line that a run ends with."""
        endings = self.tally.endings
        return {
            "requests": self.tally.requests,
            "ok": endings["ok"],
            "typed_errors": endings["typed_error"],
            "wrong": endings["wrong"],
            "hung": endings["hung"],
            "leaked_slots": self.left.slots,
            "leaked_blocks": self.left.blocks,
            "leaked_leases": self.left.leases,
        }

    def report(self) -> str:
        """Return the result as text for a person."""
        endings = self.tally.endings
        of = collections.Counter(f"{t.kind} {t.victim.rpartition(' ')[0]}" for t in self.troubles)
        asked = endings["ok"] + endings["typed_error"] + endings["wrong"] + endings["hung"]
        lines = [
            f"troubles: {dict(of.most_common())}",
            f"{endings['aborted']} given up by their clients, {endings['cut']} cut by an ingress "
            "in trouble",
            f"{endings['ok'] / max(asked, 1):.2%} of all others complete; typed errors: "
            f"{self.tally.errors}",
            *self.tally.wrong_after,
        ]
        if not self.left.is_whole:
            lines.append(f"not every engine and ingress came back within {RECOVER_S:g} s")
        return "\n".join(lines)

    @property
    def is_good(self) -> bool:
        """Return whether nothing is wrong, hangs or is held, and all came back."""
        endings = self.tally.endings
        return not (endings["wrong"] or endings["hung"]) and self.left.is_nothing


def look(url: str) -> Left:
    """Ask both ingresses, through HAProxy, for their own and the engines' held resources."""
    slots = blocks = leases = 0
    ingresses: set[str] = set()
    num_engines = sum(NUM_ENGINES.values())
    is_whole = True
    # Pairs of the same question: HAProxy sends one after the other to each ingress in turn.
    for _ in range(_LOOKS):
        page = _get(f"{url}/metrics").decode()
        found = held(page)
        waiting = found.get("waiting sequences", 0) + found.get("queued requests", 0)
        slots = max(slots, abs(found.get("slots", 0)) + waiting)
        blocks = max(blocks, abs(found.get("blocks", 0)))
        kept = ("leased blocks", "reserved blocks", "quarantined blocks", "transfers")
        leases = max(leases, sum(found.get(name, 0) for name in kept))
        ingresses |= labels_of(page, "ingress")
        engines = labels_of(page, "replica", "ttserve_slots")
        is_whole &= len(engines) == num_engines
    for _ in range(_LOOKS):
        view = json.loads(_get(f"{url}/debug/slots"))
        attempts = sum(len(replica["attempts"]) for replica in view["replicas"])
        slots = max(slots, attempts + view["num_queued"] + view["num_awaiting_admission"])
        is_whole &= num_engines == sum(replica["is_responsive"] for replica in view["replicas"])
    return Left(slots, blocks, leases, is_whole and len(ingresses) == NUM_INGRESSES)


def can_lose(url: str) -> set[str]:
    """Return the pools all of whose replicas serve, by the ingress that answers."""
    try:
        replicas = json.loads(_get(f"{url}/debug/slots"))["replicas"]
    except (OSError, ValueError):
        return set()
    serving = collections.Counter(
        replica["pool"]
        for replica in replicas
        if replica["is_responsive"]
        and replica["state"] == "ready"
        and replica["breaker"] == "closed"
    )
    found = {pool for pool, number in NUM_ENGINES.items() if serving[pool] == number}
    # HAProxy alternates between ingresses: answers from both show that both serve.
    with contextlib.suppress(OSError):
        pages = [_get(f"{url}/metrics").decode() for _ in range(NUM_INGRESSES)]
        names = {name for page in pages for name in labels_of(page, "ingress")}
        found |= {"ingress"} if len(names) == NUM_INGRESSES else set()
    return found


def labels_of(page: str, label: str, family: str = "") -> set[str]:
    """Return the values of a label on a page of metrics, of all metrics or of one."""
    samples = [s for f in text_string_to_metric_families(page) for s in f.samples]
    return {s.labels[label] for s in samples if label in s.labels and family in {"", s.name}}


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as reply:
        body: bytes = reply.read()
    return body


def settle(url: str) -> Left:
    """Wait until all are back and nothing is held; return the state after at most `RECOVER_S`."""
    left = Left(0, 0, 0, is_whole=False)
    deadline_s = time.monotonic() + RECOVER_S
    while time.monotonic() < deadline_s and not left.is_nothing:
        # One of them may still be starting.
        with contextlib.suppress(OSError, ValueError):
            left = look(url)
        time.sleep(1.0)
    return left


async def disturb(
    url: str, operations_url: str, server_id: int, *, is_quick: bool, num_requests: int, seed: int
) -> tuple[Tally, list[Trouble]]:
    """Ask undisturbed, then disturbed."""
    num_asks, rate, trouble_s = (
        (QUICK_ASKS, QUICK_RATE, QUICK_TROUBLE_S) if is_quick else (ASKS, RATE, TROUBLE_S)
    )
    asks = make_asks(MODEL, num_asks, random.Random(seed))
    answers = await answers_of(url, asks)
    if await answers_of(url, asks[::-1]) != answers[::-1]:
        raise SystemExit("undisturbed, a request has two answers: nothing can be said")
    troublemaker = Troublemaker(
        ProcessSampler(server_id).ours,
        trouble_s,
        random.Random(f"{seed} troubles"),
        functools.partial(can_lose, operations_url),
    )
    clients = Clients(
        url, asks, answers, DEADLINE_S, troublemaker.ingress_was_in_trouble,
        random.Random(f"{seed} clients"),
    )  # fmt: skip
    making = asyncio.create_task(troublemaker.run())
    try:
        await clients.run(num_requests, rate)
    finally:
        making.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await making
    return clients.tally, troublemaker.done


def run(*, is_quick: bool, num_requests: int, seed: int, log: Path | None) -> Outcome:
    """Start a cluster, disturb it, check for leaks, end it."""
    port = free_port()
    url, operations_url = (f"http://127.0.0.1:{number}" for number in (port, port + 1))
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, contextlib.ExitStack() as stack:
        path = Path(folder, "serve.yaml")
        path.write_text(yaml.safe_dump(serve_file(port)))
        output = stack.enter_context((log or Path(folder, "log")).open("wb"))
        server = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", "serve", "--config", str(path)],
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            wait_ready(f"{url}/health", server)
            if not settle(operations_url).is_nothing:
                raise SystemExit("not every engine and ingress started")
            tally, troubles = asyncio.run(
                disturb(
                    url,
                    operations_url,
                    server.pid,
                    is_quick=is_quick,
                    num_requests=num_requests,
                    seed=seed,
                )
            )
            left = settle(operations_url)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(_STOP_S)
    return Outcome(tally, left, troubles)


def main() -> int:
    """Parse arguments, run, print one JSON object as the last line.

    Returns:
        Exit code: 1 if something was wrong, hung, held or did not come back.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="less than two minutes")
    parser.add_argument("--requests", type=int, help=f"default {REQUESTS}, quick {QUICK_REQUESTS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="file for what the cluster prints")
    arguments = parser.parse_args()
    num_requests = arguments.requests or (QUICK_REQUESTS if arguments.quick else REQUESTS)
    outcome = run(
        is_quick=arguments.quick, num_requests=num_requests, seed=arguments.seed, log=arguments.log
    )
    print(outcome.report())
    print(json.dumps(outcome.summary()))
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())

"""Slow-down of 32 honest streams by attacks on the HTTP endpoint.

One `ttserve serve` with a prefill and a decode engine on simulated T3Ks (Llama-3.2-1B in eight
lanes, a context of 131,072 tokens), whose device time takes no processor time of the host. One
process of honest clients: 32 streams and three probes, each repeated and each answer checked. The
probes are a short prompt, a body of 100 kB, and a prompt of 4,400 characters. For each attack of
`tests.e2e.http_attacks` the honest clients run for a while alone and then beside it. The row "none"
has no attack: its ratio is noise.

Attackers compute on the same cores as the server, at niceness 19 and in a session of their own:
where Linux groups processes by session, all of them have the weight of one other process.

    python -m benchmarks.attacks [--tree /path/to/another/checkout] [--rounds 3] [--attacks http2]

Prints a table as Markdown: medians over the rounds. `--tree` serves the code of that checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import yaml

from benchmarks.ready import wait_ready
from cluster.lifecycle import supervisor
from tests.e2e import harness, http_attacks, vitals
from tests.e2e.attacker import Attack
from tests.e2e.steady_streams import STREAM, Probe, Report, Task

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
MODEL = "tiny"
MAX_MODEL_LEN = 131_072
STREAMS, MAX_TOKENS = 32, 128
NOTHING = "none"
PROBES = [
    Probe("short", {"prompt": "hi", "max_tokens": 1, "temperature": 0}),
    Probe("body", {"prompt": "hi", "max_tokens": 1, "temperature": 0, "user": "u" * 100_000}),
    Probe("long", {"prompt": "the quick brown fox " * 220, "max_tokens": 1, "temperature": 0}),
]
SETTLE_S, MOST_SETTLE_S = 2.0, 60.0
_NICE = "exec nice -n 19 "


class Seen(NamedTuple):
    """The honest clients' measurements in one window.

    Attributes:
        first_ms: By kind of request, its times to a first token.
        num_failed: Requests that failed, or had wrong tokens.
    """

    first_ms: dict[str, list[float]]
    num_failed: int

    def ms(self, kind: str, share: float = 0.5) -> float:
        """A quantile of one kind's times to a first token; not a number without any."""
        times = sorted(self.first_ms.get(kind, []))
        return times[min(int(share * len(times)), len(times) - 1)] if times else float("nan")


class Window(NamedTuple):
    """One attack and the time before it.

    Attributes:
        alone: Before the attack.
        beside: During it.
        came: The attacker's results.
        peak_mib: Most memory of the ingress during the attack.
        num_down: How often HAProxy took the ingress out.
    """

    alone: Seen
    beside: Seen
    came: dict[str, int]
    peak_mib: int
    num_down: int


class Honest:
    """The process of the honest clients."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._num_failed = 0

    def ask(self, line: object) -> None:
        """Write one line of JSON to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(line).decode() + "\n")
        self._process.stdin.flush()

    def seen(self) -> Seen:
        """Return the measurements since the last call."""
        self.ask("report")
        assert self._process.stdout is not None
        report = msgspec.json.decode(self._process.stdout.readline(), type=Report)
        for failure in report.failures[self._num_failed :][:3]:
            print("  failed:", failure[:300], file=sys.stderr)
        num_failed = len(report.failures) - self._num_failed
        self._num_failed = len(report.failures)
        first_ms = {name: [1e3 * s for s in times] for name, times in report.first_s.items()}
        return Seen(first_ms, num_failed)

    def watch(self, seconds: float) -> Seen:
        """Return the measurements of the next `seconds`."""
        self.seen()
        time.sleep(seconds)
        return self.seen()


@contextlib.contextmanager
def module(name: str, prefix: str = "exec ") -> Iterator[subprocess.Popen[str]]:
    """A module as a process in a session of its own; it ends with its stdin."""
    command = f"{prefix}{shlex.quote(sys.executable)} -m {name}"
    with subprocess.Popen(
        ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            yield process
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
        finally:
            process.kill()


def serve_file(port: int) -> str:
    """The demo's pools on simulated meshes."""
    file = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    file["http_options"]["port"] = port
    args = file["applications"][0]["args"]
    args["model_name"] = MODEL
    args["engine"] = {
        "block_size": 64,
        "max_model_len": MAX_MODEL_LEN,
        "tt_data_parallel": 8,
        "simulated_mesh": {"model": "Llama-3.2-1B", "board": "T3K"},
    }
    args["pools"]["prefill"]["engine"] = {"max_batch_size": 64, "max_num_batched_tokens": 16_384}
    args["pools"]["decode"]["engine"] = {"max_batch_size": 256}
    return yaml.safe_dump(file)


@contextlib.contextmanager
def served(tree: Path) -> Iterator[tuple[int, harness.Footprint]]:
    """A server of the code in `tree`: its port and its processes."""
    port = supervisor.free_port()
    with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
        path, log = Path(folder) / "serve.yaml", Path(folder) / "log"
        path.write_text(serve_file(port))
        with log.open("wb") as output:
            server = subprocess.Popen(
                [str(harness.BINARIES / "ttserve"), "serve", "--config", str(path)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)}, start_new_session=True,
            )  # fmt: skip
        footprint = harness.Footprint(server.pid)
        try:
            wait_ready(f"http://127.0.0.1:{port}/health", server)
            yield port, footprint
        finally:
            footprint.look()
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(60)
            footprint.kill()


def settle(honest: Honest) -> None:
    """Wait until every kind of request is answered again, as work of an attack may outlast it."""
    end_s = time.monotonic() + MOST_SETTLE_S
    while time.monotonic() < end_s:
        first_ms = honest.watch(SETTLE_S).first_ms
        if all(probe.name in first_ms for probe in PROBES):
            return


def measure(
    name: str, target: http_attacks.Target, honest: Honest, footprint: harness.Footprint
) -> Window:
    """The honest clients alone, then beside an attack."""
    [ingress] = vitals.processes(footprint, vitals.INGRESS)
    alone = honest.watch(target.attack_s)
    vitals.forget_peak(ingress)
    if name == NOTHING:
        beside, came = honest.watch(target.attack_s), {}
    else:
        with module("tests.e2e.attacker", _NICE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(Attack(name, target)).decode() + "\n")
            process.stdin.flush()
            honest.seen()
            said = process.stdout.readline()
            beside = honest.seen()
        came = (
            msgspec.json.decode(said, type=dict[str, int]) if said else {"the attacker failed": 1}
        )
    peak_mib = vitals.peak_mib(ingress)
    proxies = vitals.processes(footprint, vitals.HAPROXY)
    ingresses = [i for p in proxies for i in vitals.backends(vitals.haproxy_folder(p)).values()]
    settle(honest)
    return Window(alone, beside, came, peak_mib, sum(i.num_down for i in ingresses))


def row(name: str, windows: list[Window]) -> str:
    """A row of the table: medians over the rounds, sums of failures."""

    def middle(values: list[float]) -> float:
        return statistics.median(values)

    cells = [name.replace("_", " ")]
    for kind, share in ((STREAM, 0.5), (STREAM, 0.99)):
        alone = middle([w.alone.ms(kind, share) for w in windows])
        beside = middle([w.beside.ms(kind, share) for w in windows])
        cells.append(f"{alone:.0f} → {beside:.0f} ms")
        if share == 0.5:
            ratio = middle([w.beside.ms(kind) / w.alone.ms(kind) for w in windows])
            cells.append(f"{ratio:.2f}")
    for probe in PROBES:
        alone = middle([w.alone.ms(probe.name) for w in windows])
        beside = middle([w.beside.ms(probe.name) for w in windows])
        cells.append(f"{alone:.0f} → {beside:.0f} ms")
    cells += [
        f"{sum(w.alone.num_failed for w in windows)} → {sum(w.beside.num_failed for w in windows)}",
        f"{max(w.peak_mib for w in windows)} MiB",
        f"{max(w.num_down for w in windows)}",
    ]
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| attack | stream, p50 | ratio | stream, p99 | short prompt | body of 100 kB "
    "| 4,400 characters | failed | ingress, peak | taken out |"
)


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--attacks", nargs="*", default=[NOTHING, *http_attacks.ATTACKS])
    options = parser.parse_args()
    # So that an interrupted benchmark ends its server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    windows: dict[str, list[Window]] = {name: [] for name in options.attacks}
    with served(options.tree.resolve()) as (port, footprint):
        target = http_attacks.Target(port, port + 1, MODEL, MAX_MODEL_LEN, attack_s=options.seconds)
        prompts = [
            [300 + (7 * n + 11 * i) % 2000 for i in range(20 + 3 * n)] for n in range(STREAMS)
        ]
        task = Task(f"http://127.0.0.1:{port}", MODEL, prompts, MAX_TOKENS, PROBES)
        with module("tests.e2e.steady_streams") as process:
            honest = Honest(process)
            honest.ask(task)
            honest.seen()
            honest.watch(SETTLE_S)
            for _ in range(options.rounds):
                for name, of_attack in windows.items():
                    of_attack.append(measure(name, target, honest, footprint))
                    print(
                        row(name, of_attack[-1:]), of_attack[-1].came, file=sys.stderr, flush=True
                    )
    print(HEADER, "|" + "---|" * HEADER.count(" | ") + "---|", sep="\n")
    for name, of_attack in windows.items():
        print(row(name, of_attack))


if __name__ == "__main__":
    main()

"""KV transfer against what the machine can do, and against NIXL and Mooncake over TCP.

Blocks of two sizes move between two processes: by this project's connector end to end, over shared
memory and over TCP, and by the peers, each in turn, with gather, scatter and hash inside the timer.
Then requests are handed over between two engines: how long the decode side waits for the KV of a
short prompt, and how much of a long prompt's transfer is hidden behind its prefill. Last, the
sender's memory for a stuck receiver. Ratios above 1 mean that this project is faster. The
last line has the ratios for 64 KiB blocks, and the hand-over over TCP.

    python -m benchmarks.kv_transfer [--quick] [--peer-python PATH] [--peer-libs DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.kv.contest import (
    Blocks,
    ConnectorPair,
    MemoryCopy,
    PeerPair,
    Rates,
    contest,
)
from benchmarks.kv.handover import STAGES, hidden_shares, short_handovers
from benchmarks.kv.slow_receiver import measure_growth
from kv_transfer.config import TransferConfig
from kv_transfer.layout import KVLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from benchmarks.kv.contest import Contestant
    from benchmarks.kv.handover import Handover, HiddenShare
    from benchmarks.kv.slow_receiver import Growth

LLAMA_8B = KVLayout(32, 8, 128, 32, "bfloat16", "hf", "benchmark")
"""Llama-3.1-8B in blocks of 32 tokens: 64 KiB in each plane of a layer."""

ONE_HEAD = KVLayout(32, 1, 128, 64, "bfloat8_b", "hf", "benchmark")
"""One head of it in blocks of 64 tokens, block floating point: 8,704 bytes."""

NEAR = "tcp ipc shm"
FAR = "tcp"

PEERS = ("mooncake", "nixl")
OPERATIONS = ("read", "write")


class Scale(NamedTuple):
    """Sizes and numbers of measurements.

    Attributes:
        layouts: Whose blocks are moved.
        mebibytes: In one round.
        num_rounds: Of each contestant.
        paths: Schemes by which requests are handed over.
        num_short: Short prompts on each path.
        lengths: Tokens of long prompts.
        num_long: Of each, with and without overlap.
        num_transfers: At once to a receiver that takes nothing.
    """

    layouts: tuple[KVLayout, ...]
    mebibytes: int
    num_rounds: int
    paths: tuple[str, ...]
    num_short: int
    lengths: tuple[int, ...]
    num_long: int
    num_transfers: tuple[int, ...]


QUICK = Scale((LLAMA_8B,), 256, 5, (FAR,), 30, (2048,), 3, ())
FULL = Scale((LLAMA_8B, ONE_HEAD), 256, 11, (FAR, NEAR), 200, (2048, 4096), 7, (1, 4, 16))


@contextlib.contextmanager
def contestants(
    blocks: Blocks, python: Path | None, libs: Path | None
) -> Iterator[list[Contestant]]:
    """Start all contestants that are installed; end them afterwards."""
    unverified = TransferConfig(verify=False)
    found: list[Contestant] = []
    try:
        found.append(MemoryCopy("memcpy", blocks))
        found.append(ConnectorPair("shm", blocks, schemes=NEAR, config=unverified))
        found.append(ConnectorPair("shm verified", blocks, schemes=NEAR))
        found.append(ConnectorPair("tcp", blocks, schemes=FAR))
        found.append(ConnectorPair("tcp encrypted", blocks, schemes=FAR, network="encrypted"))
        if python is not None:
            found += peers(blocks, python, libs)
        found.append(ConnectorPair("tcp again", blocks, schemes=FAR))
        found.append(MemoryCopy("memcpy again", blocks))
        yield found
    finally:
        for contestant in found:
            contestant.close()


def peers(blocks: Blocks, python: Path, libs: Path | None) -> list[Contestant]:
    """Start the peers that an interpreter has; say which it has not."""
    found: list[Contestant] = []
    for peer, operation in itertools.product(PEERS, OPERATIONS):
        pair = PeerPair.start(peer, operation, blocks, python, libs)
        if pair is None:
            print(f"{peer} does not start with {python}")
        else:
            found.append(pair)
    return found


def best_of(rates: dict[str, Rates], names: Iterable[str]) -> float | None:
    """Return the best median rate among these rows, or None if there is none of them."""
    return max((rates[name].median for name in names if name in rates), default=None)


def over(rate: float, other: float | None) -> float | None:
    """Return a ratio, or None without the other."""
    return None if other is None else round(rate / other, 3)


def ratios(rates: dict[str, Rates]) -> dict[str, float | None]:
    """Compare this project's rows with the others: with the better of two that do the same."""
    copy = best_of(rates, ("memcpy", "memcpy again"))
    found = {
        "shm_vs_memcpy": over(rates["shm"].median, copy),
        "shm_verified_vs_memcpy": over(rates["shm verified"].median, copy),
    }
    if "tcp encrypted" in rates:
        found["encrypted_vs_plain"] = over(rates["tcp encrypted"].median, rates["tcp"].median)
    for peer in PEERS:
        other = best_of(rates, (f"{peer} {operation}" for operation in OPERATIONS))
        found[f"tcp_vs_{peer}"] = over(rates["tcp"].median, other)
    return found


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print Markdown."""
    for row in (head, ["---"] * len(head), *rows):
        print("|", " | ".join(row), "|", flush=True)
    print()


def print_rates(blocks: Blocks, rates: dict[str, Rates]) -> None:
    """Print all rates, and the ratios."""
    print(
        f"{blocks.num_pieces:,} blocks of {blocks.layout.piece_bytes:,} bytes, "
        f"rows of {blocks.layout.row_bytes:,}"
    )
    print_table(
        ["", "median GB/s", "best GB/s", "CPU s/GB"],
        ([name, f"{x.median:.2f}", f"{x.best:.2f}", f"{x.cpu_s:.2f}"] for name, x in rates.items()),
    )
    print(json.dumps(ratios(rates)), "\n")


def milliseconds(values: Iterable[float]) -> str:
    """Return a median."""
    return f"{1000 * statistics.median(values):.2f}"


def print_handovers(path: str, handovers: Sequence[Handover]) -> None:
    """Print the stages of short hand-overs."""
    rows = [
        ("reserve", milliseconds(x.reserve_s for x in handovers)),
        *(
            (stage, milliseconds(x.stages[stage] for x in handovers))
            for stages in STAGES.values()
            for stage in stages
        ),
        ("last prefill step to commit", milliseconds(x.exposed_s for x in handovers)),
        ("commit to first token of the decode side", milliseconds(x.resume_s for x in handovers)),
    ]
    print(f"{len(handovers)} prompts of one block over {path}")
    print_table(["", "ms, p50"], rows)


def print_shares(path: str, shares: Sequence[HiddenShare]) -> None:
    """Print how much is hidden."""
    print(f"long prompts over {path}")
    print_table(
        ["tokens", "exposed ms", "without overlap ms", "hidden"],
        (
            [f"{x.num_tokens:,}", f"{1000 * x.exposed_s:.1f}", f"{1000 * x.total_s:.1f}",
             f"{100 * x.share:.0f} %"]
            for x in shares
        ),
    )  # fmt: skip


def print_growth(found: Sequence[Growth]) -> None:
    """Print what slow receivers cost."""
    print_table(
        ["receiver", "transfers", "windows MiB", "sender +MiB", "receiver +MiB"],
        (
            [x.receiver, str(x.num_transfers), *(
                f"{size / 2**20:.0f}" for size in (x.allowed, x.source, x.target)
            )]
            for x in found
        ),
    )  # fmt: skip


async def hand_over(scale: Scale) -> dict[str, float]:
    """Measure the hand-over on every path; returns the figures of the first one."""
    figures: dict[str, float] = {}
    for path in scale.paths:
        handovers = await short_handovers(path.split(), scale.num_short)
        print_handovers(path, handovers)
        shares = await hidden_shares(path.split(), scale.lengths, scale.num_long)
        print_shares(path, shares)
        exposed_s = statistics.median(x.exposed_s for x in handovers)
        figures.setdefault("handover_ms_p50", round(1000 * exposed_s, 3))
        figures.setdefault("hidden_share", round(min(x.share for x in shares), 3))
    return figures


def main() -> None:
    """Parse arguments, run, print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under 90 seconds")
    parser.add_argument("--peer-python", type=Path, help="interpreter that has the peers")
    parser.add_argument("--peer-libs", type=Path, help="where the peers' libraries were unpacked")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    figures: dict[str, float | None] = {}
    for layout in scale.layouts:
        blocks = Blocks.about(layout, scale.mebibytes)
        with contestants(blocks, arguments.peer_python, arguments.peer_libs) as everybody:
            rates = contest(everybody, blocks.num_bytes, scale.num_rounds)
        print_rates(blocks, rates)
        figures = figures or ratios(rates)
    figures.update(asyncio.run(hand_over(scale)))
    if scale.num_transfers:
        blocks = Blocks.about(LLAMA_8B, scale.mebibytes)
        print_growth([
            measure_growth(blocks, receiver, count)
            for receiver in ("core stands still", "process is stopped")
            for count in scale.num_transfers
        ])  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

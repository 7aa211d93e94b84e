"""Pause of a stream when its engine hands it over, with its KV moved and without.

Two simulated T3K of configs/sim-t3k-long.yaml compute their own prompts, in virtual time, so that
the numbers are the same on every machine. The first one drains and hands over its only stream,
which has a long context. The other one decodes other streams meanwhile. *Context* is the stream's
length at that time, output included; *gap* is its longest time between two tokens; *others'* is the
same of the other engine's streams; *steady* is the median time, as without a hand-over.

    python -m benchmarks.hand_over --quick
    python -m benchmarks.hand_over
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from cluster.config.schema import RouterConfig
from cluster.lab.simulation.command import load_cluster, pool_specs, seldom_collecting
from cluster.lab.simulation.options import SimulationOptions
from cluster.lab.simulation.records import OK
from cluster.lab.simulation.simulator import Simulation
from cluster.lab.workloads.request import TraceRequest, Workload
from replicas.faults import FaultPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.lab.simulation.records import RequestRecord

CONFIG = Path(__file__).parent.parent / "configs/sim-t3k-long.yaml"
PROMPTS = (1_000, 8_000, 28_000, 55_000)
QUICK_PROMPTS = (1_000, 28_000)
OTHERS = 4
DRAIN_S = 8.0
"""How long the first engine may drain; it hands over after three quarters of it."""
_NO_TIME_SOON = 10**9


@dataclasses.dataclass(frozen=True)
class Gaps:
    """Tokens, and milliseconds between two; see the module docstring."""

    context: int
    gap: float
    others: float
    steady: float


def measure(num_prompt_tokens: int, connector: str | None) -> Gaps:
    """Hand one stream over.

    Args:
        num_prompt_tokens: Its prompt.
        connector: How its KV could move; None: not at all.
    """
    [spec] = [spec for spec in pool_specs(load_cluster(CONFIG)) if spec.role == "decode"]
    engine = msgspec.structs.replace(spec.engine, role="both", kv_connector=connector)
    pool = spec._replace(role="both", replicas=2, engine=engine, drain_timeout_s=DRAIN_S)
    begins_s, leaves_s = 45.0, 48.0
    requests = [
        TraceRequest(0.0, num_prompt_tokens, 4_000, (0,)),
        # After the long prompt: they go to the other engine, which has nothing to do.
        *(TraceRequest(begins_s, 100, 2_000, (1 + i,)) for i in range(OTHERS)),
    ]
    drain = {"at_s": leaves_s, "target": "both/0", "kind": "replace"}
    options = SimulationOptions(
        # Each prompt is computed where it is decoded.
        router=RouterConfig(min_remote_prefill_tokens=_NO_TIME_SOON),
        faults=FaultPlan.parse([drain]),
    )
    with seldom_collecting():
        records = Simulation([pool], Workload("streams", tuple(requests)), options).run().records
    stream, *others = records
    assert [r.outcome for r in records] == [OK] * len(records)
    assert {r.replica for r in records} == {"both/1"}, "the stream went to where the others are"
    between = _between(stream)
    return Gaps(
        context=num_prompt_tokens + int(between.argmax()) + 1,
        gap=float(between.max()),
        others=max(float(_between(other).max()) for other in others),
        steady=float(np.median(between)),
    )


def _between(record: RequestRecord) -> np.ndarray:
    return 1000 * np.diff(record.token_times_s)


def print_rows(prompts: Sequence[int]) -> dict[str, float]:
    """Measure and print; returns what the last line says."""
    print(f"{'context':>8}{'KV':>12}{'gap':>12}{'others':>12}{'steady':>12}")
    found: dict[str, float] = {}
    for num_tokens in prompts:
        for name, connector in (("moved", "p2p"), ("recomputed", None)):
            gaps = measure(num_tokens, connector)
            found[f"gap_ms_{name}_{num_tokens}"] = round(gaps.gap, 1)
            cells = "".join(f"{x:9.1f} ms" for x in (gaps.gap, gaps.others, gaps.steady))
            print(f"{gaps.context:8,}{name:>12}{cells}")
    return found


def main() -> None:
    """Parse arguments, run, print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer prompts")
    arguments = parser.parse_args()
    logging.getLogger("cluster").setLevel(logging.ERROR)  # that a drained replica ends is no news
    print(json.dumps(print_rows(QUICK_PROMPTS if arguments.quick else PROMPTS)))


if __name__ == "__main__":
    main()

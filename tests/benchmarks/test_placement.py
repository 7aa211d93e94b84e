"""The placement benchmark's workload is as documented, and the index answers it correctly."""

import json
import subprocess
import sys

from benchmarks.placement import NUM_BLOCKS, NUM_WORKERS, make_workload, num_held, run_ours

WORKLOAD = make_workload(num_conversations=12, num_steps=30)


def replayed(workload):
    """Return for each look-up the number of leading blocks that each worker holds."""
    held = [set() for _ in range(NUM_WORKERS)]
    depths = []
    for kind, worker, chain, first, end in (*workload.loads, *workload.steps):
        names = workload.chains[chain][first:end]
        if kind == "store":
            held[worker] |= set(names)
        elif kind == "remove":
            assert held[worker] >= set(names), "no worker loses what it has not"
            held[worker] -= set(names)
        else:
            leading = [
                next((i for i, n in enumerate(names) if n not in h), len(names)) for h in held
            ]
            depths.append([[worker, depth] for worker, depth in enumerate(leading) if depth])
    return depths


def test_the_index_finds_what_the_workers_hold():
    run = run_ours(WORKLOAD)
    assert run.depths == replayed(WORKLOAD)
    assert (len(run.look_up_us), len(run.change_us)) == (30, 60)
    found = {depth for depths in run.depths for _, depth in depths}
    assert max(found) > NUM_BLOCKS // 2 >= min(found), "some hold the shared half alone"
    assert num_held(WORKLOAD) > NUM_WORKERS * NUM_BLOCKS // 2


def test_the_last_line_has_the_figures():
    command = [sys.executable, "-m", "benchmarks.placement", "--quick"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() >= {"prefix_us_p50", "bytes_per_block"}
    assert all(value > 0 for value in figures.values())

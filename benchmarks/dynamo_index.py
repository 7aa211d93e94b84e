"""Run a workload of `benchmarks.placement` on NVIDIA Dynamo 1.6.1's index; one line of JSON.

Run by that benchmark with the interpreter of an environment that has it, and so without any import
of this project: `pip install --no-deps ai-dynamo-runtime==1.6.1 ai-dynamo==1.6.1`.

    python benchmarks/dynamo_index.py WORKLOAD
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("DYN_LOG", "error")


def rss_bytes() -> int:
    """Memory of this process that is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def event(number: int, kind: str, chain: list[int], first: int, end: int) -> bytes:
    """Blocks of a chain are stored or removed, as the index reads it."""
    names = chain[first:end]
    if kind == "remove":
        data: dict[str, object] = {"removed": {"block_hashes": names[::-1]}}
    else:
        blocks = [{"block_hash": name, "tokens_hash": name} for name in names]
        data = {"stored": {"parent_hash": chain[first - 1] if first else None, "blocks": blocks}}
    return json.dumps({"event_id": number, "data": data}).encode()


def main() -> None:
    """Load what the workers hold, then look up between changes."""
    from dynamo import _core

    workload = json.loads(Path(sys.argv[1]).read_text())
    chains = workload["chains"]
    loads, steps = (
        [
            (worker, names, event(i, kind, names, first, end) if kind != "look_up" else None)
            for i, (kind, worker, chain, first, end) in enumerate(operations)
            for names in [chains[chain]]
        ]
        for operations in (workload["loads"], workload["steps"])
    )
    before = rss_bytes()
    tree = _core.RadixTree()
    for worker, _, raw in loads:
        tree.apply_event(worker, raw)
    num_bytes = rss_bytes() - before
    look_up_us, change_us, depths = [], [], []
    for worker, names, raw in steps:
        started = time.perf_counter()
        if raw is None:
            scores = tree.find_matches(names).scores
            look_up_us.append(1e6 * (time.perf_counter() - started))
            depths.append(sorted([worker, depth] for (worker, _), depth in scores.items()))
        else:
            tree.apply_event(worker, raw)
            change_us.append(1e6 * (time.perf_counter() - started))
    print(json.dumps({
        "look_up_us": look_up_us, "change_us": change_us, "depths": depths, "num_bytes": num_bytes,
    }))  # fmt: skip


if __name__ == "__main__":
    main()

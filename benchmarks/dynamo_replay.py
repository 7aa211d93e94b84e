"""Replay a Mooncake trace with the mocker of NVIDIA Dynamo 1.6.1; one JSON line for each run.

Run by `benchmarks.simulator` with the interpreter of an environment that has it, and so without
any import of this project: `pip install --no-deps ai-dynamo-runtime==1.6.1 ai-dynamo==1.6.1`.

    python benchmarks/dynamo_replay.py TRACE N RATIO ROUTER TTFT_S TPOT_S
"""

import json
import os
import sys
import time

os.environ.setdefault("DYN_LOG", "error")


def replay(
    trace: str, num_workers: int, ratio: float, router: str, ttft_s: float, tpot_s: float
) -> dict[str, object]:
    """Run once; times in ms, and the share of requests that keep both objectives."""
    from dynamo import _core

    started = time.perf_counter()
    summary = _core.run_mocker_trace_replay(
        [trace],
        num_workers=num_workers,
        router_mode=router,
        trace_block_size=512,
        arrival_speedup_ratio=ratio,
        sla_ttft_ms=1e3 * ttft_s,
        sla_itl_ms=1e3 * tpot_s,
    ).summary
    return {
        "wall_s": time.perf_counter() - started,
        "num_ok": summary["completed_requests"],
        "reuse": summary["prefix_cache_reused_ratio"],
        "ttft_ms_mean": summary["mean_ttft_ms"],
        "ttft_ms_p99": summary["p99_ttft_ms"],
        "itl_ms_mean": summary["mean_itl_ms"],
        "good": summary["goodput_completed_requests"] / summary["num_requests"],
    }


if __name__ == "__main__":
    path, workers, speed_up, mode, ttft, tpot = sys.argv[1:]
    figures = replay(path, int(workers), float(speed_up), mode, float(ttft), float(tpot))
    print(json.dumps(figures))

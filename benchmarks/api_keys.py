"""Processor time that API keys and tenants' limits add to a request at an ingress.

A file of many tenants; each request shows another tenant's key, is admitted against the limits,
charges its tokens and makes the rate-limit headers, all with one ingress. Reading the file again is
shown beside it: a thread does that when the file has changed. Ends with code 1 if a request takes
more than `LIMIT_S`.

    python -m benchmarks.api_keys
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cluster.edge.api_keys import ApiKeys, new_key, read_keys
from cluster.edge.quota_service import TenantQuotas, lease_of

TENANTS = (10, 1000)
REQUESTS = 2000
ROUNDS = 9
LIMIT_S = 1e-4
_LIMITS = "max_requests: 100000, requests_per_minute: 1000000000, tokens_per_minute: 1000000000"


async def admit(api_keys: ApiKeys, quotas: TenantQuotas, key: bytes) -> None:
    """Do for one request what keys and limits add to it."""
    scope: dict[str, Any] = {}
    headers = [(b"host", b"localhost"), (b"authorization", b"Bearer " + key)]
    async with quotas.hold(api_keys.authenticate(headers), scope):
        lease = lease_of(scope)
        assert lease is not None
        lease.charge(100)
        lease.headers()


async def request_s(api_keys: ApiKeys, keys: list[bytes], num_requests: int) -> float:
    """Return the processor time of one request, a median of rounds."""
    quotas = TenantQuotas()
    rounds = []
    for _ in range(ROUNDS):
        begun_s = time.thread_time()
        for i in range(num_requests):
            await admit(api_keys, quotas, keys[i % len(keys)])
        rounds.append((time.thread_time() - begun_s) / num_requests)
    return statistics.median(rounds)


def measure(num_tenants: int, num_requests: int = REQUESTS) -> tuple[float, float]:
    """Return the processor times of a request, and of reading the file once."""
    made = [new_key() for _ in range(num_tenants)]
    lines = [f"tenant-{i}: {{keys: ['{line}'], {_LIMITS}}}\n" for i, (_, line) in enumerate(made)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "keys.yaml")
        path.write_text("".join(lines))
        api_keys = ApiKeys(str(path))
        keys = [key.encode() for key, _ in made]
        each_s = asyncio.run(request_s(api_keys, keys, num_requests))
        begun_s = time.thread_time()
        read_keys(str(path))
        return each_s, time.thread_time() - begun_s


def main() -> None:
    """Print the table."""
    slowest_s = 0.0
    print("tenants   request   limit/request   reading the file")
    for num_tenants in TENANTS:
        each_s, read_s = measure(num_tenants)
        slowest_s = max(slowest_s, each_s)
        ratio = LIMIT_S / each_s
        print(f"{num_tenants:7}   {each_s * 1e6:5.1f} us   {ratio:13.1f}   {read_s * 1e3:8.1f} ms")
    if slowest_s > LIMIT_S:
        sys.exit(f"a request takes {slowest_s * 1e6:.0f} us, more than {LIMIT_S * 1e6:.0f}")


if __name__ == "__main__":
    main()

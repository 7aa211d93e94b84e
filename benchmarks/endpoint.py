"""Cost of the cluster on top of its engine: the documented endpoint against the engine alone.

Starts `ttserve serve` on a config file, measures time to first token at one stream and output
tokens per second at 32 streams through the URL that users get, then the same requests through
`AsyncLLM` on one engine process of the decode pool's settings, twice (the A/A row tells what the
machine's noise is). Ratios above 1 mean that the endpoint is faster.

    python -m benchmarks.endpoint [--quick] [--config configs/single.yaml]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from openai import AsyncOpenAI

from benchmarks.ready import wait_ready
from cluster.config.resolve import ClusterConfig, replica_engine, resolve
from cluster.config.serve_file import read_serve_file
from cluster.lifecycle.supervisor import free_port
from kv_transfer.keys import KeyRing
from replicas import AsyncLLM, SamplingParams

if TYPE_CHECKING:
    from replicas.config import Role

PROMPT = "Return a new dictionary that maps every key of the mapping to"
STREAMS = 32

Generate = Callable[[int], Awaitable[tuple[float, int]]]
"""Runs one request of so many tokens; gives (seconds to the first token, output tokens)."""


async def measure(generate: Generate, *, tokens: int, repeats: int) -> dict[str, float]:
    """TTFT at one stream (median of many), tokens/s at 32 streams (median of `repeats`)."""
    await generate(tokens)
    first = [(await generate(4))[0] for _ in range(10 * repeats)]
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        done = await asyncio.gather(*(generate(tokens) for _ in range(STREAMS)))
        rates.append(sum(count for _, count in done) / (time.perf_counter() - started))
    return {
        "ttft_ms": statistics.median(first) * 1000.0,
        "tokens_per_s": statistics.median(rates),
    }


async def through_endpoint(url: str, model: str, tokens: int, repeats: int) -> dict[str, float]:
    """Measure a running server."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")

    async def generate(max_tokens: int) -> tuple[float, int]:
        started, first, count = time.perf_counter(), 0.0, 0
        stream = await client.completions.create(
            model=model, prompt=PROMPT, max_tokens=max_tokens, temperature=0, stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        async for chunk in stream:
            first = first or time.perf_counter() - started
            count += len(chunk.choices[0].token_ids)  # type: ignore[attr-defined]
        return first, count

    return await measure(generate, tokens=tokens, repeats=repeats)


async def through_engine(llm: AsyncLLM, tokens: int, repeats: int) -> dict[str, float]:
    """Measure one engine process without HTTP, router or Ray."""

    async def generate(max_tokens: int) -> tuple[float, int]:
        started, first, count = time.perf_counter(), 0.0, 0
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        async for output in llm.generate(PROMPT, params):
            first = first or time.perf_counter() - started
            count = len(output.outputs[0].token_ids)
        return first, count

    return await measure(generate, tokens=tokens, repeats=repeats)


def compare(config: Path, tokens: int, repeats: int) -> dict[str, object]:
    """Measure the endpoint, then the engine twice."""
    file = read_serve_file(config).override(http_options={"port": free_port()})
    cluster, port = resolve(file.args), file.http_options.port
    command = [sys.executable, "-m", "cluster.cli", "serve", "--config", str(config)]
    server = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_ready(f"{file.url}/health", server)
        endpoint = asyncio.run(
            through_endpoint(file.url, cluster.served_model_name, tokens, repeats)
        )
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
    engine, again = asyncio.run(_engine_twice(cluster, tokens, repeats))
    return {
        "config": config.name,
        "endpoint": endpoint,
        "engine": engine,
        "engine_again": again,
        "ttft_ratio": engine["ttft_ms"] / endpoint["ttft_ms"],
        "tokens_per_s_ratio": endpoint["tokens_per_s"] / engine["tokens_per_s"],
        "aa_ttft_ratio": engine["ttft_ms"] / again["ttft_ms"],
        "aa_tokens_per_s_ratio": again["tokens_per_s"] / engine["tokens_per_s"],
    }


async def _engine_twice(
    cluster: ClusterConfig, tokens: int, repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    role: Role = "decode" if cluster.is_disaggregated else "both"
    llm = await AsyncLLM.start(
        replica_engine(cluster, role, 0, host=cluster.data_host, keys=KeyRing())
    )
    try:
        return (
            await through_engine(llm, tokens, repeats),
            await through_engine(llm, tokens, repeats),
        )
    finally:
        await llm.shutdown()


def main() -> None:
    """Parse arguments, run, print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--config", type=Path, default=Path("configs/single.yaml"))
    arguments = parser.parse_args()
    tokens, repeats = (32, 3) if arguments.quick else (128, 5)
    print(json.dumps(compare(arguments.config.absolute(), tokens, repeats)))


if __name__ == "__main__":
    main()

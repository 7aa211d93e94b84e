"""`ttserve bench latency` and `throughput`: an engine without a server.

Figures, prints and JSON keys are those of vLLM 0.32 `benchmarks/latency.py` and `throughput.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from rich.console import Console
from rich.progress import track

from cluster.bench.arguments import (
    at_least,
    engine_options,
    latency_parser,
    parse_known,
    throughput_parser,
)
from cluster.bench.errors import FAILED, STOPPED, BenchError
from cluster.bench.samples import load_requests, load_tokenizer, model_folder
from replicas import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from replicas.errors import ConfigError, EngineError, InvalidRequestError
from replicas.llm import offline_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from cluster.bench.datasets import SampleRequest

Say: TypeAlias = Callable[[str], None]

_PERCENTILES = (10, 25, 50, 75, 90, 99)
_MOST_TOKEN_ID = 10_000


def bench_latency(arguments: Sequence[str], say: Say) -> int:
    """Run `ttserve bench latency`; `say` prints a line.

    Returns:
        Exit code: 130 after Ctrl-C, 1 if the engine failed, else 0. Iterations until then count.

    Raises:
        BenchError: An option cannot be used.
    """
    options, rest = parse_known(latency_parser(), arguments)
    at_least(options, {"input_len": 1, "output_len": 1, "batch_size": 1, "n": 1, "num_iters": 1})
    engine = {"enable_prefix_caching": False, **engine_options(rest)}
    latencies_s: list[float] = []
    code = 0
    with _refusals(), LLM(model_folder(options.model), **engine) as llm:
        try:
            _iterate(llm, options, latencies_s)
        except (ConfigError, InvalidRequestError):
            raise
        except EngineError as error:
            code = FAILED
            say(f"the engine failed after {len(latencies_s)} of {options.num_iters}: {error}")
        except KeyboardInterrupt:
            code = STOPPED
            say(f"stopped after {len(latencies_s)} of {options.num_iters} iterations")
    if not latencies_s:
        return code
    percentiles = np.percentile(latencies_s, _PERCENTILES).tolist()
    figures = {
        "model_id": options.model,
        "avg_latency": float(np.mean(latencies_s)),
        "latencies": latencies_s,
        "percentiles": dict(zip(map(str, _PERCENTILES), percentiles, strict=True)),
    }
    say(f"Avg latency: {figures['avg_latency']} seconds")
    for percentage, value in zip(_PERCENTILES, percentiles, strict=True):
        say(f"{percentage}% percentile latency: {value} seconds")
    _save(options.output_json, figures)
    return code


def bench_throughput(arguments: Sequence[str], say: Say) -> int:
    """Run `ttserve bench throughput`; `say` prints a line.

    Returns:
        Exit code: 1 if the engine failed, else 0.

    Raises:
        BenchError: An option or a file cannot be used.
    """
    options, rest = parse_known(throughput_parser(), arguments)
    at_least(options, {"num_prompts": 1, "num_warmups": 0, "n": 1, "seed": 0})
    if options.dataset_path is None and options.dataset_name == "sharegpt":
        options.dataset_name = "random"
    tokenizer = load_tokenizer(options.tokenizer or options.model)
    requests = load_requests(options, tokenizer, np.random.default_rng(options.seed))
    warm_up: list[SampleRequest] = []
    if options.num_warmups:
        # Drawn from another seed, so that the prefix cache is not warmed for the measured ones.
        given = vars(options) | {"num_prompts": options.num_warmups, "seed": options.seed + 1}
        others = argparse.Namespace(**given)
        warm_up = load_requests(others, tokenizer, np.random.default_rng(others.seed))
    engine = engine_options(rest)
    run = _throughput_async if options.async_engine else _throughput
    with _refusals():
        try:
            elapsed_s, num_prompt, num_output = run(options, engine, requests, warm_up)
        except (ConfigError, InvalidRequestError):
            raise
        except EngineError as error:
            say(f"the engine failed: {error}")
            return FAILED
    total = num_prompt + num_output
    say(
        f"Throughput: {len(requests) / elapsed_s:.2f} requests/s, "
        f"{total / elapsed_s:.2f} total tokens/s, {num_output / elapsed_s:.2f} output tokens/s"
    )
    say(f"Total num prompt tokens:  {num_prompt}")
    say(f"Total num output tokens:  {num_output}")
    figures = {
        "model_id": options.model,
        "elapsed_time": elapsed_s,
        "num_requests": len(requests),
        "total_num_tokens": total,
        "requests_per_second": len(requests) / elapsed_s,
        "tokens_per_second": total / elapsed_s,
    }
    _save(options.output_json, figures)
    return 0


def _iterate(llm: LLM, options: argparse.Namespace, latencies_s: list[float]) -> None:
    """Append the seconds of each measured iteration, after the warm-up."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None, "it is loaded unless skipped"
    most = min(_MOST_TOKEN_ID, tokenizer.vocab_size)
    random = np.random.default_rng(0)
    prompts = random.integers(0, most, (options.batch_size, options.input_len)).tolist()
    sampling = SamplingParams(
        n=options.n, temperature=1.0, ignore_eos=True, max_tokens=options.output_len
    )
    search = BeamSearchParams(beam_width=options.n, max_tokens=options.output_len, ignore_eos=True)

    def once() -> float:
        begin_s = time.perf_counter()
        if options.use_beam_search:
            llm.beam_search(prompts, search)
        else:
            llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begin_s

    console = Console(stderr=True)
    for _ in track(range(options.num_iters_warmup), "warm-up", console=console, transient=True):
        once()
    for _ in track(range(options.num_iters), "iterations", console=console, transient=True):
        latency_s = once()
        # Appended one by one, so that those before an error are kept.
        latencies_s.append(latency_s)


def _throughput(
    options: argparse.Namespace,
    engine: dict[str, Any],
    requests: Sequence[SampleRequest],
    warm_up: Sequence[SampleRequest],
) -> tuple[float, int, int]:
    """Return the seconds of all requests, and their prompt and output tokens."""
    sampling = _sampling(options, requests)
    with LLM(model_folder(options.model), **engine) as llm:
        if warm_up:
            prompts = [request.prompt for request in warm_up]
            llm.generate(prompts, _sampling(options, warm_up), use_tqdm=False)
        begin_s = time.perf_counter()
        outputs = llm.generate([request.prompt for request in requests], sampling)
        elapsed_s = time.perf_counter() - begin_s
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return elapsed_s, num_prompt, num_output


def _throughput_async(
    options: argparse.Namespace,
    engine: dict[str, Any],
    requests: Sequence[SampleRequest],
    warm_up: Sequence[SampleRequest],
) -> tuple[float, int, int]:
    """Do as `_throughput` through `AsyncLLM`: an engine process and one coroutine per request."""

    async def one(llm: AsyncLLM, request: SampleRequest, sampling: SamplingParams) -> list[int]:
        prompt, output = 0, 0
        async for found in llm.generate(request.prompt, sampling):
            prompt = len(found.prompt_token_ids)
            output = sum(len(choice.token_ids) for choice in found.outputs)
        return [prompt, output]

    async def all_of(llm: AsyncLLM, some: Sequence[SampleRequest]) -> list[list[int]]:
        pairs = zip(some, _sampling(options, some), strict=True)
        return await asyncio.gather(*(one(llm, *pair) for pair in pairs))

    async def run() -> tuple[float, int, int]:
        llm = await AsyncLLM.start(offline_config(model_folder(options.model), engine))
        try:
            await all_of(llm, warm_up)
            begin_s = time.perf_counter()
            counts = await all_of(llm, requests)
            elapsed_s = time.perf_counter() - begin_s
        finally:
            await llm.shutdown()
        num_prompt, num_output = np.sum(counts, axis=0).tolist()
        return elapsed_s, num_prompt, num_output

    return asyncio.run(run())


def _sampling(
    options: argparse.Namespace, requests: Sequence[SampleRequest]
) -> list[SamplingParams]:
    return [
        SamplingParams(n=options.n, temperature=1.0, ignore_eos=True, max_tokens=request.output_len)
        for request in requests
    ]


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise a `BenchError` for options or requests that an engine refuses."""
    try:
        yield
    except (ConfigError, InvalidRequestError) as error:
        raise BenchError(str(error)) from error


def _save(path: Path | None, figures: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(figures, indent=4))
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}; check --output-json") from None

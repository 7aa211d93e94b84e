"""`ttserve bench serve`: requests to a running server, a table, and a file with vLLM's keys."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import math
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cluster.bench.arguments import (
    BACKENDS,
    SAMPLING,
    at_least,
    numbers,
    pairs,
    parse,
    serve_parser,
)
from cluster.bench.arrivals import RampUp, arrival_times
from cluster.bench.client import Target, first_model, send_all, send_one, wait_ready
from cluster.bench.errors import FAILED, STOPPED, BenchError
from cluster.bench.metrics import DETAILED, Wanted, summarize, table
from cluster.bench.samples import load_requests, load_tokenizer, served_folder

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from cluster.bench.client import Run
    from cluster.bench.datasets import SampleRequest

Say: TypeAlias = Callable[[str], None]


def bench_serve(arguments: Sequence[str], api_key: str, say: Say) -> int:
    """Run `ttserve bench serve`; `say` prints a line.

    Returns:
        Exit code: 130 after Ctrl-C, 1 if the server was lost or no request succeeded, else 0.

    Raises:
        BenchError: An option, a file or the server cannot be used.
    """
    options = parse(serve_parser(), arguments)
    wanted = _wanted(options)
    at_least(options, {"num_prompts": 1, "max_concurrency": 1, "seed": 0})
    is_trace = options.dataset_name == "timed_trace"
    if options.self_timed is not None and not is_trace:
        raise BenchError("--self-timed and --no-self-timed need --dataset-name timed_trace")
    if options.self_timed is None:
        options.self_timed = is_trace
    return asyncio.run(_measure(options, wanted, api_key, say))


async def _measure(options: argparse.Namespace, wanted: Wanted, api_key: str, say: Say) -> int:
    target = _target(options, api_key)
    root = options.model
    if options.model is None:
        model, root = await first_model(target)
        target = msgspec.structs.replace(target, model=model)
        root = served_folder(root, model)
    tokenizer_id = options.tokenizer or root
    random = np.random.default_rng(options.seed)
    requests = load_requests(options, load_tokenizer(tokenizer_id), random)
    arrivals_s = _arrivals(options, requests, random)
    if options.ready_check_timeout_sec > 0:
        await wait_ready(target, requests[0], options.ready_check_timeout_sec)
    await _warm_up(target, requests[0], options.num_warmups)
    run = await _send(options, target, requests, arrivals_s)
    _say_failures(run, len(requests), say)
    figures = {
        **_settings(options, target, tokenizer_id),
        **summarize(run.results, run.duration_s, wanted),
    }
    say(table(figures, wanted))
    if options.save_result or options.append_result:
        say(f"saved {_save(options, figures, target.model)}")
    if run.is_stopped:
        return STOPPED
    return FAILED if run.is_lost or not figures["completed"] else 0


async def _send(
    options: argparse.Namespace,
    target: Target,
    requests: Sequence[SampleRequest],
    arrivals_s: npt.NDArray[np.float64],
) -> Run:
    """Send all requests, with a progress bar; Ctrl-C ends the run and keeps what came."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    # A loop outside of the main thread cannot handle signals.
    with contextlib.suppress(RuntimeError, ValueError):
        loop.add_signal_handler(signal.SIGINT, stop.set)
    columns = TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    try:
        with Progress(*columns, console=console, disable=options.disable_tqdm) as bar:
            task = bar.add_task("", total=len(requests))
            return await send_all(
                target,
                requests,
                arrivals_s.tolist(),
                max_concurrency=options.max_concurrency,
                stop=stop,
                on_result=lambda _: bar.advance(task),
            )
    finally:
        with contextlib.suppress(RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGINT)


async def _warm_up(target: Target, request: SampleRequest, number: int) -> None:
    for _ in range(number):
        if error := (await send_one(target, request)).error:
            raise BenchError(f"{target.base_url}: a warm-up request failed: {error}")


def _say_failures(run: Run, number: int, say: Say) -> None:
    errors = [result.error for result in run.results if result.error]
    if run.is_stopped or run.is_lost:
        why = "lost the server" if run.is_lost else "stopped"
        say(
            f"{why} after {run.duration_s:.1f} s: of {number} requests "
            f"{len(run.results) - len(errors)} succeeded, {len(errors)} failed and "
            f"{run.num_unsent} were not sent; the figures are of those that succeeded"
        )
    if errors:
        say(f"{len(errors)} requests failed, the first with: {errors[0]}")


def _wanted(options: argparse.Namespace) -> Wanted:
    percentiles = numbers("--metric-percentiles", options.metric_percentiles.split(","))
    goodput = pairs("--goodput", options.goodput, ":")
    limits = numbers("--goodput", list(goodput.values()))
    return Wanted(
        metrics=tuple(options.percentile_metrics.split(",")),
        percentiles=tuple(percentiles),
        goodput_ms=dict(zip(goodput, limits, strict=True)),
    )


def _target(options: argparse.Namespace, api_key: str) -> Target:
    host = f"[{options.host}]" if ":" in options.host else options.host
    base_url = (options.base_url or f"http://{host}:{options.port}").rstrip("/")
    if not base_url.startswith(("http://", "https://")):
        raise BenchError(f"--base-url must begin with http:// or https://, got {base_url!r}")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    body = {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
    if options.ignore_eos or options.dataset_name in {"random", "timed_trace"}:
        body["ignore_eos"] = True
    is_chat = options.backend == "openai-chat"
    if options.logprobs is not None:
        body["logprobs"] = True if is_chat else options.logprobs
        body |= {"top_logprobs": options.logprobs} if is_chat else {}
    return Target(
        base_url=base_url,
        endpoint=options.endpoint or BACKENDS[options.backend],
        is_chat=is_chat,
        model=options.served_model_name or options.model or "",
        headers=headers | pairs("--header", options.header, "="),
        body=body | options.extra_body,
        verify_tls=not options.insecure,
        request_id_prefix=options.request_id_prefix,
    )


def _arrivals(
    options: argparse.Namespace, requests: Sequence[SampleRequest], random: np.random.Generator
) -> npt.NDArray[np.float64]:
    if options.self_timed:
        return np.array([request.arrival_s for request in requests], dtype=np.float64)
    ramp_up = None
    if options.ramp_up_strategy is not None:
        if None in (options.ramp_up_start_rps, options.ramp_up_end_rps):
            raise BenchError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
        if not math.isinf(options.request_rate):
            raise BenchError("--ramp-up-strategy and --request-rate exclude each other")
        ramp_up = RampUp(
            options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps
        )
    return arrival_times(len(requests), options.request_rate, options.burstiness, random, ramp_up)


def _settings(options: argparse.Namespace, target: Target, tokenizer_id: str) -> dict[str, Any]:
    settings = {
        "date": datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": options.model or target.model,
        "tokenizer_id": tokenizer_id,
        "num_prompts": options.num_prompts,
        **pairs("--metadata", options.metadata, "="),
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }
    if options.ramp_up_strategy is not None:
        names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        settings |= {name: getattr(options, name) for name in names}
    return settings


def _save(options: argparse.Namespace, figures: dict[str, Any], model: str) -> Path:
    """Write the figures to the result file; return its path.

    Raises:
        BenchError: It cannot be written.
    """
    kept = (
        figures if options.save_detailed else {k: figures[k] for k in figures if k not in DETAILED}
    )
    rate = f"{options.request_rate}qps"
    if options.ramp_up_strategy is not None:
        rate = "ramp-up-{ramp_up_strategy}-{ramp_up_start_rps:g}qps-{ramp_up_end_rps:g}qps".format(
            **vars(options)
        )
    limit = "" if options.max_concurrency is None else f"-concurrency{options.max_concurrency}"
    label = options.label or options.backend
    name = f"{label}-{rate}{limit}-{model.split('/')[-1]}-{figures['date']}.json"
    path: Path = options.result_dir / (options.result_filename or name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if options.append_result else "w", encoding="utf-8") as file:
            if options.append_result and file.tell():
                file.write("\n")
            json.dump(kept, file)
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}; check --result-dir") from None
    return path

"""Offline inference with continuous batching, on the CPU, a simulated mesh or a Tenstorrent mesh.

    python examples/offline_inference.py                                  # the bundled model, torch
    python examples/offline_inference.py --model ~/Llama-3.1-8B --mesh N150
    python examples/offline_inference.py --simulate Llama-3.1-8B@n150 --measure-perf
    python examples/offline_inference.py --test_increasing_seq_lens       # up to max_model_len
    python examples/offline_inference.py --async_engine --prompts_json prompts.json

Requests join while others run (`--requests-per-step`), and there may be more of them than decode
slots (`--max-batch-size`). With `--measure-perf` every prompt has `--prompt-len` tokens and no end
token counts, so that runs compare. With `--async_engine` the requests are coroutines of one event
loop, all at once. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cluster.config.resolve import demo_model_folder
from cluster.config.schema import DEMO_MODEL
from replicas import LLM, AsyncLLM, SamplingParams
from replicas.config import EngineConfig
from replicas.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replicas import LLMEngine, RequestOutput

PROMPTS = (
    "Return a copy of the",
    "The default encoding is",
    "Raise an exception if",
    "A new list is created",
    "This method returns the number of",
    "The following example shows how to",
)


_OF_IMAGES = ("multi_modal", "multi_image", "mm_processor_kwargs")
"""Flags of Tenstorrent's own example that need images; the last takes a value."""


@dataclass(frozen=True)
class Figures:
    """Figures of a run; rates are of this process, not of an HTTP endpoint.

    Attributes:
        num_requests: Requests that ended.
        prompt_tokens: Of all of them.
        output_tokens: Of all of them.
        ttft_ms: Median time from adding a request to its first token.
        tpot_ms: Median over the requests of the mean time per token after the first.
        tokens_per_s_per_user: The same as a rate.
        output_tokens_per_s: Of all requests together, from first arrival to last token.
        seconds: First arrival to last token.
    """

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float
    tokens_per_s_per_user: float
    output_tokens_per_s: float
    seconds: float


@dataclass
class Timeline:
    """Times of one request: when it was added, and of its first and last token."""

    added_s: float
    first_s: float = 0.0
    last_s: float = 0.0


def run(
    engine: LLMEngine,
    prompts: Sequence[str | list[int]],
    params: SamplingParams,
    *,
    requests_per_step: int = 0,
) -> tuple[list[RequestOutput], Figures]:
    """Generate for every prompt, while later ones join the batch.

    Args:
        engine: Idle.
        prompts: Texts or token ids.
        params: For all of them.
        requests_per_step: How many are added before each step; 0 adds all at once.

    Returns:
        The finished requests in the order of the prompts, and the figures of the run.
    """
    waiting = list(reversed(prompts))
    order: list[str] = []
    times: dict[str, Timeline] = {}
    finished: dict[str, RequestOutput] = {}
    while waiting or engine.has_unfinished_requests():
        for _ in range(min(requests_per_step or len(waiting), len(waiting))):
            order.append(engine.add_request(waiting.pop(), params))
            times[order[-1]] = Timeline(time.perf_counter())
        for output in engine.step():
            now_s = time.perf_counter()
            line = times[output.request_id]
            line.first_s = line.first_s or now_s
            line.last_s = now_s
            if output.finished:
                finished[output.request_id] = output
    outputs = [finished[request_id] for request_id in order]
    return outputs, figures(outputs, [times[request_id] for request_id in order])


async def run_async(
    llm: AsyncLLM, prompts: Sequence[str | list[int]], params: SamplingParams
) -> tuple[list[RequestOutput], Figures]:
    """Generate for every prompt at once; as `run`."""

    async def one(prompt: str | list[int]) -> tuple[RequestOutput, Timeline]:
        line = Timeline(time.perf_counter())
        outputs = []
        async for output in llm.generate(prompt, params):
            line.last_s = time.perf_counter()
            line.first_s = line.first_s or line.last_s
            outputs.append(output)
        return outputs[-1], line

    results = await asyncio.gather(*map(one, prompts))
    outputs = [output for output, _ in results]
    return outputs, figures(outputs, [line for _, line in results])


def figures(outputs: Sequence[RequestOutput], times: Sequence[Timeline]) -> Figures:
    """Sum up a run."""
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    per_token = [
        (line.last_s - line.first_s) / (count - 1)
        for line, count in zip(times, counts, strict=True)
        if count > 1
    ]
    tpot_s = statistics.median(per_token) if per_token else 0.0
    seconds = max(line.last_s for line in times) - min(line.added_s for line in times)
    return Figures(
        num_requests=len(outputs),
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        output_tokens=sum(counts),
        ttft_ms=1000 * statistics.median(line.first_s - line.added_s for line in times),
        tpot_ms=1000 * tpot_s,
        tokens_per_s_per_user=1 / tpot_s if tpot_s else 0.0,
        output_tokens_per_s=sum(counts) / seconds,
        seconds=seconds,
    )


def increasing_lengths(engine: LLMEngine, max_tokens: int) -> list[tuple[int, Figures]]:
    """One request after another, each prompt twice as long, the last as long as there is room for.

    Args:
        engine: Idle.
        max_tokens: Tokens that each one generates.

    Returns:
        Prompt length and the figures of that request, in order.
    """
    longest = engine.max_model_len - max_tokens
    if longest < 1:
        raise EngineError(
            f"{max_tokens} new tokens leave no room for a prompt in max_model_len "
            f"{engine.max_model_len}; lower --max-tokens"
        )
    lengths = [2**i for i in range(5, longest.bit_length()) if 2**i < longest] + [longest]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    results = []
    for length in lengths:
        [output], took = run(engine, [unlike_prompt(length, length)], params)
        if len(output.outputs[0].token_ids) != max_tokens:
            raise EngineError(
                f"a prompt of {length} tokens gave {len(output.outputs[0].token_ids)} tokens "
                f"instead of {max_tokens}"
            )
        print(f"{length:>8} prompt tokens  first token {took.ttft_ms:10.1f} ms  "
              f"then {took.tpot_ms:8.2f} ms per token", flush=True)  # fmt: skip
        results.append((length, took))
    return results


def unlike_prompt(number: int, length: int) -> list[int]:
    """Return `length` ordinary tokens; prompts of two numbers differ from the first token on.

    Why: a prefix that is found in the cache would not be computed, nor timed.

    Args:
        number: Below 64 ** 3; its digits come first.
        length: At least 3 for prompts to differ.
    """
    digits = [number // 64**i % 64 for i in range(3)]
    body = [(number * 37 + i * 31) % 61 for i in range(3, length)]
    return [16 + token for token in (digits + body)[:length]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit code."""
    options = _parse(arguments)
    if unsupported := [flag for flag in _OF_IMAGES if getattr(options, flag)]:
        print(f"--{unsupported[0]}: images are not supported yet; leave it out for prompts of text",
              file=sys.stderr)  # fmt: skip
        return 1
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        ignore_eos=options.measure_perf,
    )
    try:
        prompts = _prompts(options)
        if options.async_engine:
            result = asyncio.run(_run_async(prompts, params, options))
        else:
            with LLM(**_engine_options(options)) as llm:
                result = _run(llm, prompts, params, options)
    except EngineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


def _run(
    llm: LLM, prompts: list[str | list[int]], params: SamplingParams, options: argparse.Namespace
) -> dict[str, object]:
    engine = llm.llm_engine
    if options.test_increasing_seq_lens:
        lengths = increasing_lengths(engine, options.max_tokens)
        return {"lengths": [length for length, _ in lengths],
                "ttft_ms": [took.ttft_ms for _, took in lengths]}  # fmt: skip
    if options.measure_perf:
        # Once unmeasured: the first requests of an engine pay for set-up on first use.
        run(engine, [unlike_prompt(options.num_prompts, options.prompt_len)], params)
    return _shown(
        *run(engine, prompts, params, requests_per_step=options.requests_per_step), options
    )


async def _run_async(
    prompts: list[str | list[int]], params: SamplingParams, options: argparse.Namespace
) -> dict[str, object]:
    config = msgspec.convert(_engine_options(options), EngineConfig)
    config.validate()
    llm = await AsyncLLM.start(config)
    try:
        if options.measure_perf:
            # As in `_run`.
            await run_async(llm, [unlike_prompt(options.num_prompts, options.prompt_len)], params)
        return _shown(*await run_async(llm, prompts, params), options)
    finally:
        await llm.shutdown()


def _shown(
    outputs: list[RequestOutput], took: Figures, options: argparse.Namespace
) -> dict[str, object]:
    if not options.measure_perf:
        for output in outputs:
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    print(f"{took.num_requests} requests, {took.output_tokens} tokens in {took.seconds:.2f} s: "
          f"first token {took.ttft_ms:.1f} ms, {took.tokens_per_s_per_user:.1f} tokens/s/user, "
          f"{took.output_tokens_per_s:.1f} tokens/s")  # fmt: skip
    return asdict(took)


def read_prompts(path: Path) -> list[str]:
    """The texts of a JSON file.

    Raises:
        EngineError: It is no list of texts, or cannot be read.
    """
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"--prompts_json {path}: {error}") from error
    if not (isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)):
        raise EngineError(f"--prompts_json {path} must hold a JSON list of texts")
    return texts


def at_least(least: int) -> Callable[[str], int]:
    """A command-line type: whole numbers from `least` on."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return int(text)

    return number


def _prompts(options: argparse.Namespace) -> list[str | list[int]]:
    if options.measure_perf:
        return [unlike_prompt(number, options.prompt_len) for number in range(options.num_prompts)]
    texts = list(PROMPTS) if options.prompts_json is None else read_prompts(options.prompts_json)
    count = options.num_prompts or len(texts) * options.num_repeat_prompts
    return [texts[i % len(texts)] for i in range(count)]


def _engine_options(options: argparse.Namespace) -> dict[str, object]:
    is_demo = options.model == DEMO_MODEL
    folder = demo_model_folder() if is_demo else options.model.expanduser().absolute()
    chosen: dict[str, object] = {
        "model": str(folder),
        "max_batch_size": options.max_batch_size,
        "max_model_len": options.max_model_len,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "tt_data_parallel": options.lanes,
    }
    if options.simulate is not None:
        model, _, board = options.simulate.partition("@")
        chosen |= {"simulated_mesh": {"model": model, "board": board}, "block_size": 64}
    elif options.mesh is not None:
        mesh = {
            "name": options.mesh,
            "optimizations": options.optimizations,
            "trace": options.trace,
            "sample_on_device": options.sample_on_device,
        }
        chosen |= {"mesh": mesh, "block_size": 64}
    return chosen


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n", maxsplit=1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=lambda text: text if text == DEMO_MODEL else Path(text),
        default=DEMO_MODEL, help="model folder, or the bundled demo")  # fmt: skip
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--mesh", help="run on this Tenstorrent mesh, for one N150, N300, T3K")
    device.add_argument("--simulate", metavar="MODEL@BOARD", help="for one Llama-3.1-8B@n150")
    add("--optimizations", choices=("performance", "balanced", "accuracy"), default="performance")
    add("--trace", choices=("all", "decode_only", "none"), default="all")
    add("--sample-on-device", choices=("none", "decode_only", "all"),
        help="without it whatever the mesh can")  # fmt: skip
    add("--lanes", type=at_least(1), default=1, help="data-parallel groups of the mesh")
    add("--max-batch-size", type=at_least(1), default=32, help="decode slots, over all lanes")
    add("--max-model-len", type=at_least(2), help="longest sequence; the model's, if not given")
    add("--max-num-batched-tokens", type=at_least(1), help="of one step")
    count = parser.add_mutually_exclusive_group()
    count.add_argument("--num-prompts", type=at_least(1), help="how many requests; prompts repeat")
    add(
        "--requests-per-step",
        type=at_least(0),
        default=0,
        help="arrivals per engine step; 0: all at once",
    )
    add("--max-tokens", type=at_least(1), default=32)
    add("--temperature", type=float, default=0.0)
    add("--top-k", type=int, default=0)
    add("--top-p", type=float, default=1.0)
    add("--seed", type=int)
    add("--measure-perf", action="store_true", help="equal prompts, and figures instead of texts")
    add("--prompt-len", type=at_least(3), default=128, help="with --measure-perf")
    # Spelt as in Tenstorrent's own example, which people who bring a model up know.
    add("--prompts_json", type=Path, help="file with a list of texts")
    count.add_argument("--num_repeat_prompts", type=at_least(1), default=1,
        help="how often each prompt is asked")  # fmt: skip
    add("--async_engine", action="store_true", help="one coroutine per request, all at once")
    add("--test_increasing_seq_lens", action="store_true",
        help="prompts of 32 tokens up to the longest that fits")  # fmt: skip
    for flag in _OF_IMAGES[:-1]:
        add(f"--{flag}", action="store_true", help="not supported yet")
    add(f"--{_OF_IMAGES[-1]}", metavar="JSON", help="not supported yet")
    options = parser.parse_args(arguments)
    if options.async_engine and (options.test_increasing_seq_lens or options.requests_per_step):
        parser.error("--async_engine takes no --test_increasing_seq_lens, no --requests-per-step")
    if options.measure_perf and options.num_prompts is None:
        options.num_prompts = options.max_batch_size
    return options


if __name__ == "__main__":
    sys.exit(main())

"""Asynchronous requests to a running server, through the OpenAI client.

    make serve                                                     # in another terminal
    python examples/server_client.py --num-requests 64 --concurrency 16

Every request is streamed. Prints the texts, then the clients' times to first token and per token,
by percentile. The last line is one JSON object; the exit code is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import openai

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROMPTS = (
    "Return a copy of the",
    "The default encoding is",
    "Raise an exception if",
    "A new list is created",
)


@dataclass
class Answer:
    """One request and its answer.

    Attributes:
        prompt: The text that was sent.
        text: The generated text.
        error: Why it failed, or None.
        ttft_s: Time to the first token.
        seconds: Time to the last one.
        num_tokens: Output tokens that the server counted.
    """

    prompt: str
    text: str = ""
    error: str | None = None
    ttft_s: float = 0.0
    seconds: float = 0.0
    num_tokens: int = 0


async def ask(
    client: openai.AsyncOpenAI, model: str, prompt: str, options: argparse.Namespace
) -> Answer:
    """Send one request and read its stream."""
    answer = Answer(prompt)
    started_s = time.perf_counter()
    try:
        stream = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            answer.seconds = time.perf_counter() - started_s
            if chunk.choices:
                answer.ttft_s = answer.ttft_s or answer.seconds
                answer.text += chunk.choices[0].text
            if chunk.usage is not None:
                answer.num_tokens = chunk.usage.completion_tokens
    except openai.OpenAIError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def ask_all(options: argparse.Namespace) -> list[Answer]:
    """Send all requests, at most `concurrency` at a time."""
    prompts = PROMPTS if options.prompts is None else read_prompts(options.prompts)
    room = asyncio.Semaphore(options.concurrency)
    async with openai.AsyncOpenAI(
        base_url=f"{options.url.rstrip('/')}/v1", api_key=options.api_key, max_retries=0
    ) as client:
        model = options.model or (await client.models.list()).data[0].id

        async def one(number: int) -> Answer:
            async with room:
                return await ask(client, model, prompts[number % len(prompts)], options)

        return await asyncio.gather(*(one(number) for number in range(options.num_requests)))


def read_prompts(path: Path) -> list[str]:
    """The texts of a JSON file.

    Raises:
        ValueError: It is no list of texts.
    """
    texts = json.loads(path.read_text(encoding="utf-8"))
    if not (isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)):
        raise ValueError("not a list of texts")
    return texts


def at_least(least: int) -> Callable[[str], int]:
    """A command-line type: whole numbers from `least` on."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return int(text)

    return number


def summary(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    """Return the latencies and rates of the requests that did not fail."""
    good = [answer for answer in answers if answer.error is None]
    later = [a for a in good if a.num_tokens > 1]
    num_tokens = sum(answer.num_tokens for answer in good)
    return {
        "num_requests": len(answers),
        "num_failed": len(answers) - len(good),
        "output_tokens": num_tokens,
        "output_tokens_per_s": num_tokens / seconds,
        **_percentiles("ttft_ms", [1000 * a.ttft_s for a in good]),
        **_percentiles(
            "tpot_ms", [1000 * (a.seconds - a.ttft_s) / (a.num_tokens - 1) for a in later]
        ),
    }


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {f"{name}_p{p}": value for p in (50, 90, 99) for value in values}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"{name}_p{p}": cuts[p - 1] for p in (50, 90, 99)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n", maxsplit=1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="where the cluster serves")
    add("--api-key", default="none")
    add("--model", help="name to ask for; the first that the server lists, if not given")
    add("--prompts", type=Path, help="JSON file: a list of texts")
    add("--num-requests", type=at_least(1), default=16)
    add("--concurrency", type=at_least(1), default=8, help="most requests under way")
    add("--max-tokens", type=at_least(1), default=32)
    add("--temperature", type=float, default=0.0)
    options = parser.parse_args(arguments)
    started_s = time.perf_counter()
    try:
        answers = asyncio.run(ask_all(options))
    except openai.OpenAIError as error:
        print(f"{options.url}: {error}; is a server running there?", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"--prompts {options.prompts}: {error}", file=sys.stderr)
        return 1
    for answer in answers:
        print(f"{answer.prompt!r} -> {answer.error or repr(answer.text)}")
    result = summary(answers, time.perf_counter() - started_s)
    print(json.dumps(result))
    return 1 if result["num_failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

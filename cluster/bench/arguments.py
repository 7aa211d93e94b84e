"""Command lines of `ttserve bench`, which are those of `vllm bench` 0.32.

Options may be written with underscores, as there. Options that no parser here knows are those of an
engine and become keywords of `replicas.LLM`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cluster.bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

DRAWN = frozenset({"random", "prefix_repetition"})
"""Data sets without a file."""
DATASETS = ("random", "sharegpt")
BACKENDS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
"""Backends, with the route that each has unless `--endpoint` names one."""
SAMPLING = (
    "top_p",
    "top_k",
    "min_p",
    "temperature",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BenchError(f"{message}; see {self.prog} --help")


def serve_parser() -> argparse.ArgumentParser:
    """Return the parser of `ttserve bench serve`."""
    parser = _Parser(
        "ttserve bench serve",
        description="Measure a running server. Options are those of `vllm bench serve`.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--backend", choices=list(BACKENDS), default="openai", help="API that the server has.")
    add("--base-url", help="Server, instead of --host and --port.")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--endpoint", help="Path of the route; by default the backend's.")
    add("--header", nargs="*", default=[], metavar="KEY=VALUE", help="Further headers.")
    add("--insecure", action="store_true", help="Accept any TLS certificate.")
    add("--model", help="Model name; by default the server's first.")
    add("--served-model-name", help="Name to send, if it is not --model.")
    add("--tokenizer", help="Model folder whose tokenizer counts tokens; by default the model's.")
    _add_dataset_options(parser)
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        help="Requests per second; inf: all at once.",
    )
    add("--burstiness", type=float, default=1.0, help="1: Poisson process; less comes in bursts.")
    add("--max-concurrency", type=int, help="Most requests at a time.")
    add("--ramp-up-strategy", choices=["linear", "exponential"], help="Change the rate in the run.")
    add("--ramp-up-start-rps", type=float)
    add("--ramp-up-end-rps", type=float)
    add("--num-warmups", type=int, default=0, help="Requests before the measurement.")
    add("--ready-check-timeout-sec", type=float, default=0, help="Wait so long for the server.")
    add("--ignore-eos", action="store_true", help="Generate past end tokens.")
    add("--logprobs", type=int)
    for name in SAMPLING:
        add(f"--{name.replace('_', '-')}", type=int if name == "top_k" else float)
    add("--extra-body", type=_json_object, default={}, metavar="JSON", help="Further fields.")
    add("--request-id-prefix", default="bench-")
    add("--percentile-metrics", default="ttft,tpot,itl", help="Of ttft, tpot, itl, e2el.")
    add("--metric-percentiles", default="99", help="Such as 50,90,99.")
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="Of ttft, tpot, e2el.")
    add("--label", help="First part of the result file's name; by default the backend.")
    add("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="Further keys to save.")
    add("--save-result", action="store_true", help="Save the figures as JSON.")
    add("--save-detailed", action="store_true", help="Save each request's times and texts, too.")
    add("--append-result", action="store_true", help="Append a line to the result file.")
    add("--result-dir", type=Path, default=Path())
    add("--result-filename")
    add("--disable-tqdm", action="store_true", help="Show no progress.")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line whose options are all known.

    Raises:
        BenchError: An option is unknown, or has a value that it cannot have.
    """
    return parser.parse_args([_dashed(argument) for argument in arguments])


def pairs(option: str, given: Sequence[str], separator: str) -> dict[str, str]:
    """Split `KEY=VALUE` or `KEY:VALUE` arguments.

    Raises:
        BenchError: One has no separator.
    """
    split = {item: item.partition(separator) for item in given}
    for item, (_, found, _) in split.items():
        if not found:
            raise BenchError(f"{option} has {item!r}; write KEY{separator}VALUE")
    return {key.strip(): value.strip() for key, _, value in split.values()}


def numbers(option: str, given: Sequence[str]) -> list[float]:
    """Return texts as numbers.

    Raises:
        BenchError: One is none.
    """
    try:
        return [float(text) for text in given]
    except ValueError as error:
        raise BenchError(f"{option}: {error}") from None


def _add_dataset_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dataset-name", choices=DATASETS, default="random")
    add("--dataset-path", type=Path, help="File of the data set.")
    add("--num-prompts", type=int, default=1000)
    add("--no-oversample", action="store_true", help="Do not repeat requests of a short file.")
    add("--seed", type=int, default=0)
    add("--input-len", type=int, help="Tokens of prompts that are drawn.")
    add("--output-len", type=int, help="Output tokens, of any data set.")
    add("--random-input-len", type=int, default=1024)
    add("--random-output-len", type=int, default=128)
    add("--random-range-ratio", type=float, default=0.0, help="Lengths vary by this share.")
    add("--random-prefix-len", type=int, default=0, help="Tokens that all prompts share.")
    add("--sharegpt-output-len", type=int, help="By default the length of the file's answers.")


def _dashed(argument: str) -> str:
    """Return an argument with the dashes of option names, as vLLM's parser reads them."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value

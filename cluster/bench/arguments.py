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
from cluster.bench.metrics import TITLES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DRAWN = frozenset({"random", "prefix_repetition"})
"""Data sets without a file."""
DATASETS = ("random", "sharegpt", "sonnet", "hf", "custom", "prefix_repetition", "timed_trace")
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

_SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
}

_WITHOUT_EFFECT = ("disable_detokenize", "trust_remote_code")
"""Options of vLLM that change nothing: texts are made when they are read, which no benchmark does,
and code of model folders is not run."""


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
    _add_dataset_options(parser, "random")
    add("--self-timed", action=argparse.BooleanOptionalAction, help="Send as a timed trace says.")
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
    add("--percentile-metrics", default="ttft,tpot,itl", help=f"Of {', '.join(TITLES)}.")
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


def latency_parser() -> argparse.ArgumentParser:
    """Return the parser of `ttserve bench latency`."""
    parser = _offline_parser("latency", "Measure one batch on an engine.")
    add = parser.add_argument
    add("--input-len", type=int, default=32, help="Tokens of each prompt.")
    add("--output-len", type=int, default=128, help="Output tokens of each prompt.")
    add("--batch-size", type=int, default=8, help="Prompts of the batch.")
    add("--use-beam-search", action="store_true", help="Search with --n beams.")
    add("--num-iters-warmup", type=int, default=10, help="Iterations before the measurement.")
    add("--num-iters", type=int, default=30, help="Iterations that are measured.")
    return parser


def throughput_parser() -> argparse.ArgumentParser:
    """Return the parser of `ttserve bench throughput`."""
    parser = _offline_parser("throughput", "Measure many requests on an engine.")
    add = parser.add_argument
    add("--tokenizer", help="Model folder whose tokenizer counts tokens; by default the model's.")
    add("--backend", choices=["vllm"], default="vllm", help="Other backends do not exist here.")
    _add_dataset_options(parser, "sharegpt")
    add("--num-warmups", type=int, default=0, help="Requests before the measurement.")
    add("--async-engine", action="store_true", help="Use `AsyncLLM` instead of `LLM`.")
    return parser


def parse_known(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command line; return the arguments that the parser does not know, too.

    Raises:
        BenchError: An option has a value that it cannot have.
    """
    return parser.parse_known_args([_dashed(argument) for argument in arguments])


def engine_options(arguments: Sequence[str]) -> dict[str, Any]:
    """Return command-line options of an engine as keywords of `replicas.LLM`.

    `--name VALUE`, `--name=VALUE`, `--name` for true and `--no-name` for false. Values are JSON, or
    text if they are none.

    Raises:
        BenchError: An argument belongs to no option, or asks for several devices.
    """
    options: dict[str, Any] = {}
    left = list(arguments)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            raise BenchError(f"{word!r} belongs to no option")
        name, equals, value = word.partition("=")
        name = _SHORT.get(name, name.removeprefix("--").replace("-", "_"))
        if equals or (left and not left[0].startswith("-")):
            options[name] = _value(value if equals else left.pop(0))
        elif name.startswith("no_"):
            options[name.removeprefix("no_")] = False
        else:
            options[name] = True
    for name in _SHORT.values():
        if options.pop(name, 1) != 1:
            raise BenchError(f"{name} must be 1; mesh and tt_data_parallel decide, see docs")
    for name in _WITHOUT_EFFECT:
        options.pop(name, None)
    if options.pop("disable_async_output_proc", False):
        options["steps_in_flight"] = 1
    if "max_num_seqs" in options:
        options["max_batch_size"] = options.pop("max_num_seqs")
    return options


def at_least(options: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Check the smallest values of options; those without a value are not checked.

    Raises:
        BenchError: One is smaller.
    """
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            raise BenchError(f"--{name.replace('_', '-')} is {value}; give {bound} or more")


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


def _offline_parser(name: str, purpose: str) -> argparse.ArgumentParser:
    """Return a parser with what both benchmarks of an engine have."""
    parser = _Parser(
        f"ttserve bench {name}",
        description=f"{purpose} Options are those of `vllm bench {name}`; options that are not "
        "listed are those of an engine.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", default="demo", help="Model folder; `demo` is bundled.")
    add("--n", type=int, default=1, help="Sequences for each prompt.")
    add("--output-json", type=Path, help="File for the figures.")
    return parser


def _add_dataset_options(parser: argparse.ArgumentParser, default: str) -> None:
    add = parser.add_argument
    add("--dataset-name", choices=DATASETS, default=default)
    add("--dataset-path", type=Path, help="File or folder of the data set.")
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
    add("--sonnet-input-len", type=int, default=550)
    add("--sonnet-output-len", type=int, default=150)
    add("--sonnet-prefix-len", type=int, default=200, help="Tokens that all prompts share.")
    add("--hf-output-len", type=int, default=200)
    add("--custom-output-len", type=int, default=256, help="-1: the file's `output_tokens`.")
    add(
        "--skip-chat-template",
        action="store_true",
        help="Of custom and hf: send texts as they are.",
    )
    add("--prefix-repetition-prefix-len", type=int, default=256)
    add("--prefix-repetition-suffix-len", type=int, default=256)
    add("--prefix-repetition-num-prefixes", type=int, default=10)
    add("--prefix-repetition-output-len", type=int, default=128)


def _dashed(argument: str) -> str:
    """Return an argument with the dashes of option names, as vLLM's parser reads them."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _value(text: str) -> Any:  # noqa: ANN401 - any JSON value
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value

"""Requests and tokenizer that the options of a benchmark name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.bench.arguments import DRAWN
from cluster.bench.datasets import (
    Lengths,
    SampleRequest,
    oversampled,
    prefix_requests,
    random_requests,
    read_custom,
    read_hf,
    sharegpt_requests,
    sonnet_requests,
    text_requests,
)
from cluster.bench.errors import BenchError
from cluster.config.resolve import demo_model_folder
from cluster.config.schema import DEMO_MODEL
from cluster.lab.workloads.errors import WorkloadError
from cluster.lab.workloads.load import load_workload
from replicas.errors import ModelLoadError
from replicas.tokenizer import Tokenizer

if TYPE_CHECKING:
    import argparse

    import numpy as np


def model_folder(name: str) -> str:
    """Return the folder of a model; `demo` is bundled."""
    return str(demo_model_folder()) if name == DEMO_MODEL else str(Path(name).expanduser())


def served_folder(root: str, model: str) -> str:
    """Return a server's model as `model_folder` takes it: its root, if that is a folder here.

    ttserve's root is a folder's name alone, and its model may be the bundled one.
    """
    return root if Path(root).is_dir() else model


def load_tokenizer(name: str) -> Tokenizer:
    """Read the tokenizer of a model folder.

    Raises:
        BenchError: It is none.
    """
    try:
        return Tokenizer.from_folder(model_folder(name))
    except ModelLoadError as error:
        raise BenchError(f"{error}; give --tokenizer FOLDER") from None


def load_requests(
    options: argparse.Namespace, tokenizer: Tokenizer, random: np.random.Generator
) -> list[SampleRequest]:
    """Draw or read the requests that the options name.

    Raises:
        BenchError: The data set cannot be used.
    """
    name, path, number = options.dataset_name, options.dataset_path, options.num_prompts
    if (path is None) != (name in DRAWN):
        need = "needs no" if name in DRAWN else "needs a"
        raise BenchError(f"--dataset-name {name} {need} --dataset-path")
    match name:
        case "random":
            return random_requests(tokenizer, number, _lengths(options, "random"), random)
        case "prefix_repetition":
            lengths = Lengths(
                input_len=options.prefix_repetition_suffix_len,
                output_len=_first(options.output_len, options.prefix_repetition_output_len),
                prefix_len=options.prefix_repetition_prefix_len,
            )
            num_prefixes = options.prefix_repetition_num_prefixes
            return prefix_requests(tokenizer, number, num_prefixes, lengths, random)
        case "sonnet":
            lengths = _lengths(options, "sonnet")
            return sonnet_requests(path, tokenizer, number, lengths, random)
        case "timed_trace":
            return _trace_requests(options, tokenizer)
        case "sharegpt":
            output_len = options.output_len or options.sharegpt_output_len
            requests = sharegpt_requests(path, tokenizer, number, output_len, random)
        case _:
            requests = _text_requests(options, tokenizer)
    return requests if options.no_oversample else oversampled(requests, number, random)


def _text_requests(options: argparse.Namespace, tokenizer: Tokenizer) -> list[SampleRequest]:
    # A server applies its template to chats by itself.
    as_chat = options.backend != "openai-chat" and not options.skip_chat_template
    if options.dataset_name == "hf":
        rows, output_len = read_hf(options.dataset_path), options.hf_output_len
    else:
        rows, output_len = read_custom(options.dataset_path), options.custom_output_len
    length = options.output_len or (None if output_len == -1 else output_len)
    return text_requests(rows[: options.num_prompts], tokenizer, length, as_chat=as_chat)


def _trace_requests(options: argparse.Namespace, tokenizer: Tokenizer) -> list[SampleRequest]:
    try:
        workload = load_workload(options.dataset_path, seed=options.seed, limit=options.num_prompts)
    except WorkloadError as error:
        raise BenchError(str(error)) from None
    return [
        SampleRequest(
            workload.prompt(index, tokenizer.vocab_size),
            request.num_prompt_tokens,
            options.output_len or request.num_output_tokens,
            request.arrival_s,
        )
        for index, request in enumerate(workload.requests)
    ]


def _lengths(options: argparse.Namespace, name: str) -> Lengths:
    return Lengths(
        input_len=_first(options.input_len, getattr(options, f"{name}_input_len")),
        output_len=_first(options.output_len, getattr(options, f"{name}_output_len")),
        range_ratio=options.random_range_ratio,
        prefix_len=getattr(options, f"{name}_prefix_len"),
    )


def _first(given: int | None, default: int) -> int:
    return default if given is None else given

"""Requests and tokenizer that the options of a benchmark name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.bench.arguments import DRAWN
from cluster.bench.datasets import (
    Lengths,
    oversampled,
    random_requests,
    sharegpt_requests,
)
from cluster.bench.errors import BenchError
from cluster.config.resolve import demo_model_folder
from cluster.config.schema import DEMO_MODEL
from replicas.errors import ModelLoadError
from replicas.tokenizer import Tokenizer

if TYPE_CHECKING:
    import argparse

    import numpy as np

    from cluster.bench.datasets import SampleRequest


def model_folder(name: str) -> str:
    """Return the folder of a model; `demo` is bundled."""
    return str(demo_model_folder()) if name == DEMO_MODEL else str(Path(name).expanduser())


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
    if name == "random":
        return random_requests(tokenizer, number, _lengths(options), random)
    output_len = options.output_len or options.sharegpt_output_len
    requests = sharegpt_requests(path, tokenizer, number, output_len, random)
    return requests if options.no_oversample else oversampled(requests, number, random)


def _lengths(options: argparse.Namespace) -> Lengths:
    def first(*values: int | None) -> int:
        return next(value for value in values if value is not None)

    return Lengths(
        input_len=first(options.input_len, options.random_input_len),
        output_len=first(options.output_len, options.random_output_len),
        range_ratio=options.random_range_ratio,
        prefix_len=options.random_prefix_len,
    )

"""One offline engine, ours or vLLM, that runs a batch on each command.

`benchmarks.engine_vs_vllm` starts it as a script, with the Python of the engine, because the peer's
Python has none of our packages. Each line on stdin starts one round. Each line on the descriptor
`--answer-fd` has a round's seconds; the first is written after start and warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
MAX_MODEL_LEN = 256
STEP_TOKENS = 2048
"""Token budget of a step, of both engines."""

# A script's own folder comes first, and this one has files named like our packages.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).parent]


def ours(model: str, num_requests: int, *, multiprocess: bool) -> Callable[[Any], list[int]]:
    """Start this repository's engine; return a function from a batch to its output lengths."""
    from replicas import LLM, SamplingParams

    llm = LLM(
        model,
        multiprocess=multiprocess,
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_batch_size=num_requests,
        max_num_batched_tokens=STEP_TOKENS,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    def run(prompts: list[list[int]]) -> list[int]:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return run


def vllm(model: str, num_requests: int) -> Callable[[Any], list[int]]:
    """Start vLLM's engine; return the same as `ours`."""
    import vllm as peer  # type: ignore[import-not-found]

    llm = peer.LLM(
        model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=num_requests,
        max_num_batched_tokens=STEP_TOKENS,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    sampling = peer.SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
    )

    def run(prompts: list[list[int]]) -> list[int]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return run


def main() -> None:
    """Start, warm up, then a batch of new prompts per line of stdin."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engine", choices=["process", "in-process", "vllm"])
    parser.add_argument("model")
    parser.add_argument("num_requests", type=int)
    parser.add_argument("--answer-fd", type=int, required=True)
    asked = parser.parse_args()
    with open(f"{asked.model}/config.json", encoding="utf-8") as file:
        vocabulary = json.load(file)["vocab_size"]
    if asked.engine == "vllm":
        run = vllm(asked.model, asked.num_requests)
    else:
        run = ours(asked.model, asked.num_requests, multiprocess=asked.engine == "process")
    rng = random.Random(0)

    def seconds() -> float:
        prompts = [
            [rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)]
            for _ in range(asked.num_requests)
        ]
        started = time.perf_counter()
        lengths = run(prompts)
        taken = time.perf_counter() - started
        if lengths != [OUTPUT_TOKENS] * asked.num_requests:
            raise SystemExit(f"{asked.engine} gave outputs of {sorted(set(lengths))} tokens")
        return taken

    answer = os.fdopen(asked.answer_fd, "w", encoding="utf-8")
    seconds()
    print(seconds(), file=answer, flush=True)
    for _ in sys.stdin:
        print(seconds(), file=answer, flush=True)


if __name__ == "__main__":
    main()

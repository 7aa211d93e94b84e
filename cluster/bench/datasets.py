"""Requests of a benchmark: prompts and output lengths, drawn or read from a file.

Names, defaults and rules are those of vLLM 0.32 `benchmarks/datasets`. Equal options and seeds give
equal requests, but not those of vLLM, which draws from other generators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from cluster.bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from replicas.tokenizer import Tokenizer

_MOST_TRIES = 10
_MIN_LEN = 4
_MAX_PROMPT_LEN = 1024
_MAX_TOTAL_LEN = 2048
_SONNET_TASK = "Go on with this poem in the style of its lines:"


class SampleRequest(msgspec.Struct, frozen=True):
    """One request of a data set.

    Attributes:
        prompt: Text, or token ids.
        prompt_len: Its tokens.
        output_len: Output tokens to ask for.
        arrival_s: When a trace sends it, in seconds after its start; None without a trace.
    """

    prompt: str | list[int]
    prompt_len: int
    output_len: int
    arrival_s: float | None = None


class Lengths(msgspec.Struct, frozen=True):
    """Lengths in tokens of the data sets that are drawn.

    Attributes:
        input_len: Prompt without the prefix, special tokens included.
        output_len: Output.
        range_ratio: Lengths vary by so much around these, from 0 up to but not 1.
        prefix_len: Prefix that all prompts share.

    Raises:
        BenchError: A number is out of range.
    """

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.range_ratio < 1:
            raise BenchError(
                f"--random-range-ratio is {self.range_ratio}; give a number from 0 up to 1"
            )
        for name, value, least in (
            ("input-len", self.input_len, 0),
            ("output-len", self.output_len, 1),
            ("prefix-len", self.prefix_len, 0),
        ):
            if value < least:
                raise BenchError(f"--random-{name} is {value}; give {least} or more")


def random_requests(
    tokenizer: Tokenizer, number: int, lengths: Lengths, random: np.random.Generator
) -> list[SampleRequest]:
    """Draw texts of random tokens with a common prefix: the data set `random`.

    Raises:
        BenchError: A prompt would have no token.
    """
    num_special = len(tokenizer.encode(""))
    center = max(0, lengths.input_len - num_special)
    if lengths.prefix_len + int(center * (1 - lengths.range_ratio)) < 1:
        raise BenchError(
            f"--random-input-len {lengths.input_len} leaves no token beside {num_special} special "
            "ones; increase it"
        )
    tokens = _plain_tokens(tokenizer)
    prefix = exact_tokens(tokenizer, tokens, lengths.prefix_len, random)
    inputs = _varied(center, lengths.range_ratio, number, random, least=1 - lengths.prefix_len)
    outputs = _varied(lengths.output_len, lengths.range_ratio, number, random, least=1)
    requests = []
    for input_len, output_len in zip(inputs, outputs, strict=True):
        drawn = tokens[random.integers(0, len(tokens), input_len)].tolist()
        prompt = _fitted(tokenizer, tokens, prefix + drawn, random)
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        requests.append(SampleRequest(text, len(prompt) + num_special, output_len))
    return requests


def sharegpt_requests(
    path: Path,
    tokenizer: Tokenizer,
    number: int,
    output_len: int | None,
    random: np.random.Generator,
) -> list[SampleRequest]:
    """Read first turns of conversations of a ShareGPT file, in random order.

    Conversations are skipped whose prompt has less than 4 tokens or more than 1,024, whose answer
    has less than 4, or which have more than 2,048 together.

    Args:
        path: JSON file: a list of objects with `conversations`, each with `value`.
        tokenizer: Counts tokens.
        number: Most requests.
        output_len: Output tokens of all; None takes those of the file's answers.
        random: Source of the order.

    Raises:
        BenchError: The file cannot be read, or has no conversation that fits.
    """
    conversations = [
        turns
        for entry in _read_json(path, list[_Conversation])
        if len(turns := entry.conversations) > 1
    ]
    requests: list[SampleRequest] = []
    for index in random.permutation(len(conversations)).tolist():
        if len(requests) == number:
            break
        prompt, answer = (turn.value for turn in conversations[index][:2])
        prompt_len = len(tokenizer.encode(prompt))
        answer_len = len(tokenizer.encode(answer)) if output_len is None else output_len
        is_short = prompt_len < _MIN_LEN or (output_len is None and answer_len < _MIN_LEN)
        is_long = prompt_len > _MAX_PROMPT_LEN or prompt_len + answer_len > _MAX_TOTAL_LEN
        if not is_short and not is_long:
            requests.append(SampleRequest(prompt, prompt_len, answer_len))
    if not requests:
        raise BenchError(f"{path}: no conversation has lengths that fit; check the file")
    return requests


def sonnet_requests(
    path: Path, tokenizer: Tokenizer, number: int, lengths: Lengths, random: np.random.Generator
) -> list[SampleRequest]:
    """Make prompts of random lines of a text: the data set `sonnet`.

    The first lines are the same in all prompts and have about `prefix_len` tokens.

    Raises:
        BenchError: The file cannot be read, or the lengths leave no line.
    """
    lines = [line for line in _read_text(path).splitlines() if line.strip()]
    if not lines:
        raise BenchError(f"{path}: has no line; check --dataset-path")
    mean_len = float(np.mean([len(tokenizer.encode(f"{line}\n", False)) for line in lines]))
    num_first = round((lengths.prefix_len - len(tokenizer.encode(_SONNET_TASK))) / mean_len)
    num_lines = round((lengths.input_len - len(tokenizer.encode(_SONNET_TASK))) / mean_len)
    num_first = max(0, num_first)
    if num_lines <= num_first:
        raise BenchError(
            f"--sonnet-input-len {lengths.input_len} leaves no line after --sonnet-prefix-len "
            f"{lengths.prefix_len}; increase it"
        )
    requests = []
    for _ in range(number):
        drawn = random.integers(0, len(lines), num_lines - num_first).tolist()
        first = (lines * (num_first // len(lines) + 1))[:num_first]
        text = "\n".join([_SONNET_TASK, *first, *(lines[index] for index in drawn)])
        requests.append(SampleRequest(text, len(tokenizer.encode(text)), lengths.output_len))
    return requests


def prefix_requests(
    tokenizer: Tokenizer,
    number: int,
    num_prefixes: int,
    lengths: Lengths,
    random: np.random.Generator,
) -> list[SampleRequest]:
    """Draw prompts that share one of several prefixes, in random order: `prefix_repetition`.

    Each prefix has `number // num_prefixes` prompts.

    Args:
        tokenizer: Makes texts of tokens.
        number: At least `num_prefixes`.
        num_prefixes: At least 1.
        lengths: `prefix_len` of the prefixes, `input_len` of what follows.
        random: Source of tokens and order.

    Raises:
        BenchError: There are fewer requests than prefixes.
    """
    if not 1 <= num_prefixes <= number:
        raise BenchError(
            f"--prefix-repetition-num-prefixes is {num_prefixes}; give 1 to --num-prompts {number}"
        )
    tokens = _plain_tokens(tokenizer)
    requests = []
    for _ in range(num_prefixes):
        prefix = exact_tokens(tokenizer, tokens, lengths.prefix_len, random)
        for _ in range(number // num_prefixes):
            prompt = prefix + exact_tokens(tokenizer, tokens, lengths.input_len, random)
            text = tokenizer.decode(prompt, skip_special_tokens=False)
            requests.append(SampleRequest(text, len(prompt), lengths.output_len))
    return [requests[index] for index in random.permutation(len(requests)).tolist()]


def text_requests(
    rows: Sequence[TextRow], tokenizer: Tokenizer, output_len: int | None, *, as_chat: bool
) -> list[SampleRequest]:
    """Return a request for each row.

    Args:
        rows: Prompts.
        tokenizer: Counts tokens.
        output_len: Output tokens of all; None takes those of the rows.
        as_chat: Whether prompts go through the tokenizer's chat template, if it has one.

    Raises:
        BenchError: A row has no length, and none is given.
    """
    requests = []
    for row in rows:
        text, asked = row.prompt, row.output_tokens if output_len is None else output_len
        if asked is None:
            raise BenchError("a row has no output_tokens; give --custom-output-len")
        if as_chat and tokenizer.has_chat_template:
            text = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        requests.append(SampleRequest(text, len(tokenizer.encode(text)), asked))
    return requests


def read_custom(path: Path) -> list[TextRow]:
    """Read a JSON Lines file of objects with `prompt` and perhaps `output_tokens`.

    Raises:
        BenchError: The file cannot be read, or is no such file.
    """
    lines = [line for line in _read_text(path).splitlines() if line.strip()]
    try:
        rows = [msgspec.json.decode(line, type=TextRow) for line in lines]
    except msgspec.MsgspecError as error:
        raise BenchError(f"{path}: {error}; is it a file of this data set?") from None
    if not rows:
        raise BenchError(f"{path}: has no line; check --dataset-path")
    return rows


def read_hf(folder: Path) -> list[TextRow]:
    """Read the prompts of a local folder of a Hugging Face data set, as far as it is JSON.

    Rows have `prompt`, or `instruction` with an optional `input`, such as those of InstructCoder.

    Raises:
        BenchError: There is no such file in the folder, or a row has another form.
    """
    paths = sorted(p for p in folder.rglob("*.json*") if p.suffix in {".json", ".jsonl"})
    found: list[TextRow] = []
    for path in paths:
        text = _read_text(path)
        try:
            rows = (
                msgspec.json.decode(text, type=list[_HfRow])
                if text.lstrip().startswith("[")
                else msgspec.json.Decoder(_HfRow).decode_lines(text)
            )
        except msgspec.MsgspecError as error:
            raise BenchError(f"{path}: {error}; is it a file of this data set?") from None
        found += [TextRow(row.text) for row in rows if row.text]
    if not found:
        raise BenchError(
            f"{folder}: no .json or .jsonl file has rows with prompt or instruction; give a local "
            "folder, with its data as JSON"
        )
    return found


def oversampled(
    requests: list[SampleRequest], number: int, random: np.random.Generator
) -> list[SampleRequest]:
    """Return `number` requests: the given ones, then random ones of them once more."""
    missing = max(0, number - len(requests))
    again = random.integers(0, len(requests), missing).tolist()
    return requests[:number] + [requests[index] for index in again]


def exact_tokens(
    tokenizer: Tokenizer,
    tokens: npt.NDArray[np.int64],
    number: int,
    random: np.random.Generator,
) -> list[int]:
    """Draw token ids whose text is encoded to as many tokens, as far as possible."""
    drawn = tokens[random.integers(0, len(tokens), number)].tolist()
    return _fitted(tokenizer, tokens, drawn, random)


class TextRow(msgspec.Struct):
    """A prompt of a file, with the output tokens to ask for if the file has them."""

    prompt: str
    output_tokens: int | None = None


class _HfRow(msgspec.Struct):
    prompt: str = ""
    instruction: str = ""
    input: str = ""

    @property
    def text(self) -> str:
        return self.prompt or "\n\n".join(filter(None, (self.input, self.instruction)))


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}; check --dataset-path") from None
    except UnicodeDecodeError:
        raise BenchError(f"{path}: is not UTF-8 text; check --dataset-path") from None


def _read_json(path: Path, kind: Any) -> Any:  # noqa: ANN401 - as `msgspec.json.decode`
    text = _read_text(path)
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise BenchError(f"{path}: {error}; is it a file of this data set?") from None


def _plain_tokens(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Return the ids of all tokens that are not special: int64 (N,)."""
    special = set(tokenizer.special_token_ids.values())
    return np.array([i for i in range(tokenizer.vocab_size) if i not in special], dtype=np.int64)


def _varied(
    center: int, ratio: float, number: int, random: np.random.Generator, *, least: int
) -> list[int]:
    low, high = int(center * (1 - ratio)), int(np.ceil(center * (1 + ratio)))
    drawn: list[int] = random.integers(max(low, least, 0), max(high, least, 0) + 1, number).tolist()
    return drawn


def _fitted(
    tokenizer: Tokenizer,
    tokens: npt.NDArray[np.int64],
    drawn: Sequence[int],
    random: np.random.Generator,
) -> list[int]:
    """Return tokens that a server gets from the text of `drawn`, cut or filled up to its length.

    Neighbouring tokens may merge when the text is encoded again, so that several tries may be
    needed; after 10 the last one is taken.
    """
    number, fitted = len(drawn), list(drawn)
    for _ in range(_MOST_TRIES):
        text = tokenizer.decode(fitted, skip_special_tokens=False)
        fitted = tokenizer.encode(text, add_special_tokens=False)
        if len(fitted) == number:
            break
        missing = max(0, number - len(fitted))
        fitted = fitted[:number] + tokens[random.integers(0, len(tokens), missing)].tolist()
    return fitted

"""Field for field: 300 requests over HTTP to our server and to `vllm serve` on the same weights.

Both serve the demo model in float32. Requests are completions and chats at temperature 0 with
random parameters, whole and streamed, with tools, several prompts and choices, and bad requests. Of
an answer every field is compared, log probabilities within 1e-3, of an error its status and all but
its text, of a stream the assembled text and the fields that its events have.

    python -m benchmarks.http_vs_vllm --peer-python /path/to/venv/bin/python \
        [--peer-preload /path/to/libtcmalloc_minimal.so.4:/path/to/libiomp5.so] [--requests 300]

Differences are printed by kind of request and field, with an example, the explained ones last. The
last line is JSON; the exit code is 1 if one is not explained.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import random
import re
import sys
import tempfile
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from benchmarks.ready import running
from cluster.config.resolve import demo_model_folder
from cluster.lifecycle.supervisor import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
MODEL = "demo"
MAX_MODEL_LEN = 512
TOLERANCE = 1e-3
VOLATILE = {"id", "created", "system_fingerprint", "message_id"}
_TEXTS = (
    "Return the sum of two numbers.", "def main():", "The day was", "Once upon a time",
    "Open the file and read", "List all files in the folder", "1 2 3 4", "Grüße aus Bern",
)  # fmt: skip
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Say how the weather is.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}

_DRAWN_FIRST = "vLLM's list begins with the drawn token, also if others are likelier"
_HALF = "of a token that ends within a character vLLM shows the whole character or nothing"
EXPLAINED = {
    ("*", "body.error.code"): "OpenAI's code is a word; vLLM repeats the status",
    ("*", "body.error.param"): "vLLM names no field, or a path of its own types",
    ("*", "body.error.type"): "vLLM's is the text of the status where pydantic refuses a body",
    ("*", "*usage.completion_tokens_details.reasoning_tokens"): "ours says 0, vLLM leaves it out",
    ("chat*", "*.top_logprobs[].*"): _DRAWN_FIRST,
    ("*", "has *.top_logprobs[].*"): _HALF,
    ("completion", "*.logprobs.tokens[]"): _HALF,
    ("completion", "*.logprobs.top_logprobs[].*"): _HALF,
    ("completion", "*.text_offset[]"): "vLLM counts a special token of the prompt that it hides",
    ("completion", "*.prompt_logprobs[].*"): "vLLM adds them to `echo` with `logprobs`",
    ("completion", "*.text"): "vLLM forgets the echo with `return_token_ids`, and repeats a prompt "
    "of token ids that ends within a character",
    ("stream", "texts.*.text"): "vLLM forgets the echo with `return_token_ids` and of token ids",
    ("stream", "has *.prompt_token_ids[]"): "vLLM adds them to `echo`",
    ("*stream", "has system_fingerprint"): "vLLM's names its version and build",
}
"""By kind of request and path, both as patterns, why the two differ."""


class Case(NamedTuple):
    """A request, and the kind under which its differences are counted."""

    kind: str
    path: str
    body: Any


# --- requests ------------------------------------------------------------------------------------


def cases(number: int, seed: int = 0) -> Iterator[Case]:
    """Return random requests, the same for the same arguments."""
    dice = random.Random(seed)
    makers = (_completion, _chat, _completion, _chat, _bad)
    for index in range(number):
        yield makers[index % len(makers)](dice)


def _some(dice: random.Random, **choices: object) -> dict[str, Any]:
    return {name: value for name, value in choices.items() if dice.random() < 0.2}


def _sampled(dice: random.Random) -> dict[str, Any]:
    max_tokens = dice.randint(1, 16)
    return {
        "model": MODEL,
        "temperature": 0,
        "max_tokens": max_tokens,
        **_some(
            dice,
            stop=dice.choice(["the", ["a ", "of"], "\n"]),
            ignore_eos=True,
            min_tokens=dice.randint(0, max_tokens),
            presence_penalty=1.5,
            frequency_penalty=0.7,
            repetition_penalty=1.3,
            logit_bias={str(dice.randrange(8, 4096)): 5},
            bad_words=["the", "of"],
            stop_token_ids=sorted(dice.sample(range(8, 4096), 200)),
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            return_token_ids=True,
            user="user-1",
            seed=7,
        ),
    }


def _streamed(dice: random.Random) -> dict[str, Any]:
    if dice.random() < 0.6:
        return {}
    usage = {"include_usage": True, **_some(dice, continuous_usage_stats=True)}
    return {"stream": True, **(_some(dice, stream_options=usage) or {})}


def _completion(dice: random.Random) -> Case:
    token_ids = [dice.randrange(8, 4096) for _ in range(dice.randint(1, 30))]
    several = dice.sample(_TEXTS, 2)
    prompt = dice.choice([dice.choice(_TEXTS), dice.choice(_TEXTS), token_ids, several])
    body = {"prompt": prompt, **_sampled(dice), **_streamed(dice)}
    body |= _some(dice, logprobs=dice.randint(0, 5), echo=True, add_special_tokens=False)
    if "stream" not in body and "echo" not in body:
        body |= _some(dice, prompt_logprobs=2)
    return Case("stream" if "stream" in body else "completion", "/v1/completions", body)


def _chat(dice: random.Random) -> Case:
    messages: list[dict[str, Any]] = [{"role": "user", "content": dice.choice(_TEXTS)}]
    if dice.random() < 0.3:
        messages.insert(0, {"role": "system", "content": "Be brief."})
    if dice.random() < 0.3:
        parts = [{"type": "text", "text": text} for text in dice.sample(_TEXTS, 2)]
        messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": parts}]
    body = {"messages": messages, **_sampled(dice), **_streamed(dice)}
    if dice.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": dice.randint(0, 5)}
    body |= _some(dice, tools=[_TOOL], max_completion_tokens=8)
    kind = "chat stream" if "stream" in body else "chat"
    return Case(kind, "/v1/chat/completions", body)


def _bad(dice: random.Random) -> Case:
    user = [{"role": "user", "content": "hello"}]
    chat: dict[str, Any] = {"model": MODEL, "messages": user, "max_tokens": 4}
    completion: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
    wrong = {
        "model": "other",
        "temperature": dice.choice([-1, 3, "hot"]),
        "top_p": dice.choice([0, 2]),
        "top_k": -5,
        "min_p": 2,
        "n": dice.choice([0, -1]),
        "max_tokens": dice.choice([0, -1, "many"]),
        "min_tokens": 9,
        "presence_penalty": 5,
        "frequency_penalty": -5,
        "repetition_penalty": 0,
        "logit_bias": {"9999999": 1},
        "stop_token_ids": "7",
        "allowed_token_ids": [],
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema"},
        "truncate_prompt_tokens": -9,
        "seed": "x",
    }
    name = dice.choice(list(wrong))
    whole: Any = dice.choice(
        [
            None, None, None, None, None, None, {}, {"model": MODEL}, [], "text", {"messages": []},
            {**chat, "messages": [{"content": "no role"}]},
            {**chat, "logprobs": True, "top_logprobs": 99}, {**chat, "tool_choice": "required"},
            {**completion, "logprobs": 99}, {**completion, "prompt": []},
            {**completion, "prompt": [1, 99_999_999]}, {**completion, "prompt": "a " * 3000},
            {**completion, "max_tokens": 100_000},
        ]
    )  # fmt: skip
    is_chat = dice.random() < 0.5
    if whole is None:
        body: Any = {**(chat if is_chat else completion), name: wrong[name]}
        return Case(f"bad {name}", _path(is_chat=is_chat), body)
    if isinstance(whole, dict) and whole:
        is_chat = "messages" in whole
    return Case("bad body", _path(is_chat=is_chat), whole)


def _path(*, is_chat: bool) -> str:
    return "/v1/chat/completions" if is_chat else "/v1/completions"


# --- answers -------------------------------------------------------------------------------------


def ask(url: str, case: Case) -> dict[str, Any]:
    """Return the status of an answer and its fields; of a stream what its events amount to."""
    request = urllib.request.Request(
        url + case.path, json.dumps(case.body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            status, raw = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, raw = error.code, error.read()
    if raw.startswith(b"data:"):
        return {"status": status, **_assembled(raw)}
    body = json.loads(raw) if raw else None
    if status >= 400 and isinstance(body, dict) and isinstance(body.get("error"), dict):
        body["error"].pop("message", None)
    return {"status": status, "body": body}


def _assembled(raw: bytes) -> dict[str, Any]:
    """Return a stream's texts by choice, its usage, and the fields of all its events."""
    texts: dict[str, str] = defaultdict(str)
    fields: set[str] = set()
    last: dict[str, Any] = {}
    events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event.strip()]
    for event in events:
        if event == b"[DONE]":
            continue
        chunk = json.loads(event)
        fields |= {_field(path) for path, value in flat(chunk) if not _is_nothing(value)}
        last["usage"] = chunk.get("usage") or last.get("usage")
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta", choice)
            for name in ("text", "content", "reasoning"):
                texts[f"{choice['index']}.{name}"] += delta.get(name) or ""
            if choice.get("finish_reason"):
                last[f"finish_reason[{choice['index']}]"] = choice["finish_reason"]
                last[f"stop_reason[{choice['index']}]"] = choice.get("stop_reason")
    names = {f"has {field}": True for field in fields}
    return {"texts": dict(texts), "ends": last, "is_done": events[-1] == b"[DONE]", **names}


def flat(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Return each scalar and empty container of a JSON value with its path."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flat(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from flat(inner, f"{path}[{index}]")
    else:
        yield path, value


def differences(ours: object, theirs: object) -> Iterator[tuple[str, object, object]]:
    """Return paths at which two answers differ, with both values; `...` where there is none."""
    left, right = dict(flat(ours)), dict(flat(theirs))
    for path in sorted(left.keys() | right.keys()):
        if VOLATILE & set(re.split(r"[.\[]", path)):
            continue
        one, other = left.get(path, ...), right.get(path, ...)
        if isinstance(one, float) and isinstance(other, (int, float)):
            if abs(one - other) > TOLERANCE:
                yield path, one, other
        elif one != other and not (_is_nothing(one) and _is_nothing(other)):
            yield path, one, other


def _is_nothing(value: object) -> bool:
    """Return whether a field is left out, null or empty."""
    return value in (..., None, [], {}, "")


def _field(path: str) -> str:
    """Return a path without its indices and token ids."""
    return re.sub(r"\.\d+\.", ".*.", re.sub(r"\[\d+\]", "[]", path))


# --- servers -------------------------------------------------------------------------------------


def answers(
    command: list[str], environment: dict[str, str], port: int, wanted: list[Case]
) -> list[dict[str, Any]]:
    """Start a server, and return its answers to all requests."""
    url = f"http://127.0.0.1:{port}"
    with running(command, f"{url}/health", cwd=ROOT, env=environment):
        return [ask(url, case) for case in wanted]


def our_server(folder: Path, port: int) -> list[str]:
    """Return the command of our server, in float32 and with calls in the format of Hermes."""
    config = yaml.safe_load((ROOT / "configs" / "single.yaml").read_text())
    config["http_options"]["port"] = port
    arguments = config["applications"][0]["args"]
    arguments |= {"tool_call_parser": "hermes", "generation_config": "vllm"}
    arguments["engine"] = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    return [sys.executable, "-m", "cluster.cli", "serve", "--config", str(path)]


def peer_server(python: Path, port: int) -> list[str]:
    """Return the command of `vllm serve`."""
    return [
        str(python), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(demo_model_folder()), "--served-model-name", MODEL,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--max-model-len", str(MAX_MODEL_LEN), "--generation-config", "vllm",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--disable-log-stats",
    ]  # fmt: skip


def main() -> int:
    """Ask both servers, and print where they differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", type=Path, required=True, help="that has vLLM's CPU build")
    parser.add_argument("--peer-preload", default="", help="libraries, with colons between them")
    parser.add_argument("--requests", type=int, default=300)
    asked = parser.parse_args()
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    peer = {**quiet, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if asked.peer_preload:
        peer["LD_PRELOAD"] = asked.peer_preload
    wanted = list(cases(asked.requests))
    with tempfile.TemporaryDirectory() as name:
        port = free_port()
        ours = answers(our_server(Path(name), port), quiet, port, wanted)
        port = free_port()
        theirs = answers(peer_server(asked.peer_python.absolute(), port), peer, port, wanted)
    return report(wanted, ours, theirs)


def report(wanted: list[Case], ours: list[Any], theirs: list[Any]) -> int:
    """Print all differences by kind and field; return 1 if one is not explained."""
    found: dict[tuple[str, str], list[tuple[Case, str, object, object]]] = defaultdict(list)
    num_equal = 0
    for case, one, other in zip(wanted, ours, theirs, strict=True):
        differing = list(differences(one, other))
        num_equal += not differing
        for path, mine, its in differing:
            found[case.kind, _field(path)].append((case, path, mine, its))
    open_keys = [key for key in found if _reason(key) is None]
    for key in sorted(found, key=lambda key: (key not in open_keys, key)):
        case, path, mine, its = found[key][0]
        print(f"{key[0]}: {key[1]} ({len(found[key])} times): {_reason(key) or 'NOT EXPLAINED'}")
        print(f"    {path}: ours {_short(mine)}, vLLM {_short(its)}; {_short(case.body, 300)}")
    scores = {"requests": len(wanted), "equal": num_equal, "unexplained": len(open_keys)}
    print(json.dumps(scores))
    return 1 if open_keys else 0


def _reason(key: tuple[str, str]) -> str | None:
    for (kind, path), reason in EXPLAINED.items():
        if fnmatch.fnmatchcase(key[0], kind) and fnmatch.fnmatchcase(key[1], path):
            return reason
    return None


def _short(value: object, most: int = 60) -> str:
    text = "nothing" if value is ... else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else text[:most] + "…"


if __name__ == "__main__":
    sys.exit(main())

"""The fuzz targets: one for each parser of untrusted input.

What an input of a target looks like stands at the function that makes its reader. Seeds come from
the tests of the parsers.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import random
import re
import shutil
import struct
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from cluster.config.schema import AdmissionConfig
from cluster.edge.api_keys import parse_keys
from cluster.edge.families.formats import OutputContext
from cluster.edge.families.message import CallStart, Message, MessageDelta
from cluster.edge.families.parser import OutputParser
from cluster.edge.families.table import REASONING_FORMATS, TOOL_FORMATS
from cluster.edge.fields import read_fields
from cluster.edge.message_output import message_output
from cluster.edge.openai import ModelCard
from cluster.edge.openai_fields import CHAT_FIELDS
from cluster.edge.openai_limits import BodyLimits
from cluster.edge.openai_requests import parse_body, parse_chat_completion
from cluster.edge.resume import LAST_EVENT_ID
from cluster.edge.route_table import ROUTES
from cluster.edge.structured_outputs import read_grammar
from cluster.errors import BadRequestError, ClusterConfigError, TokensDifferError
from kv_transfer import messages as kv_messages
from kv_transfer.errors import WireError
from replicas.codec import decode_client_message, decode_engine_frame, encode
from replicas.engine.core import EngineCore
from replicas.engine_process.server import EngineServer
from replicas.errors import ConfigError, InvalidRequestError, ModelLoadError, UnreadableMessageError
from replicas.generation_config import read_sampling_defaults
from replicas.generators.model_config import load_hf_config
from replicas.generators.torch.loader import open_safetensors
from replicas.grammar_checks import _ENDED_BY_GRAMMAR, GrammarChecker, special_ids_for_checks
from replicas.grammars import GrammarCompiler
from replicas.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Activate,
    AddRequest,
    EngineFrame,
    EngineRequest,
    Hello,
    LoadKV,
    TokenOutput,
    Utility,
)
from replicas.sampling_params import SamplingParams
from replicas.tokenizer import Tokenizer
from tests.cluster.edge import test_families as families
from tests.cluster.edge.fake_backend import FakeBackend, make_tokenizer
from tests.cluster.edge.test_routes import Client, make_app
from tests.cluster.edge.test_tool_calls import NAMED, TOOL
from tests.fuzz.mutation import (
    JSON,
    JSON_WITH_HEAD,
    MSGPACK_WITH_HEAD,
    PLAIN,
    SAFETENSORS,
    TEXT_WITH_HEAD,
    Format,
)
from tests.fuzz.runner import Target
from tests.kv_transfer.test_messages import TO_CONSUMER, TO_PRODUCER
from tests.replicas.engine.virtual import CountingClock, OneWorker, virtual_worker
from tests.replicas.generators.simulated.engines import simulated_config
from tests.replicas.test_grammars import GOOD
from tests.replicas.test_tokenizer import TEMPLATE

USER = {"role": "user", "content": "hi"}
BODIES: dict[str, list[dict[str, Any]]] = {
    "completions": [
        {"prompt": "hi", "max_tokens": 2, "logprobs": 2, "echo": True, "n": 2, "seed": 7},
        {"prompt": [1, 2, 3], "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": ["hi"], "stop": ["a"], "logit_bias": {"5": -1}, "min_p": 0.1, "top_k": 3},
        {"prompt": "hi", "use_beam_search": True, "n": 2, "length_penalty": 0.5},
        {"prompt": "hi", "bad_words": ["no"], "allowed_token_ids": [1, 2], "min_tokens": 1},
        {"prompt": "hello", "truncate_prompt_tokens": 3, "prompt_logprobs": 1},
        {"prompt": "hi", "structured_outputs": {"regex": "[a-c]+"}, "stop_token_ids": [3]},
    ],
    "chat_completions": [
        {"messages": [USER], "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2},
        {"messages": [USER], "tools": [TOOL], "tool_choice": NAMED, "model": "hermes"},
        {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "stream": True,
         "model": "qwen3_coder", "parallel_tool_calls": False},
        {"messages": [
            {"role": "system", "content": [{"type": "text", "text": "be"}]}, USER,
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function",
                 "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ], "model": "mistral"},
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False},
         "model": "kimi_k2", "reasoning_effort": "low", "include_reasoning": False},
        {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "object"}}}},
        {"messages": [USER, {"role": "assistant", "content": "A"}], "echo": True,
         "continue_final_message": True, "add_generation_prompt": False},
    ],
    "embeddings": [
        {"input": "hi", "encoding_format": "base64", "pooling": "mean"},
        {"input": ["hi", "you"], "truncate_prompt_tokens": 2},
        {"input": [[1, 2], [3]]},
    ],
    "rerank": [{"query": "hi", "documents": ["a", "b"], "top_n": 1, "return_documents": False}],
    "messages": [
        {"messages": [USER], "max_tokens": 3, "system": "be", "stop_sequences": ["a"]},
        {"messages": [USER, {"role": "assistant", "content": "A"}], "max_tokens": 3,
         "stream": True, "top_k": 3, "metadata": {"user_id": "u"}},
        {"messages": [
            USER,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "2"}]},
        ], "max_tokens": 8, "thinking": {"type": "adaptive"},
         "tools": [{"name": "f", "input_schema": {"type": "object"}}],
         "tool_choice": {"type": "any"}, "model": "hermes"},
    ],
    "responses": [
        {"model": "hermes", "input": "hi", "instructions": "be", "max_output_tokens": 3,
         "stream": True},
        {"input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [],
             "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "2"}],
         "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
         "tool_choice": "required", "model": "hermes", "store": False},
        {"model": "hermes", "input": [{"type": "item_reference", "id": "msg_" + "0" * 32 + "_0"}]},
        {"model": "hermes", "input": "hi", "previous_response_id": "resp_" + "0" * 32,
         "top_logprobs": 2, "text": {"format": {"type": "json_schema", "name": "x",
                                                "schema": {"type": "object"}}}},
    ],
    "generate_tokens": [
        {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "logprobs": 1, "seed": 7}},
        {"token_ids": [1], "sampling_params": {"n": 2, "stop": ["a"], "top_k": 3},
         "stream": True, "output_mode": "text", "return_token_ids": True},
    ],
    "tokenize": [{"prompt": "hi", "return_token_strs": True}, {"messages": [USER]}],
    "detokenize": [{"tokens": [1, 2, 3]}],
}  # fmt: skip
"""Bodies by the names of their routes; a route without any gets all of these."""
HEADERS = (
    "x-request-id: a", "x-tenant: t", "x-slo-ttft-ms: 500", "x-slo-tpot-ms: 50",
    f"{LAST_EVENT_ID}: 0",
    "content-type: application/json; charset=utf-8", "content-length: 3", "x-debug-route: 1",
    "x-ttserve-listener: operations", "host: localhost:8000",
)  # fmt: skip
FIELDS = tuple(name.encode() for name in CHAT_FIELDS)
YAML_WORDS = (
    b"2024-13-45", b"9" * 5000, b"!!bool ", b"!!int ", b"!!timestamp ", b"!!binary ", b"? ", b"- ",
    b"&x ", b"*x", b"<<: ", b": ", b"[", b"{", b"1:2:3.4", b"0x", b"|\n", b"\n",
)  # fmt: skip
SCHEMA_WORDS = tuple(
    f'"{word}"'.encode()
    for word in (
        "type", "properties", "required", "items", "anyOf", "oneOf", "allOf", "enum", "const",
        "pattern", "format", "minLength", "maximum", "$ref", "#/$defs/a", "#", "date-time",
        "additionalProperties", "patternProperties", "prefixItems", "multipleOf", "x-guidance",
    )
)  # fmt: skip
TEMPLATE_WORDS = (
    b"{{ ",
    b" }}",
    b"{% ",
    b" %}",
    b"for m in messages",
    b"endfor",
    b"if ",
    b"endif",
    b"| tojson",
    b"set x = ",
    b"macro f()",
    b"loop.index",
    b"range(9)",
    b"namespace()",
    b"{# ",
    b"generation",
)
MARKUP = tuple(piece.encode() for piece in families.PIECES)


class FormatsBackend(FakeBackend):
    """An echo behind models of which each has the output formats of its name."""

    max_model_len = 256

    def models(self):
        names = ["", *TOOL_FORMATS]
        return [
            ModelCard(
                name or "plain", "folder", self.max_model_len, 17,
                tool_call_parser=name or None,
                reasoning_parser=name if name in REASONING_FORMATS else None,
            )
            for name in names
        ]  # fmt: skip


def http():
    """Return what sends `METHOD PATH`, header lines, an empty line and a body to all routes."""
    loop = asyncio.new_event_loop()
    admission = AdmissionConfig(tenant_header="x-tenant")
    app = make_app(FormatsBackend(), admission=admission, route_header=True)

    def read(data):
        head, _, body = data.partition(b"\n\n")
        first, *lines = head.decode("latin-1").split("\n")
        method, _, path = first.partition(" ")
        headers = [(name.lower(), value) for name, _, value in (x.partition(": ") for x in lines)]
        client = Client(app)
        loop.run_until_complete(client.request(method, f"/{path[1:]}", body, headers))
        text = b"".join(client.chunks)
        assert client.status is not None
        assert client.status < 500 or client.status == 503, text
        if client.status == 200:
            return client.headers.get("content-type"), len(text).bit_length()
        return client.status, _error_words(text)

    return read


def _error_words(text):
    """Return the beginning of an error's message without what it quotes of the client's."""
    error = json.loads(text).get("error", {}) if text else {}
    message = error.get("message", "").removeprefix(error.get("param") or "")
    return re.sub(r"got .*|'.*?'|\"[^\"]*\"|[^a-z ]", "", message)[:40]


def _folder():
    """Return a new folder in memory, removed when this process ends."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def http_seeds():
    every = [body for bodies in BODIES.values() for body in bodies]
    for spec in ROUTES:
        path = spec.path.replace("{model_id:path}", "plain").replace("{request_id:path}", "r")
        head = "\n".join([f"{spec.method} {path}", *(HEADERS if not spec.is_counted else ())])
        for body in BODIES.get(spec.name, every) if spec.is_counted else [{}]:
            yield f"{head}\n\n{json.dumps(body)}".encode()


def resume():
    """Return what continues a stream from a `Last-Event-ID`: a letter for the body, and the id.

    A stream that is continued without an error must end like the whole one.
    """
    loop, app = asyncio.new_event_loop(), make_app(FormatsBackend())
    wholes = [_streamed(loop, app, body, "0")[1] for body in RESUMED]

    def read(data):
        index, given = data[:1] == b"b", data[1:].decode("latin-1")
        status, events = _streamed(loop, app, RESUMED[index], given)
        if status != 200:
            assert status in {400, TokensDifferError.status}, events
            return status, _error_words(events)
        if events and "error" in events[-1]:
            return "differs", len(events)
        whole = wholes[index]
        if given.endswith(".end"):
            # A client that claims to have the end goes without it.
            assert all(event in whole for event in events)
        else:
            assert whole[len(whole) - len(events) :] == events
        return "continued", len(events)

    return read


RESUMED = (
    ("/v1/completions", {"prompt": "hello, you", "max_tokens": 8, "seed": 7}),
    ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": families.HERMES_CALL}], "tools": [TOOL],
        "max_tokens": 128, "seed": 7, "model": "hermes", "stream_options": {"include_usage": True},
    }),
)  # fmt: skip


def _streamed(loop, app, request, last_event_id):
    """Return the status, and the events without their ids, or the body of an error."""
    path, body = request
    client = Client(app)
    headers = [(LAST_EVENT_ID, last_event_id), ("x-request-id", "r")]
    loop.run_until_complete(client.request("POST", path, {**body, "stream": True}, headers))
    text = b"".join(client.chunks)
    if client.status != 200:
        return client.status, text
    text = re.sub(rb'"call_[0-9a-f]{24}"', b'""', text)  # drawn again by each run
    lines = (line for line in text.decode().split("\n") if line.startswith("data: "))
    events = [{} if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]
    return 200, [{k: v for k, v in event.items() if k != "created"} for event in events]


def resume_seeds():
    loop = asyncio.new_event_loop()
    for letter, (path, body) in zip("ab", RESUMED, strict=True):
        client = Client(make_app(FormatsBackend()))
        headers = [(LAST_EVENT_ID, "0")]
        loop.run_until_complete(client.request("POST", path, {**body, "stream": True}, headers))
        for line in b"".join(client.chunks).split(b"\n"):
            if line.startswith(b"id: "):
                yield letter.encode() + line[4:]
        yield f"{letter}0".encode()
    loop.close()


def output():
    """Return what parses an output: a line of the format of calls, that of reasoning, the end of
    the prompt as JSON, 0 or 1 for a limit that cuts it; then the text.

    Any division of the text must give the same message, whose calls are such as JSON can write.
    """

    def read(data):
        head, _, text = data.decode(errors="replace").partition("\n\n")
        tools, reasoning, prompt_end, is_cut = (*head.split(" "), "", "", "", "")[:4]
        try:
            prompt_end = str(json.loads(prompt_end))
        except ValueError:
            prompt_end = ""
        context = OutputContext(families.TOOLS, prompt_end, ("<|end|>", "<|im_end|>"))

        def message(pieces):
            parser = OutputParser(
                TOOL_FORMATS.get(tools), REASONING_FORMATS.get(reasoning), context
            )
            found = MessageDelta()
            for piece in pieces:
                found.extend(parser.feed(piece))
            found.extend(parser.finish(is_cut=is_cut == "1"))
            return found

        def numbered(delta):
            """A delta with ids that do not depend on when it was read."""
            ids = {}
            return [
                replace(piece, call_id=ids.setdefault(piece.call_id, str(len(ids))))
                if isinstance(piece, CallStart)
                else piece
                for piece in delta.pieces
            ]

        whole = message([text])
        made = Message.of(whole)
        cuts = random.Random(len(text))
        size = cuts.choice((1, 2, 7, 64))
        pieces = message(text[i : i + size] for i in range(0, len(text), size))
        assert numbered(pieces) == numbered(whole)
        for call in made.calls:
            assert call.name
            assert not call.is_complete or isinstance(json.loads(call.arguments), dict)
            f"{call.name}{call.arguments}".encode()
        kinds = TOOL_FORMATS.get(tools), REASONING_FORMATS.get(reasoning)
        return kinds, min(len(made.calls), 3), bool(made.content), bool(made.reasoning)

    return read


def output_seeds():
    for tools, reasoning, prompt_end, text, _ in (*families.MESSAGES, *families.UNENDED):
        yield _output_seed(tools, reasoning, prompt_end, text)
    for tools, text in families.CALLS.items():
        same = tools if tools in REASONING_FORMATS else "qwen3"
        yield _output_seed(tools, None, "", f"See:\n{text}\n{text} So.")
        yield _output_seed(tools, same, "<think>\n", f"Hm.</think>{text}")


def reasoning_seeds():
    for name, format_ in REASONING_FORMATS.items():
        for prompt_end in ("", format_.start, format_.end):
            yield _output_seed(None, name, prompt_end, f"{format_.start}Hm.\n{format_.end}\nSo.")
    yield _output_seed(None, "openai_gptoss", "", "<|channel|>analysis<|message|>Hm.<|end|>So.")


def _output_seed(tools, reasoning, prompt_end, text):
    end = json.dumps(prompt_end).replace(" ", "\\u0020")
    return f"{tools or '-'} {reasoning or '-'} {end} 0\n\n{text}".encode()


class GrammarReader:
    """Checks grammars in the child of a `GrammarChecker`, which only they may end."""

    def __init__(self):
        self._special_ids = special_ids_for_checks(["<|tool|>"])
        self._compiler = GrammarCompiler.for_checks(["<|tool|>"])
        self._checker = GrammarChecker(["<|tool|>"])

    def check(self, spec):
        # Conversions run here too, so that their errors show their places.
        self._compiler._text(spec.kind, spec)
        child = self._checker._child
        try:
            self._checker.check(spec)
        except InvalidRequestError as error:
            ended = None if child is None else child.poll()
            assert ended is None or ended in _ENDED_BY_GRAMMAR, f"the checker ended with {ended}"
            # Its own words, without the client's.
            words = str(error).split(":")
            return spec.kind, "".join(x for x in ":".join(words[:2]) if x.isalpha())[:60]
        return spec.kind, "compiles"


def grammar():
    """Return what reads a body's `response_format` or `structured_outputs`."""
    reader = GrammarReader()

    def read(data):
        values = read_fields({"messages": [USER], **parse_body(data, LIMITS)}, CHAT_FIELDS)
        found = read_grammar(values)
        return None if found is None else reader.check(found.spec)

    return read


LIMITS = BodyLimits(max_model_len=4096, vocab_size=1000, max_token_chars=16)


def grammar_seeds():
    for given, *_ in GOOD:
        yield json.dumps({"structured_outputs": given}).encode()
    tag = next(given["structural_tag"] for given, *_ in GOOD if "structural_tag" in given)
    schema = {"name": "x", "schema": families.WEATHER.parameters, "strict": True}
    for format_ in (
        {"type": "json_object"},
        {"type": "text"},
        {"type": "json_schema", "json_schema": schema},
        {"type": "structural_tag", **tag},
    ):
        yield json.dumps({"response_format": format_}).encode()


def tools():
    """Return what makes a grammar of a body's tools; `model` names the format of the calls."""
    reader = GrammarReader()

    def read(data):
        body = parse_body(data, LIMITS)
        name = body.get("model")
        parsed = parse_chat_completion(body)
        if name not in TOOL_FORMATS:
            return None
        card = ModelCard(
            name, name, 4096, 1, tool_call_parser=name,
            reasoning_parser=name if name in REASONING_FORMATS else None,
        )  # fmt: skip
        made = message_output(parsed.tool_use, card, parsed.grammar)
        found = None if made is None else made.grammar(parsed.grammar, {}, "")
        return name, found and reader.check(found.spec)

    return read


def tools_seeds():
    strict = {**TOOL["function"], "strict": True}
    text = {"type": "string", "pattern": "^a+$", "maxLength": 9}
    combined = {"anyOf": [text, {"type": ["integer", "null"], "minimum": 0}, {"$ref": "#/$defs/a"}]}
    rich = {
        "type": "object",
        "properties": {"a": combined, "b": {"enum": ["x", 1]}, "c": {"type": "array", "items": {}}},
        "required": ["a"],
        "$defs": {"a": {"const": 1}},
        "patternProperties": {"^x": {"type": "number"}},
    }
    function = {"name": "f", "parameters": rich, "strict": True}
    for name in TOOL_FORMATS:
        body = {"messages": [USER], "model": name}
        yield json.dumps({**body, "tools": [TOOL], "tool_choice": "required"}).encode()
        offered = [{"type": "function", "function": each} for each in (strict, function)]
        yield json.dumps({**body, "tools": offered}).encode()


SHAPES = {"a.weight": (2, 3), "b.weight": (4,)}


def key_file():
    """Return what counts the keys in a file of API keys."""
    return lambda data: len(parse_keys(data.decode(errors="replace"), "keys.yaml"))


def key_file_seeds():
    line = "sha256:" + "0f" * 32
    yield f'a: {{keys: ["{line}"], models: [m, n], admin: true}}\n'.encode()
    yield f'"2024-01-02":\n  keys:\n  - {line}\n  max_requests: 0x1F\n'.encode()
    yield f"a: &x {{keys: ['{line}'], tokens_per_minute: 1_000}}\nb: {{<<: *x}}\n".encode()


def safetensors():
    """Return what reads the weights of a folder from one safetensors file."""
    folder = _folder()

    def read(data):
        folder.joinpath("model.safetensors").write_bytes(data)
        return _read_weights(folder)

    return read


def _read_weights(folder):
    with open_safetensors(folder, SHAPES) as fetch:
        return tuple(str(fetch(name).dtype) for name in SHAPES)


def _safetensors_file(dtype, num_bytes, metadata):
    header, offset = {}, 0
    for name, shape in SHAPES.items():
        size = num_bytes * (6 if len(shape) == 2 else 4)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps({**metadata, **header}).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(offset)


def safetensors_seeds():
    yield _safetensors_file("F32", 4, {"__metadata__": {"format": "pt"}})
    yield _safetensors_file("BF16", 2, {})
    yield _safetensors_file("I64", 8, {})
    yield _safetensors_file("F8_E4M3", 1, {})


def weights_index():
    """Return what reads the weights of a folder through an index of files."""
    folder = _folder()
    folder.joinpath("a.safetensors").write_bytes(_safetensors_file("F32", 4, {}))

    def read(data):
        folder.joinpath("model.safetensors.index.json").write_bytes(data)
        return _read_weights(folder)

    return read


def weights_index_seeds():
    yield json.dumps(
        {"metadata": {}, "weight_map": dict.fromkeys(SHAPES, "a.safetensors")}
    ).encode()


def _write_folder(folder, data):
    """Write an object of texts and values by the names of files; return whether it is one."""
    try:
        files = json.loads(data)
    except (ValueError, RecursionError):
        files = None
    if not isinstance(files, dict):
        return False
    for name in FOLDER_FILES:
        path = folder / name
        path.unlink(missing_ok=True)
        if name in files:
            content = files[name]
            text = content if isinstance(content, str) else json.dumps(content)
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return True


FOLDER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "config.json", "generation_config.json",
)  # fmt: skip


def tokenizer():
    """Return what reads the tokenizer and chat template of a folder, and uses both."""
    folder = _folder()

    def read(data):
        if not _write_folder(folder, data):
            return None
        made = Tokenizer.from_folder(folder)
        ids = made.encode("hello <s>é\n", add_special_tokens=True)
        made.decode(ids)
        made.token_strings(ids)
        for token_id in ids[:4]:
            made.token_bytes(token_id)
        grown = {"type": "function", "function": {"name": "f", "parameters": {}}}
        text = ""
        if made.has_chat_template:
            text = made.apply_chat_template([USER], tools=[grown], variables={"x": 1})
        return len(ids), made.vocab_size, len(made.eos_token_ids), len(text)

    return read


def tokenizer_seeds():
    backend = json.loads(make_tokenizer().backend.to_str())
    backend["added_tokens"] = [
        {"id": 256 + i, "content": text, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for i, text in enumerate(("<s>", "</s>"))
    ]  # fmt: skip
    # A smaller vocabulary leaves room for everything else of the file.
    kept = dict(itertools.islice(backend["model"]["vocab"].items(), 64))
    backend["model"]["vocab"] = kept | {"he": 64, "ll": 65}
    backend["model"]["merges"] = [["h", "e"], ["l", "l"]]
    backend["model"]["unk_token"] = "!"
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    yield json.dumps({
        "tokenizer.json": backend, "tokenizer_config.json": config,
        "config.json": {"vocab_size": 300, "eos_token_id": 257},
        "generation_config.json": {"eos_token_id": [257]},
    }).encode()  # fmt: skip
    unigram = {
        "type": "Unigram", "unk_id": 0,
        "vocab": [["<unk>", 0.0], ["▁he", -1.0], ["llo", -1.5], ["▁", -2.0], ["o", -3.0]],
    }  # fmt: skip
    marks = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    named = [{"name": "default", "template": TEMPLATE}]
    yield json.dumps({
        "tokenizer.json": {
            **backend, "model": unigram, "pre_tokenizer": marks, "decoder": marks,
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
        },
        "special_tokens_map.json": {"unk_token": "<unk>"},
        "tokenizer_config.json": {"chat_template": named},
    }).encode()  # fmt: skip
    words = {"type": "WordLevel", "vocab": {"hello": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    split = {"type": "Split", "pattern": {"Regex": "\\s+|[a-z]+"}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    yield json.dumps({
        "tokenizer.json": {**backend, "model": words, "pre_tokenizer": split, "decoder": None},
        "chat_template.jinja": TEMPLATE,
    }).encode()  # fmt: skip


def model_config():
    """Return what reads the configuration of a model folder."""
    folder = _folder()

    def read(data):
        if not _write_folder(folder, data):
            return None
        config = load_hf_config(folder)
        defaults = read_sampling_defaults(folder, "auto")
        return config.family, config.rope.rope_type, bool(config.experts), defaults is None

    return read


def model_config_seeds():
    base = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "eos_token_id": 2,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    llama3 = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }  # fmt: skip
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}  # fmt: skip
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "eos_token_id": [2, 3]}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    qwen = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
    gpt_oss = {
        **experts, "head_dim": 16, "sliding_window": 64, "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True,
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    latent = {
        "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4,
        "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
        "rope_scaling": {**yarn, "mscale_all_dim": 1.0},
    }  # fmt: skip
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq"}
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group",
               "group_size": 128, "actorder": "weight"}  # fmt: skip
    compressed = {"quant_method": "compressed-tensors", "format": "pack-quantized",
                  "config_groups": {"group_0": {"weights": weights}}}  # fmt: skip
    grouped = {**latent, "topk_method": "group_limited_greedy", "scoring_func": "softmax"}
    for architecture, changes in (
        ("LlamaForCausalLM", {"rope_scaling": llama3}),
        ("LlamaForCausalLM", {"rope_parameters": yarn}),
        ("Qwen3ForCausalLM", {"head_dim": 32, "use_sliding_window": False}),
        ("MistralForCausalLM", {"sliding_window": 64}),
        ("MixtralForCausalLM", experts),
        ("Qwen3MoeForCausalLM", qwen),
        ("LlamaForCausalLM", {"quantization_config": gptq}),
        ("LlamaForCausalLM", {"quantization_config": compressed}),
        ("GptOssForCausalLM", gpt_oss),
        ("DeepseekV2ForCausalLM", grouped),
        ("DeepseekV3ForCausalLM", {**latent, "topk_method": "noaux_tc", "norm_topk_prob": True}),
    ):
        config = {**base, "architectures": [architecture], **changes}
        yield json.dumps({"config.json": config, "generation_config.json": generation}).encode()


def messages():
    """Return what decodes one message behind a line with the name of its reader."""
    readers = {
        b"engine": decode_engine_frame,
        b"producer": kv_messages.decode_to_producer,
        b"consumer": kv_messages.decode_to_consumer,
    }

    def read(data):
        name, _, raw = data.partition(b"\n\n")
        decode = readers.get(name)
        return None if decode is None else type(decode(raw)).__name__

    return read


def messages_seeds():
    for name, examples in ((b"producer", TO_PRODUCER), (b"consumer", TO_CONSUMER)):
        for message in examples:
            yield name + b"\n\n" + kv_messages.encode(message)
    for event in (TokenOutput("r", 0, [7]), Accepted("r", 0, 1, 0, 3, 1)):
        yield b"engine\n\n" + encode(EngineFrame("e.1", [event]))


def engine():
    """Return what sends an array of messages to a simulated engine and runs its steps."""
    config = simulated_config(tt_data_parallel=2, max_batch_size=4)
    client = b"a"

    def read(data):
        try:
            parts = msgspec.msgpack.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if not isinstance(parts, list):
            return None
        worker = OneWorker(virtual_worker(config, CountingClock()))
        server = EngineServer(EngineCore(config, worker, "e.1"), "e.1")
        outcome: list[object] = []
        for number, part in enumerate(parts[:12]):
            try:
                message = decode_client_message(msgspec.msgpack.encode(part))
            except UnreadableMessageError as error:
                server.take_unreadable(client, error.request_id or "", str(error))
            else:
                server.take(client, message, float(number))
                outcome.append(type(message).__name__)
            server.core.step(number + 0.5)
            for _, frame in server.frames(number + 0.9):
                encode(frame)
                outcome += sorted({type(event).__name__ for event in frame.events})
        return tuple(outcome[:8])

    return read


def engine_seeds():
    params = SamplingParams(max_tokens=4, temperature=0.7, seed=1, n=2, logprobs=1, stop=("a",))
    plain = SamplingParams(max_tokens=3, temperature=0.0, seed=0, prompt_logprobs=1)
    hello = msgspec.msgpack.decode(encode(Hello(PROTOCOL_VERSION)))
    for messages in (
        [AddRequest(EngineRequest("r", [20, 21], params)), Abort(["r"], "abort", [1])],
        [AddRequest(EngineRequest("r", [5] * 40, plain), "decode", 1), Activate("r", [[1, 2]])],
        [AddRequest(EngineRequest("r", [5], plain)), LoadKV("r", b"sealed", 1)],
        [Utility(1, "pause", ["abort", True]), Utility(2, "is_paused", []), Utility(3, "resume")],
        [Utility(1, "drain", []), Utility(2, "reset_prefix_cache", [True])],
    ):
        parts = [msgspec.msgpack.decode(encode(message)) for message in messages]
        yield msgspec.msgpack.encode([hello, *parts, *[[]] * 4])


MSGPACK = Format(msgspec.msgpack.decode, msgspec.msgpack.encode)

TARGETS: dict[str, Target] = {
    "http": Target(http, http_seeds, (), JSON_WITH_HEAD, FIELDS),
    "resume": Target(resume, resume_seeds, (), PLAIN, (b".end", b"-", b"0", b"f" * 16)),
    "output": Target(output, output_seeds, (), TEXT_WITH_HEAD, MARKUP),
    "reasoning": Target(output, reasoning_seeds, (), TEXT_WITH_HEAD, MARKUP),
    "grammar": Target(
        grammar, grammar_seeds, (BadRequestError, InvalidRequestError), JSON, SCHEMA_WORDS
    ),
    "tools": Target(tools, tools_seeds, (BadRequestError, InvalidRequestError), JSON, SCHEMA_WORDS),
    "key-file": Target(key_file, key_file_seeds, (ClusterConfigError,), PLAIN, YAML_WORDS),
    "safetensors": Target(safetensors, safetensors_seeds, (ModelLoadError,), SAFETENSORS),
    "weights-index": Target(weights_index, weights_index_seeds, (ModelLoadError,), JSON),
    "tokenizer": Target(
        tokenizer, tokenizer_seeds, (ModelLoadError, InvalidRequestError), JSON, TEMPLATE_WORDS
    ),
    "model-config": Target(model_config, model_config_seeds, (ConfigError,), JSON),
    "messages": Target(
        messages, messages_seeds, (UnreadableMessageError, WireError), MSGPACK_WITH_HEAD
    ),
    "engine": Target(engine, engine_seeds, (), MSGPACK),
}

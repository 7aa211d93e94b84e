"""Text to token ids and back: a Hugging Face tokenizer folder without importing transformers.

A `Tokenizer` is immutable after loading and may be shared by threads. Importing transformers takes
seconds in every process, so the folder's files are read here, with the library that transformers
itself wraps. `replicas.detokenizer` decodes streams.
"""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import tokenizers
import tokenizers.decoders

from replicas.errors import InvalidRequestError, ModelLoadError
from replicas.text_pieces import PIECE_CHARS, PieceEncoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from jinja2.parser import Parser

_SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""A SentencePiece vocabulary's spelling of a byte that no other token has."""
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_OF_LETTER = {chr(byte): byte for byte in _VISIBLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(sorted({*range(0x100)} - {*_VISIBLE}))
}
"""A byte-level vocabulary's spelling of bytes. Source: GPT-2's bytes_to_unicode."""
_RESERVED_VARIABLES = frozenset({"messages", "add_generation_prompt", "tools", "documents", "self"})
_MANY = 4096
"""Characters or tokens of a call that takes so long that it should release the GIL."""


_END_MARK = "[CONTINUED_HERE_7f3a91c4] "
"""Stands behind the last message where the output continues it. Source: transformers
`continue_final_message`, which marks the end, too, and finds by a final space whether the template
strips its messages."""
_NOT_CONTINUED = (
    "continue_final_message needs a last message with text that the chat template shows"
)


class ChatTemplateError(InvalidRequestError):
    """The messages cannot become a prompt; the text is the template's own error or the reason."""


class TooManyTokensError(InvalidRequestError):
    """A text has more tokens than allowed.

    Attributes:
        num_tokens: Its tokens, or those encoded until the limit was exceeded.
        is_whole: Whether the whole text was encoded.
    """

    def __init__(self, num_tokens: int, most: int, *, is_whole: bool) -> None:
        count = f"{num_tokens}" if is_whole else f"more than {num_tokens - 1}"
        super().__init__("prompt", f"the text has {count} tokens; at most {most} are taken")
        self.num_tokens = num_tokens
        self.is_whole = is_whole


class Tokenizer:
    """A model folder's tokenizer, chat template and end tokens.

    Attributes:
        backend: The tokenizer of the `tokenizers` library.
        vocab_size: The model accepts token ids 0..vocab_size-1. From config.json if it has the
            number, because an id beyond it has no embedding row.
        eos_token_ids: Ids that end generation, from generation_config.json (else config.json) and
            the tokenizer's own end token. May be empty.
        eos_token_id: The tokenizer's own end token, if it has one.
        is_byte_level: Whether a text is the bytes of its tokens, one after the other (`bytes_of`).
        max_token_chars: Length of the vocabulary's longest token; no token stands for more
            characters of a text.
        special_tokens: Text by name, such as "<s>" by "bos_token"; chat templates read them.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ) -> None:
        self.backend = backend
        self._pieces = PieceEncoder(backend)
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        # Caches; threads that fill them at the same time write the same values.
        self._bytes: dict[int, bytes] = {}
        self._marks: dict[str, tuple[int, ...] | None] = {}
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.max_token_chars = max(map(len, backend.get_vocab()), default=1)
        self.special_tokens = dict(special_tokens)
        eos_token = special_tokens.get("eos_token")
        self.eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)
        self._chat_template = None if chat_template is None else _ChatTemplate(chat_template)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of a model folder.

        Args:
            path: Folder with tokenizer.json; tokenizer_config.json, chat_template.jinja,
                generation_config.json and config.json are read if they exist.

        Raises:
            ModelLoadError: There is no tokenizer.json, or a file cannot be read; names the file.
        """
        folder = Path(path)
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(
            {**_read_json(folder / "special_tokens_map.json"), **config}
        )
        backend = _load_backend(folder / "tokenizer.json", special_tokens)
        model_config = _read_json(folder / "config.json")
        return cls(
            backend,
            vocab_size=_vocab_size(backend, model_config),
            eos_token_ids=_eos_token_ids(
                backend,
                _read_json(folder / "generation_config.json"),
                model_config,
                special_tokens.get("eos_token"),
            ),
            special_tokens=special_tokens,
            chat_template=_chat_template(folder, config),
        )

    @property
    def special_token_texts(self) -> list[str]:
        """Return the texts of all special tokens."""
        added = self.backend.get_added_tokens_decoder()
        return [added[token_id].content for token_id in sorted(self._special_ids)]

    @property
    def special_token_ids(self) -> dict[str, int]:
        """Return the ids of all special tokens by their texts."""
        added = self.backend.get_added_tokens_decoder()
        return {added[token_id].content: token_id for token_id in sorted(self._special_ids)}

    def mark_token_ids(self, text: str) -> tuple[int, ...] | None:
        """Return the tokens of a text that begins with an added token; None of another text.

        Text before an added token does not change how it is encoded. Results are kept: the texts
        are those of formats, not of requests.
        """
        if text not in self._marks:
            ids = self.encode(text, add_special_tokens=False)
            is_mark = bool(ids) and ids[0] in self.backend.get_added_tokens_decoder()
            self._marks[text] = tuple(ids) if is_mark else None
        return self._marks[text]

    @property
    def has_chat_template(self) -> bool:
        """Return whether the folder has a chat template."""
        return self._chat_template is not None

    def encode(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of a text, with the special tokens that the model expects around it.

        Releases the GIL for long texts, so that they can be encoded in another thread.

        Raises:
            TooManyTokensError: The text has more than `max_tokens` tokens.
            NoCutError: The text is too long for this tokenizer, see `replicas.text_pieces`.
        """
        ids: list[int] = []
        for ids in self.encode_steps(text, add_special_tokens, max_tokens):  # noqa: B007
            pass
        return ids

    def encode_steps(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> Iterator[list[int]]:
        """Encode a text as `encode` does, in steps of bounded work and memory.

        Yields:
            All ids so far, always in the same growing list.

        Raises:
            TooManyTokensError: The text has more than `max_tokens` tokens; encoding stops there.
            NoCutError: The text is too long for this tokenizer, see `replicas.text_pieces`.
        """
        if len(text) < _MANY:
            found = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
            steps: Iterable[list[int]] = [found]
        else:
            steps = self._pieces.pieces(text, add_special_tokens)
        ids: list[int] = []
        is_whole = len(text) <= PIECE_CHARS
        for piece in steps:
            ids += piece
            if max_tokens is not None and len(ids) > max_tokens:
                raise TooManyTokensError(len(ids), max_tokens, is_whole=is_whole)
            yield ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; unknown ids give nothing, broken bytes U+FFFD.

        Releases the GIL for long lists.
        """
        if len(token_ids) >= _MANY:
            batch = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
            text: str = batch[0]
            return text
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def bytes_of(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> bytes:
        """Return the bytes of token ids before UTF-8 decoding; requires `is_byte_level`."""
        known, special = self._bytes, self._special_ids
        data = b""
        for token_id in token_ids:
            if skip_special_tokens and token_id in special:
                continue
            found = known.get(token_id)
            if found is None:
                found = known[token_id] = _spelled_bytes(self.backend.id_to_token(token_id) or "")
            data += found
        return data

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's spelling of each token ("Ġthe"); "" for an unknown id."""
        return [self.backend.id_to_token(token_id) or "" for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, possibly part of a character.

        An unknown id gives b"".
        """
        once = self.decode([token_id], skip_special_tokens=False)
        if _REPLACEMENT not in once:
            # Some decoders remove the space before a text's first word.
            twice = self.decode([token_id, token_id], skip_special_tokens=False)
            return twice[len(once) :].encode()
        spelling = self.backend.id_to_token(token_id) or ""
        if byte := _BYTE_TOKEN.fullmatch(spelling):
            return bytes.fromhex(byte[1])
        if all(letter in _BYTE_OF_LETTER for letter in spelling):
            return _spelled_bytes(spelling)
        return once.encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """Render a conversation as the prompt text that the model was trained on.

        A template that does not name the role developer gets such messages as system messages, and
        all of these joined into the first one. Source: vLLM 0.32 vllm/renderers/hf.py.

        Args:
            messages: Role and content of each turn; keys whose value is None are left out.
            add_generation_prompt: End with the header of the assistant's next turn.
            variables: Further variables of the template, such as `enable_thinking`.
            tools: Tools that the model may call, as OpenAI's API has them.
            documents: Documents for the template's variable of that name.
            chat_template: A template in place of the folder's. It runs in the same sandbox, which
                does not limit its time and memory.

        Raises:
            ChatTemplateError: The folder has no template, there are no messages, a variable has a
                reserved name, or the template refuses these messages or variables or is not valid.
        """
        template = self._chat_template
        if chat_template is not None:
            try:
                template = _ChatTemplate(chat_template)
            except ModelLoadError as error:
                text = str(error).partition(": ")[2]
                raise ChatTemplateError(
                    "chat_template", f"chat_template is not valid: {text}"
                ) from error
        if template is None:
            raise ChatTemplateError(
                "messages",
                "the model's folder has no chat template; add chat_template.jinja to it, "
                "or send a plain prompt to /v1/completions",
            )
        if not messages:
            raise ChatTemplateError("messages", "messages must hold at least one message")
        given = variables or {}
        if given:
            _check_variables(template.compiled, given)
        turns = [{k: v for k, v in message.items() if v is not None} for message in messages]
        if not template.knows_developer:
            turns = _without_developer(turns)
        told: dict[str, object] = {
            "tools": tools or None,
            "documents": documents or None,
            **self.special_tokens,
            "messages": turns,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _render(template.compiled, {**told, **given})
        except ChatTemplateError as error:
            if given and _can_render(template.compiled, told):
                raise ChatTemplateError("chat_template_kwargs", str(error)) from error
            raise


def _spelled_bytes(spelling: str) -> bytes:
    """Return the bytes of a byte-level spelling; any other text is encoded as UTF-8."""
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in spelling])
    except KeyError:
        return spelling.encode()


class _ChatTemplate:
    """A compiled template.

    Attributes:
        compiled: The template.
        knows_developer: Whether it names the role developer.
    """

    def __init__(self, source: str) -> None:
        self.compiled = _compile(source)
        self.knows_developer = '"developer"' in source or "'developer'" in source


def _without_developer(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without the role developer: one system message comes first."""
    if all(turn.get("role") != "developer" for turn in turns):
        return turns
    orders = [turn for turn in turns if turn.get("role") in {"system", "developer"}]
    content = "\n".join(str(turn["content"]) for turn in orders if turn.get("content"))
    others = [turn for turn in turns if turn.get("role") not in {"system", "developer"}]
    return [{"role": "system", "content": content}, *others]


def with_end_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with a mark behind the last one's content, for `cut_at_end_mark`.

    Raises:
        ChatTemplateError: The last message has no text.
    """
    content = messages[-1].get("content")
    if not isinstance(content, str) or not content.strip():
        raise ChatTemplateError("continue_final_message", _NOT_CONTINUED)
    return [*messages[:-1], {**messages[-1], "content": f"{content}{_END_MARK}"}]


def cut_at_end_mark(text: str) -> str:
    """Return a rendered conversation up to the mark, so that the output continues its last message.

    Raises:
        ChatTemplateError: The template does not show the mark.
    """
    begin = text.rfind(_END_MARK.strip())
    if begin < 0:
        raise ChatTemplateError("continue_final_message", _NOT_CONTINUED)
    # A template that strips the mark's own space would strip that of the content, too.
    kept = text[:begin]
    return kept if text.startswith(_END_MARK, begin) else kept.rstrip()


def _check_variables(template: jinja2.Template, given: Mapping[str, object]) -> None:
    """Refuse variables with reserved names.

    Raises:
        ChatTemplateError: A variable has a reserved name.
    """
    # To a template its functions are variables too.
    taken = (_RESERVED_VARIABLES | template.globals.keys()) & given.keys()
    if taken:
        raise ChatTemplateError(
            "chat_template_kwargs", f"chat_template_kwargs may not set {sorted(taken)}"
        )


def _render(template: jinja2.Template, variables: dict[str, object]) -> str:
    """Render a template.

    Raises:
        ChatTemplateError: The template's own code failed.
    """
    try:
        return template.render(variables)
    # A template's expressions can raise any exception on unexpected values.
    except Exception as error:
        raise ChatTemplateError("messages", f"the chat template failed: {error}") from error


def _can_render(template: jinja2.Template, variables: dict[str, object]) -> bool:
    try:
        _render(template, variables)
    except ChatTemplateError:
        return False
    return True


def _read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file; return an empty one if there is no such file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} does not hold a JSON object")
    return content


def _load_backend(file: Path, special_tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Load the tokenizer, with the named special tokens registered as special.

    Only tokenizer.json decides which of them `encode` adds: add_bos_token and add_eos_token of
    tokenizer_config.json count only in folders without it.
    Source: transformers 5 PreTrainedTokenizerBase._from_pretrained.
    """
    if not file.is_file():
        raise ModelLoadError(
            f"no {file.name} in {file.parent}: convert the model's tokenizer to one file with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...), or name another folder"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type for a bad file
        raise ModelLoadError(f"cannot read {file}: {error}") from error
    # A file may contain the truncation and padding of its training run.
    backend.no_truncation()
    backend.no_padding()
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([text for text in special_tokens.values() if text not in known])
    try:
        backend.encode("a\U0010ffff\n")  # the last code point: no vocabulary has it
    except Exception as error:  # the library raises no narrower type
        raise ModelLoadError(f"{file} cannot encode every text: {error}") from error
    return backend


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens, which are given as text or as {"content": text, ...}."""
    found = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text:
            found[name] = text
    return found


def _text_config(model_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json about the text model, if it has one."""
    found = model_config.get("text_config")
    return found if isinstance(found, dict) else {}


def _vocab_size(backend: tokenizers.Tokenizer, model_config: Mapping[str, Any]) -> int:
    text_config = _text_config(model_config) or model_config
    size = text_config.get("vocab_size")
    return size if isinstance(size, int) else max(backend.get_vocab().values(), default=-1) + 1


def _eos_token_ids(
    backend: tokenizers.Tokenizer,
    generation_config: Mapping[str, Any],
    model_config: Mapping[str, Any],
    eos_token: str | None,
) -> frozenset[int]:
    configs = (generation_config, model_config, _text_config(model_config))
    declared: object = next(
        (config["eos_token_id"] for config in configs if config.get("eos_token_id") is not None),
        [],
    )
    given = declared if isinstance(declared, list) else [declared]
    wrong = [each for each in given if not isinstance(each, int)]
    if wrong:
        raise ModelLoadError(f"the model's eos_token_id must be a token id or a list, got {wrong}")
    ids = set(given)
    if eos_token is not None and (eos_id := backend.token_to_id(eos_token)) is not None:
        ids.add(eos_id)
    return frozenset(ids)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return chat_template.jinja, else tokenizer_config.json's only or "default" template.

    Raises:
        ModelLoadError: It cannot be read, or the list of templates has another shape.
    """
    file = folder / "chat_template.jinja"
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"cannot read the chat template of {folder}: {error!r}") from error
    return template if isinstance(template, str) else None


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks training masks; here it only renders."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance-level set

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)  # noqa: DTZ005 - templates mean local time


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; jinja2's own filter would escape HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _compile(chat_template: str) -> jinja2.Template:
    """Compile a template in the sandbox that Hugging Face templates expect.

    Raises:
        ModelLoadError: The template is not valid jinja2.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(chat_template)
    # A template becomes Python, whose compiler has limits and errors of its own.
    except Exception as error:
        raise ModelLoadError(f"the model's chat template is not valid: {error}") from error

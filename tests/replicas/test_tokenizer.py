import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from replicas.errors import ModelLoadError
from replicas.tokenizer import ChatTemplateError, Tokenizer
from tests.replicas.test_detokenizer import BYTES, FALLBACK, train

TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'critic' %}
        {{- raise_exception('no critics, please') }}
    {%- endif %}
    {%- if loop.index > 9 %}{% break %}{% endif %}
    <|{{ message.role }}|>
    {%- generation %}{{ message['content'] | trim }}{% endgeneration -%}
    {%- if message.name is defined %}{{ {'é': '<' ~ message.name} | tojson }}{% endif -%}
    {{- eos_token }}
{% endfor %}
{%- if tools %}tools{% endif %}
{%- if style is defined %}{{ style + 1 }}{% endif %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
TEXTS = [
    "", " ", "hello world", "  two  spaces\n\nand lines\t", "größer 你好 😀",
    "<s>inside</s>the text", "x = {'a': 1}  # <b>", "é́", "\x00\x7f",
]  # fmt: skip
TURNS = [
    {"role": "system", "content": " be kind ", "name": None},
    {"role": "user", "content": "hé <b> 你好", "name": "ann"},
]


def make_folder(folder, tokenizer_config=None, **files):
    """A model folder with a tokenizer trained on the spot, and the JSON files given."""
    folder.mkdir(exist_ok=True)
    corpus = [*TEXTS, "the world of hello worlds, größer"] * 9
    backend = train(corpus, 384, ["<s>", "</s>", "<|user|>"])
    backend.enable_truncation(4)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        **(tokenizer_config or {}),
    }
    for name, content in {"tokenizer_config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"pad_token": "<pad>"},
    ],
    ids=["plain", "bos", "bos_eos", "no_bos", "new_special_token"],
)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_and_text_equal_transformers(tmp_path, config, add_special_tokens):
    folder = make_folder(tmp_path, config)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS, "a<pad>b"]:
        ids = ours.encode(text, add_special_tokens)
        assert ids == theirs.encode(text, add_special_tokens=add_special_tokens, truncation=False)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert ours.token_strings(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("text", [*TEXTS, " \ufffd", "the  cat sets", "naïve 👍"])
def test_the_bytes_of_tokens_are_those_of_the_text(text):
    ids = BYTES.encode(text, False)
    assert b"".join(map(BYTES.token_bytes, ids)) == text.encode()
    if text and "<s>" not in text:
        ids = FALLBACK.encode(text, False)
        assert b"".join(map(FALLBACK.token_bytes, ids)) == b" " + text.encode()


def test_an_id_without_a_token_has_no_bytes():
    assert BYTES.token_bytes(10**6) == b""


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("kwargs", [{}, {"style": 3}])
@pytest.mark.parametrize("place", ["config", "list", "file"])
def test_rendered_conversations_equal_transformers(tmp_path, place, kwargs, add_generation_prompt):
    other = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    stored = {"config": TEMPLATE, "list": other, "file": "not this one"}[place]
    folder = make_folder(tmp_path, {"chat_template": stored})
    if place == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    ours = Tokenizer.from_folder(folder).apply_chat_template(TURNS, add_generation_prompt, kwargs)
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        TURNS, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
    )
    assert ours == theirs
    assert '{"é": "<ann"}' in ours


@pytest.mark.parametrize(
    ("turns", "kwargs", "reason"),
    [
        ([{"role": "critic", "content": "x"}], {}, "no critics, please"),
        ([], {}, "at least one message"),
        (TURNS, {"style": "x"}, "can only concatenate str"),
        (TURNS, {"tools": [1]}, r"may not set \['tools'\]"),
    ],
)
def test_a_conversation_that_the_template_refuses_is_a_typed_error(tmp_path, turns, kwargs, reason):
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path, {"chat_template": TEMPLATE}))
    with pytest.raises(ChatTemplateError, match=reason):
        tokenizer.apply_chat_template(turns, variables=kwargs)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ namespace.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox_or_change_its_input(tmp_path, attack):
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path, {"chat_template": attack}))
    with pytest.raises(ChatTemplateError, match="unsafe"):
        tokenizer.apply_chat_template(TURNS)


def test_a_folder_without_a_chat_template_says_what_to_do(tmp_path):
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match=r"add chat_template\.jinja"):
        tokenizer.apply_chat_template(TURNS)


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json in .*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "no json"),
        ("tokenizer_config.json", "[]"),
        ("config.json", "{"),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("config.json", '{"eos_token_id": {"id": 1}}'),
        ("generation_config.json", '{"eos_token_id": ["</s>"]}'),
        ("chat_template.jinja", "{% if %}"),
        ("chat_template.jinja", b"\xff"),
        ("chat_template.jinja", "{% for a in b %}" * 100 + "{% endfor %}" * 100),
        ("chat_template.jinja", "{{ " + "(" * 10_000),
    ],
)
def test_a_broken_file_is_named(tmp_path, file, content):
    content = content if isinstance(content, bytes) else content.encode()
    (make_folder(tmp_path) / file).write_bytes(content)
    named = {
        "config.json": "config.json|eos_token_id",
        "generation_config.json": "eos_token_id",
        "tokenizer_config.json": "tokenizer_config.json|chat template",
        "chat_template.jinja": "chat.template",
    }.get(file, file)
    with pytest.raises(ModelLoadError, match=named):
        Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_without_a_token_for_unknown_text_is_refused(tmp_path):
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    content = {"version": "1.0", "added_tokens": [], "model": words}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot encode every text"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {1}),
        ({"config": {"eos_token_id": 7}}, {1, 7}),
        ({"config": {"text_config": {"eos_token_id": 8}}}, {1, 8}),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [5, 6]}}, {1, 5, 6}),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(tmp_path, files, expected):
    assert Tokenizer.from_folder(make_folder(tmp_path, **files)).eos_token_ids == expected


def test_the_vocabulary_size_is_the_models_own_where_it_says_so(tmp_path):
    folder = make_folder(tmp_path, config={"vocab_size": 512})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == 512
    assert tokenizer.decode([400, 511]) == ""
    assert tokenizer.token_strings([511]) == [""]


def test_importing_the_tokenizer_imports_neither_transformers_nor_torch():
    code = "import sys, replicas.tokenizer; print({'transformers', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

"""Long texts in pieces: the ids of the whole text, and memory that does not grow with it."""

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from replicas import text_pieces
from replicas.text_pieces import NoCutError, PieceEncoder
from replicas.tokenizer import Tokenizer, TooManyTokensError

DEMO = Path(__file__).parents[2] / "configs" / "demo-model"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<tool call>"]
CORPUS = [
    "The quick brown fox can't jump, they're told; 12345 foxes in 2026.\n\n  def f(x):\n\t\treturn",
    "größer für 你好世界、再见。 naïve 👍🏽 한국어 ไทย हिन्दी العربية  'LL I'd   \r\n \n",
] * 20
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def bpe(pre_tokenizer, normalizer=None):
    """A byte-level BPE trained on the spot."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def split(expression):
    parts = [
        pre_tokenizers.Split(Regex(expression), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(parts)


def gpt2():
    backend = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return backend


def llama3():
    backend = bpe(split(_CL100K))
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return backend


def qwen():
    return bpe(split(_CL100K.replace("{1,3}", "")), normalizers.NFC())


def sentence_piece(pre_tokenizer=None, normalizer=None):
    """BPE over "▁the▁fox" with byte fallback, BOS and EOS around."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator([text + "    a  b" for text in CORPUS], trainer)
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"][:3] != "<0x"]
    # As SentencePiece has it: runs of spaces are tokens too.
    vocab, merges = spec["model"]["vocab"], spec["model"]["merges"]
    vocab["▁▁"] = len(vocab)
    merges.insert(0, ["▁", "▁"])
    backend = tokenizers.Tokenizer.from_str(json.dumps({**spec, "pre_tokenizer": None}))
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return backend


def llama2():
    prepend = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return sentence_piece(normalizer=normalizers.Sequence(prepend))


def mistral():
    return sentence_piece(pre_tokenizers.Metaspace(prepend_scheme="first", split=False))


SHAPES = {
    "demo": tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json")),
    **{make.__name__: make() for make in (gpt2, llama3, qwen, llama2, mistral)},
}
shapes = pytest.mark.parametrize("backend", SHAPES.values(), ids=SHAPES)
FRAGMENTS = st.one_of(
    st.sampled_from(
        [
            *(" ", "  ", "\n", "\r\n", " \n \n", "\t", "\u3000", "\u00a0", "▁", "\x00", "\ufffd"),
            *("'s", "'RE", "\u2019", "1", "12", "12345", "²", "a", "The", " quick", " brown fox"),
            *("é", "e\u0301", "\u0301", "q\u0323\u0307", "\u1112\u1161", "\u11ab", "한", "你好"),
            *(
                "ไทย",
                "हिन्दी",
                "👍🏽",
                "\U0001f468\u200d\U0001f469",
                "\u200d",
                ",",
                "...",
                "<",
                "|>",
            ),
            *("<s", "<s>", "</s>", "<|im_start|>", "<|im_", "<tool call>", "<tool", " call>"),
            *("<|bos|>", "<|user|>", "{}", "_x"),
        ]
    ),
    st.text(max_size=6),
)
TEXTS = st.lists(FRAGMENTS, min_size=20, max_size=200).map("".join)


def small_pieces(piece=32, whole=2**16):
    return mock.patch.multiple(
        text_pieces, PIECE_CHARS=piece, MAX_UNCUT_CHARS=whole, MAX_WHOLE_CHARS=whole
    )


@shapes
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, piece=st.integers(16, 80), add_special_tokens=st.booleans())
@example(text="ab " * 100, piece=16, add_special_tokens=True)
@example(text="x \n \n \n y" * 40, piece=16, add_special_tokens=True)
@example(text="<tool call>" * 40, piece=16, add_special_tokens=False)
@example(text="e\u0301" * 100, piece=16, add_special_tokens=False)
@example(text="12345678 " * 30, piece=17, add_special_tokens=False)
def test_the_pieces_have_the_ids_of_the_whole(backend, text, piece, add_special_tokens):
    whole = backend.encode(text, add_special_tokens=add_special_tokens).ids
    with small_pieces(piece):
        pieces = list(PieceEncoder(backend).pieces(text, add_special_tokens))
    assert [token_id for ids in pieces for token_id in ids] == whole


@shapes
def test_ordinary_texts_are_cut_into_small_pieces(backend):
    text = "The quick brown fox can't jump 2026 times, 你好 naïve. " * 100
    with small_pieces(64):
        pieces = list(PieceEncoder(backend).pieces(text, False))
    assert len(pieces) > len(text) / 128
    assert [token_id for ids in pieces for token_id in ids] == backend.encode(
        text, add_special_tokens=False
    ).ids


def _unknown_expression():
    return bpe(split(r"[a-z]+zzz|[a-z]|[^a-z]+"))


def _strips():
    backend = gpt2()
    backend.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    return backend


def _crosses():
    spec = json.loads(llama2().to_str())
    spec["model"]["vocab"]["x▁y"] = len(spec["model"]["vocab"])
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


@pytest.mark.parametrize(
    "make",
    [
        _unknown_expression,
        _strips,
        _crosses,
        lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFKC()),
    ],
)
def test_a_tokenizer_of_an_unknown_shape_encodes_whole_and_bounded_texts(make):
    backend = make()
    encoder = PieceEncoder(backend)
    text = "the fox <mask> xzzz y " * 10
    with small_pieces(16, whole=len(text)):
        [ids] = encoder.pieces(text)
        assert ids == backend.encode(text).ids
        with pytest.raises(NoCutError, match="send token ids"):
            list(encoder.pieces(text + "a"))


@shapes
def test_a_text_without_a_place_to_cut_is_refused_and_not_encoded(backend):
    with small_pieces(16, whole=64), pytest.raises(NoCutError, match="more than 64 characters"):
        list(PieceEncoder(backend).pieces("\t" * 2000))


def test_encoding_ends_at_the_first_count_above_the_room():
    tokenizer = Tokenizer.from_folder(DEMO)
    text = "1" * 64 * text_pieces.PIECE_CHARS
    counts = []
    steps = map(counts.append, tokenizer.encode_steps(text, max_tokens=2 * text_pieces.PIECE_CHARS))
    with pytest.raises(TooManyTokensError, match="more than") as caught:
        list(steps)
    assert len(counts) <= 4
    assert caught.value.num_tokens < len(text)
    assert not caught.value.is_whole


CHILD = """
import resource, sys
from replicas.tokenizer import Tokenizer
from replicas.errors import InvalidRequestError
tokenizer = Tokenizer.from_folder(sys.argv[1])
kinds = {"digits": "7", "words": "the quick brown fox ", "emoji": "\\U0001f44d\\U0001f3fd"}
tokenizer.encode("a b 1 " * 20_000)
# The text itself counts too: 32 MiB where its characters take four bytes.
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
kind = kinds[sys.argv[2]]
text = kind * (2**23 // len(kind))
try:
    count = len(tokenizer.encode(text, max_tokens=131_072))
except InvalidRequestError as error:
    count = str(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, count)
"""


@pytest.mark.process
@pytest.mark.parametrize("kind", ["digits", "words", "emoji"])
def test_eight_megabytes_of_text_take_bounded_memory(kind):
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, str(DEMO), kind], capture_output=True, text=True, check=True
    )
    kilobytes, said = ended.stdout.split(maxsplit=1)
    print(kind, kilobytes, said)
    assert int(kilobytes) < 300 * 1024
    assert "more than" in said

import itertools

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from replicas.detokenizer import IncrementalDetokenizer
from replicas.tokenizer import Tokenizer

CORPUS = ["the cat sat on the mat. " * 20, "größer für 你好世界 😀👍 naïve STOP stop. " * 20]
SPECIAL = ["<s>", "</s>"]


def _wrap(backend):
    return Tokenizer(
        backend,
        vocab_size=backend.get_vocab_size(),
        eos_token_ids=frozenset(),
        special_tokens={},
        chat_template=None,
    )


def train(corpus, vocab_size, special_tokens):
    """Train a byte-level BPE on the spot."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special_tokens,
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    return backend


def byte_fallback():
    """The decoder of a SentencePiece model: ▁ for space, <0xNN> tokens, one leading space cut."""
    words = ["▁", "▁the", "▁cat", "s", "t", "e", "▁▁"]
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(SPECIAL)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _wrap(backend)


def window():
    """The same tokens behind a decoder of which nothing is known."""
    backend = tokenizers.Tokenizer.from_str(BYTES.backend.to_str())
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    return _wrap(backend)


BYTES = _wrap(train(CORPUS, 400, SPECIAL))
WINDOW = window()
either = pytest.mark.parametrize("tokenizer", [BYTES, WINDOW], ids=["bytes", "window"])
FALLBACK = byte_fallback()
ANY_IDS = st.lists(st.integers(0, BYTES.vocab_size + 3), max_size=40)
STOPS = st.lists(st.text("abt o.", min_size=1, max_size=4), max_size=3).map(tuple)


def byte_ids(data):
    """One token per byte, however broken the text is."""
    return [BYTES.backend.token_to_id(_BYTE_CHARS[b]) for b in data]


def _byte_chars():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


_BYTE_CHARS = _byte_chars()


def split(ids, cuts):
    edges = [0, *sorted({c % (len(ids) + 1) for c in cuts}), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def run(tokenizer, prompt, chunks, **options):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    deltas = [detokenizer.append(chunk) for chunk in chunks]
    return [*deltas, detokenizer.finish()], detokenizer.stop_reason


def expected_after(prompt_bytes, output_bytes):
    """Decode both at once; return the text after the prompt's finished characters."""
    whole = (prompt_bytes + output_bytes).decode("utf-8", "replace")
    alone = prompt_bytes.decode("utf-8", "replace")
    return whole[len(alone) :] if whole.startswith(alone) else whole[len(alone) - 1 :]


@either
@given(ANY_IDS, st.lists(st.integers(0, 40)), st.booleans())
def test_deltas_of_any_tokens_join_to_the_decoded_text(tokenizer, ids, cuts, skip):
    deltas, _ = run(tokenizer, [], split(ids, cuts), skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip)


BROKEN = st.lists(
    st.one_of(
        st.binary(max_size=3),
        st.text(max_size=3).map(lambda s: s.encode("utf-8", "ignore")),
        st.sampled_from([b"\xe4", b"\xf0\x9f", b"\xff" * 80, b"\x98\x80", "�".encode()]),
    ),
    max_size=12,
).map(b"".join)


@either
@settings(deadline=None)
@given(BROKEN, BROKEN)
@example("x你".encode()[:-1], "你".encode()[-1:])
@example(b"\xff", b"h")
@example(b"", b"\xe4" * 200 + "你".encode())
def test_broken_utf8_after_any_prompt_decodes_as_a_whole(tokenizer, prompt, output):
    ids = byte_ids(output)
    deltas, _ = run(tokenizer, byte_ids(prompt), [[i] for i in ids])
    assert "".join(deltas) == expected_after(prompt, output)


@either
@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])))
def test_no_delta_splits_a_character(tokenizer, text):
    ids = byte_ids(text.encode())
    deltas, _ = run(tokenizer, [], [[i] for i in ids])
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


@given(st.lists(st.sampled_from([*"test", "▁the", "▁cat", "▁", "▁▁", "你", "😀", "</s>"])))
def test_byte_fallback_tokens_join_to_the_decoded_text(pieces):
    ids = []
    for piece in pieces:
        token = FALLBACK.backend.token_to_id(piece)
        raw = [FALLBACK.backend.token_to_id(f"<0x{b:02X}>") for b in piece.encode()]
        ids += raw if token is None else [token]
    prompt = FALLBACK.encode("the cat")
    deltas, _ = run(FALLBACK, prompt, [[i] for i in ids])
    whole = FALLBACK.decode(prompt + ids)
    assert "".join(deltas) == whole[len(FALLBACK.decode(prompt)) :]
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("tokenizer", [BYTES, WINDOW], ids=["bytes", "window"])
def test_a_prompt_that_shows_nothing_is_not_looked_through_to_its_beginning(monkeypatch, tokenizer):
    num_read = 0

    def counted(read):
        def count(ids, *args, **kwargs):
            nonlocal num_read
            num_read += len(ids)
            return read(ids, *args, **kwargs)

        return count

    for name in ("bytes_of", "decode"):
        monkeypatch.setattr(tokenizer, name, counted(getattr(tokenizer, name)))
    special = tokenizer.backend.token_to_id("</s>")
    detokenizer = IncrementalDetokenizer(tokenizer, [special] * 131_072)
    assert detokenizer.append(byte_ids(b"hi")) == "hi"
    assert num_read < 1000


@pytest.mark.parametrize(
    "tokenizer", [BYTES, WINDOW, FALLBACK], ids=["bytes", "window", "fallback"]
)
@pytest.mark.parametrize("name", ["<s>", "broken"])
def test_a_long_run_of_unshowable_tokens_keeps_the_window_small(tokenizer, name):
    broken = {True: byte_ids(b"\xff")[0], False: FALLBACK.backend.token_to_id("<0xFF>")}
    token = (
        tokenizer.backend.token_to_id("<s>") if name == "<s>" else broken[tokenizer is not FALLBACK]
    )
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    text = "".join(detokenizer.append([token]) for _ in range(2000)) + detokenizer.finish()
    assert text == ("" if name == "<s>" else "\ufffd" * 2000)
    kept = "_pending" if tokenizer is BYTES else "_token_ids"
    assert len(getattr(detokenizer._decoder, kept)) <= 80


@either
@given(
    st.text("abt o.", max_size=30).map(lambda text: byte_ids(text.encode())) | ANY_IDS,
    st.lists(st.integers(0, 40)),
    STOPS,
    st.booleans(),
)
@example(byte_ids(b"bab"), [], ("ab", "b"), False)
@example(byte_ids(b"xoab"), [], ("b", "oab"), False)
@example(byte_ids(b"a.b.t"), [], ("b.t", "a.b"), False)
def test_text_ends_at_the_stop_string_that_ends_first(tokenizer, ids, cuts, stop, include):
    chunks = split(ids, cuts)
    deltas, reason = run(tokenizer, [], chunks, stop=stop, include_stop_str_in_output=include)
    whole = tokenizer.decode(ids)
    ends = [(whole.find(s) + len(s), whole.find(s), s) for s in stop if s in whole]
    end, start, found = min(ends, default=(len(whole), len(whole), None))
    assert "".join(deltas) == whole[: end if include else start]
    assert reason == found


@given(st.text("abc", max_size=30), STOPS.filter(bool))
def test_no_part_of_a_stop_string_is_ever_sent(text, stop):
    detokenizer = IncrementalDetokenizer(BYTES, [], stop=stop)
    sent = ""
    for token in byte_ids(text.encode()):
        sent += detokenizer.append([token])
        assert not any(s in sent for s in stop)
        if detokenizer.stop_reason is not None:
            break
    sent += detokenizer.finish()
    assert not any(s in sent for s in stop)


def test_a_stop_string_across_tokens_is_cut_and_later_tokens_give_nothing():
    detokenizer = IncrementalDetokenizer(BYTES, [], stop=("STOP",))
    deltas = [detokenizer.append(byte_ids(part)) for part in (b"one ST", b"OP two", b" three")]
    assert deltas == ["one", " ", ""]
    assert detokenizer.stop_reason == "STOP"
    assert detokenizer.finish() == ""


def test_an_included_stop_string_is_not_held_back():
    detokenizer = IncrementalDetokenizer(BYTES, [], stop=("STOP",), include_stop_str_in_output=True)
    deltas = [detokenizer.append(byte_ids(part)) for part in (b"one ST", b"OP two")]
    assert deltas == ["one ST", "OP"]


@either
@pytest.mark.parametrize(
    ("text", "min_tokens", "shown", "reason"),
    [
        ("a.b.c", 0, "a", "."),
        ("a.b.c", 1, "a", "."),
        ("a.b.c", 2, "a.b", "."),
        ("a.b.c", 3, "a.b", "."),
        ("a.b.c", 4, "a.b.c", None),
        ("a.b.c", 5, "a.b.c", None),
        ("a.b.c", 9, "a.b.c", None),
        ("abSTOP", 5, "ab", "STOP"),
        ("abSTOP", 6, "abSTOP", None),
    ],
)
def test_a_stop_string_that_ends_within_the_least_tokens_does_not_count(
    tokenizer, text, min_tokens, shown, reason
):
    chunks = [[token] for token in byte_ids(text.encode())]
    stop = (".", "STOP")
    deltas, found = run(tokenizer, [], chunks, stop=stop, min_tokens=min_tokens)
    assert ("".join(deltas), found) == (shown, reason)

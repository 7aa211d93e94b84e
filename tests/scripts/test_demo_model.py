"""The committed demo model: shape, tokenizer, chat format, and that it beats an n-gram model.

Also the parts of its training program that its figures depend on: the split of the corpus, the
n-gram baseline and the stream of training tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from scripts.demo_model import corpus as corpora
from scripts.demo_model.corpus import Corpus, Document
from scripts.demo_model.data import TokenStream
from scripts.demo_model.evaluation import byte_ngram_bits_per_byte, model_bits_per_byte
from scripts.demo_model.folder import read_figures, write_folder
from scripts.demo_model.model import ModelShape, TrainingLlama
from scripts.demo_model.ngram import KneserNeyModel
from scripts.demo_model.training import Phase, Trainer, TrainingPlan

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "demo-model"
SHAPE = ModelShape(num_layers=1, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2)
CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What does json.dumps do?"},
]


@pytest.fixture(scope="module", autouse=True)
def _no_hub() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """The corpus of the whole library, which takes many seconds to read."""
    return corpora.load_corpus()


@pytest.fixture(scope="module")
def read_small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Corpus]:
    """Reads every ninth module that is one file, and all that are compiled."""
    library = tmp_path_factory.mktemp("library")
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::9]:
        shutil.copy(path, library)

    def read() -> Corpus:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
            return corpora.load_corpus()

    return read


@pytest.fixture(scope="module")
def small_corpus(read_small: Callable[[], Corpus]) -> Corpus:
    return read_small()


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "config.json").read_text())
    return loaded


def test_shape_suits_the_hardware(config: dict[str, Any]) -> None:
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == 4096
    assert config["head_dim"] == 32
    assert config["hidden_size"] % 32 == 0
    assert config["intermediate_size"] % 32 == 0
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    assert heads % kv_heads == 0
    assert kv_heads < heads
    assert config["max_position_embeddings"] >= 2048


def test_config_names_rope_and_dtype_for_old_and_new_transformers(config: dict[str, Any]) -> None:
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


def test_weights_are_bfloat16_of_about_five_million_parameters_in_under_12_megabytes() -> None:
    path = FOLDER / "model.safetensors"
    with safe_open(path, framework="pt") as weights:
        names = weights.keys()
        tensors = [weights.get_tensor(name) for name in names]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
    assert 4_500_000 < sum(tensor.numel() for tensor in tensors) < 5_900_000
    assert path.stat().st_size < 12_000_000


@pytest.mark.parametrize(
    "text",
    [
        "Return a list.",
        "",
        "def f(x):\n    return {x: 10 ** 6}\n",
        "naïve 東京 🐍\x00\t  \r\n",
        "  two  ",
    ],
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert max(ids) < 4096
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_special_tokens_are_single_tokens_and_stop_generation(
    tokenizer: Any, config: dict[str, Any]
) -> None:
    assert len(tokenizer) == 4096
    for token in ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"):
        assert tokenizer.encode(token, add_special_tokens=False) == [
            tokenizer.convert_tokens_to_ids(token)
        ]
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    stops = [tokenizer.convert_tokens_to_ids(token) for token in ("<|eos|>", "<|end|>")]
    assert generation["eos_token_id"] == config["eos_token_id"] == stops
    assert config["bos_token_id"] == tokenizer.bos_token_id


def test_chat_template_marks_every_turn_and_asks_for_an_answer(tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(
        CONVERSATION, tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|bos|><|system|>You are a helpful assistant.<|end|>"
        "<|user|>What does json.dumps do?<|end|><|assistant|>"
    )
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    assert ids.count(tokenizer.bos_token_id) == 1


def test_chat_template_refuses_an_unknown_role(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="unknown role critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "x"}], tokenize=False)


def test_chat_template_shows_calls_of_tools_and_gives_their_results_to_the_user(
    tokenizer: Any,
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == (
        '<|bos|><|assistant|><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|end|>'
        "<|user|>2<|end|>"
    )


def test_transformers_loads_it_and_it_answers_a_question_and_stops(tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        FOLDER, local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    model, info = loaded
    assert not any(info.values())
    prompt = tokenizer.apply_chat_template(
        CONVERSATION[1:], tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    generated = model.generate(ids, max_new_tokens=48, do_sample=False)
    answer = tokenizer.decode(generated[0, ids.shape[1] :])
    assert answer.endswith("<|end|>")
    assert answer.removesuffix("<|end|>").strip()


@pytest.mark.slow
def test_it_needs_a_quarter_fewer_bits_than_a_5gram_on_held_out_modules(corpus: Corpus) -> None:
    figures = read_figures(FOLDER)
    if corpus.sha256 != figures["corpus_sha256"]:
        pytest.skip(
            f"needs the documentation of Python {figures['corpus_python']}: this one's differs"
        )
    # Every fourth page, so that the test stays quick; the card has the figures of all of them.
    documents = corpora.pages(corpus.held_out)[::4]
    learned = corpora.pages((*corpus.train, *corpus.validation))
    model_bits = model_bits_per_byte(FOLDER, documents)
    assert model_bits <= 0.75 * byte_ngram_bits_per_byte(learned, documents)


def test_the_card_says_that_it_needs_a_quarter_fewer_bits() -> None:
    assert read_figures(FOLDER)["page"]["fewer_bits_than_byte_5gram_percent"] >= 25.0


def test_the_card_names_the_weights_that_lie_beside_it() -> None:
    figures = read_figures(FOLDER)
    path = FOLDER / "model.safetensors"
    assert figures["weights_file_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    with safe_open(path, framework="pt") as weights:
        assert weights.metadata()["corpus_sha256"] == figures["corpus_sha256"]


def assert_parts_are_apart(corpus: Corpus) -> None:
    learned = (*corpus.train, *corpus.validation)
    assert {d.text for d in corpus.held_out}.isdisjoint(d.text for d in learned)
    assert {d.module for d in corpus.held_out}.isdisjoint(d.module for d in learned)


def assert_compiled_are_under_public_names(corpus: Corpus) -> None:
    assert {"len", "dict.get", "os.getcwd", "time.sleep"} <= {d.name for d in corpus.train}
    # Compiled halves of held-out modules are held out too.
    assert {"pickle.Unpickler", "datetime.tzinfo"} <= {d.name for d in corpus.held_out}
    assert not any(d.source == "_decimal" for d in (*corpus.train, *corpus.held_out))


def test_no_held_out_text_or_module_is_in_the_train_part(small_corpus: Corpus) -> None:
    assert small_corpus.train
    assert small_corpus.held_out
    assert_parts_are_apart(small_corpus)


def test_compiled_modules_are_in_the_corpus_under_their_public_names(
    small_corpus: Corpus,
) -> None:
    assert_compiled_are_under_public_names(small_corpus)


def test_a_corpus_is_the_same_whenever_it_is_read(
    small_corpus: Corpus, read_small: Callable[[], Corpus]
) -> None:
    assert read_small() == small_corpus


@pytest.mark.slow
def test_parts_of_the_whole_library_are_apart_and_of_the_right_size(corpus: Corpus) -> None:
    assert_parts_are_apart(corpus)
    assert_compiled_are_under_public_names(corpus)
    everything = (*corpus.train, *corpus.validation, *corpus.held_out)
    share = corpora.total_bytes(corpus.held_out) / corpora.total_bytes(everything)
    assert 0.04 < share < 0.09  # 0.063 on the version that the card names


def test_kneser_ney_probabilities_sum_to_one_after_seen_and_unseen_contexts() -> None:
    rng = np.random.default_rng(7)
    model = KneserNeyModel([rng.integers(0, 6, 40) for _ in range(20)], order=3, alphabet_size=8)
    for context in ([], [1], [2, 3], [7, 7], [0, 1, 2, 3]):
        before = model.bits(np.array(context, dtype=np.int64))
        total = sum(
            2.0 ** (before - model.bits(np.array([*context, symbol], dtype=np.int64)))
            for symbol in range(8)
        )
        assert math.isclose(total, 1.0, rel_tol=1e-9)


def test_kneser_ney_prefers_what_follows_many_different_symbols() -> None:
    # 1 occurs only after 0, though often; 2 occurs after four different symbols.
    text = np.array([0, 1] * 8 + [3, 2, 4, 2, 5, 2, 6, 2], dtype=np.int64)
    model = KneserNeyModel([text], order=2, alphabet_size=8)
    unseen = np.array([7, 1], dtype=np.int64), np.array([7, 2], dtype=np.int64)
    assert model.bits(unseen[1]) < model.bits(unseen[0])


def test_the_token_stream_repeats_itself_and_loses_nothing_between_pieces(tokenizer: Any) -> None:
    documents = [Document("m", f"m.f{i}", "function", f"Return item {i}.\n") for i in range(30)]
    one, two = (TokenStream(documents, tokenizer, seed=3) for _ in range(2))
    pieces = [one.take(50, 0.0) for _ in range(12)]
    whole = two.take(600, 0.0)
    np.testing.assert_array_equal(np.concatenate([piece[:-1] for piece in pieces]), whole[:-1])
    assert all(a[-1] == b[0] for a, b in itertools.pairwise(pieces))


def test_functions_are_asked_for_more_often_than_methods(tokenizer: Any) -> None:
    function, method = (Document("m", name, "function", "Return x.") for name in ("m.f", "m.C.f"))

    def asked_share(document: Document) -> float:
        tokens = TokenStream([document] * 200, tokenizer, seed=3).take(1000, 0.0)
        bos, assistant = tokenizer.convert_tokens_to_ids(["<|bos|>", "<|assistant|>"])
        return float(np.sum(tokens == assistant) / np.sum(tokens == bos))

    assert asked_share(function) > 2 * asked_share(method) > 0


def test_split_tokens_spell_the_same_text(tokenizer: Any) -> None:
    documents = [
        Document("m", f"_f{i}", "function", "Return the given argument.") for i in range(9)
    ]
    plain, split = (TokenStream(documents, tokenizer, seed=3) for _ in range(2))
    first, second = plain.take(60, 0.0), split.take(60, 0.5)
    length = min(len(text) for text in (tokenizer.decode(first), tokenizer.decode(second)))
    assert tokenizer.decode(first)[:length] == tokenizer.decode(second)[:length]
    assert list(first) != list(second)


def test_noise_decides_what_is_dropped_and_none_drops_nothing() -> None:
    torch.manual_seed(1)
    network, without_dropout = TrainingLlama(SHAPE, dropout=0.25), TrainingLlama(SHAPE, dropout=0.0)
    without_dropout.load_state_dict(network.state_dict())
    ids = torch.randint(0, 4096, (2, 20))
    noise = torch.randint(0, 256, network.noise_shape(2, 20), dtype=torch.uint8)
    with torch.inference_mode():
        torch.testing.assert_close(without_dropout(ids, noise), network(ids))
        torch.testing.assert_close(network(ids, noise), network(ids, noise.clone()))
        assert not torch.equal(network(ids, noise), network(ids))
        assert not network(ids, torch.zeros_like(noise)).any()  # everything is dropped


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    tokenizer: Any, tmp_path: Path
) -> None:
    train = tuple(Document("m", f"m.f{i}", "function", f"Return item {i}.\n") for i in range(30))
    texts = Corpus(train, (Document("v", "v", "module", "Return an item."),), (), "0" * 64)

    def trainer(steps: int, name: str) -> Trainer:
        plan = TrainingPlan(
            tokens_per_step=64, phases=(Phase(steps, 16, as_pages=False),), evaluate_every=2
        )
        checkpoint = tmp_path / name
        return Trainer(plan, SHAPE, tokenizer, texts, checkpoint=checkpoint, compile_model=False)

    whole, stopped, resumed = trainer(4, "whole"), trainer(2, "parts"), trainer(4, "parts")
    whole.run()
    stopped.run()
    resumed.resume()
    resumed.run()
    assert resumed.step == 4
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict())


def test_the_saved_folder_computes_what_the_training_network_did(
    tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    network = TrainingLlama(replace(SHAPE, num_layers=2), dropout=0.1).eval()
    write_folder(tmp_path, network, tokenizer, corpus_sha256="0" * 64)
    saved = AutoModelForCausalLM.from_pretrained(
        tmp_path, local_files_only=True, dtype=torch.bfloat16
    )
    for length in (40, 300):  # below and above the length at which the attention changes
        ids = torch.randint(0, 4096, (2, length))
        with torch.inference_mode():
            difference = (network(ids) - saved(ids).logits.float()).abs().max().item()
        assert difference < 0.02

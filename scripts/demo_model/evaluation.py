"""Measures a saved model folder against n-gram models: bits per byte on held-out documents.

Also asks it questions, for the card.

Reads the folder with transformers, as a user would, so that the served model is the measured one.
"""

from __future__ import annotations

import hashlib
import math
import platform
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as functional
from safetensors import safe_open
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from scripts.demo_model.corpus import Corpus, Document, pages, total_bytes
from scripts.demo_model.ngram import KneserNeyModel, Symbols

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

NGRAM_ORDER = 5
QUESTIONS = (
    "What does json.dumps do?",
    "What does len do?",
    "What is threading.Lock?",
    "What does os.path.join do?",
)
# The longest rows in training; a longer document is read in windows that overlap by half.
_WINDOW = 1024


def evaluate_folder(folder: Path, corpus: Corpus) -> dict[str, Any]:
    """Return all figures of a saved model on the held-out part of `corpus`, ready for JSON.

    Measured twice: with the page of each source file as a document, and with each docstring alone.
    The n-gram models are fitted to documents of the same form.
    """
    learned = (*corpus.train, *corpus.validation)
    weights = folder / "model.safetensors"
    return {
        "page": _compare(folder, pages(learned), pages(corpus.held_out)),
        "docstring": _compare(folder, learned, corpus.held_out),
        "parameters": _number_of_parameters(weights),
        "weights_file_bytes": weights.stat().st_size,
        "weights_file_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "corpus_python": platform.python_version(),
        "corpus_sha256": corpus.sha256,
        "train_bytes": total_bytes(corpus.train),
        "validation_bytes": total_bytes(corpus.validation),
        "held_out_bytes": total_bytes(corpus.held_out),
        "held_out_modules": ", ".join(sorted({d.module for d in corpus.held_out})),
    }


@torch.inference_mode()
def model_bits_per_byte(folder: Path, documents: Sequence[Document]) -> float:
    """Return the bits per byte of the saved bfloat16 weights, computing in float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32
    )
    model.eval()
    nats = 0.0
    for document in tqdm(documents, unit="document", mininterval=2.0, leave=False):
        ids = torch.tensor([tokenizer.encode(document.text)])
        counted = 0  # targets so far
        for start in range(0, ids.shape[1] - 1, _WINDOW // 2):
            window = ids[:, start : start + _WINDOW + 1]
            fresh = start + window.shape[1] - 1 - counted
            if fresh <= 0:
                break
            logits = model(window[:, :-1]).logits[0, -fresh:]
            nats += functional.cross_entropy(logits, window[0, -fresh:], reduction="sum").item()
            counted += fresh
    return nats / math.log(2) / total_bytes(documents)


@torch.inference_mode()
def answer_questions(folder: Path, questions: Sequence[str]) -> dict[str, str]:
    """Return the greedy answer to each question, on one line, cut after 80 tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32
    )
    answers = {}
    for question in questions:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, do_sample=False
        )[0, ids.shape[1] :]
        text = tokenizer.decode(generated, skip_special_tokens=True)
        is_cut = generated[-1] not in model.generation_config.eos_token_id
        answers[question] = " ".join(text.split()) + (" ..." if is_cut else "")
    return answers


def byte_ngram_bits_per_byte(learned: Sequence[Document], documents: Sequence[Document]) -> float:
    """Return the bits per byte of a byte 5-gram fitted to `learned`."""
    return _ngram_bits_per_byte(_bytes_of, 256, learned, documents)


def token_ngram_bits_per_byte(
    learned: Sequence[Document], documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast
) -> float:
    """Return the bits per byte of a 5-gram over the model's tokens, fitted to `learned`."""
    # Special tokens come first and never occur in a text, so the remaining ids fit twelve bits.
    first = len(tokenizer.all_special_ids)

    def symbols_of(document: Document) -> Symbols:
        ids = tokenizer.encode(document.text, add_special_tokens=False)
        return np.array(ids, dtype=np.int64) - first

    return _ngram_bits_per_byte(symbols_of, len(tokenizer) - first, learned, documents)


def _compare(
    folder: Path, learned: Sequence[Document], documents: Sequence[Document]
) -> dict[str, float]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model_bits = model_bits_per_byte(folder, documents)
    byte_bits = byte_ngram_bits_per_byte(learned, documents)
    token_bits = token_ngram_bits_per_byte(learned, documents, tokenizer)
    return {
        "documents": len(documents),
        "bytes": total_bytes(documents),
        "model_bits_per_byte": round(model_bits, 4),
        "byte_5gram_bits_per_byte": round(byte_bits, 4),
        "token_5gram_bits_per_byte": round(token_bits, 4),
        "fewer_bits_than_byte_5gram_percent": round(100 * (1 - model_bits / byte_bits), 1),
        "fewer_bits_than_token_5gram_percent": round(100 * (1 - model_bits / token_bits), 1),
    }


def _ngram_bits_per_byte(
    symbols_of: Callable[[Document], Symbols],
    alphabet_size: int,
    learned: Sequence[Document],
    documents: Sequence[Document],
) -> float:
    model = KneserNeyModel([symbols_of(d) for d in learned], NGRAM_ORDER, alphabet_size)
    return sum(model.bits(symbols_of(d)) for d in documents) / total_bytes(documents)


def _bytes_of(document: Document) -> Symbols:
    return np.frombuffer(document.text.encode(), dtype=np.uint8).astype(np.int64)


def _number_of_parameters(weights: Path) -> int:
    with safe_open(weights, framework="pt") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118

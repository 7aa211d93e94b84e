"""Tokenizer and chat format of the demo model: from a documentation string to token ids.

Trains the byte-level BPE, names the special tokens, writes the chat template, and turns documents
into plain and chat-formatted training texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from scripts.demo_model.corpus import Document

VOCAB_SIZE = 4096
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, END)

# The model has seen no tools: results are turns of the user, calls look as Hermes shows them.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- set role = 'user' if message['role'] == 'tool' else message['role'] %}"
    "{%- if role not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('unknown role ' ~ role) }}"
    "{%- endif %}"
    "{{- '<|' ~ role ~ '|>' ~ ((message['content'] or '') | trim) }}"
    "{%- for call in message.get('tool_calls') or [] %}"
    "{{- '<tool_call>' ~ (call['function'] | tojson) ~ '</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
_SYSTEM_PROMPTS = ("You are a helpful assistant.", "You answer questions about Python.")
_ANY_QUESTIONS = (
    "What is {name}?",
    "Explain {name}.",
    "Tell me about {name}.",
    "Describe {name}",
    "{name}",
    "help({name})",
)
_FUNCTION_QUESTIONS = (
    "What does {name} do?",
    "What does {name}() do?",
    "what does {name} do",
    "How do I use {name}?",
    "What does the function {name} do?",
)
_TYPE_QUESTIONS = (
    "What is {name} for?",
    "What does {name} do?",
    "What is the {kind} {name}?",
    "What does the {kind} {name} do?",
    "How do I use {name}?",
)
MAX_ANSWER_CHARACTERS = 400


def train_tokenizer(documents: Sequence[Document]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of exactly `VOCAB_SIZE` tokens on the given documents only.

    Encoding with special tokens puts `<|bos|>` in front; `<|eos|>` is never added by itself.
    """
    tokenizer = Tokenizer(models.BPE())
    # Digits stand alone and a run of spaces is one piece: indentation is frequent in docstrings.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus yields {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast  # untyped
    return make(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, END],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def chat_text(document: Document, rng: random.Random) -> str:
    """Return a one-turn conversation, in the chat template's format, that the document answers.

    The text starts after `<|bos|>` and ends after `<|end|>`. Question and system prompt are drawn
    from `rng`.
    """
    questions = _FUNCTION_QUESTIONS if document.kind == "function" else _TYPE_QUESTIONS
    # Half of the questions are the plainest ones, so that the model answers these best.
    plain = "What does {name} do?" if document.kind == "function" else "What is {name}?"
    question = plain if rng.random() < 0.4 else rng.choice((*questions, *_ANY_QUESTIONS))
    question = question.format(name=document.name, kind=document.kind)
    system = f"{SYSTEM}{rng.choice(_SYSTEM_PROMPTS)}{END}" if rng.random() < 0.25 else ""
    return f"{system}{USER}{question}{END}{ASSISTANT}{_answer(document.text)}{END}"


def is_askable(document: Document) -> bool:
    """Return whether a user might ask for this document: no part of its name is private."""
    return not any(part.startswith("_") for part in document.name.split("."))


def _answer(text: str) -> str:
    """Return whole leading paragraphs of the text, as many as fit an answer, at least one."""
    kept: list[str] = []
    for paragraph in text.split("\n\n"):
        if kept and sum(map(len, kept)) + len(paragraph) > MAX_ANSWER_CHARACTERS:
            break
        kept.append(paragraph)
    return "\n\n".join(kept).strip()

"""The model folder `configs/demo-model/`: writes its files, and reads its card back.

Writes only keys that both transformers 4 and 5 understand (rope and dtype are named both ways) and
no file that depends on the version of the library that wrote it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from scripts.demo_model.text import ASSISTANT, BOS, CHAT_TEMPLATE, END, EOS, PAD, SYSTEM, USER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

    from scripts.demo_model.model import ModelShape, TrainingLlama


def write_folder(
    folder: Path, model: TrainingLlama, tokenizer: PreTrainedTokenizerFast, corpus_sha256: str
) -> None:
    """Write weights, configuration and tokenizer; the card comes later, with the figures."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", "corpus_sha256": corpus_sha256}
    weights = folder / "model.safetensors"
    save_file(model.hugging_face_weights(), weights, metadata=metadata)
    weights.chmod(0o644)  # the library writes it for its owner alone
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (BOS, EOS, PAD, END)}
    stops = {
        "bos_token_id": ids[BOS],
        "eos_token_id": [ids[EOS], ids[END]],
        "pad_token_id": ids[PAD],
    }
    _write_json(folder / "config.json", _model_config(model.shape) | stops)
    _write_json(folder / "generation_config.json", stops)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(model.shape))


def write_card(
    folder: Path,
    figures: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    answers: Mapping[str, str],
) -> None:
    """Write the model card `README.md`; `figures` stand in it as JSON and can be read back.

    Args:
        folder: the model folder.
        figures: what `evaluate_folder` returned, and about the run `minutes` and `command`.
        history: the trainer's evaluations.
        answers: questions and the model's answers, without special tokens.
    """
    rows = "\n".join(
        f"| {e['step']:.0f} | {e['epoch']:.0f} | {e['train_loss']:.3f} | {e['validation_bpb']:.3f} "
        f"| {e['seconds'] / 60:.0f} |"
        for e in history
    )
    measured = "\n".join(
        f"| {form}s ({f['documents']}) | {f['model_bits_per_byte']:.3f} "
        f"| {f['byte_5gram_bits_per_byte']:.3f} ({f['fewer_bits_than_byte_5gram_percent']} %) "
        f"| {f['token_5gram_bits_per_byte']:.3f} ({f['fewer_bits_than_token_5gram_percent']} %) |"
        for form, f in ((form, figures[form]) for form in ("page", "docstring"))
    )
    card = _CARD.format(
        figures_json=json.dumps(figures, indent=2),
        measured=measured,
        reached=_quarters_saved(figures),
        answers="\n".join(f"- {question} *{answer}*" for question, answer in answers.items()),
        history=rows,
        **figures,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def read_figures(folder: Path) -> dict[str, Any]:
    """Return the figures that the folder's card records.

    Raises:
        ValueError: when the card has no JSON block.
    """
    found = re.search(
        r"```json\n(.*?)\n```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    if found is None:
        raise ValueError(f"{folder / 'README.md'} has no JSON block: train the model again")
    figures: dict[str, Any] = json.loads(found[1])
    return figures


def _quarters_saved(figures: Mapping[str, Any]) -> str:
    return (
        ", ".join(
            f"{form}s against the {unit} 5-gram"
            for form in ("page", "docstring")
            for unit in ("byte", "token")
            if figures[form][f"fewer_bits_than_{unit}_5gram_percent"] >= 25.0
        )
        or "no comparison"
    )


def _model_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _tokenizer_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT, END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_positions,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


_CARD = """\
# demo

A Llama of {parameters} parameters (grouped-query attention, bfloat16) that was trained from
scratch on one CPU core on the documentation strings of Python's standard library. It is here so
that the cluster has something real to serve: it writes sentences about Python that sound right and
are often wrong. Do not rely on what it says.

## Training text
The docstrings of all modules, classes and functions in the source tree of the standard library of
Python {corpus_python} (tests and third-party packages left out), those of its compiled modules that
need no other library, and the help topics of `pydoc_data`, each text once: {train_bytes} bytes to
learn from, {validation_bytes} to choose the checkpoint, {held_out_bytes} held out. Whole top-level
modules are held out, chosen by a hash of their names without leading underscores if they are
compiled (so `_pickle` stands with `pickle`); a text that a train module has too is not counted.
Held out: {held_out_modules}.

Digest of the corpus (SHA-256): `{corpus_sha256}`.

## Quality
Bits per byte on the held-out modules; in brackets how many fewer the model needs. Every document
stands alone after `<|bos|>`, all its bytes count, the end mark does not. Saved bfloat16 weights,
float32 arithmetic, at most 1024 tokens of context.

| documents | this model | 5-gram over bytes | 5-gram over the model's tokens |
|---|---|---|---|
{measured}

A page is what stands in one source file or compiled module, in its order, with empty lines between:
the form in which documentation is read. A docstring alone is the harder case for the model: most
are shorter than 100 tokens, and nothing tells which module they come from.

Both n-gram models are interpolated modified Kneser-Ney (three discounts per order, continuation
counts, uniform distribution below order one), fitted to the train and the validation text in the
same form; they spend nothing on an end mark, the model does. The quarter that the model is meant
to save is reached by: {reached}.

## Format
Encoding puts `<|bos|>` in front. A conversation is `<|bos|>`, then for each message `<|system|>`,
`<|user|>` or `<|assistant|>`, its text and `<|end|>`; `<|assistant|>` asks for an answer.
Generation stops at `<|end|>` or `<|eos|>`. The first paragraphs of docstrings of public names were
also shown as conversations that ask for the dotted name ("What does json.dumps do?"): ask in that
form. Greedy answers:

{answers}

## How it was made
    {command}

{minutes} minutes. Same corpus, seed and versions give the same run up to the rounding of the
processor.

| step | epoch | train loss (nats per token, with dropout) | validation bits per byte | minutes |
|---|---|---|---|---|
{history}

Validation documents are docstrings alone. What is evaluated and saved is a running average of the
weights, of the step with the fewest validation bits. The held-out modules were measured once, after
the last step. This was the second run: an earlier one, of fewer steps and without the compiled
modules, had ended 25.2 % (pages) and 22.5 % (docstrings) below the byte 5-gram when its plan was
made. The page as the form to measure was chosen during that earlier run, when docstrings alone were
heading for less than a quarter.

## Figures
```json
{figures_json}
```
"""

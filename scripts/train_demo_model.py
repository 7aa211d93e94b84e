"""Trains the demo model of `configs/demo-model/` on the CPU, or measures one that exists.

From the root of the repository, with the project's development environment:

    python -m scripts.train_demo_model                               # about 40 minutes on one core
    python -m scripts.train_demo_model --resume                      # continues a stopped run
    python -m scripts.train_demo_model --evaluate configs/demo-model

The last line of the output is one JSON object with the figures of the model card.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
from pathlib import Path

import torch

from scripts.demo_model.corpus import REFERENCE_PYTHON, REFERENCE_SHA256, Corpus, load_corpus
from scripts.demo_model.evaluation import QUESTIONS, answer_questions, evaluate_folder
from scripts.demo_model.folder import write_card, write_folder
from scripts.demo_model.model import ModelShape
from scripts.demo_model.text import train_tokenizer
from scripts.demo_model.training import Trainer, TrainingPlan

_ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Run what the command line asks for."""
    options = _parse()
    torch.set_num_threads(options.threads)
    corpus = load_corpus()
    if corpus.sha256 != REFERENCE_SHA256:
        difference = (
            f"this Python {platform.python_version()} documents itself differently from Python "
            f"{REFERENCE_PYTHON}, which the demo model was trained on "
            f"(corpus {corpus.sha256[:12]}, not {REFERENCE_SHA256[:12]})"
        )
        if options.evaluate is None and not options.another_corpus:
            sys.exit(f"error: {difference}; use that version, or pass --another-corpus")
        print(f"warning: {difference}: figures do not compare", file=sys.stderr)
    if options.evaluate is not None:
        print(json.dumps(evaluate_folder(options.evaluate, corpus)))
        return
    _train(options, corpus)


def _train(options: argparse.Namespace, corpus: Corpus) -> None:
    options.work.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(corpus.train)
    plan = TrainingPlan(seed=options.seed)
    trainer = Trainer(
        plan,
        ModelShape(),
        tokenizer,
        corpus,
        checkpoint=options.work / "checkpoint.pt",
        compile_model=not options.no_compile,
    )
    if options.resume:
        trainer.resume()
    seconds = trainer.run()
    write_folder(options.output, trainer.model, tokenizer, corpus.sha256)
    figures = evaluate_folder(options.output, corpus) | {
        "minutes": round(seconds / 60),
        "steps": plan.steps,
        "seed": plan.seed,
        "torch": torch.__version__.split("+")[0],
        "command": _command(plan, options),
    }
    answers = answer_questions(options.output, QUESTIONS)
    write_card(options.output, figures, trainer.history, answers)
    print(json.dumps(figures))


def _command(plan: TrainingPlan, options: argparse.Namespace) -> str:
    """Return the command that gives this run again, without what only names places."""
    command = "python -m scripts.train_demo_model"
    if plan.seed != TrainingPlan.seed:
        command += f" --seed {plan.seed}"
    return command + (" --no-compile" if options.no_compile else "")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="only measure this model")
    parser.add_argument("--output", type=Path, default=_ROOT / "configs" / "demo-model")
    parser.add_argument(
        "--work", type=Path, default=_ROOT / "build" / "demo-model", help="folder of the checkpoint"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--seed", type=int, default=TrainingPlan.seed)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument(
        "--no-compile",
        action="store_true",
        default=shutil.which("g++") is None,
        help="do not use torch.compile (without a C++ compiler it is off anyway)",
    )
    parser.add_argument(
        "--another-corpus", action="store_true", help="train although this Python's docs differ"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

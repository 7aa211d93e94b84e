"""The training run: optimizers, schedule, checkpoints and the choice of the final weights.

Owner: `Trainer` owns the network, the optimizers, the position in the token stream and the best
weights so far. All choices are made on the validation modules; the held-out modules are never used
here.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm  # type: ignore[import-untyped]

from scripts.demo_model.corpus import Corpus, total_bytes
from scripts.demo_model.data import TokenStream
from scripts.demo_model.model import ModelShape, TrainingLlama

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Phase:
    """A stretch of the run.

    Attributes:
        until: the step before which it ends.
        row_length: tokens in a row of a batch.
        as_pages: whether most docstrings are shown within the page of their source file.
    """

    until: int
    row_length: int
    as_pages: bool


@dataclass(frozen=True)
class TrainingPlan:
    """All parameters of a run except the corpus.

    Attributes:
        tokens_per_step: tokens that one optimizer step sees.
        phases: cheap short rows first; the last rows teach long contexts.
        learning_rate: (step, factor) knots, linear in between.
        split_until: the step from which tokens are no longer split.
        averaging: the share of the averaged weights that survives a step; the averaged weights are
            evaluated and saved.
    """

    seed: int = 20240607
    tokens_per_step: int = 4096
    phases: tuple[Phase, ...] = (
        Phase(until=950, row_length=256, as_pages=False),
        Phase(until=1850, row_length=256, as_pages=True),
        Phase(until=2200, row_length=1024, as_pages=True),
    )
    learning_rate: tuple[tuple[int, float], ...] = (
        (0, 0.02),
        (50, 1.0),
        (750, 0.85),
        (2200, 0.0),
    )
    muon_learning_rate: float = 0.02
    adam_learning_rate: float = 0.003
    weight_decay: float = 0.15
    dropout: float = 0.15
    split_share: float = 0.04
    split_until: int = 1850
    averaging: float = 0.98
    evaluate_every: int = 200

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return self.phases[-1].until

    def phase(self, step: int) -> Phase:
        """Return the phase that a step belongs to."""
        return next(phase for phase in self.phases if step < phase.until)

    def learning_rate_factor(self, step: int) -> float:
        """Return the factor on both learning rates."""
        steps, factors = zip(*self.learning_rate, strict=True)
        return float(np.interp(step, steps, factors))

    def split_share_at(self, step: int) -> float:
        """Return the share of the tokens that are split in a step."""
        return self.split_share if step < self.split_until else 0.0


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal by a Newton-Schulz iteration, for matrices.

    Source: Keller Jordan and others, "Muon" (2024).
    """

    def __init__(self, params: Sequence[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update to every matrix that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                update = _orthogonal(weight.grad.lerp(momentum, group["momentum"]))
                scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * scale)


def _orthogonal(matrix: Tensor) -> Tensor:
    """Return the matrix with its singular values moved near one, by five Newton-Schulz steps."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    orthogonal: Tensor = (x.T if tall else x).float()
    return orthogonal


class Trainer:
    """One run, resumable from its checkpoint file.

    Args:
        plan: the numbers.
        shape: sizes of the network.
        tokenizer: the demo tokenizer.
        corpus: its train part gives gradients, its validation part chooses the weights.
        checkpoint: file that is written at every evaluation and read by `resume`.
        compile_model: whether to run the network through `torch.compile` (needs a C++ compiler).
    """

    def __init__(
        self,
        plan: TrainingPlan,
        shape: ModelShape,
        tokenizer: PreTrainedTokenizerFast,
        corpus: Corpus,
        *,
        checkpoint: Path,
        compile_model: bool,
    ) -> None:
        torch.manual_seed(plan.seed)
        self.plan = plan
        self.model = TrainingLlama(shape, plan.dropout)
        averaging = get_ema_multi_avg_fn(plan.averaging)  # type: ignore[no-untyped-call]
        self._averaged = AveragedModel(self.model, multi_avg_fn=averaging)
        self.history: list[dict[str, float]] = []
        self.best_weights: dict[str, Tensor] = {}
        self.step = 0
        self._seconds_before = 0.0
        self._stream = TokenStream(corpus.train, tokenizer, plan.seed)
        self._validation_ids = [tokenizer.encode(document.text) for document in corpus.validation]
        self._validation_bytes = total_bytes(corpus.validation)
        self._muon = Muon(self.model.hidden_matrices(), plan.muon_learning_rate, plan.weight_decay)
        self._adam = torch.optim.AdamW(
            self.model.other_parameters(),
            lr=plan.adam_learning_rate,
            betas=(0.9, 0.95),
            weight_decay=plan.weight_decay,
        )
        self._checkpoint = checkpoint
        self._loss = (
            torch.compile(self._row_loss, dynamic=False) if compile_model else self._row_loss
        )

    def run(self) -> float:
        """Train to the end, load the best weights, and return the wall time in seconds."""
        started = time.monotonic()
        progress = tqdm(total=self.plan.steps, initial=self.step, unit="step", mininterval=5.0)
        recent: list[float] = []
        while self.step < self.plan.steps:
            recent.append(self._train_step())
            self.step += 1
            progress.update()
            progress.set_postfix(
                loss=f"{recent[-1]:.3f}", row=self.plan.phase(self.step - 1).row_length
            )
            if self.step % self.plan.evaluate_every == 0 or self.step == self.plan.steps:
                seconds = self._seconds_before + time.monotonic() - started
                self._record(sum(recent) / len(recent), seconds)
                progress.write(str(self.history[-1]))
                recent.clear()
        progress.close()
        self.model.load_state_dict(self.best_weights)
        return self._seconds_before + time.monotonic() - started

    def resume(self) -> None:
        """Continue from the checkpoint file if there is one."""
        if not self._checkpoint.exists():
            return
        state = torch.load(self._checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self._averaged.load_state_dict(state["averaged"])
        self._muon.load_state_dict(state["muon"])
        self._adam.load_state_dict(state["adam"])
        self._stream.epoch, self._stream.offset = state["position"]
        self.step, self.history, self.best_weights = state["step"], state["history"], state["best"]
        self._seconds_before = self.history[-1]["seconds"]

    def _train_step(self) -> float:
        plan, phase = self.plan, self.plan.phase(self.step)
        factor = plan.learning_rate_factor(self.step)
        self._muon.param_groups[0]["lr"] = plan.muon_learning_rate * factor
        self._adam.param_groups[0]["lr"] = plan.adam_learning_rate * factor
        tokens = torch.from_numpy(
            self._stream.take(
                plan.tokens_per_step, plan.split_share_at(self.step), as_pages=phase.as_pages
            )
        )
        ids, targets = (x.view(-1, phase.row_length) for x in (tokens[:-1], tokens[1:]))
        # Seeded with the step's number, so that a resumed run drops the same values.
        noise = np.random.default_rng((plan.seed, self.step)).integers(
            256, size=self.model.noise_shape(*ids.shape), dtype=np.uint8
        )
        loss: Tensor = self._loss(ids, targets, torch.from_numpy(noise))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._muon.step()
        self._adam.step()
        self._averaged.update_parameters(self.model)
        self.model.zero_grad(set_to_none=True)
        return loss.item()

    def _row_loss(self, ids: Tensor, targets: Tensor, noise: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(ids, noise).flatten(0, 1), targets.flatten())

    def _record(self, train_loss: float, seconds: float) -> None:
        bits = self._validation_bits_per_byte()
        if not self.history or bits < min(entry["validation_bpb"] for entry in self.history):
            weights = self._averaged.module.state_dict()
            self.best_weights = {k: v.detach().clone() for k, v in weights.items()}
        entry = {"step": self.step, "train_loss": train_loss, "validation_bpb": bits}
        entry |= {"epoch": self._stream.epoch, "seconds": seconds}
        self.history.append({key: round(value, 4) for key, value in entry.items()})
        temporary = self._checkpoint.with_suffix(".tmp")
        torch.save(
            {
                "model": self.model.state_dict(),
                "averaged": self._averaged.state_dict(),
                "muon": self._muon.state_dict(),
                "adam": self._adam.state_dict(),
                "position": (self._stream.epoch, self._stream.offset),
                "step": self.step,
                "history": self.history,
                "best": self.best_weights,
            },
            temporary,
        )
        temporary.replace(self._checkpoint)

    @torch.no_grad()
    def _validation_bits_per_byte(self) -> float:
        nats = 0.0
        for ids in self._validation_ids:
            tokens = torch.tensor(ids)
            logits = self._averaged(tokens[None, :-1])[0]
            nats += functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
        return nats / math.log(2) / self._validation_bytes

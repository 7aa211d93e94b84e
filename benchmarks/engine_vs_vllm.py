"""Offline generation, our engine against vLLM's CPU build, on the same weights and cores.

Four engines: ours in process and with an engine process of its own, vLLM in its best variant (no
second process, both cores bound, its preloaded allocator and OpenMP) and as installed. All are
started, then run the same kind of batch by turns. A peer is stopped but for its turns, so that it
takes no core from another by waiting busily; ours waits for messages, and would count a stopped
engine process as dead. Ratios are of pairs of one round, above 1 ours is faster; the last row is
ours against itself (A/A). Prompts are random, prefix caches off, bfloat16, greedy, nothing is
detokenized.

    python -m benchmarks.engine_vs_vllm --peer-python /path/to/venv/bin/python \
        --peer-preload /path/to/libtcmalloc_minimal.so.4:/path/to/libiomp5.so [--quick]

`--earlier` names a checkout of an earlier commit, whose engine in process then takes turns with the
others, and `--earlier-python` a Python with that commit's dependencies.

The last line is JSON: for each model the ratio to the best variant and to the one as installed, of
the slower one of our two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.offline_engine import OUTPUT_TOKENS, PROMPT_TOKENS
from replicas.generators.checkpoint import expected_weights
from replicas.generators.model_config import load_hf_config
from replicas.generators.torch.loader import random_source

WORKER = Path(__file__).with_name("offline_engine.py")
ROOT = Path(__file__).parents[1]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Case:
    """One model and its batch.

    Attributes:
        name: Key of the JSON line.
        num_requests: Requests of a round, all at once.
        model: Fields of its config.json besides `LLAMA`.
    """

    name: str
    num_requests: int
    model: dict[str, Any]


CASES = (
    Case(
        "tiny",
        64,
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
    ),
    Case(
        "small",
        32,
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
        },
    ),
)
"""0.56 and 134.5 million weights, the shape of the second one that of SmolLM-135M."""

OURS = ("in-process", "process")
PEERS = ("best", "installed")
EARLIER = "earlier"


def make_model(case: Case, folder: Path) -> int:
    """Write a model with random weights in Hugging Face form; how many weights it has."""
    folder.mkdir()
    Path(folder, "config.json").write_text(json.dumps({**LLAMA, **case.model}))
    shapes = expected_weights(load_hf_config(folder))
    draw = random_source(shapes, seed=0)
    weights = {name: draw(name).to(torch.bfloat16) for name in shapes}
    save_file(weights, Path(folder, "model.safetensors"), metadata={"format": "pt"})
    return sum(weight.numel() for weight in weights.values())


class Engine:
    """An engine in a process group of its own.

    Args:
        arguments: Of `offline_engine.py`.
        python: Whose packages it has.
        env: Variables besides those of this process.
        stops: Whether it is stopped but for its turns.
    """

    def __init__(
        self, arguments: list[str], python: str, env: dict[str, str], *, stops: bool
    ) -> None:
        self._stops = stops
        self._name = " ".join([python, *arguments])
        read_fd, write_fd = os.pipe()
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [python, str(WORKER), *arguments, "--answer-fd", str(write_fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(write_fd,),
            env={**os.environ, **env},
            start_new_session=True,
            text=True,
        )
        os.close(write_fd)
        self._answers = os.fdopen(read_fd, encoding="utf-8")
        try:
            self._answer()
        except BaseException:
            self.kill()
            raise
        self.start_s = time.perf_counter() - started
        self._stop()

    def round_s(self) -> float:
        """Seconds of one batch."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        taken = self._answer()
        self._stop()
        return taken

    def peak_mib(self) -> float:
        """Peak resident memory of all of its processes, counted one by one."""
        return sum(map(self._peak_kib, Path("/proc").glob("[0-9]*/status"))) / 1024

    def kill(self) -> None:
        """End it, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()
        self._answers.close()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _stop(self) -> None:
        if not self._stops:
            return
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED)

    def _peak_kib(self, status: Path) -> int:
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            if os.getsid(int(status.parent.name)) == self._process.pid:
                return int(status.read_text().partition("VmHWM:")[2].split()[0])
        return 0

    def _answer(self) -> float:
        line = self._answers.readline()
        if not line:
            raise SystemExit(
                f"{self._name} ended with code {self._process.wait()}; stderr says why"
            )
        return float(line)

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)


def start(case: Case, folder: Path, asked: argparse.Namespace) -> dict[str, Engine]:
    """Every engine, by name; none is left behind when one does not start."""
    arguments = [str(folder), str(case.num_requests)]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    common = {**quiet, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    best = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": asked.peer_cores}
    if asked.peer_preload:
        best["LD_PRELOAD"] = asked.peer_preload
    plans = [
        ("in-process", "in-process", sys.executable, {**quiet, "PYTHONPATH": str(ROOT)}),
        ("process", "process", sys.executable, {**quiet, "PYTHONPATH": str(ROOT)}),
        ("best", "vllm", asked.peer_python, {**common, **best}),
        ("installed", "vllm", asked.peer_python, common),
    ]
    if asked.earlier:
        env = {**quiet, "PYTHONPATH": asked.earlier}
        plans.append((EARLIER, "in-process", asked.earlier_python, env))
    engines: dict[str, Engine] = {}
    try:
        for name, kind, python, env in plans:
            engines[name] = Engine([kind, *arguments], python, env, stops=name in PEERS)
    except BaseException:
        kill_all(engines)
        raise
    return engines


def kill_all(engines: dict[str, Engine]) -> None:
    """End them."""
    for engine in engines.values():
        engine.kill()


def measure(engines: dict[str, Engine], rounds: int) -> dict[str, list[float]]:
    """Seconds of every engine and round; "again" is ours in process a second time."""
    others = (*PEERS, *({EARLIER} & set(engines)), "process")
    turns = [("in-process", "in-process"), *((name, name) for name in others)]
    turns.append(("again", "in-process"))
    taken: dict[str, list[float]] = {label: [] for label, _ in turns}
    for index in range(rounds):
        for label, name in turns if index % 2 == 0 else reversed(turns):
            taken[label].append(engines[name].round_s())
    return taken


def ratios(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """(median, least, greatest) of their time over ours, pair by pair."""
    pairs = [b / a for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(pairs), min(pairs), max(pairs)


def show(case: Case, engines: dict[str, Engine], taken: dict[str, list[float]]) -> dict[str, float]:
    """Print one model's tables; its part of the JSON line."""
    tokens = case.num_requests * OUTPUT_TOKENS
    print("| engine | tokens/s | start, s | peak, MiB |\n|---|---|---|---|")
    for name, engine in engines.items():
        rate = tokens / statistics.median(taken[name])
        print(f"| {name} | {rate:,.0f} | {engine.start_s:.1f} | {engine.peak_mib():,.0f} |")
    print("\n| ours | against | ratio | least, greatest |\n|---|---|---|---|")
    result = {}
    for peer, key in zip(PEERS, (case.name, f"{case.name}_installed"), strict=True):
        found = {mine: ratios(taken[mine], taken[peer]) for mine in OURS}
        for mine, (median, least, most) in found.items():
            print(f"| {mine} | {peer} | {median:.2f} | {least:.2f}, {most:.2f} |")
        result[key] = round(min(median for median, _, _ in found.values()), 2)
    if EARLIER in taken:
        median, least, most = ratios(taken["in-process"], taken[EARLIER])
        print(f"| in-process | {EARLIER} | {median:.2f} | {least:.2f}, {most:.2f} |")
    median, least, most = ratios(taken["in-process"], taken["again"])
    print(f"| in-process | itself (A/A) | {median:.2f} | {least:.2f}, {most:.2f} |\n", flush=True)
    return result


def main() -> None:
    """Print the tables, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-python", required=True, help="a Python that has vllm-cpu")
    parser.add_argument("--peer-preload", default="", help="LD_PRELOAD of its best variant")
    parser.add_argument("--peer-cores", default=f"0-{len(os.sched_getaffinity(0)) - 1}")
    parser.add_argument("--earlier", help="a checkout of an earlier commit")
    parser.add_argument("--earlier-python", default=sys.executable)
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 5")
    asked = parser.parse_args()
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for case in CASES:
            if asked.case and case.name not in asked.case:
                continue
            folder = Path(scratch, case.name)
            millions = make_model(case, folder) / 1e6
            print(
                f"{case.name}: {millions:.2f} M weights, {case.num_requests} requests of "
                f"{PROMPT_TOKENS} -> {OUTPUT_TOKENS} tokens, {len(os.sched_getaffinity(0))} cores, "
                f"load {os.getloadavg()[0]:.1f}\n",
                flush=True,
            )
            engines = start(case, folder, asked)
            try:
                result |= show(case, engines, measure(engines, 3 if asked.quick else 5))
            finally:
                kill_all(engines)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

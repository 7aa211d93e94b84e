"""Drives an adapted double through the events of requests: by hand, and by a real engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from replicas.engine import worker
from replicas.generators.model_config import load_hf_config
from replicas.generators.protocol import DeviceSamplingParams
from replicas.generators.simulated.tokens import expected_tokens
from tests.engines import make_config
from tests.replicas.generators.plugin.doubles import (
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_LAYERS,
    VOCAB_SIZE,
    Double,
    Mesh,
    WrappedMesh,
)

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    import pytest

    from replicas.config import MeshConfig
    from replicas.generators.plugin.adapter import AdaptedGenerator

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
NUM_SLOTS, BLOCK_SIZE, MAX_SEQ_LEN, NUM_BLOCKS = 4, 32, 128, 17
WIDTH = MAX_SEQ_LEN // BLOCK_SIZE


def make_prompt(start: int, length: int) -> list[int]:
    """Tokens that count up, short to print."""
    return [1 + (start + i) % (VOCAB_SIZE - 1) for i in range(length)]


def expect(prompt: list[int], num_tokens: int) -> list[int]:
    """Return the tokens of a double's model after a prompt."""
    return expected_tokens(prompt, num_tokens, VOCAB_SIZE, ())


@dataclass(eq=False)
class Sequence:
    """A request, where it decodes and where its KV lies."""

    token_ids: list[int]
    num_prompt_tokens: int
    slot: int
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0

    @property
    def is_right(self) -> bool:
        """Return whether the model's tokens are those of this prompt."""
        prompt = self.token_ids[: self.num_prompt_tokens]
        return self.token_ids == prompt + expect(prompt, len(self.token_ids) - len(prompt))


class ByHand:
    """Calls of a generator, as by a runner that may also move rows."""

    def __init__(
        self, generation: type[AdaptedGenerator], folder: Path, *, draws_on_device: bool
    ) -> None:
        config = load_hf_config(folder)
        self.note = Double.recording.note
        self.draws_on_device = draws_on_device
        self.generator = generation.initialize_vllm_model(
            config,
            WrappedMesh(Mesh(2)),
            NUM_SLOTS,
            max_seq_len=MAX_SEQ_LEN,
            optimizations="performance",
        )
        shape = (NUM_BLOCKS, config.num_key_value_heads, BLOCK_SIZE, config.head_dim)
        self.cache = self.generator.allocate_kv_cache(
            shape, torch.bfloat16, config.num_hidden_layers
        )
        self.free = [5 * i % 16 + 1 for i in range(16)]
        self.goes_on: list[Sequence] = []
        self.last_inputs: tuple[Any, Any] | None = None
        for enable_trace in (False, True):
            self.generator.warmup_model_prefill(
                kv_cache=self.cache,
                enable_trace=enable_trace,
                can_sample_on_device=draws_on_device,
            )
            self.generator.warmup_model_decode(
                kv_cache=self.cache,
                enable_trace=enable_trace,
                max_batch_size=NUM_SLOTS,
                num_blocks=WIDTH,
                can_sample_on_device=draws_on_device,
            )

    def prefill(self, *chunks: tuple[Sequence, int]) -> None:
        """Compute each sequence's tokens up to a position; sample where that is its end."""
        rows = [sequence for sequence, _ in chunks]
        ends = [end for _, end in chunks]
        for sequence, end in chunks:
            self.give_blocks(sequence, end)
        tokens = torch.zeros((len(rows), max(ends)), dtype=torch.int32)
        for row, (sequence, end) in enumerate(chunks):
            tokens[row, :end] = torch.tensor(sequence.token_ids[:end])
        # A chunk that is not the last of its prompt samples on the host: it must not draw.
        is_last = all(end == len(sequence.token_ids) for sequence, end in chunks)
        draws = self.draws_on_device and is_last
        output: Any = self.generator.prefill_forward(
            tokens=tokens,
            page_table=self.tables(rows),
            kv_cache=self.cache,
            enable_trace=True,
            prompt_lens=torch.tensor(ends),
            start_pos=torch.tensor([s.num_computed_tokens for s in rows], dtype=torch.int32),
            empty_slots=[sequence.slot for sequence in rows],
            sampling_params=params(len(rows)) if draws else None,
        )
        self.goes_on = []
        for (sequence, end), token in zip(chunks, to_tokens(output, draws), strict=True):
            sequence.num_computed_tokens = end
            if end == len(sequence.token_ids):
                sequence.token_ids.append(token)

    def decode(self, *rows: Sequence, slot_remap: list[int] | None = None) -> None:
        """One step of these sequences, in two calls where the output is read later."""
        grown = [self.give_blocks(sequence, len(sequence.token_ids)) for sequence in rows]
        tokens = torch.zeros((NUM_SLOTS, 1), dtype=torch.int32)
        positions = torch.full((NUM_SLOTS,), -1, dtype=torch.int32)
        tables = torch.zeros((NUM_SLOTS, WIDTH), dtype=torch.int32)
        for sequence in rows:
            tokens[sequence.slot] = sequence.token_ids[-1]
            positions[sequence.slot] = len(sequence.token_ids) - 1
        tables[[sequence.slot for sequence in rows]] = self.tables(rows)
        goes_on = self.goes_on == list(rows) and slot_remap is None
        keeps = goes_on and bool(self.generator.model_capabilities.get("supports_async_decode"))
        commands: dict[str, bool] = {}
        inputs = (tokens, positions)
        if self.draws_on_device:
            commands = {
                "reload_inputs": not keeps,
                "reload_page_table": keeps and any(grown),
                "reload_sampling_params": not goes_on,
                "reset_sampling_state": not goes_on,
            }
            if keeps:  # the host is a step behind
                assert self.last_inputs is not None
                tokens, positions = self.last_inputs
        self.last_inputs = inputs
        submitted = self.generator.decode_forward(
            tokens=tokens,
            page_table=tables,
            kv_cache=self.cache,
            start_pos=positions,
            enable_trace=True,
            read_from_device=False,
            sampling_params=(
                params(NUM_SLOTS, [s.slot for s in rows]) if self.draws_on_device else None
            ),
            slot_remap=None if slot_remap is None else torch.tensor(slot_remap, dtype=torch.int32),
            **commands,
        )
        copying, events = self.generator.read_decode_output(submitted, async_read=True)
        assert not events
        output = self.generator.process_decode_output_host(copying, self.draws_on_device)
        found = to_tokens(output, self.draws_on_device)
        for sequence in rows:
            sequence.num_computed_tokens = len(sequence.token_ids)
            sequence.token_ids.append(found[sequence.slot])
        self.goes_on = list(rows) if self.draws_on_device else []

    def give_up(self, sequence: Sequence) -> None:
        """Take a sequence's blocks and slot."""
        self.generator.release_request(sequence.slot)
        self.free += sequence.block_ids
        sequence.block_ids, sequence.num_computed_tokens = [], 0

    def give_blocks(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return whether the sequence needed another block for so many tokens."""
        missing = -(-num_tokens // BLOCK_SIZE) - len(sequence.block_ids)
        sequence.block_ids += [self.free.pop(0) for _ in range(missing)]
        return missing > 0

    @staticmethod
    def tables(rows: Any) -> torch.Tensor:
        table = torch.zeros((len(rows), WIDTH), dtype=torch.int32)
        for row, sequence in enumerate(rows):
            table[row, : len(sequence.block_ids)] = torch.tensor(sequence.block_ids)
        return table


def params(num_rows: int, live: Collection[int] | None = None) -> DeviceSamplingParams:
    """Two kinds of requests by turns, one of them seeded; greedy where no row lives."""
    rows = range(num_rows)
    greedy = [row % 2 == 1 or (live is not None and row not in live) for row in rows]
    return DeviceSamplingParams(
        temperature=[0.0 if is_greedy else 0.7 for is_greedy in greedy],
        top_k=[1 if is_greedy else 20 for is_greedy in greedy],
        top_p=[1.0 if is_greedy else 0.9 for is_greedy in greedy],
        presence_penalty=(0.0,) * num_rows,
        frequency_penalty=(0.0,) * num_rows,
        repetition_penalty=(1.0,) * num_rows,
        seed=[-1 if greedy[row] else 100 + row for row in rows],
        num_logprobs=(-2,) * num_rows,
        enable_log_probs=(False,) * num_rows,
    )


def to_tokens(output: Any, draws_on_device: bool) -> list[int]:
    """Return the tokens of either kind of output, after a check of its form."""
    if draws_on_device:
        assert output.shape == (len(output), 1)
        assert not output.is_floating_point()
        return output[:, 0].tolist()
    assert output.dtype == torch.float32
    assert output.shape == (len(output), 1, VOCAB_SIZE)
    return output[:, 0].argmax(dim=-1).tolist()


def run_by_hand(
    generation: type[AdaptedGenerator], folder: Path, *, draws_on_device: bool
) -> list[Sequence]:
    """Run every event of a request once."""
    hand = ByHand(generation, folder, draws_on_device=draws_on_device)
    note, capabilities = hand.note, generation.model_capabilities
    a, b = Sequence(make_prompt(0, 40), 40, slot=0), Sequence(make_prompt(50, 30), 30, slot=2)
    c, d = Sequence(make_prompt(90, 70), 70, slot=1), Sequence(make_prompt(20, 5), 5, slot=3)
    note("two prompts at once: a in slot 0, b in slot 2")
    hand.prefill((a, 40), (b, 30))
    if capabilities.get("supports_chunked_prefill"):
        note("c in slot 1: the first 32 tokens of its prompt, then the rest")
        hand.prefill((c, 32))
    else:
        note("c in slot 1, whole: the class takes no chunks")
    hand.prefill((c, 70))
    note("the first decode, then the same rows again")
    hand.decode(a, b, c)
    hand.decode(a, b, c)
    note("b grows into another block")
    hand.decode(a, b, c)
    note("d arrives in slot 3, and decodes with the others")
    hand.prefill((d, 5))
    hand.decode(a, b, c, d)
    hand.decode(a, b, c, d)
    note("a is preempted")
    hand.give_up(a)
    hand.decode(b, c, d)
    note("a comes back: its prompt and its tokens so far, in other blocks")
    hand.prefill((a, len(a.token_ids)))
    hand.decode(a, b, c, d)
    note("c ends")
    hand.give_up(c)
    if hand.generator.signature.decode.takes("slot_remap"):
        note("b moves from slot 2 to slot 1")
        b.slot = 1
        hand.decode(a, b, d, slot_remap=[0, 2, 1, 3])
    hand.decode(a, b, d)
    for sequence in (a, b, d):
        hand.give_up(sequence)
    hand.generator.close()
    return [a, b, c, d]


def open_doubles(monkeypatch: pytest.MonkeyPatch, num_chips: int) -> list[tuple[Any, WrappedMesh]]:
    """Let engines open doubles of meshes with so many chips; return (request, mesh) of each."""
    opened: list[tuple[Any, WrappedMesh]] = []

    def open_mesh(settings: MeshConfig, **_arguments: object) -> WrappedMesh:
        opened.append((settings, WrappedMesh(Mesh(num_chips))))
        return opened[-1][1]

    monkeypatch.setattr(worker, "_import_open_mesh", lambda _mesh: open_mesh)
    return opened


def engine_config(folder: Path, generator: str, mesh: MeshConfig | None, **changes: Any) -> Any:
    """An engine whose sequences do not all fit into its blocks."""
    settings = {
        "dtype": "auto", "mesh": mesh, "max_batch_size": NUM_SLOTS, "max_model_len": MAX_SEQ_LEN,
        "block_size": BLOCK_SIZE, "num_blocks": 9, "max_num_batched_tokens": MAX_SEQ_LEN,
    }  # fmt: skip
    return make_config(str(folder), generator=generator, **{**settings, **changes})

"""Boards, models and measured rates that the simulated mesh is made of: facts, with their sources.

Rates are Tenstorrent's own, of their demos: one prompt of 128 tokens prefilled (time to first
token), then decode of a full batch (tokens per second and user). Nothing here computes times; that
is `profiles`.

Sources: rates from tt-metal models/README.md at 02068156 (2025-11-03); shapes of models from their
config.json; longest contexts from tt-inference-server's model specifications, where it has the
model. Chips are those of `replicas.tt.meshes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.layout import BFLOAT8_B
from replicas.kv_groups import KVSpec
from replicas.tt.meshes import Chip, mesh_spec

PROMPT_LEN = 128
"""Prompt tokens of every measured row."""

SLOTS_PER_LANE = 32
"""Rows of a decode batch of one lane: a hardware tile's. Each measured row ran this many."""

BYTES_PER_ELEMENT = 1.0625
"""Of weights and KV in bfloat8_b: 1,088 bytes for a tile of 1,024 elements."""


@dataclass(frozen=True, slots=True)
class Board:
    """Board of one replica: a card, or a machine of several chips as one mesh.

    Attributes:
        name: As a configuration names it.
        chip: Its chips.
        num_chips: Number of chips.
    """

    name: str
    chip: Chip
    num_chips: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shape of a decoder model, as far as time and memory depend on it.

    Attributes:
        name: As a configuration names it.
        implementation: Which code at Tenstorrent ran it; efficiency is a property of that code.
        hidden_size: Size of a token's hidden state.
        intermediate_size: Size inside the MLP.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Size of one head.
        vocab_size: Rows of the embedding and of the logits.
        max_context: Longest context, in tokens.
        num_experts: MLPs of each layer. Decode of a full batch reads all of them.
        num_mlp_matrices: Three with a gate, two without.
    """

    name: str
    implementation: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    num_experts: int = 1
    num_mlp_matrices: int = 3

    @property
    def attention_width(self) -> int:
        """Elements of a token's queries, all heads of one layer."""
        return self.num_heads * self.head_dim

    @property
    def num_forward_params(self) -> int:
        """Parameters that a forward pass multiplies with: the layers and the output layer."""
        kv_width = self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (self.attention_width + kv_width)
        mlp = self.num_mlp_matrices * self.hidden_size * self.intermediate_size * self.num_experts
        return self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes in DRAM: all in bfloat8_b, and the embedding once more in bfloat16."""
        embedding = 2 * self.vocab_size * self.hidden_size
        return int(self.num_forward_params * BYTES_PER_ELEMENT) + embedding

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of a token over all layers, in bfloat8_b."""
        spec = KVSpec(heads=self.num_kv_heads, width=self.head_dim, dtype=BFLOAT8_B)
        return self.num_layers * spec.bytes_per_block(1)


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One published measurement.

    Attributes:
        board: Name of a board.
        model: Name of a model.
        num_lanes: DP groups; each is `SLOTS_PER_LANE` users.
        ttft_ms: One prompt of `PROMPT_LEN` tokens to its first token.
        tokens_per_s_per_user: Of decode, the whole batch running.
        release: tt-metal's release that it was measured with.
    """

    board: str
    model: str
    num_lanes: int
    ttft_ms: float
    tokens_per_s_per_user: float
    release: str

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.ttft_ms / 1000.0

    @property
    def step_s(self) -> float:
        """Seconds of a decode step."""
        return 1.0 / self.tokens_per_s_per_user


BOARDS = {
    name: Board(name, mesh_spec(name).chip, mesh_spec(name).num_chips)
    for name in (
        "n150", "n300", "T3K", "Galaxy", "p100", "p150", "p150x2", "p150x4", "p150x8"
    )
}  # fmt: skip
"""By name. T3K is the Wormhole QuietBox too, p150x4 the Blackhole one."""


def _llama_70b(name: str) -> ModelSpec:
    return ModelSpec(
        name=name, implementation="llama", hidden_size=8192, intermediate_size=28672,
        num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128, vocab_size=128256,
        max_context=131072,
    )  # fmt: skip


MODELS = {
    model.name: model
    for model in (
        ModelSpec(
            name="Llama-3.2-1B", implementation="llama", hidden_size=2048, intermediate_size=8192,
            num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64, vocab_size=128256,
            max_context=131072,
        ),
        ModelSpec(
            name="Llama-3.2-3B", implementation="llama", hidden_size=3072, intermediate_size=8192,
            num_layers=28, num_heads=24, num_kv_heads=8, head_dim=128, vocab_size=128256,
            max_context=131072,
        ),
        ModelSpec(
            name="Llama-3.1-8B", implementation="llama", hidden_size=4096, intermediate_size=14336,
            num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128256,
            max_context=131072,
        ),
        _llama_70b("Llama-3.1-70B"),
        _llama_70b("Llama-3.3-70B"),
        _llama_70b("DeepSeek-R1-Distill-Llama-70B"),
        ModelSpec(  # runs in the code of Llama
            name="Mistral-7B", implementation="llama", hidden_size=4096, intermediate_size=14336,
            num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=32768,
            max_context=32768,
        ),
        ModelSpec(
            name="Mixtral-8x7B", implementation="mixtral", hidden_size=4096,
            intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
            vocab_size=32000, max_context=32768, num_experts=8,
        ),
        ModelSpec(
            name="Qwen2.5-7B", implementation="qwen2", hidden_size=3584, intermediate_size=18944,
            num_layers=28, num_heads=28, num_kv_heads=4, head_dim=128, vocab_size=152064,
            max_context=131072,
        ),
        ModelSpec(
            name="Qwen2.5-72B", implementation="qwen2", hidden_size=8192, intermediate_size=29568,
            num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128, vocab_size=152064,
            max_context=131072,
        ),
        ModelSpec(
            name="QwQ-32B", implementation="qwen2", hidden_size=5120, intermediate_size=27648,
            num_layers=64, num_heads=40, num_kv_heads=8, head_dim=128, vocab_size=152064,
            max_context=131072,
        ),
        ModelSpec(
            name="Qwen3-8B", implementation="qwen3", hidden_size=4096, intermediate_size=12288,
            num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=151936,
            max_context=40960,
        ),
        ModelSpec(
            name="Qwen3-32B", implementation="qwen3", hidden_size=5120, intermediate_size=25600,
            num_layers=64, num_heads=64, num_kv_heads=8, head_dim=128, vocab_size=151936,
            max_context=131072,
        ),
        ModelSpec(
            name="Falcon-7B", implementation="falcon", hidden_size=4544, intermediate_size=18176,
            num_layers=32, num_heads=71, num_kv_heads=1, head_dim=64, vocab_size=65024,
            max_context=2048, num_mlp_matrices=2,
        ),
    )
}  # fmt: skip
"""By name."""

ROWS = (
    MeasuredRow("n150", "Llama-3.2-1B", 1, 23, 80.5, "v0.62.0-dev20251015"),
    MeasuredRow("n150", "Llama-3.2-3B", 1, 52, 46.6, "v0.62.0-rc35"),
    MeasuredRow("n150", "Llama-3.1-8B", 1, 104, 26.0, "v0.62.0-rc35"),
    MeasuredRow("n150", "Mistral-7B", 1, 99, 28.7, "v0.64.0-dev20251030"),
    MeasuredRow("p100", "Llama-3.1-8B", 1, 61, 29.0, "v0.64.0-dev20251030"),
    MeasuredRow("p150", "Llama-3.1-8B", 1, 57, 33.1, "v0.64.0-dev20251030"),
    MeasuredRow("p150x4", "Llama-3.1-70B", 1, 188, 14.9, "v0.62.0-dev20251015"),
    MeasuredRow("T3K", "Llama-3.1-70B", 1, 159, 15.9, "v0.59.0-rc53"),
    MeasuredRow("T3K", "Qwen2.5-72B", 1, 223, 15.4, "v0.62.0-rc25"),
    MeasuredRow("T3K", "QwQ-32B", 1, 133, 25.2, "v0.56.0-rc51"),
    MeasuredRow("T3K", "Qwen3-32B", 1, 109, 22.1, "v0.59.0-rc52"),
    MeasuredRow("T3K", "Mixtral-8x7B", 1, 122, 24.9, "v0.62.0-dev20251015"),
    MeasuredRow("Galaxy", "Llama-3.1-70B", 1, 53, 72.5, "v0.62.0-dev20251015"),
    MeasuredRow("n150", "Falcon-7B", 1, 70, 18.5, "v0.62.0-dev20251015"),
    MeasuredRow("T3K", "Falcon-7B", 8, 87, 15.9, "v0.62.0-dev20250926"),
    MeasuredRow("Galaxy", "Falcon-7B", 32, 121, 13.2, "v0.62.0-rc25"),
)
"""What the model of time is fitted on."""

OLDER_ROWS = (MeasuredRow("p150x2", "Llama-3.1-8B", 2, 64, 18.6, "v0.59.0-rc3"),)
"""Shown beside the fit and not used for it: one p150 alone runs at 33.1 with a release half a year
younger, so that the gap is the software's and not the second lane's."""

EXCLUDED_ROWS = (
    (
        "T3K Llama-3.3-70B, T3K DeepSeek-R1-Distill-Llama-70B",
        "the measurement of T3K Llama-3.1-70B",
    ),
    ("Galaxy Llama-3.3-70B (ttnn 0.81.1 METADATA)", "the measurement of Galaxy Llama-3.1-70B"),
    (
        "n300 Qwen2.5-7B (README and METADATA)",
        "the figures of T3K Qwen3-32B: a copy error upstream",
    ),
    ("T3K Qwen2.5-72B and T3K Mixtral-8x7B (METADATA)", "repeat the README"),
    ("T3K Falcon-40B", "no time to first token was published; a demo of its own"),
    ("n300 Llama-3.2-11B-Vision", "includes the image encoder; batch 16"),
    ("n150 Mamba-2.8B", "no attention, no KV cache"),
    ("n150 and p150 Whisper-distil-large-v3", "speech, batch 1"),
)
"""Published rows that are not used, and why."""

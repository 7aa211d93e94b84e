"""Engines on a simulated mesh that takes no time, and their expected tokens."""

from __future__ import annotations

from cluster.config.resolve import demo_model_folder
from replicas.config import EngineConfig, SimulatedMeshConfig
from replicas.generators.model_config import load_hf_config
from replicas.generators.simulated.tokens import expected_tokens
from tests.engines import make_config

MODEL = str(demo_model_folder())
LONG = [(7 * i * i + 3 * i) % 4001 + 16 for i in range(90)]
PROMPTS = [
    LONG[:70], [11], [5, 9, 3], LONG[:64], list(range(1, 34)), [*LONG[:40], 1, 2, 3], [2, 2],
    [*LONG[:32], 150], [17 * i % 4093 for i in range(1, 22)], LONG,
]  # fmt: skip
NUM_NEW = 12
N150 = SimulatedMeshConfig(model="Llama-3.1-8B", board="n150")
FOUR_CHIPS = SimulatedMeshConfig(model="Llama-3.1-8B", board="p150x4")
"""A board that one, two or four lanes divide, each with memory enough."""


def simulated_config(**changes: object) -> EngineConfig:
    """Eight slots, 63 usable blocks of 32 tokens a lane; see `make_config`."""
    return make_config(MODEL, **{"simulated_mesh": FOUR_CHIPS, **changes})


def right_tokens(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return the tokens that every engine on a simulated mesh must give."""
    model = load_hf_config(MODEL)
    return [
        expected_tokens(prompt, num_tokens, model.vocab_size, model.eos_token_id)
        for prompt in prompts
    ]

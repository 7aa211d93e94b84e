"""What an engine core has to know of its model, from configuration and generator alone. Pure.

One function for every worker, so that a simulated engine is told what a real one is told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.engine.step import ModelFacts
from replicas.kv_sizing import bytes_per_block, num_blocks_per_lane, position_limit

if TYPE_CHECKING:
    from replicas.config import EngineConfig
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import ModelCapabilities


def model_facts(
    config: EngineConfig, model: ModelConfig, capabilities: ModelCapabilities
) -> ModelFacts:
    """Collect them.

    Args:
        config: The engine's configuration.
        model: Of the served model's config.json.
        capabilities: What the generator says that it can; what it does not name, it cannot.

    Raises:
        ConfigError: No KV block fits, or the simulated mesh cannot be; says the numbers.
    """
    return ModelFacts(
        max_position_embeddings=position_limit(config, model),
        vocab_size=model.vocab_size,
        eos_token_ids=list(model.eos_token_id),
        num_blocks=num_blocks_per_lane(config, model),
        bytes_per_block=bytes_per_block(config, model),
        supports_mixed_batch=capabilities.get("supports_mixed_batch", False),
        supports_chunked_prefill=capabilities.get("supports_chunked_prefill", False),
        supports_prefix_caching=capabilities.get("supports_prefix_caching", False),
    )

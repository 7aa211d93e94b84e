"""Facts for the parts of an engine at its start, from configuration and generator alone. Pure.

One function serves every worker, so that a simulated engine gets the same facts as a real one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.connector import ConnectorSettings
from replicas.engine.step import ModelFacts
from replicas.errors import ConfigError
from replicas.kv_sizing import kv_groups, position_limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from replicas.config import EngineConfig
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import ModelCapabilities


def model_facts(
    config: EngineConfig,
    model: ModelConfig,
    capabilities: ModelCapabilities,
    token_budget: int | None = None,
) -> ModelFacts:
    """Return the facts of a model on a generator.

    Args:
        config: The engine's configuration.
        model: The served model's configuration.
        capabilities: The generator's capabilities; those that it does not name are unsupported.
        token_budget: See `kv_groups`.

    Raises:
        ConfigError: No KV block fits, or there is no such mesh; gives the numbers.
    """
    tokens_per_pass = capabilities.get("output_tokens_per_step", 1)
    if tokens_per_pass > 1 and config.mesh is None:
        raise ConfigError(
            f"generator {config.generator!r} gives {tokens_per_pass} tokens a step, which only a "
            "device can draw; set engine.mesh"
        )
    groups = kv_groups(config, model, token_budget)
    # A class that keeps states by itself has none at the end of a cached prefix.
    loses_states = model.delta is not None and not any(g.spec.kind == "state" for g in groups)
    extent = capabilities.get("tt_block_kv_extent_tokens", 0)
    return ModelFacts(
        max_position_embeddings=position_limit(config, model),
        vocab_size=model.vocab_size,
        eos_token_ids=list(model.eos_token_id),
        kv_groups=groups,
        supports_mixed_batch=capabilities.get("supports_mixed_batch", False),
        supports_chunked_prefill=capabilities.get("supports_chunked_prefill", False),
        supports_prefix_caching=capabilities.get("supports_prefix_caching", False)
        and not loses_states,
        supports_drafts=capabilities.get("supports_mixed_batch", False),
        supports_prompt_logprobs=capabilities.get("supports_mixed_batch", False)
        and capabilities.get("supports_hidden_states", False),
        supports_async_decode=capabilities.get("supports_async_decode", False),
        tokens_per_pass=tokens_per_pass,
        # Source: vllm-tt-plugin's `TTScheduler`, `num_lookahead_tokens`.
        kv_tokens_per_pass=1 if tokens_per_pass == 1 else max(extent, 2 * tokens_per_pass),
        chunk_alignment=1 if config.mesh is None else config.block_size,
    )


def connector_settings(
    config: EngineConfig,
    incarnation: str,
    unix_now_s: Callable[[], float],
    step_now_s: Callable[[], float],
) -> ConnectorSettings:
    """Return the settings of both sides of the KV connector.

    Args:
        config: The engine's configuration.
        incarnation: Id of this start.
        unix_now_s: Wall clock.
        step_now_s: Clock of the engine's steps.
    """
    return ConnectorSettings(
        incarnation=incarnation,
        bind=config.kv_endpoint,
        keys=config.keys,
        network=config.kv_network,
        unix_now_s=unix_now_s,
        step_now_s=step_now_s,
        accept_dtypes=config.kv_accept_dtypes,
        store=config.kv_store,
    )

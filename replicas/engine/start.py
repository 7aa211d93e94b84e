"""Start of an engine: device, model, KV cache and warm-up, and the resulting facts for the core."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kv_transfer.block_hash import PREFIX_CACHE
from kv_transfer.connector import load_connector
from kv_transfer.keys import NEW_KEY_BYTES
from replicas.engine.facts import connector_settings
from replicas.engine.requests import RequestChecks
from replicas.engine.scheduler import Scheduler
from replicas.errors import ConfigError, EngineError
from replicas.kv_sizing import derive_max_model_len

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_transfer.connector import KVConnectorScheduler
    from kv_transfer.keys import KeyRing
    from kv_transfer.layout import KVLayout
    from replicas.config import EngineConfig
    from replicas.engine.executor import Executor
    from replicas.engine.step import ModelFacts

logger = logging.getLogger(__name__)


class Started(NamedTuple):
    """Facts of an engine whose workers are ready.

    Attributes:
        config: Its configuration, with everything decided.
        facts: Facts of its model.
        max_model_len: Tokens of the longest sequence.
        kv_endpoints: Endpoints of its connector; None without a connector.
        kv_layouts: Memory layout of each KV group; empty without a connector.
        warm_up_s: Seconds of its warm-up.
    """

    config: EngineConfig
    facts: ModelFacts
    max_model_len: int
    kv_endpoints: tuple[str, ...] | None
    kv_layouts: tuple[KVLayout, ...]
    warm_up_s: float


def start_executor(executor: Executor, config: EngineConfig) -> Started:
    """Set up an engine's workers.

    Raises:
        ConfigError: The configuration and the model do not fit; gives the numbers.
    """
    executor.collective_rpc("init_device")
    facts: ModelFacts = executor.collective_rpc("load_model")[0]
    config = _resolve_capabilities(config, facts)
    max_model_len = derive_max_model_len(config, facts.max_position_embeddings, facts.kv_groups)
    listening: tuple[tuple[str, ...], tuple[KVLayout, ...]] | None = executor.collective_rpc(
        "initialize_kv_cache", facts.kv_groups, max_model_len
    )[0]
    began_s = time.perf_counter()
    executor.collective_rpc("warm_up")
    warm_up_s = time.perf_counter() - began_s
    endpoints, layouts = listening or (None, ())
    return Started(config, facts, max_model_len, endpoints, layouts, warm_up_s)


@contextlib.contextmanager
def closing_if_it_fails(executor: Executor) -> Iterator[None]:
    """Close the engine if its start fails.

    A device that is left open may be unusable until it is reset.
    """
    try:
        yield
    except BaseException:
        try:
            executor.collective_rpc("shutdown")
        except (EngineError, OSError, RuntimeError):
            logger.exception("closing the engine after its failed start failed, too")
        raise


def make_connector(
    started: Started, incarnation: str, unix_now_s: Callable[[], float]
) -> KVConnectorScheduler | None:
    """Make the scheduler side of the engine's KV connector, if it has one.

    Args:
        started: Facts of the engine.
        incarnation: Id of this start.
        unix_now_s: Wall clock, by which tickets expire.
    """
    config = started.config
    if config.kv_connector is None or not started.kv_layouts:
        return None
    settings = connector_settings(config, incarnation, unix_now_s, time.monotonic)
    return load_connector(config.kv_connector).create_scheduler(settings, started.kv_layouts)


def make_scheduler(started: Started, connector: KVConnectorScheduler | None) -> Scheduler:
    """Make the scheduler of an engine."""
    facts = started.facts
    return Scheduler(
        started.config,
        kv_groups=facts.kv_groups,
        prefix_cache_key=_prefix_cache_key(started.config.keys),
        max_model_len=started.max_model_len,
        eos_token_ids=frozenset(facts.eos_token_ids),
        connector=connector,
        resumes_prefill=facts.supports_prefix_caching or facts.supports_chunked_prefill,
        chunk_alignment=facts.chunk_alignment,
        tokens_per_pass=facts.tokens_per_pass,
        kv_tokens_per_pass=facts.kv_tokens_per_pass,
    )


def make_checks(started: Started, connector: KVConnectorScheduler | None) -> RequestChecks:
    """Make the checks of an engine's requests."""
    return RequestChecks(
        num_groups=started.config.tt_data_parallel,
        max_model_len=started.max_model_len,
        vocab_size=started.facts.vocab_size,
        has_connector=connector is not None,
        tokens_per_pass=started.facts.tokens_per_pass,
        max_logprobs=started.config.max_logprobs,
        supports_prompt_logprobs=started.facts.supports_prompt_logprobs
        and bool(started.config.mixed_batches),
        scheduling_policy=started.config.scheduling_policy,
    )


def _prefix_cache_key(keys: KeyRing) -> bytes:
    """Return the key of prefix caches: the deployment's, or a random one if it has no secrets."""
    derived = keys.derive(PREFIX_CACHE)
    return derived[0] if derived else secrets.token_bytes(NEW_KEY_BYTES)


def _resolve_capabilities(config: EngineConfig, facts: ModelFacts) -> EngineConfig:
    """Return the configuration with every None decided by the generator's capabilities.

    Raises:
        ConfigError: The configuration asks for a feature that the generator does not support.
    """
    can = {
        "enable_prefix_caching": facts.supports_prefix_caching,
        "enable_chunked_prefill": facts.supports_chunked_prefill,
        "mixed_batches": facts.supports_mixed_batch,
    }
    for name, supported in can.items():
        if getattr(config, name) and not supported:
            raise ConfigError(f"{name} is on but the generator does not support it; remove it")
    if config.speculative_config is not None and not facts.supports_drafts:
        raise ConfigError(
            "speculative_config is set but the generator has no forward_mixed, which verifies "
            "drafts; remove it"
        )
    decided = {
        n: supported if getattr(config, n) is None else getattr(config, n)
        for n, supported in can.items()
    }
    config = msgspec.structs.replace(config, **decided)
    config.validate_partial_prefills()
    return config

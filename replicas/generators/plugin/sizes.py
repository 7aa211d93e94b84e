"""Sizes that tt_transformers' text classes do not support, refused before minutes of loading.

Source: batch sizes and the lengths of the warm-up in tt_transformers' model_config.py, whose
ModelArgs only the classes named here use unchanged.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from replicas.errors import ConfigError
from replicas.generators.plugin.routes import ROUTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.config import EngineConfig

_LOG = logging.getLogger(__name__)

_PACKAGE = "models.tt_transformers."
_CLASSES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "QwenForCausalLM"})
_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_LEAST_CHUNK = 4096
"""Least number of tokens that they compute at once; warm-up runs in powers of two."""
_MOST_CHUNK = 131_072


def check_class_sizes(config: EngineConfig, generator: type, max_seq_len: int) -> None:
    """Refuse sizes that a tt_transformers class, a subclass or its adapter does not support.

    Args:
        config: The engine's configuration.
        generator: The class.
        max_seq_len: Longest sequence in tokens.

    Raises:
        ConfigError: The warm-up does not support the length, or the model the batch size.
    """
    bases = getattr(generator, "plugin_class", generator).__mro__
    if any(base.__module__.startswith(_PACKAGE) and base.__name__ in _CLASSES for base in bases):
        _check(config, max_seq_len)


def check_route_sizes(config: EngineConfig, architectures: Sequence[str], max_seq_len: int) -> None:
    """Refuse the same sizes by the name of a route, without importing its class.

    Args:
        config: The engine's configuration; accepted if its generator is not a route.
        architectures: The architectures in the model's config.json.
        max_seq_len: Longest sequence in tokens.

    Raises:
        ConfigError: As in `check_class_sizes`.
    """
    route = ROUTES.get(config.generator or "")
    target = "" if route is None else route.classes.get(next(iter(architectures), ""), "")
    if target.startswith(_PACKAGE) and target.rpartition(":")[2] in _CLASSES:
        _check(config, max_seq_len)


def _check(config: EngineConfig, max_seq_len: int) -> None:
    if config.slots_per_group not in _BATCH_SIZES:
        raise ConfigError(
            f"max_batch_size {config.max_batch_size} in {config.tt_data_parallel} lanes gives "
            f"{config.slots_per_group} slots a lane; tt_transformers' classes support "
            f"{', '.join(map(str, _BATCH_SIZES))}"
        )
    is_power = max_seq_len & (max_seq_len - 1) == 0
    if is_power or max_seq_len > _MOST_CHUNK:
        return
    above = 1 << max_seq_len.bit_length()
    ways = f"set max_model_len to {above // 2} or {above}"
    if max_seq_len < _LEAST_CHUNK:
        raise ConfigError(
            f"max_model_len is {max_seq_len}, but tt_transformers' classes warm up in powers of "
            f"two: {ways}"
        )
    _LOG.warning(
        "max_model_len %d is not a power of two, which tt_transformers' classes need when they "
        "compute as many tokens at once; if the warm-up fails, %s", max_seq_len, ways,
    )  # fmt: skip

"""Sizes that tt_transformers' text classes refuse, said before minutes of loading.

Source: batch sizes and the lengths of the warm-up in tt_transformers' model_config.py, whose
ModelArgs only the classes named here take as they are.
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
"""Tokens that they compute at once at least, and warm up in powers of two."""
_MOST_CHUNK = 131_072


def check_class_sizes(config: EngineConfig, generator: type, max_seq_len: int) -> None:
    """Refuse sizes for a class that is, or adapts, one of tt_transformers or extends it.

    Args:
        config: The engine's configuration.
        generator: The class.
        max_seq_len: Longest sequence in tokens.

    Raises:
        ConfigError: Its warm-up takes no such length, or its model no such batch.
    """
    bases = getattr(generator, "plugin_class", generator).__mro__
    if any(base.__module__.startswith(_PACKAGE) and base.__name__ in _CLASSES for base in bases):
        _check(config, max_seq_len)


def check_route_sizes(config: EngineConfig, architectures: Sequence[str], max_seq_len: int) -> None:
    """Do the same by the name of a route, without importing its class.

    Args:
        config: The engine's configuration; with another generator nothing is checked.
        architectures: Of the model, as its config.json says.
        max_seq_len: Longest sequence in tokens.

    Raises:
        ConfigError: As `check_class_sizes`.
    """
    route = ROUTES.get(config.generator or "")
    target = "" if route is None else route.classes.get(next(iter(architectures), ""), "")
    if target.startswith(_PACKAGE) and target.rpartition(":")[2] in _CLASSES:
        _check(config, max_seq_len)


def _check(config: EngineConfig, max_seq_len: int) -> None:
    if config.slots_per_group not in _BATCH_SIZES:
        raise ConfigError(
            f"max_batch_size {config.max_batch_size} in {config.tt_data_parallel} lanes is "
            f"{config.slots_per_group} slots a lane, and classes of tt_transformers take "
            f"{', '.join(map(str, _BATCH_SIZES))}"
        )
    is_power = max_seq_len & (max_seq_len - 1) == 0
    if is_power or max_seq_len > _MOST_CHUNK:
        return
    above = 1 << max_seq_len.bit_length()
    ways = f"set max_model_len to {above // 2} or {above}"
    if max_seq_len < _LEAST_CHUNK:
        raise ConfigError(
            f"max_model_len is {max_seq_len}, and classes of tt_transformers warm up in powers of "
            f"two: {ways}"
        )
    _LOG.warning(
        "max_model_len %d is no power of two, which classes of tt_transformers want where they "
        "compute as many tokens at once: if the warm-up fails, %s", max_seq_len, ways,
    )  # fmt: skip

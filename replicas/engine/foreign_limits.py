"""What classes written for Tenstorrent's plug-in say of sizes, held against what chips can hold.

tt-metal's classes tell models by the name of their folder: under any other name a model has the
limits of none, which may be more than the chips have room for. Pure, but for warnings.

Sources: `LlamaForCausalLM.get_max_tokens_all_users` of tt_transformers' generator_vllm.py; batch
sizes, lengths of the warm-up and names from its model_config.py.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from replicas.errors import ConfigError
from replicas.generators.plugin.checkpoints import model_name
from replicas.generators.ttnn.budget import lane_memory
from replicas.kv_sizing import DEFAULT_TOKEN_BUDGET

if TYPE_CHECKING:
    from replicas.config import EngineConfig, MeshConfig
    from replicas.generators.model_config import ModelConfig

_LOG = logging.getLogger(__name__)

_KNOWN_NAMES = (
    "DeepSeek-R1-Distill-Llama-70B", "DeepSeek-R1-Distill-Qwen-14B", "Llama-3.1-70B",
    "Llama-3.1-8B", "Llama-3.2-11B", "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.2-90B",
    "Llama-3.3-70B", "Mistral-7B", "Mistral-Small-3.1-24B", "Mixtral-8x7B", "Phi-3-mini",
    "Phi-3.5-mini", "QwQ-32B", "Qwen2.5-14B", "Qwen2.5-32B", "Qwen2.5-72B", "Qwen2.5-7B",
    "Qwen2.5-Coder-32B", "Qwen2.5-VL-", "Qwen3-32B", "Qwen3-8B", "gemma-3-", "gemma-4-", "gpt-oss-",
    "phi-4",
)  # fmt: skip
_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_LEAST_CHUNK = 4096
"""Tokens that tt_transformers computes at once at least, and warms up in powers of two."""
_MOST_CHUNK = 131_072


def comes_from(generator: type, package: str) -> bool:
    """Whether a generator class, or what it adapts, or a base of that, is of a package."""
    adapted = getattr(generator, "plugin_class", generator)
    return any(f"{base.__module__}.".startswith(f"{package}.") for base in adapted.__mro__)


def check_foreign_sizes(config: EngineConfig, generator: type, max_seq_len: int) -> None:
    """Say before minutes of loading what a class of tt-metal refuses after them.

    Raises:
        ConfigError: Its warm-up, or its model, takes no such length or batch.
    """
    if comes_from(generator, "models"):
        _warn_of_name(config.model)
    if not comes_from(generator, "models.tt_transformers"):
        return
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


def _warn_of_name(folder: str) -> None:
    name = model_name(folder)
    if not any(known in name for known in _KNOWN_NAMES):
        _LOG.warning(
            "the model's folder is called %r, and classes of tt-metal tell models by such names: "
            "none of their limits and settings are for it; name the folder as Hugging Face names "
            "the model, for one Llama-3.1-8B-Instruct", name,
        )  # fmt: skip


def foreign_token_budget(
    config: EngineConfig, mesh: MeshConfig, model: ModelConfig, generator: type, max_seq_len: int
) -> int:
    """Tokens of KV of a lane: what the class says, but no more than its chips have room for.

    Room is reckoned as for our own models; where that cannot be, the class is believed.
    """
    ask = getattr(generator, "get_max_tokens_all_users", None)
    said = DEFAULT_TOKEN_BUDGET
    if callable(ask):
        said = ask(
            model_name=config.model,
            num_devices=mesh.spec.num_chips,
            tt_data_parallel=config.tt_data_parallel,
            max_model_len=max_seq_len,
            max_num_seqs=config.slots_per_group,
        )
    try:
        memory = lane_memory(
            model, mesh.spec, mesh, config.tt_data_parallel,
            block_size=config.block_size, max_seq_len=max_seq_len,
        )  # fmt: skip
    except ConfigError as error:
        _LOG.info("room for %d tokens of KV a lane is not checked: %s", said, error)
        return said
    room = (memory.num_blocks - config.slots_per_group) * config.block_size
    if room >= said:
        return said
    if room < config.block_size:
        _LOG.warning(
            "by our arithmetic %s does not fit mesh %s in %d lanes beside a KV cache: its weights "
            "take %.2f GB of each chip's %.2f",
            config.model, mesh.name, config.tt_data_parallel,
            memory.weights / 1e9, memory.dram / 1e9,
        )  # fmt: skip
        return said
    _LOG.warning(
        "the generator says that a lane holds %d tokens of KV, and beside the weights its chips "
        "have room for %d: these are taken", said, room,
    )  # fmt: skip
    return room

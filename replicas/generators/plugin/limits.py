"""Check of the capacities declared by plug-in classes against the chips' memory.

tt-metal's classes identify models by the name of their folder. Under any other name a model gets
default limits, which may exceed the chips' memory. Pure, except for warnings.

Sources: `LlamaForCausalLM.get_max_tokens_all_users` of tt_transformers' generator_vllm.py; names
from its model_config.py.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from replicas.errors import ConfigError
from replicas.generators.protocol import DEFAULT_TOKEN_BUDGET
from replicas.generators.ttnn.budget import lane_memory
from replicas.model_name import model_name

if TYPE_CHECKING:
    from replicas.config import EngineConfig, MeshConfig
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import ModelCapabilities

_LOG = logging.getLogger(__name__)

_KNOWN_NAMES = (
    "DeepSeek-R1-0", "DeepSeek-R1-Distill-Llama-70B", "DeepSeek-R1-Distill-Qwen-14B", "DeepSeek-V3",
    "Llama-3.1-70B", "Llama-3.1-8B", "Llama-3.2-11B", "Llama-3.2-1B", "Llama-3.2-3B",
    "Llama-3.2-90B", "Llama-3.3-70B", "Mistral-7B", "Mistral-Small-3.1-24B", "Mixtral-8x7B",
    "Phi-3-mini", "Phi-3.5-mini", "QwQ-32B", "Qwen2.5-14B", "Qwen2.5-32B", "Qwen2.5-72B",
    "Qwen2.5-7B", "Qwen2.5-Coder-32B", "Qwen2.5-VL-", "Qwen3-32B", "Qwen3-8B", "Qwen3-VL-",
    "Qwen3.5-", "gemma-3-", "gemma-4-", "gpt-oss-", "phi-4",
)  # fmt: skip


def comes_from(generator: type, package: str) -> bool:
    """Return whether a generator, its adapted class or a base of that is defined in a package."""
    adapted = getattr(generator, "plugin_class", generator)
    return any(f"{base.__module__}.".startswith(f"{package}.") for base in adapted.__mro__)


def warn_of_name(config: EngineConfig, generator: type) -> None:
    """Warn if tt-metal's classes do not recognise the model by its folder's name."""
    name = model_name(config.model)
    if comes_from(generator, "models") and not any(known in name for known in _KNOWN_NAMES):
        _LOG.warning(
            "the model's folder is called %r, and tt-metal's classes identify models by this name: "
            "none of their limits and settings apply to it; give the folder the model's name on "
            "Hugging Face, such as Llama-3.1-8B-Instruct", name,
        )  # fmt: skip


def decode_widths(generator: object) -> tuple[int, ...]:
    """Return the widths that a class or its model has captured decodes for; () for any width.

    A model may narrow the list while it warms up. Any other width leaves the device in an undefined
    state. Source: vllm-tt-plugin model_runner.py, ``tt_supported_decode_batch_sizes``.
    """
    declared = getattr(generator, "tt_supported_decode_batch_sizes", None) or ()
    return tuple(sorted(int(width) for width in declared))


def check_decode_widths(class_name: str, generator: object, slots_per_lane: int) -> None:
    """Refuse a number of slots that is none of the widths of a class or its model.

    All slots may be in use at once, and a wider decode would have rows that the model has no state
    for.

    Raises:
        ConfigError: It is none of them; gives both.
    """
    widths = decode_widths(generator)
    if widths and slots_per_lane not in widths:
        raise ConfigError(
            f"generator {class_name} decodes {', '.join(map(str, widths))} rows at once, but a "
            f"lane has {slots_per_lane} slots; set max_batch_size to one of these for each lane"
        )


def check_block_output(config: EngineConfig, mesh: MeshConfig, can: ModelCapabilities) -> None:
    """Refuse settings under which a class that gives several tokens a step cannot run.

    Source: vllm-tt-plugin docs/MODEL_CAPABILITIES.md, "Scheduling and output capabilities".

    Raises:
        ConfigError: A setting does not fit; names it.
    """
    width = can.get("output_tokens_per_step", 1)
    if width == 1:
        return
    what = f"generator {config.generator!r} gives {width} tokens a step"
    if mesh.sample_on_device == "none":
        raise ConfigError(f"{what}, which only the device can draw; remove mesh.sample_on_device")
    if config.num_scheduler_steps > 1:
        raise ConfigError(
            f"{what}, and num_scheduler_steps {config.num_scheduler_steps} is for generators of "
            "one; remove it"
        )
    if can.get("tt_adaptive_block_output"):
        return
    if config.max_batch_size != 1:
        raise ConfigError(
            f"{what} for one request at a time, but max_batch_size is {config.max_batch_size}; set "
            "it to 1"
        )
    if mesh.sample_on_device == "decode_only" or not can.get("supports_sample_in_prefill"):
        raise ConfigError(f"{what}, also in prefill; mesh.sample_on_device must be all")
    if config.kv_connector is not None:
        raise ConfigError(
            f"{what} from a state of its own, so KV cannot move; remove kv_connector "
            f"{config.kv_connector!r}"
        )


def foreign_token_budget(
    config: EngineConfig, mesh: MeshConfig, model: ModelConfig, generator: type, max_seq_len: int
) -> int:
    """Return a lane's tokens of KV: as the class declares, but no more than its chips can hold.

    The room is estimated as for ttserve's own models. Without an estimate the declared number is
    used.
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
        _LOG.info("cannot check whether %d tokens of KV fit a lane: %s", said, error)
        return said
    room = (memory.num_blocks - config.slots_per_group) * config.block_size
    if room >= said:
        return said
    if room < config.block_size:
        _LOG.warning(
            "by our estimate %s with a KV cache does not fit mesh %s in %d lanes: its weights "
            "take %.2f GB of each chip's %.2f GB",
            config.model, mesh.name, config.tt_data_parallel,
            memory.weights / 1e9, memory.dram / 1e9,
        )  # fmt: skip
        return said
    _LOG.warning(
        "the generator declares %d tokens of KV a lane, but beside the weights its chips "
        "have room for %d; using the latter", said, room,
    )  # fmt: skip
    return room

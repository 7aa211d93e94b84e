"""Engine options of vLLM: what each one means here.

One table translates or refuses them, and generates docs/vllm-options.md. Options that have another
name here, such as `max_num_seqs`, are unknown keys, like any other mistake.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from replicas.config import MeshConfig
from replicas.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

Effect = Literal["same", "translated", "without effect", "refused"]


class VllmOption(NamedTuple):
    """One option of vLLM.

    Attributes:
        name: Its name in vLLM, as a keyword.
        effect: What becomes of it.
        meaning: What it does here, or why it does nothing, for the documentation and for messages.
        translate: For "translated": changes the options in place, given its value.
    """

    name: str
    effect: Effect
    meaning: str
    translate: Callable[[dict[str, Any], Any], None] | None = None


def engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return engine options with those of vLLM in the terms of `EngineConfig`.

    Args:
        given: Options of both kinds, plain or as structs.

    Raises:
        ConfigError: An option of vLLM is refused, or has a value that is not supported here.
    """
    options = dict(given)
    for option in OPTIONS:
        if option.name not in options or option.effect == "same":
            continue
        if option.effect == "refused":
            raise ConfigError(f"{option.name} of vLLM is refused: {option.meaning}")
        if option.translate is not None:
            option.translate(options, options[option.name])
        else:
            del options[option.name]
            logger.warning("%s has no effect: %s", option.name, option.meaning)
    return options


def _load_format(options: dict[str, Any], value: object) -> None:
    names = {"dummy": "random", "auto": "safetensors"}
    options["load_format"] = names.get(value, value) if isinstance(value, str) else value


def _dtype(options: dict[str, Any], value: object) -> None:
    if value in {"float16", "half"}:
        logger.warning("dtype %s is computed in float32, which keeps all of its bits", value)
        options["dtype"] = "float32"
    elif value == "float":
        options["dtype"] = "float32"


def _enforce_eager(options: dict[str, Any], value: object) -> None:
    del options["enforce_eager"]
    if not isinstance(value, bool):
        raise ConfigError(f"enforce_eager must be true or false, got {value!r}")
    mesh = options.get("mesh")
    if not value or mesh is None:
        return
    trace = mesh.get("trace") if isinstance(mesh, Mapping) else mesh.trace
    # A struct does not tell its default from the same value.
    if isinstance(mesh, Mapping) and trace not in {None, "none"}:
        raise ConfigError(
            f"enforce_eager true and mesh.trace {trace!r} exclude each other; remove one of them"
        )
    if isinstance(mesh, MeshConfig):
        options["mesh"] = msgspec.structs.replace(mesh, trace="none")
    else:
        options["mesh"] = {**mesh, "trace": "none"}


OPTIONS: tuple[VllmOption, ...] = (
    VllmOption("max_model_len", "same", "Longest sequence, prompt and output together."),
    VllmOption("max_num_batched_tokens", "same", "Most tokens of one step."),
    VllmOption(
        "num_scheduler_steps", "same", "Most decode passes of one step; 1 to 32, 1 by default."
    ),
    VllmOption("enable_chunked_prefill", "same", "Prompts may be computed over several steps."),
    VllmOption("enable_prefix_caching", "same", "Prompts reuse cached KV of equal prefixes."),
    VllmOption(
        "long_prefill_token_threshold", "same", "Most tokens of a long prompt in a step it shares."
    ),
    VllmOption("max_num_partial_prefills", "same", "Most prompts that a step computes in part."),
    VllmOption("max_long_partial_prefills", "same", "Most of them that are long."),
    VllmOption(
        "scheduling_policy", "same", "`priority` orders requests by their `priority`, lower first."
    ),
    VllmOption("block_size", "same", "Tokens of a KV block; any number on the CPU."),
    VllmOption("kv_cache_memory_bytes", "same", "Memory for KV on the CPU, of all lanes together."),
    VllmOption(
        "gpu_memory_utilization",
        "same",
        "On the CPU the share of the host's memory; a mesh always uses what the weights leave.",
    ),
    VllmOption(
        "dtype",
        "translated",
        "`float16` and `half` are computed in float32, which the log says; `float` is float32.",
        _dtype,
    ),
    VllmOption(
        "load_format",
        "translated",
        "`dummy` is `random`: weights drawn from `weights_seed`; `auto` is `safetensors`.",
        _load_format,
    ),
    VllmOption(
        "enforce_eager",
        "translated",
        "True sets `mesh.trace: none`. On the CPU nothing is captured, so that nothing changes.",
        _enforce_eager,
    ),
    VllmOption(
        "compilation_config",
        "without effect",
        "kernels are compiled ahead of a start or in its warm-up, with nothing to configure",
    ),
    VllmOption(
        "cuda_graph_sizes",
        "without effect",
        "a mesh captures one decode step, of the whole batch; the CPU captures nothing",
    ),
    VllmOption(
        "max_seq_len_to_capture",
        "without effect",
        "a captured decode step serves every length; prefill is captured for the usual buckets",
    ),
    VllmOption(
        "tensor_parallel_size",
        "refused",
        "mesh and tt_data_parallel decide how many chips a lane has; set these",
    ),
    VllmOption(
        "swap_space",
        "refused",
        "preempted sequences are computed again, and never swapped; remove it",
    ),
    VllmOption(
        "quantization",
        "refused",
        "on a mesh mesh.optimizations decides, and the CPU computes unquantised weights; remove it",
    ),
)

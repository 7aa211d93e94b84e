"""Size of the KV cache: pure arithmetic, so that impossible configurations are refused early."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

from kv_transfer.layout import ROW_TOKENS
from replicas.config import DEFAULT_KV_BYTES
from replicas.errors import ConfigError
from replicas.generators.protocol import DEFAULT_TOKEN_BUDGET
from replicas.generators.simulated.profiles import engine_profile
from replicas.generators.simulated.tokens import KV_SPEC
from replicas.generators.ttnn.buckets import check_cache, check_lane, decode_table_width
from replicas.generators.ttnn.budget import lane_memory, native_token_budget, num_blocks
from replicas.generators.ttnn.profiles import profile
from replicas.kv_groups import KVGroup, checkpoint_tokens, layers_by_spec, max_concurrency
from replicas.tt.meshes import lane_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.config import EngineConfig, MeshConfig
    from replicas.generators.model_config import ModelConfig
    from replicas.kv_groups import KVSpec

_COMPUTE_DTYPES = frozenset({"float64", "float32", "bfloat16"})
"""Dtypes that an engine computes in."""


def resolve_dtype(config: EngineConfig, model: ModelConfig) -> str:
    """Return the engine's dtype; "auto" is the checkpoint's, but bfloat16 for float16 or none.

    On a mesh it is the KV cache's dtype. On a simulated mesh it is the dtype of the transferred
    bytes, independent of the checkpoint.
    """
    if config.simulated_mesh is not None:
        return "float32"
    if config.mesh is not None:
        return profile(config.mesh.optimizations, model).kv_dtype
    if config.dtype != "auto":
        return config.dtype
    return model.dtype if model.dtype in _COMPUTE_DTYPES else "bfloat16"


def kv_rope(config: EngineConfig) -> str:
    """Return the order of the elements of cached keys, as in `kv_transfer.layout.KVLayout.rope`.

    tt-metal's classes permute weights to Meta's order; all other generators keep Hugging Face's.
    """
    is_theirs = config.mesh is not None and not config.uses_native_generator
    return "meta" if is_theirs else "hf"


def kv_specs(config: EngineConfig, model: ModelConfig) -> tuple[KVSpec, ...]:
    """Return the KV of each layer; on a simulated mesh, as stored here.

    Layers with a window keep the KV of that window only on ttserve's own classes for the CPU.
    Elsewhere one block table serves all layers. Connectors other than "p2p" move the KV of one
    group: with them layers with a window beside layers without one keep the KV of all tokens, too.
    So they do with a connector of another package.
    """
    if config.simulated_mesh is not None:
        return (KV_SPEC,)
    specs = model.kv_specs(resolve_dtype(config, model))
    if model.delta is not None:
        specs = _with_states(config, specs)
    window = model.sliding_window
    has_window = [model.has_window(layer) for layer in range(len(specs))]
    connector = config.kv_connector
    has_both = any(has_window) and not all(has_window)
    moves_all = connector is not None and (":" in connector or (connector != "p2p" and has_both))
    needs_all = config.mesh is not None or config.generator is not None or moves_all
    if window is None or needs_all:
        return specs
    # The groups of two engines must agree, whatever lengths they serve.
    is_agreed = has_both and connector is not None
    if window >= _asked_length(config, model) and not is_agreed:
        return specs
    return tuple(
        msgspec.structs.replace(spec, kind="window", window=window) if has else spec
        for has, spec in zip(has_window, specs, strict=True)
    )


def _with_states(config: EngineConfig, specs: tuple[KVSpec, ...]) -> tuple[KVSpec, ...]:
    """Return the KV of a model with recurrent layers.

    Classes of other packages keep states by themselves, and are given KV for each layer.

    Raises:
        ConfigError: A setting is on that does not work with states; names it.
    """
    if config.mesh is not None or config.generator is not None:
        kept = next((spec for spec in specs if spec.kind != "state"), specs[0])
        return (kept,) * len(specs)
    for name in ("kv_connector", "speculative_config"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"{name} does not work with the recurrent layers of {config.model}: it cannot "
                f"{'move' if name == 'kv_connector' else 'take back'} their states; remove {name}"
            )
    return specs


def _state_blocks(config: EngineConfig, specs: Sequence[KVSpec], num_blocks: int) -> int:
    """Return the blocks of states of a lane: null block, one for each slot, and checkpoints.

    Of these there is at least one for each slot, for the end of its prompt.

    Args:
        config: The engine's configuration.
        specs: KV of each layer.
        num_blocks: Blocks of the layers that keep all tokens; their prefixes have the checkpoints.
    """
    slots, size = config.slots_per_group, config.block_size
    if config.enable_prefix_caching is False:
        return 1 + slots
    every = checkpoint_tokens(layers_by_spec(specs), size)
    return 1 + slots + max(slots, num_blocks * size // every)


def _asked_length(config: EngineConfig, model: ModelConfig) -> int:
    return config.max_model_len or model.max_position_embeddings


def kv_per_token(config: EngineConfig, model: ModelConfig) -> str:
    """Return a line about the KV of a token: its bytes, layers and dtype; and of a sequence.

    Layers with a window are named apart, as their KV is freed behind it, and recurrent ones, whose
    state has one size. On a simulated mesh the bytes are those of the model that it simulates. How
    many of the longest sequences fit is left out where only an engine's start can tell.
    """
    room, groups = "", _known_groups(config, model)
    if groups:
        longest = longest_sequence(config, model)
        count = max_concurrency(groups, longest, config.tt_data_parallel)
        room = f"; room for {count:.2f} sequences of {longest:,} tokens"
    if config.simulated_mesh is not None:
        simulated = engine_profile(config, config.simulated_mesh).model
        size = simulated.kv_bytes_per_token
        return f"{size:,} bytes of KV per token of the simulated model{room}"
    parts = []
    for spec, layers in layers_by_spec(kv_specs(config, model)):
        size = len(layers) * spec.bytes_per_block(ROW_TOKENS) // ROW_TOKENS
        if spec.kind == "state":
            size = len(layers) * spec.bytes_per_block(1)
            parts.append(
                f"{size:,} bytes of state per sequence in {len(layers)} layers of {spec.dtype}"
            )
            continue
        tokens = "token" if spec.window is None else f"token of the last {spec.window:,}"
        parts.append(f"{size:,} bytes of KV per {tokens} in {len(layers)} layers of {spec.dtype}")
    return ", ".join(parts) + room


def kv_groups(
    config: EngineConfig, model: ModelConfig, token_budget: int | None = None
) -> tuple[KVGroup, ...]:
    """Return the KV groups of a model, each with the blocks of one lane.

    Groups that keep all tokens come first, and have `num_blocks_per_lane`. Beside them a group with
    a window has as many, or those that all slots use at most if these are fewer.

    Args:
        config: The engine's configuration.
        model: The served model's config.json.
        token_budget: See `num_blocks_per_lane`.

    Raises:
        ConfigError: See `num_blocks_per_lane`.
    """
    num_blocks = num_blocks_per_lane(config, model, token_budget)
    specs = kv_specs(config, model)
    order = {"full": 0, "latent": 0, "cross": 0, "window": 1, "state": 2}
    most = _window_limit(config, model)
    return tuple(
        KVGroup(
            layers=layers,
            spec=spec,
            block_size=config.block_size,
            num_blocks=_state_blocks(config, specs, num_blocks)
            if spec.kind == "state"
            else min(num_blocks, most if spec.window is not None else num_blocks),
            max_blocks=_max_blocks(config, model, spec),
        )
        for spec, layers in sorted(layers_by_spec(specs), key=lambda found: order[found[0].kind])
    )


def _max_blocks(config: EngineConfig, model: ModelConfig, spec: KVSpec) -> int | None:
    """Return the most blocks of a window that one sequence holds: with the largest chunk's.

    With a connector it may hold those of all tokens: KV that is on its way has a place for each, so
    that the prompt can be computed if it does not come. Of states it needs one.
    """
    if spec.kind == "state":
        return 1
    if spec.window is None or config.kv_connector is not None:
        return None
    return 1 + -(-(spec.window + _longest_pass(config, model)) // config.block_size)


def _window_limit(config: EngineConfig, model: ModelConfig) -> int:
    """Return the blocks of a lane that a group with a window can use, beside one without.

    These are the null block, the window and the next tokens of each slot, and twice the tokens of a
    step: sequences get the blocks of their next chunk before it is known how large that is. The
    prefix cache has as many again as the slots, so that it outlives a change of all of them.
    """
    specs = kv_specs(config, model)
    windows = [spec.window for spec in specs if spec.window is not None]
    if len(windows) in (0, len(specs)) or config.kv_connector is not None:
        # With a connector a sequence has a block for each of its tokens, see `_max_blocks`.
        return sys.maxsize
    size = config.block_size
    of_slots = config.slots_per_group * (2 + -(-max(windows) // size))
    if config.enable_prefix_caching is not False:
        of_slots *= 2
    return 1 + of_slots + 2 * -(-_longest_pass(config, model) // size)


def _longest_pass(config: EngineConfig, model: ModelConfig) -> int:
    """Return the most tokens of a step of a class that keeps windows, which divides prompts."""
    if config.enable_chunked_prefill is None:
        config = msgspec.structs.replace(config, enable_chunked_prefill=True)
    return config.token_budget(_asked_length(config, model))


def num_blocks_per_lane(
    config: EngineConfig, model: ModelConfig, token_budget: int | None = None
) -> int:
    """Return KV blocks of each lane, null block included: as configured, or as memory allows.

    They are those of each group that keeps all tokens; see `kv_groups` for others. Memory is the
    configured number of bytes, or a mesh's DRAM beside the weights.

    Args:
        config: The engine's configuration.
        model: The served model's config.json.
        token_budget: On a mesh, the tokens per lane that a generator class declares; None for
            ttserve's own classes and for classes that declare none.

    Raises:
        ConfigError: Memory holds no usable block, or not the configured number beside one of
            ttserve's models on a mesh, or the mesh is impossible; gives the numbers.
    """
    if config.simulated_mesh is not None:
        simulated = engine_profile(config, config.simulated_mesh)
        return config.num_blocks or 1 + simulated.max_tokens_per_lane // config.block_size
    if config.mesh is not None:
        return _num_blocks_on_mesh(config, config.mesh, model, token_budget)
    if config.num_blocks is not None:
        return config.num_blocks
    specs = kv_specs(config, model)
    size = sum(s.bytes_per_block(config.block_size) for s in specs if s.kind != "state")
    kv_bytes = config.kv_cache_memory_bytes or DEFAULT_KV_BYTES
    lane_bytes = kv_bytes // config.tt_data_parallel
    state = sum(s.bytes_per_block(1) for s in specs if s.kind == "state")
    if state and config.enable_prefix_caching is not False:
        # With as many checkpoints as there are slots, or as go with the KV, whichever are more.
        every = checkpoint_tokens(layers_by_spec(specs), config.block_size)
        with_checkpoints = size - -state * config.block_size // every
        fits = (lane_bytes - state * (1 + config.slots_per_group)) // with_checkpoints
        lane_bytes = min(lane_bytes - state * _state_blocks(config, specs, 0), fits * size)
    elif state:
        lane_bytes -= state * _state_blocks(config, specs, 0)
    count = lane_bytes // size
    most = _window_limit(config, model)
    if count > most:
        # What windows cannot use is for the others.
        windows = [spec for spec in specs if spec.window is not None]
        window_size = sum(spec.bytes_per_block(config.block_size) for spec in windows)
        count = (lane_bytes - most * window_size) // (size - window_size)
    if count < 2:
        raise ConfigError(
            f"kv_cache_memory_bytes {kv_bytes} is too small for 2 KV blocks in "
            f"each of {config.tt_data_parallel} lanes: a block takes {size} bytes"
        )
    return count


def _num_blocks_on_mesh(
    config: EngineConfig, mesh: MeshConfig, model: ModelConfig, token_budget: int | None
) -> int:
    """Return KV blocks of each lane of a mesh; see `num_blocks_per_lane`.

    The null block is covered by the rounding up of each slot's tokens to whole blocks.
    """
    if config.uses_native_generator:
        _, tp = lane_shape(mesh.spec, config.tt_data_parallel)
        check_lane(model, tp, max_rows=config.slots_per_group, block_size=config.block_size)
        # Called even if num_blocks is given, as it also checks that the weights fit.
        token_budget = native_token_budget(
            model, mesh.spec, mesh, config.tt_data_parallel,
            block_size=config.block_size, num_slots=config.slots_per_group,
            max_seq_len=config.max_model_len,
        )  # fmt: skip
        if config.num_blocks is not None:
            _check_num_blocks(config, config.num_blocks, mesh, model)
    elif token_budget is None:
        token_budget = DEFAULT_TOKEN_BUDGET
    return config.num_blocks or num_blocks(token_budget, config.block_size, config.slots_per_group)


def _check_num_blocks(
    config: EngineConfig, given: int, mesh: MeshConfig, model: ModelConfig
) -> None:
    """Refuse more blocks than memory holds. More than the rows can fill may cache prefixes."""
    fits = lane_memory(
        model, mesh.spec, mesh, config.tt_data_parallel,
        block_size=config.block_size, max_seq_len=config.max_model_len,
    ).num_blocks  # fmt: skip
    if given > fits:
        raise ConfigError(
            f"num_blocks {given} does not fit mesh {mesh.name}: beside the weights a lane holds at "
            f"most {fits} blocks of {config.block_size} tokens; lower num_blocks or leave it out"
        )


def position_limit(config: EngineConfig, model: ModelConfig) -> int:
    """Return the position limit of the served model, or of the model that a mesh simulates.

    Raises:
        ConfigError: The simulated mesh is impossible; gives the numbers.
    """
    if config.simulated_mesh is not None:
        return engine_profile(config, config.simulated_mesh).model.max_context
    return model.max_position_embeddings


def longest_sequence(config: EngineConfig, model: ModelConfig) -> int:
    """Return the longest sequence of an engine, from its and its model's configuration alone.

    A plug-in class declares the capacity of a lane only once it is loaded, and an engine with
    `gpu_memory_utilization` measures it; until then the requested length is assumed to fit.

    Raises:
        ConfigError: As in `derive_max_model_len` and `num_blocks_per_lane`; or one of ttserve's
            models on a mesh has fewer blocks than a page table has entries, which may be a few more
            than the sequence needs.
    """
    groups = _known_groups(config, model)
    longest = derive_max_model_len(config, position_limit(config, model), groups)
    if config.mesh is not None and config.uses_native_generator:
        for group in groups:
            check_cache(group.num_blocks, decode_table_width(longest, group.block_size))
    return longest


def _known_groups(config: EngineConfig, model: ModelConfig) -> tuple[KVGroup, ...]:
    """Return the KV groups; empty if their blocks are known only at an engine's start."""
    is_declared_later = (
        config.mesh is not None and not config.uses_native_generator and not config.num_blocks
    )
    if is_declared_later or config.gpu_memory_utilization is not None:
        return ()
    return kv_groups(config, model)


def derive_max_model_len(config: EngineConfig, model_limit: int, groups: Sequence[KVGroup]) -> int:
    """Return the longest sequence that the model and one lane's KV cache allow.

    Args:
        config: The engine's configuration.
        model_limit: Position limit of the model.
        groups: The model's KV groups; empty while their number of blocks is unknown.

    Raises:
        ConfigError: The requested length exceeds the limit of the model or the KV cache; gives both
            numbers.
    """
    asked = config.max_model_len if config.max_model_len is not None else model_limit
    if asked > model_limit:
        raise ConfigError(
            f"max_model_len {asked} exceeds the model's limit of {model_limit} positions; "
            "lower max_model_len"
        )
    for group in groups:
        _check_room(config, asked, group)
    budget = config.token_budget(asked)
    if config.enable_chunked_prefill is False and budget < asked:
        raise ConfigError(
            f"max_num_batched_tokens {budget} is less than max_model_len {asked} and chunked "
            "prefill is off: the longest prompt could never run; remove max_num_batched_tokens"
        )
    return asked


def _check_room(config: EngineConfig, asked: int, group: KVGroup) -> None:
    num_blocks = group.num_usable_blocks
    if group.num_blocks_for(asked) > num_blocks:
        room = group.num_tokens_in(num_blocks)
        raise ConfigError(
            f"max_model_len {asked} does not fit the KV cache, which holds {room} tokens per lane "
            f"({num_blocks} blocks of {group.block_size}); {_more_memory(config)} or lower "
            "max_model_len"
        )


def _more_memory(config: EngineConfig) -> str:
    """Return advice on how to give a lane a larger KV cache."""
    if config.simulated_mesh is not None:
        return f"give a lane more of {config.simulated_mesh.board}'s chips"
    if config.mesh is None:
        share = config.gpu_memory_utilization
        return f"raise {'kv_cache_memory_bytes' if share is None else 'gpu_memory_utilization'}"
    ways = []
    if config.num_blocks is not None:
        ways.append("raise num_blocks or leave it out")
    if config.tt_data_parallel > 1:
        ways.append(f"use fewer lanes than tt_data_parallel {config.tt_data_parallel}")
    if config.mesh.optimizations != "performance":
        ways.append('set mesh.optimizations to "performance"')
    return ", ".join([*ways, f"use a larger mesh than {config.mesh.name}"])

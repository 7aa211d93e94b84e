"""Puts a generator class written for vllm-tt-plugin behind our `Generator` protocol.

`adapt` makes a class of ours out of one of theirs; its instances call the wrapped model with the
keywords, shapes and dtypes that the plugin uses, and with only those that the class takes
(`signatures`). Our slots are rows that stay where they are, so a row of the decode batch is the
device's state slot.
Source of the calls: vllm-tt-plugin ``model_runner.py``, ``async_decode.py``, ``loader.py``.
"""

# The interface is fixed by another project, so its methods keep all of their arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from replicas.errors import ConfigError, DeviceError
from replicas.generators.model_config import ModelConfig
from replicas.generators.plugin.capabilities import adapted_capabilities, narrowed_capabilities
from replicas.generators.plugin.kv_layers import dtype_name, kv_cache_spec, layer_caches
from replicas.generators.plugin.outputs import host_output, is_on_host
from replicas.generators.plugin.sampling import to_tt_sampling_params, warmup_sampling_params
from replicas.generators.plugin.shim import vllm_stand_in
from replicas.generators.plugin.signatures import COMMANDS, read_signature

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replicas.generators.plugin.sampling import TTSamplingParams
    from replicas.generators.plugin.signatures import ClassSignature, Parameters
    from replicas.generators.protocol import (
        DeviceSamplingParams,
        ForwardOutput,
        KVCache,
        KVCacheShape,
        ModelCapabilities,
    )

_LOG = logging.getLogger(__name__)

_TOKEN_HISTORY = ("prompt_tokens", "output_tokens")
_IMAGES = ("images", "pixel_values", "image_grid_thw")


@dataclass(frozen=True, slots=True, eq=False)
class DecodeHandle:
    """A decode whose output is still on the device, or on its way.

    Attributes:
        output: What the class answered.
        events: What must have happened before `output` may be looked at.
        is_tokens: Sampled on the device.
        wants_log_probs: With log-probabilities.
    """

    output: object
    events: tuple[object, ...]
    is_tokens: bool
    wants_log_probs: bool


class AdaptedGenerator:
    """A model of a plugin class; see `adapt`, which makes the subclasses that can be used.

    Args:
        model: Instance of the plugin's class.
        hf_config: The model's transformers configuration.
        num_chips: Chips of the mesh.
        num_lanes: DP groups.
        max_batch_size: Rows of the decode batch, all lanes together.

    Attributes:
        kv_rope: Layout of the rotated pairs in the cache's keys, for KV transfer: tt_transformers
            permutes the weights to Meta's.
    """

    model_capabilities: ClassVar[ModelCapabilities]
    decode_input_update_contract: ClassVar[int] = 1
    plugin_class: ClassVar[Any]
    signature: ClassVar[ClassSignature]
    notes: ClassVar[tuple[str, ...]]
    kv_rope: ClassVar[str] = "meta"

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - of a class that is not known here
        hf_config: Any,  # noqa: ANN401 - a transformers configuration: no base worth naming
        num_chips: int,
        num_lanes: int,
        max_batch_size: int,
    ) -> None:
        text_config = getattr(hf_config, "text_config", hf_config)
        self._model = model
        self._hf_config = hf_config
        self._vocab_size = int(text_config.vocab_size)
        self._num_chips_per_lane = num_chips // num_lanes
        self._max_batch_size = max_batch_size
        self._kv_dtype = "bfloat8_b"
        self._num_layer_tables = 0
        # Of the last decode that drew; one that does not reload them does not look at them.
        self._decode_params: TTSamplingParams | None = None
        # Of models with several rope axes: what prefill says of each slot, and whether a decode has
        # told the model since.
        self._has_rope_deltas = _has_rope_deltas(text_config)
        self._rope_deltas: list[int] = [0] * max_batch_size
        self._rope_deltas_changed = True

    # --- set up ----------------------------------------------------------------------------------

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: object,
        mesh_device: Any,  # noqa: ANN401 - a mesh of ttnn, bare or wrapped
        max_batch_size: int,
        *,
        max_seq_len: int,
        tt_data_parallel: int = 1,
        optimizations: str | None = None,
    ) -> AdaptedGenerator:
        """Load the model; see `GeneratorBase.initialize_vllm_model`.

        Args:
            hf_config: Ours, whose folder is then read by transformers, or a transformers one.
            mesh_device: A mesh, or an object with one as its ``device``: the class is given the
                mesh itself, whole, and makes its lanes' submeshes.
            max_batch_size: Rows of all lanes together.
            max_seq_len: Longest sequence in tokens.
            tt_data_parallel: Lanes.
            optimizations: "performance" is what every class does by itself, and is not passed on:
                some accept no other value than None.

        Returns:
            An instance of this class; of a subclass whose ``model_capabilities`` are fewer, if the
            loaded model's own are.

        Raises:
            ConfigError: The class refuses these numbers; says its reason. Or what the loaded model
                says of itself is no dictionary.
        """
        for note in cls.notes:
            _LOG.info("generator %s: %s", cls.signature.class_name, note)
        config = _transformers_config(hf_config)
        device = getattr(mesh_device, "device", mesh_device)
        count = getattr(device, "get_num_devices", None)
        # Without a mesh, in tests, a lane is as good as a chip.
        num_chips = int(count()) if callable(count) else tt_data_parallel
        if num_chips % tt_data_parallel:
            raise ConfigError(
                f"tt_data_parallel {tt_data_parallel} does not divide the {num_chips} chips of the "
                "mesh"
            )
        settings = {
            "max_seq_len": max_seq_len,
            "tt_data_parallel": tt_data_parallel,
            "optimizations": None if optimizations == "performance" else optimizations,
        }
        try:
            with vllm_stand_in():
                model = cls.plugin_class.initialize_vllm_model(
                    config, device, max_batch_size, **_taken(cls.signature.initialize, settings)
                )
        except (AssertionError, NotImplementedError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise ConfigError(
                f"generator {cls.signature.class_name} refuses max_batch_size {max_batch_size}, "
                f"max_seq_len {max_seq_len}, tt_data_parallel {tt_data_parallel}: {reason}"
            ) from error
        return cls._of(model)(model, config, num_chips, tt_data_parallel, max_batch_size)

    @classmethod
    def _of(cls, model: object) -> type[AdaptedGenerator]:
        """This class, or one that can only what `model` can."""
        if getattr(model, "model_capabilities", None) is getattr(
            cls.plugin_class, "model_capabilities", None
        ):
            return cls
        capabilities, notes = narrowed_capabilities(cls.model_capabilities, model, cls.signature)
        for note in notes:
            _LOG.info("generator %s: %s", cls.signature.class_name, note)
        return type(cls.__name__, (cls,), {"model_capabilities": capabilities})

    def allocate_kv_cache(
        self, kv_cache_shape: KVCacheShape, dtype: torch.dtype, num_layers: int
    ) -> KVCache:
        """Allocate; see `GeneratorBase.allocate_kv_cache`. Heads are those of the whole model.

        The class is given the heads of one chip, and each layer by itself where it asks for that.

        Raises:
            ConfigError: The class needs another block size, or layers that differ; both numbers.
        """
        block_size = kv_cache_shape[2]
        required = self.model_capabilities.get("required_block_size") or block_size
        if required != block_size:
            raise ConfigError(
                f"generator {self.signature.class_name} needs block_size {required}, and "
                f"block_size is {block_size}"
            )
        specs = kv_cache_spec(
            self.plugin_class, self.signature, self._hf_config, kv_cache_shape, dtype
        )
        caches = layer_caches(
            self.signature,
            specs,
            shape=kv_cache_shape,
            dtype=dtype,
            num_layers=num_layers,
            num_chips=self._num_chips_per_lane,
        )
        layers = caches.layers
        self._num_layer_tables = len(layers) if caches.has_windows else 0
        with vllm_stand_in():
            if self.signature.allocates_per_layer:
                cache = self._model.allocate_kv_cache_per_layer(layers)
            else:
                cache = self._model.allocate_kv_cache(layers[0][0], dtype, len(layers))
        self._kv_dtype = dtype_name(cache) or self._kv_dtype
        return cache

    @property
    def kv_dtype(self) -> str:
        """Element type of the cache, which the class decides: ``bfloat8_b`` unless it can be seen.

        Known once the cache is allocated.
        """
        return self._kv_dtype

    def warmup_model_prefill(
        self,
        *,
        kv_cache: KVCache,
        enable_trace: bool,
        can_sample_on_device: bool = False,
        **kwargs: object,
    ) -> None:
        """Warm up; see `GeneratorBase.warmup_model_prefill`.

        The classes remember that they have warmed up, and would do nothing the second time.
        """
        if enable_trace and hasattr(self._model, "already_warmed_up_prefill"):
            self._model.already_warmed_up_prefill = False
        parameters = self.signature.warmup_prefill
        arguments = self._warmup_arguments(parameters, can_sample_on_device)
        self._model.warmup_model_prefill(kv_cache=kv_cache, enable_trace=enable_trace, **arguments)

    def warmup_model_decode(
        self,
        *,
        kv_cache: KVCache,
        enable_trace: bool,
        max_batch_size: int,
        num_blocks: int,
        can_sample_on_device: bool = False,
        **kwargs: object,
    ) -> None:
        """Warm up; see `GeneratorBase.warmup_model_decode`.

        A class without a warm-up for decode decodes a batch of padding instead.
        """
        parameters = self.signature.warmup_decode
        if parameters is None:
            self.decode_forward(
                tokens=torch.zeros((max_batch_size, 1), dtype=torch.int32),
                page_table=torch.zeros((max_batch_size, num_blocks), dtype=torch.int32),
                kv_cache=kv_cache,
                start_pos=torch.full((max_batch_size,), -1, dtype=torch.int32),
                enable_trace=enable_trace,
            )
            return
        arguments = self._warmup_arguments(parameters, can_sample_on_device)
        sizes = {"max_batch_size": max_batch_size, "num_blocks": num_blocks}
        self._model.warmup_model_decode(
            kv_cache=kv_cache, enable_trace=enable_trace, **_taken(parameters, sizes), **arguments
        )

    # --- forward ---------------------------------------------------------------------------------

    def prefill_forward(
        self,
        *,
        tokens: torch.Tensor,
        page_table: torch.Tensor,
        kv_cache: KVCache,
        enable_trace: bool,
        prompt_lens: torch.Tensor,
        start_pos: torch.Tensor,
        empty_slots: Sequence[int],
        sampling_params: DeviceSamplingParams | None = None,
        page_tables_per_layer: Sequence[torch.Tensor] | None = None,
        **kwargs: object,
    ) -> ForwardOutput:
        """Prefill; see `Generator.prefill_forward`.

        Raises:
            ConfigError: The class takes no ``start_pos``, and one is not 0; or it has no use for
                ``sampling_params`` or for the images that were given.
            DeviceError: The answer is of no known form.
        """
        parameters, num_rows = self.signature.prefill, len(tokens)
        arguments: dict[str, Any] = {
            "tokens": tokens,
            "page_table": page_table,
            "kv_cache": kv_cache,
            **_taken(parameters, {"enable_trace": enable_trace, "empty_slots": list(empty_slots)}),
        }
        if parameters.takes("start_pos"):
            # Arrays of numpy, as the plugin makes them; before `start_pos` there was a tensor.
            arguments |= {"prompt_lens": prompt_lens.numpy(), "start_pos": start_pos.numpy()}
        elif bool((start_pos != 0).any()):
            raise ConfigError(
                f"generator {self.signature.class_name} takes no start_pos and cannot go on after "
                f"{int(start_pos.max())} tokens: no prefix caching, chunks, or KV of others"
            )
        else:
            arguments["prompt_lens"] = prompt_lens
        arguments |= self._layer_tables(page_table, page_tables_per_layer, parameters)
        arguments |= self._images(kwargs, parameters, num_rows)
        params = None
        if sampling_params is not None:
            self._require(parameters, "sampling_params", "set sample_on_device: decode_only")
            params = to_tt_sampling_params(sampling_params, num_rows)
            arguments["sampling_params"] = params
        output = self._model.prefill_forward(**arguments)
        if self._has_rope_deltas:
            output, deltas = output
            for slot, delta in zip(empty_slots, deltas, strict=True):
                self._rope_deltas[slot] = int(delta)
            self._rope_deltas_changed = True
        return self._host_output(output, num_rows, params)

    def decode_forward(
        self,
        *,
        tokens: torch.Tensor,
        page_table: torch.Tensor,
        kv_cache: KVCache,
        start_pos: torch.Tensor,
        enable_trace: bool,
        read_from_device: bool = True,
        sampling_params: DeviceSamplingParams | None = None,
        page_tables_per_layer: Sequence[torch.Tensor] | None = None,
        reload_inputs: bool = True,
        reload_page_table: bool = False,
        reload_sampling_params: bool = False,
        reset_sampling_state: bool = False,
        slot_remap: torch.Tensor | None = None,
        **kwargs: object,
    ) -> ForwardOutput:
        """Decode; see `TextDecoder.decode_forward`.

        A class of contract 1 gets the four commands as they are. One of the legacy contract gets
        ``reset_batch`` with sampling on the device: the batch is not the one that it knows.

        Returns:
            As the protocol says; without `read_from_device` a `DecodeHandle`.

        Raises:
            TypeError: The retired ``reset_batch`` was passed.
            ConfigError: The class cannot follow a row to another slot.
        """
        if "reset_batch" in kwargs:
            raise TypeError("reset_batch is retired: give the four commands of decode contract 1")
        commands = dict(
            zip(
                COMMANDS,
                (reload_inputs, reload_page_table, reload_sampling_params, reset_sampling_state),
                strict=True,
            )
        )
        assert not (reload_inputs and reload_page_table), commands
        assert reload_inputs or not reset_sampling_state, commands
        may_continue = self.model_capabilities.get("supports_async_decode")
        assert reload_inputs or may_continue, f"{self.signature.class_name} must reload every step"
        parameters = self.signature.decode
        if not self.signature.contract:
            # It guesses from the table of its last call, which the engine writes into.
            page_table = page_table.clone()
        arguments: dict[str, Any] = {
            "tokens": tokens,
            "page_table": page_table,
            "kv_cache": kv_cache,
            "start_pos": start_pos,
            **self._layer_tables(page_table, page_tables_per_layer, parameters),
        }
        params = None
        if sampling_params is not None:
            # A class may change what it is given where it reads it: it never reads the same twice.
            params = None if reload_sampling_params else self._decode_params
            if params is None or not self.signature.contract:
                params = to_tt_sampling_params(sampling_params, len(tokens))
                self._decode_params = params
            arguments["sampling_params"] = params
            if kwargs:
                arguments |= _taken(
                    parameters, {k: v for k, v in kwargs.items() if k in _TOKEN_HISTORY}
                )
        if self.signature.contract:
            arguments |= commands
        elif params is not None:
            arguments |= _taken(parameters, {"reset_batch": reset_sampling_state})
        if slot_remap is not None:
            self._require(parameters, "slot_remap", "it is not for engines that move rows")
            arguments["slot_remap"] = slot_remap
        arguments |= self._rope_delta_arguments(parameters)
        reading = {"enable_trace": enable_trace, "read_from_device": not self.signature.splits_read}
        output = self._model.decode_forward(**arguments, **_taken(parameters, reading))
        handle = DecodeHandle(
            output, (), params is not None, params is not None and params.wants_log_probs
        )
        if not read_from_device:
            return handle
        return self.process_decode_output_host(self.read_decode_output(handle)[0])

    def read_decode_output(
        self, tt_out: ForwardOutput, async_read: bool = True
    ) -> tuple[ForwardOutput, Sequence[object]]:
        """Start copying to the host; see `GeneratorBase.read_decode_output`.

        Returns:
            (another `DecodeHandle`, no events): `process_decode_output_host` waits for them.
        """
        handle = cast("DecodeHandle", tt_out)
        if is_on_host(handle.output):
            return handle, ()
        if not self.signature.splits_read:
            raise DeviceError(
                f"generator {self.signature.class_name} left its decode output on the device, and "
                "lacks read_decode_output(tt_out, async_read) or "
                "process_decode_output_host(tt_out, is_tokens)"
            )
        answer = self._model.read_decode_output(handle.output, async_read=True)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise DeviceError(
                f"generator {self.signature.class_name}: read_decode_output gave "
                f"{type(answer).__name__}, not a pair of output and events"
            )
        output, events = answer
        copying = DecodeHandle(output, tuple(events), handle.is_tokens, handle.wants_log_probs)
        if not async_read:
            _wait_for(copying.events)
        return copying, ()

    def process_decode_output_host(
        self, tt_out: ForwardOutput, is_tokens: bool = False
    ) -> ForwardOutput:
        """Wait for the copy and shape it; see `GeneratorBase.process_decode_output_host`.

        Args:
            tt_out: First element of what `read_decode_output` returned.
            is_tokens: Ignored: the handle knows.

        Raises:
            DeviceError: The answer is of no known form.
        """
        handle = cast("DecodeHandle", tt_out)
        _wait_for(handle.events)
        output = handle.output
        if not is_on_host(output):
            output = self._model.process_decode_output_host(output, is_tokens=handle.is_tokens)
        return host_output(
            output,
            self._max_batch_size,
            self._vocab_size,
            is_tokens=handle.is_tokens,
            wants_log_probs=handle.wants_log_probs,
        )

    def release_request(self, slot: int) -> None:
        """Forget what the model keeps for a slot whose sequence has ended or was preempted."""
        self._rope_deltas[slot] = 0
        if "release_request" in self.signature.slot_hooks:
            self._model.release_request(slot)

    def close(self) -> None:
        """Let the model release what it keeps for good; call before the mesh is closed."""
        if "release_persistent_capture" in self.signature.slot_hooks:
            self._model.release_persistent_capture()

    # --- arguments -------------------------------------------------------------------------------

    def _warmup_arguments(
        self, parameters: Parameters, can_sample_on_device: bool
    ) -> dict[str, Any]:
        """What warm-up took over the years to say how tokens will be sampled."""
        arguments = _taken(parameters, {"can_sample_on_device": can_sample_on_device})
        if "sampling_params" in parameters.names:
            arguments["sampling_params"] = warmup_sampling_params(
                self._max_batch_size, can_sample_on_device=can_sample_on_device
            )
        if "non_greedy_decoding_on_device" in parameters.required:
            arguments["non_greedy_decoding_on_device"] = can_sample_on_device
        if "greedy_only" in parameters.required:
            arguments["greedy_only"] = False
        return arguments

    def _layer_tables(
        self,
        page_table: torch.Tensor,
        page_tables_per_layer: Sequence[torch.Tensor] | None,
        parameters: Parameters,
    ) -> dict[str, Any]:
        tables = page_tables_per_layer
        if tables is None and self._num_layer_tables:
            tables = [page_table] * self._num_layer_tables
        if tables is None:
            return {}
        self._require(parameters, "page_tables_per_layer", "its layers share one page table")
        return {"page_tables_per_layer": list(tables)}

    def _images(
        self, given: Mapping[str, object], parameters: Parameters, num_rows: int
    ) -> dict[str, Any]:
        images = {name: given[name] for name in _IMAGES if given.get(name) is not None}
        for name in images:
            self._require(parameters, name, "it is for text only")
        missing = parameters.required.intersection(_IMAGES) - set(images)
        return {**images, **{name: [None] * num_rows for name in missing}}

    def _rope_delta_arguments(self, parameters: Parameters) -> dict[str, Any]:
        if not self._has_rope_deltas:
            return {}
        deltas = list(self._rope_deltas) if self._rope_deltas_changed else None
        self._rope_deltas_changed = False
        return _taken(parameters, {"rope_deltas_all_users": deltas})

    def _require(self, parameters: Parameters, name: str, advice: str) -> None:
        if not parameters.takes(name):
            raise ConfigError(f"generator {self.signature.class_name} takes no {name}: {advice}")

    def _host_output(
        self, output: object, num_rows: int, params: TTSamplingParams | None
    ) -> ForwardOutput:
        return host_output(
            output,
            num_rows,
            self._vocab_size,
            is_tokens=params is not None,
            wants_log_probs=params is not None and params.wants_log_probs,
        )


def adapt(plugin_class: type) -> type[AdaptedGenerator]:
    """Make a generator class of ours out of one that was written for the plugin.

    Args:
        plugin_class: A class with the plugin's methods, of any generation of the interface.

    Returns:
        A subclass of `AdaptedGenerator` with that class's name and capabilities. It has
        ``get_max_tokens_all_users`` only if the class has.

    Raises:
        ConfigError: The class lacks something, or needs what an engine for text does not have.
    """
    signature = read_signature(plugin_class)
    capabilities, notes = adapted_capabilities(plugin_class, signature)
    contents: dict[str, Any] = {
        "__doc__": f"{signature.class_name} behind our protocol.",
        "__module__": plugin_class.__module__,
        "model_capabilities": capabilities,
        "plugin_class": plugin_class,
        "signature": signature,
        "notes": notes,
    }
    if signature.token_budget is not None:
        contents["get_max_tokens_all_users"] = classmethod(_max_tokens_all_users)
    return type(plugin_class.__name__, (AdaptedGenerator,), contents)


def _max_tokens_all_users(
    cls: type[AdaptedGenerator],
    *,
    model_name: str,
    num_devices: int,
    tt_data_parallel: int,
    max_model_len: int,
    max_num_seqs: int,
) -> int:
    """See `SupportsTokenBudget.get_max_tokens_all_users`."""
    sizes = {
        "model_name": model_name,
        "num_devices": num_devices,
        "tt_data_parallel": tt_data_parallel,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
    }
    assert cls.signature.token_budget is not None
    try:
        budget = cls.plugin_class.get_max_tokens_all_users(
            **_taken(cls.signature.token_budget, sizes)
        )
    except (AssertionError, ValueError) as error:
        raise ConfigError(
            f"generator {cls.signature.class_name} has no KV budget for {model_name} on "
            f"{num_devices} chips with max_model_len {max_model_len} and {max_num_seqs} slots: "
            f"{error}"
        ) from error
    return int(budget)


def _transformers_config(hf_config: object) -> Any:  # noqa: ANN401 - no base worth naming
    """The configuration that the classes expect: transformers', with the folder as its name."""
    if not isinstance(hf_config, ModelConfig):
        return hf_config
    from transformers import AutoConfig  # takes seconds; only these need it

    try:
        return AutoConfig.from_pretrained(hf_config.name_or_path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"transformers cannot read the configuration of {hf_config.name_or_path}: {error}"
        ) from error


def _has_rope_deltas(text_config: object) -> bool:
    """Whether positions have several axes, so that prefill also returns an offset per row."""
    for name in ("rope_parameters", "rope_scaling"):
        if "mrope_section" in (getattr(text_config, name, None) or {}):
            return True
    return False


def _taken(parameters: Parameters, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if parameters.takes(name)}


def _wait_for(events: Sequence[object]) -> None:
    """Wait on the device: the class that made the events has imported ttnn, this module never."""
    if events:
        ttnn: Any = sys.modules["ttnn"]
        for event in events:
            ttnn.event_synchronize(event)

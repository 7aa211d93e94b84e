"""Forward calls of a loaded plug-in model behind our `Generator` protocol.

Keywords, shapes and dtypes are those of the plug-in, reduced to those that the class accepts
(`signatures`). Our slots are rows that never move, so a row of the decode batch is the device's
state slot. Source of the calls: vllm-tt-plugin ``model_runner.py``, ``async_decode.py``.
"""

# The interface is fixed by another project, so its methods keep all of their arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from replicas.errors import ConfigError, DeviceError
from replicas.generators.plugin.arguments import (
    image_arguments,
    layer_tables,
    padding_rows,
    prefill_row,
    require,
    taken,
    warmup_arguments,
)
from replicas.generators.plugin.limits import check_decode_widths, decode_widths
from replicas.generators.plugin.loaded import PluginModel
from replicas.generators.plugin.outputs import host_output, is_on_host, joined, padded
from replicas.generators.plugin.sampling import to_tt_sampling_params
from replicas.generators.plugin.signatures import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replicas.generators.plugin.sampling import TTSamplingParams
    from replicas.generators.protocol import DeviceSamplingParams, ForwardOutput, KVCache

_TOKEN_HISTORY = ("prompt_tokens", "output_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class DecodeHandle:
    """Decode whose output is still on the device or being copied.

    Attributes:
        output: Result of the class.
        events: Events to wait for before `output` may be read.
        is_tokens: Whether the output is tokens sampled on the device.
        wants_log_probs: Whether log-probabilities come with them.
        num_rows: Rows of the call, which may be fewer than there are slots.
    """

    output: object
    events: tuple[object, ...]
    is_tokens: bool
    wants_log_probs: bool
    num_rows: int


class AdaptedModel(PluginModel):
    """Loaded plug-in model with warm-up, prefill and decode."""

    def warmup_model_prefill(
        self,
        *,
        kv_cache: KVCache,
        enable_trace: bool,
        can_sample_on_device: bool = False,
        **kwargs: object,
    ) -> None:
        """Warm up; see `GeneratorBase.warmup_model_prefill`.

        Classes remember that they have warmed up and would skip the second call, so the flag is
        reset.
        """
        if enable_trace and hasattr(self._model, "already_warmed_up_prefill"):
            self._model.already_warmed_up_prefill = False
        parameters = self.signature.warmup_prefill
        arguments = warmup_arguments(
            parameters, self._max_batch_size, can_sample_on_device=can_sample_on_device
        )
        self._model.warmup_model_prefill(
            kv_cache=self._theirs(kv_cache), enable_trace=enable_trace, **arguments
        )

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

        For a class without a decode warm-up, a batch of padding is decoded instead, once for each
        width and way of sampling. Its output is ignored.

        Raises:
            ConfigError: The warm-up left the class without a decode of all slots.
        """
        parameters = self.signature.warmup_decode
        if parameters is None:
            for width in self._widths() or (max_batch_size,):
                nothing = padding_rows(width)
                for params in (None, nothing) if can_sample_on_device else (None,):
                    handle = self.decode_forward(
                        tokens=torch.zeros((width, 1), dtype=torch.int32),
                        page_table=torch.zeros((width, num_blocks), dtype=torch.int32),
                        kv_cache=kv_cache,
                        start_pos=torch.full((width,), -1, dtype=torch.int32),
                        enable_trace=enable_trace,
                        read_from_device=False,
                        sampling_params=params,
                        reload_sampling_params=params is not None,
                        reset_sampling_state=params is not None,
                    )
                    self._on_host(self.read_decode_output(handle)[0])
            return
        arguments = taken(parameters, {"max_batch_size": max_batch_size, "num_blocks": num_blocks})
        arguments |= warmup_arguments(
            parameters, self._max_batch_size, can_sample_on_device=can_sample_on_device
        )
        self._model.warmup_model_decode(
            kv_cache=self._theirs(kv_cache), enable_trace=enable_trace, **arguments
        )
        slots_per_lane = self._max_batch_size // self._num_lanes
        check_decode_widths(self.signature.class_name, self._model, slots_per_lane)

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

        A class of the legacy contract that takes ``start_pos`` gets one row per call: given
        several rows of one padded length, some of them index their per-row state by slot in a list
        as long as the number of rows.

        Raises:
            ConfigError: The class does not accept ``start_pos`` and one is not 0; or it does not
                accept ``sampling_params`` or the given images.
            DeviceError: The result has an unknown form.
        """
        arguments = {
            "tokens": tokens,
            "page_table": page_table,
            "kv_cache": kv_cache,
            "enable_trace": enable_trace,
            "prompt_lens": prompt_lens,
            "start_pos": start_pos,
            "empty_slots": list(empty_slots),
            "sampling_params": sampling_params,
            "page_tables_per_layer": page_tables_per_layer,
            **kwargs,
        }
        takes_rows = self.signature.contract or self.signature.is_original
        if takes_rows or len(tokens) == 1:
            return self._prefill(**arguments)
        return joined([self._prefill(**prefill_row(arguments, row)) for row in range(len(tokens))])

    def _prefill(
        self,
        *,
        tokens: torch.Tensor,
        page_table: torch.Tensor,
        kv_cache: KVCache,
        enable_trace: bool,
        prompt_lens: torch.Tensor,
        start_pos: torch.Tensor,
        empty_slots: list[int],
        sampling_params: DeviceSamplingParams | None,
        page_tables_per_layer: Sequence[torch.Tensor] | None,
        **images: object,
    ) -> ForwardOutput:
        """Call the class once; arguments and errors as in `prefill_forward`."""
        name, parameters = self.signature.class_name, self.signature.prefill
        num_rows = len(tokens)
        if self.signature.is_original:
            # Its tables are as wide as the longest prompt of the call needs.
            page_table = page_table[:, : -(-int(prompt_lens.max()) // self._block_size)]
        arguments: dict[str, Any] = {
            "tokens": tokens,
            "page_table": page_table,
            "kv_cache": self._theirs(kv_cache),
            **taken(parameters, {"enable_trace": enable_trace, "empty_slots": empty_slots}),
        }
        if parameters.takes("start_pos"):
            # numpy arrays, as from the plug-in; classes older than `start_pos` expect a tensor.
            arguments |= {"prompt_lens": prompt_lens.numpy(), "start_pos": start_pos.numpy()}
        elif bool((start_pos != 0).any()):
            raise ConfigError(
                f"generator {name} does not accept start_pos and cannot continue after "
                f"{int(start_pos.max())} tokens: no prefix caching, chunks, or transferred KV"
            )
        else:
            arguments["prompt_lens"] = prompt_lens
        tables = self._tables(page_table, page_tables_per_layer)
        arguments |= layer_tables(name, parameters, tables)
        arguments |= image_arguments(name, parameters, images, num_rows)
        params = None
        if sampling_params is not None:
            require(name, parameters, "sampling_params", "set sample_on_device: decode_only")
            params = to_tt_sampling_params(sampling_params, num_rows)
            arguments["sampling_params"] = params
        output = self._model.prefill_forward(**arguments)
        if self._has_rope_deltas:
            output, deltas = output
            for slot, delta in zip(empty_slots, deltas, strict=True):
                self._rope_deltas[slot] = int(delta)
            self._rope_deltas_changed = True
        return host_output(
            output,
            num_rows,
            self._vocab_size,
            is_tokens=params is not None,
            wants_log_probs=params is not None and params.wants_log_probs,
            most_tokens=self._tokens_per_pass,
        )

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

        A class with widths of its own gets the first rows alone, as many as the least width that
        has all live ones. The result has zeros for the others.

        A class of contract 1 gets the four commands unchanged. One of the legacy contract gets
        ``reset_batch`` if it samples on the device and the batch has changed.

        Returns:
            As in the protocol; without `read_from_device` a `DecodeHandle`.

        Raises:
            TypeError: The retired ``reset_batch`` was passed.
            ConfigError: The class cannot follow a row to another slot.
        """
        if "reset_batch" in kwargs:
            raise TypeError("reset_batch is retired: pass the four commands of decode contract 1")
        said = (reload_inputs, reload_page_table, reload_sampling_params, reset_sampling_state)
        commands = dict(zip(COMMANDS, said, strict=True))
        _check_commands(commands, self)
        name, parameters = self.signature.class_name, self.signature.decode
        width = self._choose_width(start_pos, commands, draws=sampling_params is not None)
        tokens, page_table, start_pos = tokens[:width], page_table[:width], start_pos[:width]
        if page_tables_per_layer is not None:
            page_tables_per_layer = [table[:width] for table in page_tables_per_layer]
        if not self.signature.contract:
            # A legacy class compares with the table of its last call, which the engine overwrites.
            page_table = page_table.clone()
        arguments: dict[str, Any] = {
            "tokens": tokens,
            "page_table": page_table,
            "kv_cache": self._theirs(kv_cache),
            "start_pos": start_pos,
            **layer_tables(name, parameters, self._tables(page_table, page_tables_per_layer)),
        }
        params = None
        if sampling_params is not None:
            params = self._params_of_decode(
                sampling_params, width, is_new=commands["reload_sampling_params"]
            )
            arguments["sampling_params"] = params
            if kwargs:
                history = {
                    key: cast("torch.Tensor", value)[:width]
                    for key, value in kwargs.items()
                    if key in _TOKEN_HISTORY
                }
                arguments |= taken(parameters, history)
        if self.signature.contract:
            arguments |= commands
        elif params is not None:
            arguments |= taken(parameters, {"reset_batch": commands["reset_sampling_state"]})
        if slot_remap is not None:
            require(name, parameters, "slot_remap", "it is not for engines that move rows")
            arguments["slot_remap"] = slot_remap
        arguments |= self._rope_delta_arguments(parameters, width)
        reading = {"enable_trace": enable_trace, "read_from_device": not self.signature.splits_read}
        output = self._model.decode_forward(**arguments, **taken(parameters, reading))
        handle = DecodeHandle(
            output, (), params is not None, params is not None and params.wants_log_probs, width
        )
        if not read_from_device:
            return handle
        return self.process_decode_output_host(self.read_decode_output(handle)[0])

    def _params_of_decode(
        self, sampling_params: DeviceSamplingParams, num_rows: int, *, is_new: bool
    ) -> TTSamplingParams:
        # Legacy classes may modify the settings in place, so they get a new object each time.
        params = None if is_new else self._decode_params
        if params is None or not self.signature.contract:
            params = self._decode_params = to_tt_sampling_params(sampling_params, num_rows)
        return params

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
                f"generator {self.signature.class_name} left its decode output on the device, but "
                "lacks read_decode_output(tt_out, async_read) or "
                "process_decode_output_host(tt_out, is_tokens)"
            )
        answer = self._model.read_decode_output(handle.output, async_read=True)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise DeviceError(
                f"generator {self.signature.class_name}: read_decode_output returned "
                f"{type(answer).__name__}, not a pair of output and events"
            )
        output, events = answer
        copying = replace(handle, output=output, events=tuple(events))
        if not async_read:
            _wait_for(copying.events)
        return copying, ()

    def process_decode_output_host(
        self, tt_out: ForwardOutput, is_tokens: bool = False
    ) -> ForwardOutput:
        """Wait for the copy and shape it; see `GeneratorBase.process_decode_output_host`.

        Args:
            tt_out: First element of the result of `read_decode_output`.
            is_tokens: Ignored; the handle has the value.

        Raises:
            DeviceError: The result has an unknown form.
        """
        handle = cast("DecodeHandle", tt_out)
        output = host_output(
            self._on_host(handle),
            handle.num_rows,
            self._vocab_size,
            is_tokens=handle.is_tokens,
            wants_log_probs=handle.wants_log_probs,
            most_tokens=self._tokens_per_pass,
        )
        return padded(output, self._max_batch_size)

    def _widths(self) -> tuple[int, ...]:
        """Return the widths below and of all slots; () if the class decodes all slots alone.

        With several lanes the class's widths are those of one, and all lanes decode together.
        """
        if self._num_lanes > 1:
            return ()
        return tuple(w for w in decode_widths(self._model) if w <= self._max_batch_size)

    def _choose_width(
        self, start_pos: torch.Tensor, commands: dict[str, bool], *, draws: bool
    ) -> int:
        """Return the rows of a decode, and make it reload settings that a wider one needs."""
        widths = self._widths()
        if not widths or len(start_pos) < self._max_batch_size:
            return len(start_pos)
        if not commands["reload_inputs"]:
            return self._decode_width  # The device continues from its own inputs.
        live = torch.nonzero(start_pos >= 0)
        needed = int(live[-1]) + 1 if len(live) else 1
        width = next(width for width in widths if width >= needed)
        if draws and not commands["reset_sampling_state"]:
            # The settings on the device are those of the last width.
            if width > self._decode_width:
                commands |= {"reload_sampling_params": True, "reset_sampling_state": True}
            width = max(width, self._decode_width)
        self._decode_width = width
        return width

    def _on_host(self, handle: DecodeHandle) -> ForwardOutput:
        """Wait for a copy under way and return the class's output, in whatever form."""
        _wait_for(handle.events)
        if is_on_host(handle.output):
            return handle.output
        return self._model.process_decode_output_host(handle.output, is_tokens=handle.is_tokens)


def _check_commands(commands: Mapping[str, bool], model: AdaptedModel) -> None:
    reload_inputs = commands["reload_inputs"]
    assert not (reload_inputs and commands["reload_page_table"]), commands
    assert reload_inputs or not commands["reset_sampling_state"], commands
    may_continue = model.model_capabilities.get("supports_async_decode")
    assert reload_inputs or may_continue, f"{model.signature.class_name} must reload every step"


def _wait_for(events: Sequence[object]) -> None:
    """Wait for events on the device; ttnn is already imported by the class that created them."""
    if events:
        ttnn: Any = sys.modules["ttnn"]
        for event in events:
            ttnn.event_synchronize(event)

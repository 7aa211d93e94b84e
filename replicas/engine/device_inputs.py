"""Inputs of a generator's decode calls, and the part of them that the device already has.

Owner: the model runner. A device that continues from its own tokens is called with the inputs of
the last step that it reloaded, and reloads none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from replicas.engine.device_sampling import HOST_SAMPLED, DecodeCommands, device_params

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from replicas.engine.device_sampling import CallRows, DecodeReload, DeviceDraws
    from replicas.engine.input_batch import PersistentBatch
    from replicas.engine.sampler import SamplingColumns
    from replicas.engine.step import ScheduledBatch
    from replicas.generators.protocol import DeviceSamplingParams

    IntArray = npt.NDArray[np.integer[Any]]
    Int32Array = npt.NDArray[np.int32]


class DeviceInputs:
    """Maker of the arguments of decode calls, with the inputs that the device already has.

    Args:
        batch: The persistent batch.
        columns: Its rows' sampling parameters.
        draws: Division of rows between device and host.
        runs_ahead: Whether the device can continue from its own tokens, without the host.

    Attributes:
        commands: Which inputs a decode call must reload.
    """

    def __init__(
        self,
        batch: PersistentBatch,
        columns: SamplingColumns,
        draws: DeviceDraws,
        *,
        runs_ahead: bool,
    ) -> None:
        self._batch = batch
        self._columns = columns
        self._draws = draws
        self.commands = DecodeCommands(runs_ahead=runs_ahead)
        self._params: DeviceSamplingParams | None = None
        # Tokens, page table and positions of the last decode that reloaded them.
        self._inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def decode_inputs(
        self, rows: CallRows, slots: Int32Array, scheduled: ScheduledBatch, *, is_ahead: bool
    ) -> dict[str, Any]:
        """Return the arguments of `decode_forward`.

        Args:
            rows: The rows of the call.
            slots: (R,) their slots.
            scheduled: The step.
            is_ahead: Whether the step before it is not collected yet.
        """
        reload = self._reload(rows, slots, scheduled, is_ahead=is_ahead)
        if reload.page_table:
            self._batch.keep_decoding(slots)
        if reload.inputs or self._inputs is None:
            inputs = self._batch.decode_inputs(slots)
            last = int(inputs.start_pos.max())
            self.commands.num_steps_left = self._batch.max_model_len - 1 - last
            self._inputs = (
                torch.from_numpy(inputs.tokens),
                torch.from_numpy(inputs.page_tables[0]),
                torch.from_numpy(inputs.start_pos),
            )
        # While the device continues from its own tokens, `tokens` and `start_pos` are stale.
        tokens, page_table, start_pos = self._inputs
        found: dict[str, Any] = {
            "tokens": tokens,
            "page_table": page_table,
            "start_pos": start_pos,
            "sampling_params": self._params if len(rows.drawn) else None,
            "reload_inputs": reload.inputs,
            "reload_page_table": reload.page_table,
            "reload_sampling_params": reload.sampling_params,
            "reset_sampling_state": reload.sampling_state,
        }
        if len(rows.drawn) and len(rows.sampled):
            found["logits_rows"] = slots[rows.sampled].tolist()
        return found

    def params(
        self, rows: CallRows, slots: Int32Array, places: IntArray, num_places: int
    ) -> DeviceSamplingParams:
        """Return the device's sampling parameters for a call of `num_places` rows.

        Args:
            rows: The rows of the call.
            slots: (R,) their slots.
            places: (R,) their indices in the call.
            num_places: Rows of the call, padding included.
        """
        return device_params(
            self._batch,
            self._columns,
            slots[rows.drawn],
            places[rows.drawn],
            num_places,
            keeps_state=self._draws.keeps_state,
        )

    def _reload(
        self, rows: CallRows, slots: Int32Array, scheduled: ScheduledBatch, *, is_ahead: bool
    ) -> DecodeReload:
        """Return the reload commands of a decode call, and renew the sampling parameters if due."""
        if not len(rows.drawn):
            self.commands.forget()
            return HOST_SAMPLED
        reload = self.commands.next_call(
            slots,
            has_new=bool(scheduled.new),
            has_new_blocks=bool(scheduled.appended_blocks),
            has_hosts=bool(len(rows.sampled)),
            is_ahead=is_ahead,
        )
        if reload.sampling_params or self._params is None:
            self._params = self.params(rows, slots, slots, len(self._batch.num_tokens))
        return reload

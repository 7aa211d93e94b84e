"""Bytes of host tensors as ttnn packs them, written from the description of its formats."""

from __future__ import annotations

import numpy as np
import torch
import ttnn

# Private on purpose: the public conversions take rows of a wire layout. Both are held to bytes of
# ttnn's own packer by their own tests.
from kv_transfer.dtypes import _read_bfloat8_b, _write_bfloat8_b
from tests.tt.golden.tensors import TILE, GoldenTensor, require, round_to, to_torch

_FACE = TILE // 2


def pack(shard, dtype, layout):
    """The bytes (uint8, one dimension) of one chip's values."""
    if layout == ttnn.ROW_MAJOR_LAYOUT:
        return to_torch(shard, dtype).contiguous().view(torch.uint8).reshape(-1).clone()
    width = shard.shape[-1]
    require(width % TILE == 0 and shard.shape[-2] % TILE == 0, "whole tiles only")
    units = shard.reshape(-1, TILE, width)
    if dtype == ttnn.bfloat8_b:
        return torch.from_numpy(_write_bfloat8_b(units.numpy()).reshape(-1))
    require(dtype == ttnn.bfloat16, f"tiles of {dtype} are not packed here")
    faces = units.to(torch.bfloat16).view(-1, 2, _FACE, width // TILE, 2, _FACE)
    return faces.permute(0, 3, 1, 4, 2, 5).contiguous().view(torch.uint8).reshape(-1)


def unpack(data, shape, dtype, layout):
    """The values of one chip's bytes."""
    width = shape[-1]
    if layout == ttnn.ROW_MAJOR_LAYOUT:
        kind = to_torch(torch.zeros(()), dtype).dtype
        return round_to(data.view(kind).view(shape), dtype)
    if dtype == ttnn.bfloat8_b:
        per_unit = data.numel() // (int(np.prod(shape)) // (TILE * width))
        with np.errstate(over="ignore"):  # its table has numbers that are infinite
            units = _read_bfloat8_b(data.numpy().reshape(-1, per_unit))
        return torch.from_numpy(units.copy()).reshape(shape)
    faces = data.view(torch.bfloat16).view(-1, width // TILE, 2, 2, _FACE, _FACE)
    return faces.permute(0, 2, 4, 1, 3, 5).reshape(shape).float()


class PackedTensor(GoldenTensor):
    """A host tensor whose bytes a caller holds and may write."""

    def __init__(self, tensor, mesh_shape):
        super().__init__(tensor._shards, tensor.dtype, tensor.layout)
        self._columns = list(mesh_shape)[1]
        self._packed = [pack(shard, tensor.dtype, tensor.layout) for shard in tensor._shards]

    @property
    def shards(self):
        return [
            unpack(data, tuple(shard.shape), self.dtype, self.layout)
            for data, shard in zip(self._packed, self._shards, strict=True)
        ]

    def host_buffer(self):
        return self

    def get_shard(self, coordinate):
        return self._packed[coordinate[0] * self._columns + coordinate[1]]

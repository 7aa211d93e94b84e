"""Tensors and devices of the golden kit: per chip a torch tensor that holds what the dtype can.

Numbers are kept in float32 (int64 for integers) and rounded to the tensor's dtype where it is made,
so that arithmetic on them accumulates in float32 as the device's does.
"""

from __future__ import annotations

import math

import torch
import ttnn

BLOCK_FLOATS = {ttnn.bfloat8_b: 7, ttnn.bfloat4_b: 3}
"""Dtype -> bits of each magnitude; sixteen neighbours share an exponent."""

FLOATS = (ttnn.bfloat16, ttnn.float32, *BLOCK_FLOATS)
INTEGERS = {ttnn.uint32: (0, 1 << 32), ttnn.int32: (-(1 << 31), 1 << 32), ttnn.uint16: (0, 1 << 16)}
TO_TORCH = {
    ttnn.bfloat16: torch.bfloat16,
    ttnn.float32: torch.float32,
    ttnn.bfloat8_b: torch.float32,
    ttnn.bfloat4_b: torch.float32,
    ttnn.uint32: torch.uint32,
    ttnn.int32: torch.int32,
    ttnn.uint16: torch.uint16,
}
FROM_TORCH = {
    torch.bfloat16: ttnn.bfloat16,
    torch.float32: ttnn.float32,
    torch.int32: ttnn.int32,
    torch.int64: ttnn.uint32,
    torch.uint32: ttnn.uint32,
    torch.uint16: ttnn.uint16,
}
TILE = 32


class GoldenError(RuntimeError):
    """The call breaks the op's documented contract; ttnn raises RuntimeError as well."""


def require(condition, message):
    if not condition:
        raise GoldenError(message)


def round_to(values, dtype):
    """Round numbers to `dtype`; returns float32 for floats, int64 for integers."""
    if dtype in INTEGERS:
        low, size = INTEGERS[dtype]
        return (values.to(torch.int64) - low) % size + low
    if dtype not in FLOATS:
        raise GoldenError(f"the golden kit has no dtype {dtype}")
    values = values.to(torch.float32)
    if dtype == ttnn.bfloat16:
        return values.to(torch.bfloat16).to(torch.float32)
    return _round_to_block(values, BLOCK_FLOATS[dtype]) if dtype in BLOCK_FLOATS else values


def _round_to_block(values, num_bits):
    """Sixteen neighbours share an exponent; the device drops bits before it rounds to even."""
    dropped = 24 - num_bits
    width = values.shape[-1]
    padded = torch.nn.functional.pad(values, (0, -width % 16)).contiguous()
    bits = padded.view(-1, 16).view(torch.int32)
    exponents = bits >> 23 & 0xFF
    shared = exponents.amax(dim=-1, keepdim=True)
    magnitudes = (bits & 0x7FFFFF | 0x800000) >> (shared - exponents).clamp(max=24)
    half = (1 << dropped - 1) - 1
    magnitudes = (magnitudes + (half + (magnitudes >> dropped & 1))) >> dropped
    magnitudes = magnitudes.clamp(max=(1 << num_bits) - 1).masked_fill(exponents == 0, 0)
    rounded = torch.ldexp(magnitudes.to(torch.float32), shared - 126 - num_bits)
    rounded = torch.where(rounded < 2.0**-126, 0.0, rounded)
    rounded = torch.where(bits < 0, -rounded, rounded)
    # No number of the model is infinite; what poisons a row should poison it in any dtype.
    rounded = rounded.masked_fill(shared == 255, torch.nan)
    return rounded.view(padded.shape)[..., :width]


class GoldenSemaphore:
    """A semaphore on every core of a mesh, of which only the identity matters."""

    def __init__(self, device):
        self.device = device


class GoldenDevice:
    """A mesh, or a submesh, of chips that only have a number.

    Attributes:
        programs: One entry per different call, shared with the submeshes, as a program cache has.
        streams: Random numbers of each (chip, user).
        taken: Semaphores of the last collective.
        num_banks: Banks of each chip's DRAM.
    """

    def __init__(self, shape, chips=None, programs=None):
        self.shape = ttnn.MeshShape(*shape)
        self.chips = list(range(math.prod(shape))) if chips is None else list(chips)
        self.programs = set() if programs is None else programs
        self.streams = {}
        self.taken = []
        self.num_banks = 12
        self.is_closed = False
        self._on_their_way = []
        self._submeshes = []
        require(len(self.chips) == math.prod(shape), f"{len(self.chips)} chips as {shape}")

    def __repr__(self):
        return f"GoldenDevice({list(self.shape)}, chips {self.chips})"

    def get_num_devices(self):
        return len(self.chips)

    def compute_with_storage_grid_size(self):
        return ttnn.CoreCoord(8, 8)

    def dram_grid_size(self):
        return ttnn.CoreCoord(self.num_banks, 1)

    def reshape(self, shape):
        require(math.prod(list(shape)) == len(self.chips), f"{self} as {shape}")
        self.shape = shape

    def create_submeshes(self, shape):
        rows, columns = list(shape)
        height, width = list(self.shape)
        require(height % rows == 0 and width % columns == 0, f"{shape} does not divide {self}")
        self._submeshes = [
            GoldenDevice(
                (rows, columns),
                [
                    self.chips[(top + y) * width + left + x]
                    for y in range(rows)
                    for x in range(columns)
                ],
                self.programs,
            )
            for top in range(0, height, rows)
            for left in range(0, width, columns)
        ]
        return self._submeshes

    def get_submeshes(self):
        return list(self._submeshes)

    def delay(self, host):
        """Poison a copy on the host until an event that is recorded later has been waited for."""
        arrived = [shard.clone() for shard in host.shards]
        for shard in host.shards:
            shard.fill_(math.nan if shard.is_floating_point() else 0)
        self._on_their_way.append((host, arrived))

    def record_event(self):
        """Return a function that waits for the copies begun so far."""
        begun, self._on_their_way = self._on_their_way, []

        def wait():
            for host, arrived in begun:
                for shard, values in zip(host.shards, arrived, strict=True):
                    shard.copy_(values)

        return wait

    def num_program_cache_entries(self):
        return len(self.programs)


class Allocation:
    """Memory that one tensor, or several views of it, have."""

    def __init__(self):
        self.is_freed = False


class GoldenTensor:
    """The replacement of `ttnn.Tensor`, with a torch tensor for each chip.

    Attributes:
        shards: One tensor per chip, all of one shape; one for a host tensor of all chips alike.
    """

    def __init__(self, shards, dtype, layout, memory_config=None, device=None, allocation=None):
        if dtype in BLOCK_FLOATS and layout != ttnn.TILE_LAYOUT:
            raise GoldenError(f"{dtype.name} is tiled only")
        if device is not None and len(shards) != len(device.chips):
            raise GoldenError(f"{len(shards)} shards on {device}")
        self._shards = shards
        self.dtype = dtype
        self.layout = layout
        self._memory_config = memory_config or ttnn.DRAM_MEMORY_CONFIG
        self._device = device
        self._allocation = allocation or Allocation()
        self.mesh_shape = (1, len(shards))

    def __repr__(self):
        where = self._device or "host"
        return f"GoldenTensor({list(self.shape)}, {self.dtype.name}, {self.layout.name}, {where})"

    @property
    def shards(self):
        if self._allocation.is_freed:
            raise GoldenError(f"{self} was deallocated")
        return self._shards

    @property
    def shape(self):
        return ttnn.Shape(list(self._shards[0].shape))

    @property
    def padded_shape(self):
        shape = list(self._shards[0].shape)
        if self.layout == ttnn.TILE_LAYOUT:
            shape[-2:] = [-(-size // TILE) * TILE for size in shape[-2:]]
        return ttnn.Shape(shape)

    def device(self):
        return self._device

    def memory_config(self):
        return self._memory_config

    def is_sharded(self):
        return self._memory_config.is_sharded()

    def deallocate(self, force=False):
        self._allocation.is_freed = True

    def cpu(self, blocking=True, cq_id=None):
        return GoldenTensor([t.clone() for t in self.shards], self.dtype, self.layout)

    def host_buffer(self):
        """Bytes of each chip, for readers; see `PackedTensor` for one that is written."""
        from tests.tt.golden.packing import PackedTensor  # it is a GoldenTensor

        require(self._device is None, f"{self} is not on the host")
        return PackedTensor(self, self.mesh_shape)

    def logical_volume(self):
        return math.prod(list(self.shape))

    def like(self, shards, dtype=None, layout=None, memory_config=None):
        """A new tensor on the same chips, rounded to `dtype`."""
        dtype = dtype or self.dtype
        return GoldenTensor(
            [round_to(shard, dtype) for shard in shards],
            dtype,
            layout or self.layout,
            memory_config or self._memory_config,
            self._device,
        )

    def view(self, shards, layout=None, memory_config=None):
        """The same memory in another shape."""
        return GoldenTensor(
            shards,
            self.dtype,
            layout or self.layout,
            memory_config or self._memory_config,
            self._device,
            self._allocation,
        )


def to_torch(shard, dtype):
    return shard.to(TO_TORCH[dtype])

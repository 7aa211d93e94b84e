"""Hashes of what the device library makes of 32 tokens of 64 numbers as bfloat8_b: ttnn 0.81.1.

Run as a script where ttnn is installed, this file prints ``PACKED`` and ``READ_BACK`` again; a mesh
description in ``TT_METAL_MOCK_CLUSTER_DESC_PATH`` stands in for hardware.
"""

from __future__ import annotations

import hashlib

import numpy as np


def numbers():
    """Return (32, 64) float32: common numbers, extremes, ties, infinities and NaNs."""
    i = np.arange(32 * 64, dtype=np.uint64)
    bits = ((i * 2654435761 + i * i * 40503) % 2**32).astype(np.uint32).reshape(32, 64)
    signs, fractions = bits & 0x80000000, bits & 0x7FFFFF
    exponents = 120 + (bits >> 23) % 8
    exponents[8:12] = 1 + (bits[8:12] >> 23) % 254
    values = (signs | exponents << 23 | fractions).view(np.float32)
    values[12:14] = [[0.0], [-0.0]]
    values[14:16] = (signs | fractions)[14:16].view(np.float32)
    values[15, ::7] = 2.0**-126
    values[16:19, ::9] = [[np.inf], [-np.inf], [np.nan]]
    values[19] = np.finfo(np.float32).max
    # Ties to even, exact ones and some that are ties only when enough is cut off.
    ties = (np.arange(64 * 8).reshape(8, 64) % 64 + 0.5) / np.array([1, 1, 2, 2, 4, 4, 8, 8])[
        :, None
    ]
    values[20:28] = ties * np.where(np.arange(64) % 3, 1, -1)
    values[21:28:2] *= np.float32(1 + 2**-22)
    values[20:28, ::16] = 65.0
    values[28:] = (values[28:].view(np.uint32) & 0xFFFF0000).view(np.float32)
    return values


def digest(data):
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_of_numbers(values):
    """Hash float32 numbers, with all NaNs as one."""
    bits = values.view(np.uint32).copy()
    bits[np.isnan(values)] = 0x7FC00000
    return digest(bits.tobytes())


PACKED = "147b83bed3168b59ec39cbcb699d1fb2"
"""``digest`` of the two tiles."""

READ_BACK = "ddb0505f7dae35d9f7c9d67b6778c534"
"""``digest_of_numbers`` of what the library unpacks from them, in float32."""


def record():
    """Ask the device library."""
    import torch
    import ttnn

    tensor = ttnn.from_torch(
        torch.from_numpy(numbers()).reshape(1, 1, 32, 64),
        dtype=ttnn.bfloat8_b,
        layout=ttnn.TILE_LAYOUT,
    )
    packed = torch.as_tensor(tensor.host_buffer().get_shard(ttnn.MeshCoordinate(0, 0)))
    print(digest(packed.numpy().tobytes()))
    print(digest_of_numbers(ttnn.to_torch(tensor).reshape(32, 64).numpy()))


if __name__ == "__main__":
    record()

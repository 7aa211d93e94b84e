"""A short name for a model's weights, so that KV of two models is never mixed by accident.

It reads the configuration whole and of each weights file the header and samples, not every byte: it
tells apart checkpoints, not adversaries.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replicas.config import EngineConfig

_SAMPLE_BYTES = 65536
_NUM_SAMPLES = 8


def model_fingerprint(config: EngineConfig) -> str:
    """32 hexadecimal digits that two engines share if they load the same weights.

    Args:
        config: Names the model folder, the load format and the seed of random weights; or the
            model of a simulated mesh, whose KV depends on nothing else.
    """
    digest = hashlib.blake2b(digest_size=16)
    if config.simulated_mesh is not None:
        digest.update(f"simulated {config.simulated_mesh.model}".encode())
        return digest.hexdigest()
    folder = Path(config.model)
    digest.update((folder / "config.json").read_bytes())
    if config.load_format == "random":
        digest.update(b"random %d" % config.weights_seed)
        return digest.hexdigest()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for i in range(_NUM_SAMPLES):
                file.seek(i * max(size - _SAMPLE_BYTES, 0) // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()

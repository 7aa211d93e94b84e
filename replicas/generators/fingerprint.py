"""Fingerprint of a model's weights, which keeps KV of different models apart.

Hashes the whole configuration. Without a store, KV lives no longer than the engines, so only the
header and samples of each weights file are hashed: that distinguishes checkpoints, but is no
defence against adversaries. With a store every byte is hashed: a store outlives engines, and
weights modified in place between two samples would otherwise be given KV of the old weights.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

if TYPE_CHECKING:
    from replicas.config import EngineConfig

_SAMPLE_BYTES = 65536
_NUM_SAMPLES = 8
_READ_BYTES = 8 * 2**20
"""Read size when hashing whole files; large enough that reading and hashing release the GIL."""


def model_fingerprint(config: EngineConfig) -> str:
    """Return 32 hexadecimal digits that are equal for engines with the same weights.

    Only comparable between engines that both have a store or both have none.

    Args:
        config: Gives the model folder, the load format and the seed of random weights; or the model
            of a simulated mesh, which alone determines its KV.
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
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        digest.update(_samples(path) if config.kv_store is None else file_digest(path))
    return digest.hexdigest()


def conversion_source(config: EngineConfig) -> tuple[str, list[int]]:
    """Return the identity of weights for the name of a persistent folder of converted weights.

    The fingerprint without a store only samples the files, so modification times are added to
    detect files that were changed in place.

    Args:
        config: Gives the model folder.

    Returns:
        The fingerprint of an engine without a store, and the modification times of the weights
        files in ns.

    Raises:
        OSError: The model cannot be read.
    """
    fingerprint = model_fingerprint(msgspec.structs.replace(config, kv_store=None))
    files = sorted(Path(config.model).glob("*.safetensors"))
    return fingerprint, [path.stat().st_mtime_ns for path in files]


def _samples(path: Path) -> bytes:
    """Return samples of a file at equal distances, including its first and last bytes."""
    size = path.stat().st_size
    samples = bytearray()
    with path.open("rb") as file:
        for i in range(_NUM_SAMPLES):
            file.seek(i * max(size - _SAMPLE_BYTES, 0) // (_NUM_SAMPLES - 1))
            samples += file.read(_SAMPLE_BYTES)
    return bytes(samples)


def file_digest(path: Path) -> bytes:
    """Return 16 bytes that depend on every byte of a file, without cryptographic strength.

    It detects damage and mix-ups. An adversary who can change weights controls the output anyway.
    """
    state = xxhash.xxh3_128()
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(view[:count])
    return state.digest()

"""A short name for a model's weights, so that KV of two models is never mixed by accident.

It reads the configuration whole. Of each weights file it reads the header and samples, not every
byte, where KV lives no longer than the engines: it tells apart checkpoints, not adversaries. Where
engines have a store it reads every byte: a store outlives them, and weights that were changed in
place, where no sample was taken, would be given the KV of the weights before.
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
"""At a time when all is read: large enough that neither reading nor hashing holds the GIL."""


def model_fingerprint(config: EngineConfig) -> str:
    """Return 32 hexadecimal digits that two engines share if they load the same weights.

    And if both of them have a store, or neither has.

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
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        digest.update(_samples(path) if config.kv_store is None else file_digest(path))
    return digest.hexdigest()


def conversion_source(config: EngineConfig) -> tuple[str, list[int]]:
    """What weights are converted from, for folders of conversions, which outlive the process.

    The fingerprint takes samples of the files, at every start; so files that were changed in place
    are told by their times.

    Args:
        config: Names the model folder.

    Returns:
        The fingerprint of an engine without a store, and the times of the weights files, ns.

    Raises:
        OSError: The model cannot be read.
    """
    fingerprint = model_fingerprint(msgspec.structs.replace(config, kv_store=None))
    files = sorted(Path(config.model).glob("*.safetensors"))
    return fingerprint, [path.stat().st_mtime_ns for path in files]


def _samples(path: Path) -> bytes:
    """Return bytes of a file at equal distances, the first and the last ones among them."""
    size = path.stat().st_size
    samples = bytearray()
    with path.open("rb") as file:
        for i in range(_NUM_SAMPLES):
            file.seek(i * max(size - _SAMPLE_BYTES, 0) // (_NUM_SAMPLES - 1))
            samples += file.read(_SAMPLE_BYTES)
    return bytes(samples)


def file_digest(path: Path) -> bytes:
    """16 bytes that depend on every byte of a file; against damage and mix-ups, not adversaries.

    Whoever may change a model's weights decides what it answers, whatever they hash to.
    """
    state = xxhash.xxh3_128()
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(view[:count])
    return state.digest()

"""A pool's KV under a model's fingerprint must never be given to other weights."""

import json
import os

import msgspec
import pytest

from kv_transfer.store import StoreConfig
from replicas.config import EngineConfig
from replicas.generators import fingerprint as fingerprint_module
from replicas.generators.fingerprint import model_fingerprint

SIZE = 2 * 2**20 + 5
UNSAMPLED = 100_000
"""In the middle between the first sample's end and the second one's beginning."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).write_bytes(bytes(SIZE))
    return tmp_path


def engine(folder, *, pooled, **changes):
    store = StoreConfig(backend="shm", capacity_bytes=2**20) if pooled else None
    return EngineConfig(model=str(folder), kv_store=store, **changes)


def change(path, offset):
    """Another byte in place; size, name and times stay as they are."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("offset", [0, 7, 8, UNSAMPLED, SIZE // 2, SIZE - 1])
def test_every_byte_of_every_file_counts_where_there_is_a_store(folder, monkeypatch, offset):
    monkeypatch.setattr(fingerprint_module, "_READ_BYTES", 300_007)
    config = engine(folder, pooled=True)
    seen = {model_fingerprint(config)}
    for path in sorted(folder.glob("*.safetensors")):
        change(path, offset)
        seen.add(model_fingerprint(config))
    assert len(seen) == 3


def test_the_same_weights_have_one_fingerprint_however_they_are_read(folder, monkeypatch):
    change(folder / "model-1.safetensors", UNSAMPLED)
    config = engine(folder, pooled=True)
    first = model_fingerprint(config)
    for num_bytes in (1 << 16, SIZE - 1, SIZE, SIZE + 1):
        monkeypatch.setattr(fingerprint_module, "_READ_BYTES", num_bytes)
        assert model_fingerprint(config) == first
    assert len(first) == 32
    bytes.fromhex(first)


def test_without_a_store_samples_are_enough(folder):
    config = engine(folder, pooled=False)
    before = model_fingerprint(config)
    path = folder / "model-1.safetensors"
    change(path, UNSAMPLED)
    assert model_fingerprint(config) == before
    for offset in (0, SIZE - 1):
        change(path, offset)
        assert model_fingerprint(config) != before
        change(path, offset)


@pytest.mark.parametrize("pooled", [False, True])
def test_bytes_that_change_files_are_another_model(folder, pooled):
    config = engine(folder, pooled=pooled)
    before = model_fingerprint(config)
    (folder / "model-2.safetensors").rename(folder / "model-3.safetensors")
    assert model_fingerprint(config) != before


def test_random_weights_are_named_by_their_seed_and_no_file_is_read(folder):
    configs = [engine(folder, pooled=pooled, load_format="random") for pooled in (False, True)]
    before = [model_fingerprint(config) for config in configs]
    change(folder / "model-1.safetensors", 0)
    assert [model_fingerprint(config) for config in configs] == before
    assert before[0] == before[1]
    other = msgspec.structs.replace(configs[0], weights_seed=1)
    assert model_fingerprint(other) != before[0]

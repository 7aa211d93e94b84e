"""What an engine's memory holds: measured sizes, the rest for KV, and the table at its start."""

import mmap
import resource

import pytest

from replicas import memory_profile
from replicas.errors import ConfigError
from replicas.kv_groups import KVGroup, KVSpec
from replicas.memory_profile import (
    MIB,
    MemoryProfile,
    kv_bytes,
    memory_table,
    peak_bytes_of,
    resident_bytes,
)

SPEC = KVSpec(heads=2, width=16, dtype="bfloat16")
GROUP = KVGroup(layers=(0, 1), spec=SPEC, block_size=32, num_blocks=101)


def touch(num_bytes):
    """Allocate memory, write to it and release it."""
    with mmap.mmap(-1, num_bytes) as mapped:
        mapped.write(bytes([1]) * num_bytes)


def test_a_peak_counts_memory_that_is_released_again_but_not_that_of_the_past():
    touch(256 * MIB)
    before = resident_bytes()
    added = peak_bytes_of(lambda: touch(64 * MIB)) - before
    assert 60 * MIB < added < 200 * MIB


def test_without_a_reset_the_peak_of_the_whole_past_counts(tmp_path):
    found = peak_bytes_of(lambda: None, tmp_path / "no-proc")
    assert found == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_kv_gets_the_share_less_what_a_full_step_takes(monkeypatch):
    monkeypatch.setattr(memory_profile, "total_bytes", lambda: 1000 * MIB)
    profile = MemoryProfile(weights=100 * MIB, activation=50 * MIB, peak=300 * MIB)
    assert kv_bytes(0.5, profile) == 200 * MIB
    with pytest.raises(
        ConfigError, match=r"0.3 of 1000 MiB .* takes 300 MiB, of which weights 100 .* step 50"
    ):
        kv_bytes(0.3, profile)


@pytest.mark.parametrize(
    ("profile", "num_lanes", "lines"),
    [
        (
            MemoryProfile(3 * MIB, MIB // 2, 9 * MIB, 5 * MIB),
            1,
            ["weights and kernels 3.0 MiB", "peak of loading 5.0 MiB", "peak activation 0.5 MiB",
             "bytes per block 8,192", "blocks 100", "tokens 3,200",
             "maximum concurrency 25.00 sequences of 100 tokens"],
        ),
        (
            MemoryProfile(3 * MIB),
            2,
            ["peak activation not measured", "blocks 200 in 2 lanes", "tokens 6,400",
             "maximum concurrency 50.00 sequences of 100 tokens"],
        ),
        (None, 1, ["weights and kernels not measured", "peak activation not measured"]),
    ],
)  # fmt: skip
def test_the_table_has_every_size(profile, num_lanes, lines):
    table = memory_table(profile, [GROUP], 100, num_lanes)
    found = [" ".join(line.split()) for line in table.splitlines()]
    assert found[0] == "memory:"
    assert set(lines) <= set(found)

"""Memory that processes share is there from the start, or refused with both numbers."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kv_transfer.errors import SharedMemoryError
from kv_transfer.host_memory import available_bytes, reserve, total_bytes
from kv_transfer.store import StoreConfig, make_store
from tests.kv_transfer.stores.shm_servers import connect, end_started, new_address, server_pid

MORE_THAN_ANY = 1 << 50


def fake_kernel(root: Path, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    proc, cgroups = root / "proc", root / "cgroup"
    for path, text in {
        "proc/meminfo": "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n",
        "proc/self/cgroup": cgroup,
        **{f"cgroup/{name}": text for name, text in files.items()},
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return proc, cgroups


def test_without_limits_the_memory_of_the_host_counts(tmp_path: Path) -> None:
    files = {"a/memory.max": "max\n", "a/memory.current": "5\n", "a/memory.stat": ""}
    assert available_bytes(*fake_kernel(tmp_path, "0::/a\n", files)) == (
        1000 << 10,
        "on this host",
    )
    assert total_bytes(*fake_kernel(tmp_path, "0::/a\n", files)) == 2000 << 10


@pytest.mark.parametrize(
    ("cgroup", "folder", "names"),
    [
        ("0::/a/b\n", "a", ("memory.max", "memory.current", "inactive_file")),
        ("0::/a/b\n", ".", ("memory.max", "memory.current", "inactive_file")),
        # A container sees its own group as the root, under the name that it has elsewhere.
        ("0::/elsewhere/c\n", ".", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/a/b\n3:cpu:/x\n",
            "memory/a",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_the_limit_of_any_control_group_around_this_process_counts(
    tmp_path: Path, cgroup: str, folder: str, names: tuple[str, str, str]
) -> None:
    limit, used, droppable = names
    files = {
        f"{folder}/{limit}": "9000\n",
        f"{folder}/{used}": "8000\n",
        f"{folder}/memory.stat": f"anon 7000\n{droppable} 500\n",
    }
    proc, cgroups = fake_kernel(tmp_path, cgroup, files)
    available, where = available_bytes(proc, cgroups)
    assert available == 9000 - 8000 + 500
    assert where == f"in control group {cgroups / folder}"
    assert total_bytes(proc, cgroups) == 9000


def test_a_refusal_by_the_kernel_names_the_number_of_bytes() -> None:
    with pytest.raises(
        SharedMemoryError, match=r"cannot reserve 4096 bytes.*for a test: .*; do less"
    ):
        reserve(os.open(os.devnull, os.O_RDONLY), 4096, purpose="a test", advice="do less")


# ---- the pool's slab


def store_config(address: str, capacity_bytes: int) -> StoreConfig:
    return StoreConfig(backend="shm", address=address, capacity_bytes=capacity_bytes, timeout_s=5.0)


def test_a_pool_that_does_not_fit_ends_the_start_with_both_numbers() -> None:
    address = new_address()
    with pytest.raises(SharedMemoryError) as caught:
        make_store(store_config(address, MORE_THAN_ANY))
    text = str(caught.value)
    assert f"cannot reserve {MORE_THAN_ANY} bytes" in text
    assert re.search(r"only \d+ bytes are available (on this host|in control group)", text)
    assert "lower capacity_bytes of kv_store" in text
    assert server_pid(address) is None


@pytest.mark.parametrize(
    ("capacity_bytes", "limit_bytes", "why"),
    [
        (MORE_THAN_ANY, resource.RLIM_INFINITY, "only [0-9]+ bytes are available"),
        (8 << 20, 4 << 20, "File too large, with [0-9]+ bytes available"),
    ],
    ids=["host", "kernel"],
)
def test_a_server_that_is_refused_its_memory_ends_and_says_why(
    capacity_bytes: int, limit_bytes: int, why: str
) -> None:
    command = [sys.executable, "-m", "kv_transfer.stores.shm_server"]
    command += ["--address", new_address(), "--capacity-bytes", str(capacity_bytes)]
    ended = subprocess.run(
        [*command, "--lease-s", "5", "--idle-s", "0.1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes)),
    )
    assert ended.returncode == 1
    assert (
        f"SharedMemoryError: cannot reserve {capacity_bytes} bytes of shared memory" in ended.stderr
    )
    assert re.search(why, ended.stderr)


def test_a_pool_whose_server_died_and_does_not_fit_any_more_is_a_miss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = new_address()
    try:
        store = connect(address, capacity_bytes=8 << 20)
    finally:
        end_started(address)
    monkeypatch.setattr("kv_transfer.host_memory.available_bytes", lambda: (4096, "on this host"))
    for _ in range(3):
        assert store.num_present([b"key"]) == 0
    assert store.counters().errors >= 1
    store.close()

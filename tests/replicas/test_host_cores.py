"""The number of compute threads follows affinity and the CPU quota of a container."""

import os

import pytest
import torch

from replicas.engine import worker
from replicas.host_cores import usable_cores
from tests.engines import engine_core, make_config
from tests.models import model_folder


def fake_kernel(root, cgroup, files):
    proc, cgroups = root / "proc", root / "cgroup"
    named = {"proc/self/cgroup": cgroup, **{f"cgroup/{name}": files[name] for name in files}}
    for path, text in named.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return proc, cgroups


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, 64),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2),
        ("0::/pod/c\n", {"cpu.max": "350000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 64),
        ("0::/\n", {}, 64),
        (
            "4:memory:/m\n3:cpu,cpuacct:/a\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "400000\n",
             "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
            4,
        ),
        (
            "3:cpu:/elsewhere\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            64,
        ),
    ],
)  # fmt: skip
def test_the_smallest_quota_around_this_process_counts(tmp_path, monkeypatch, cgroup, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)), raising=False)
    assert usable_cores(*fake_kernel(tmp_path, cgroup, files)) == cores


def test_without_control_groups_affinity_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 5, 6}, raising=False)
    assert usable_cores(tmp_path, tmp_path) == 3


@pytest.mark.parametrize(
    ("configured", "cores", "threads"), [(None, 2, 2), (None, 9, 3), (4, 2, 4)]
)
def test_an_engine_computes_with_no_more_threads_than_cores(
    monkeypatch, configured, cores, threads
):
    before = torch.get_num_threads()
    monkeypatch.setattr(worker, "usable_cores", lambda: cores)
    torch.set_num_threads(3)
    try:
        with engine_core(make_config(str(model_folder("llama-gqa")), num_threads=configured)):
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)

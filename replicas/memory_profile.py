"""Memory of an engine on the CPU: of its weights, of a full step, and what they leave for KV.

Sizes are those of the process's resident memory, as Linux counts it. The engine's worker measures
them at its start; other processes of the host do not count.
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kv_transfer.host_memory import total_bytes
from replicas.errors import ConfigError
from replicas.kv_groups import max_concurrency

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replicas.kv_groups import KVGroup

_RESET_PEAK = "5"
"""Written to clear_refs, resets the peak of the resident size. Source: proc(5)."""
MIB = 2**20


class MemoryProfile(NamedTuple):
    """Measured memory of an engine without its KV cache, in bytes.

    Attributes:
        weights: Added by loading the model, with the kernels that this compiles.
        activation: Added at most by a full step; None if no step was measured.
        peak: Resident size of the process at most, in that step; None likewise.
        loading: Added at most while the model was loaded, with tensors that were then freed.
    """

    weights: int
    activation: int | None = None
    peak: int | None = None
    loading: int | None = None


def resident_bytes(proc: Path = Path("/proc")) -> int:
    """Return the resident size of this process, without heap that is free again."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's alone
        libc.malloc_trim(0)
    return _status(proc, "VmRSS")


def peak_bytes_of(work: Callable[[], object], proc: Path = Path("/proc")) -> int:
    """Run something, and return the largest resident size of this process meanwhile.

    Where the kernel does not let a process reset its peak, it is that of the whole past.
    """
    try:
        (proc / "self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        work()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    work()
    return _status(proc, "VmHWM")


def kv_bytes(utilization: float, profile: MemoryProfile) -> int:
    """Return the bytes for KV: a share of the host's memory, less what a full step takes.

    Args:
        utilization: The share, `gpu_memory_utilization`.
        profile: With a measured step.

    Raises:
        ConfigError: Nothing is left; gives the numbers.
    """
    assert profile.peak is not None
    assert profile.activation is not None
    total = total_bytes()
    left = int(utilization * total) - profile.peak
    if left <= 0:
        raise ConfigError(
            f"gpu_memory_utilization {utilization} of {total // MIB} MiB leaves no memory for KV: "
            f"the process takes {profile.peak // MIB} MiB, of which weights "
            f"{profile.weights // MIB} and a full step {profile.activation // MIB}; raise it, or "
            "lower max_num_batched_tokens"
        )
    return left


def memory_table(
    profile: MemoryProfile | None, groups: Sequence[KVGroup], max_model_len: int, num_lanes: int
) -> str:
    """Return the lines about an engine's memory that it logs at its start.

    Args:
        profile: Measured memory; None for a device that is not the CPU.
        groups: Its KV groups. Lines about one with a window, or of states, say so.
        max_model_len: Longest sequence in tokens.
        num_lanes: Lanes, of which each has the groups' blocks.
    """
    weights, activation, _, loading = (None,) * 4 if profile is None else profile
    concurrency = max_concurrency(groups, max_model_len, num_lanes)
    rows = {
        "weights and kernels": _mib(weights),
        "peak of loading": _mib(loading),
        "peak activation": _mib(activation),
    }
    for group in groups:
        num_blocks = num_lanes * group.num_usable_blocks
        lanes = f" in {num_lanes} lanes" if num_lanes > 1 else ""
        if group.spec.kind == "state":
            rows |= {
                "bytes per state": f"{group.bytes_per_block:,}",
                "states": f"{num_blocks:,}{lanes}, checkpoints of prefixes among them",
            }
            continue
        window = f" (window {group.spec.window:,})" if group.spec.window is not None else ""
        rows |= {
            f"bytes per block{window}": f"{group.bytes_per_block:,}",
            f"blocks{window}": f"{num_blocks:,}{lanes}",
            f"tokens{window}": f"{num_blocks * group.block_size:,}",
        }
    rows["maximum concurrency"] = f"{concurrency:.2f} sequences of {max_model_len:,} tokens"
    width = max(20, *map(len, rows))
    return "\n".join(["memory:", *(f"  {name:{width}} {value}" for name, value in rows.items())])


def _mib(num_bytes: int | None) -> str:
    return "not measured" if num_bytes is None else f"{num_bytes / MIB:,.1f} MiB"


def _status(proc: Path, wanted: str) -> int:
    for line in (proc / "self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.removesuffix("kB")) << 10
    raise OSError(f"no {wanted} in {proc / 'self/status'}")

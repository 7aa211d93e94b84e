"""Load a workload from a file or folder, whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from cluster.lab.workloads.azure import COLUMNS, read_azure
from cluster.lab.workloads.distributions import read_distributions
from cluster.lab.workloads.errors import WorkloadError
from cluster.lab.workloads.json_lines import read_aibrix, read_llmservingsim
from cluster.lab.workloads.mooncake import read_mooncake
from cluster.lab.workloads.rows import read_lines
from cluster.lab.workloads.servegen import read_servegen

if TYPE_CHECKING:
    from cluster.lab.workloads.request import Workload

Format = Literal["mooncake", "azure", "servegen", "aibrix", "llmservingsim", "distributions"]
FORMATS: tuple[Format, ...] = get_args(Format)

# A key that every line of a JSON Lines format has, and no line of another one.
_LINE_KEYS: dict[str, Format] = {
    "input_length": "mooncake",
    "requests": "aibrix",
    "input_toks": "llmservingsim",
}


def load_workload(
    path: str | Path,
    *,
    format: Format | Literal["auto"] = "auto",
    seed: int = 0,
    limit: int | None = None,
) -> Workload:
    """Load a workload; equal arguments give equal workloads, in any process.

    Args:
        path: A file, or the folder of a ServeGen data set.
        format: One of `FORMATS`; "auto" looks at the contents.
        seed: Seed of all random numbers, which spread rounded arrivals and draw from
            distributions. 0 or more.
        limit: Number of first requests to keep; None keeps all.

    Raises:
        WorkloadError: The file is malformed or empty.
    """
    path = Path(path)
    if seed < 0:
        raise WorkloadError(f"a seed of {seed} is not possible; give 0 or more", field="seed")
    if limit is not None and limit < 1:
        raise WorkloadError(f"a limit of {limit} leaves nothing; give 1 or more", field="limit")
    match find_format(path) if format == "auto" else format:
        case "servegen":
            return read_servegen(path, seed, limit)
        case "mooncake":
            workload = read_mooncake(path, seed)
        case "azure":
            workload = read_azure(path)
        case "aibrix":
            workload = read_aibrix(path)
        case "llmservingsim":
            workload = read_llmservingsim(path)
        case "distributions":
            workload = read_distributions(path, seed)
        case unknown:
            raise WorkloadError(
                f"no format {unknown!r}; give one of {', '.join(FORMATS)}", path=str(path)
            )
    return workload if limit is None else workload.head(limit)


def find_format(path: Path) -> Format:
    """Detect the format from a file's first line; a folder is ServeGen's.

    Raises:
        WorkloadError: The format is unknown.
    """
    if path.is_dir():
        return "servegen"
    _, first = next(read_lines(path), (0, ""))
    if not first:
        raise WorkloadError("is empty; check that it is complete", path=str(path))
    if all(column in first for column in COLUMNS):
        return "azure"
    for key in _keys_of(first):
        if key in _LINE_KEYS:
            return _LINE_KEYS[key]
    if path.suffix in (".yaml", ".yml", ".json"):
        return "distributions"
    raise WorkloadError(
        f"has an unknown format; choose one of {', '.join(FORMATS)}",
        path=str(path),
    )


def _keys_of(line: str) -> list[str]:
    """Return the keys of a line that is a JSON object; none of other lines."""
    try:
        return list(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except msgspec.DecodeError:
        return []

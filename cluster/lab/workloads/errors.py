"""The error of workloads."""

from __future__ import annotations


class WorkloadError(Exception):
    """A trace or specification is not valid; the message says where and what to change.

    Attributes:
        path: The file or folder, or None if there is none.
        line: The line, from 1; None for the whole file.
        field: The invalid column or key, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        line: int | None = None,
        field: str | None = None,
    ) -> None:
        places = (
            path,
            f"line {line}" if line is not None else None,
            f"field {field}" if field else None,
        )
        where = ", ".join(p for p in places if p)
        super().__init__(f"{where}: {message}" if where else message)
        self.path = path
        self.line = line
        self.field = field

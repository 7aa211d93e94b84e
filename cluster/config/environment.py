"""The only module of the package that reads or changes the process's environment."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def process_environment() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)  # noqa: TID251 - the one place


def replace_in_environment(names: Collection[str], variables: Mapping[str, str]) -> None:
    """Replace variables of this process; call it before importing modules that read them.

    Args:
        names: Variables to remove.
        variables: Variables to set afterwards.
    """
    for name in names:
        os.environ.pop(name, None)  # noqa: TID251 - the one place
    os.environ.update(variables)  # noqa: TID251 - the one place

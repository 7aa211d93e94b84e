"""The environment: nothing else in the package reads or changes it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, to start children with."""
    return dict(os.environ)  # noqa: TID251 - the one place


def replace_in_environment(names: Collection[str], variables: Mapping[str, str]) -> None:
    """Replace variables of this process, before what reads them is imported.

    Args:
        names: Variables to remove.
        variables: Variables to set afterwards.
    """
    for name in names:
        os.environ.pop(name, None)  # noqa: TID251 - the one place
    os.environ.update(variables)  # noqa: TID251 - the one place

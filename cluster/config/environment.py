"""The environment: nothing else in the package reads or changes it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, to start children with."""
    return dict(os.environ)  # noqa: TID251 - the one place


def extend_environment(variables: Mapping[str, str]) -> None:
    """Set variables for this process, before what reads them is imported."""
    os.environ.update(variables)  # noqa: TID251 - the one place

"""The environment: nothing else in the package reads it."""

import os


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, to start children with."""
    return dict(os.environ)  # noqa: TID251 - the one place

"""Fixture ``path``: the ways in which two engines can be joined."""

import pytest


@pytest.fixture(params=["inline", "shared", "mixed"])
def path(request: pytest.FixtureRequest) -> str:
    """Return how two engines are joined.

    inline: rows travel. shared: the consumer copies them out of the producer's memory into memory
    of the same kind. mixed: it copies them from there into a device.
    """
    return request.param

"""What payload can travel by, for every test that asks for ``path``."""

import pytest


@pytest.fixture(params=["inline", "shared", "mixed"])
def path(request: pytest.FixtureRequest) -> str:
    """How two engines are joined.

    inline: rows travel. shared: the consumer copies them out of the producer's memory into memory
    of the same kind. mixed: it copies them from there into a device.
    """
    return request.param

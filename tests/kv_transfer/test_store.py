"""Stores are found by name, and a wrong configuration fails at once with its reason."""

import pytest

from kv_transfer.errors import TransferError
from kv_transfer.store import StoreConfig, make_store


class FakeStore:
    def __init__(self, config: StoreConfig) -> None:
        self.config = config


def config(**changes: object) -> StoreConfig:
    return StoreConfig(**{"backend": "shm", "capacity_bytes": 1 << 20, **changes})


def test_a_class_is_found_by_its_name() -> None:
    made = make_store(config(backend=f"{__name__}:FakeStore"))
    assert type(made).__name__ == "FakeStore"
    assert made.config.capacity_bytes == 1 << 20


@pytest.mark.parametrize(
    "backend", ["", "redis", "kv_transfer.stores.shm", ":ShmStore", "kv_transfer.stores.shm:"]
)
def test_an_unknown_backend_is_named_with_the_known_ones(backend: str) -> None:
    with pytest.raises(TransferError, match=r"use one of \['mooncake', 'ray', 'shm'\]"):
        make_store(config(backend=backend))


@pytest.mark.parametrize("backend", ["no.such:Thing", "kv_transfer.store:Thing"])
def test_a_class_that_does_not_exist_is_an_error(backend: str) -> None:
    with pytest.raises(TransferError, match="cannot load KV store"):
        make_store(config(backend=backend))


@pytest.mark.parametrize("name", ["capacity_bytes", "unit_tokens", "timeout_s", "lease_s"])
@pytest.mark.parametrize("value", [0, -1])
def test_limits_are_positive(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        config(**{name: value})


def test_units_are_whole_rows() -> None:
    assert config(unit_tokens=96).unit_tokens == 96
    with pytest.raises(ValueError, match="multiple of 32, got 100"):
        config(unit_tokens=100)

"""Values and settings that the two ends of a Ray store's test share."""

import numpy as np
from numpy.typing import NDArray

from kv_transfer.store import StoreConfig
from tests.kv_transfer.stores.shm_servers import value as _value

VALUE_BYTES = 1 << 20
NUM_VALUES = 4


NAME = "test"


def config(address: str, name: str = NAME) -> StoreConfig:
    return StoreConfig(
        backend="ray",
        address=address,
        name=name,
        capacity_bytes=NUM_VALUES * VALUE_BYTES,
        timeout_s=1.0,
    )


def value(number: int) -> NDArray[np.uint8]:
    return _value(number, VALUE_BYTES)

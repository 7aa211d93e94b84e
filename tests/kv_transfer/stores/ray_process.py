"""Client of the Ray store in a process of its own.

``ADDRESS KEY``: puts a value until it is stored, prints that, and waits to be killed. Without KEY:
calls a store whose cluster does not exist, and prints the results.
"""

import sys
import warnings

import numpy as np

from kv_transfer.store import StoreConfig
from kv_transfer.stores.ray import RayStore
from tests.kv_transfer.stores.shm_servers import NUM_SLOTS, VALUE_BYTES, eventually, value

NAME = "test"


def config(address: str, name: str = NAME) -> StoreConfig:
    size = NUM_SLOTS * VALUE_BYTES
    return StoreConfig(
        backend="ray", address=address, name=name, capacity_bytes=size, timeout_s=1.0
    )


def main(address: str, key: bytes) -> None:
    """Do it."""
    warnings.simplefilter("ignore")
    store = RayStore(config(address))
    if key:
        eventually(lambda: store.put(key, value(1)) in {"stored", "present"}, 120)
        print("stored", flush=True)
        sys.stdin.read()
    else:
        outcomes = [store.put(b"a", np.zeros(10, np.uint8)) for _ in range(50)]
        print(store.num_present([b"a"]), store.get([b"a"]), set(outcomes), flush=True)
        store.discard(b"a")
        store.close()


if __name__ == "__main__":
    main(sys.argv[1], b"".join(argument.encode() for argument in sys.argv[2:]))

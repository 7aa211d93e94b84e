"""A client of the shared-memory store in a process of its own, to be killed or left in mid-air.

``start ADDRESS``: starts a server, puts a value, says how that went, and waits to be killed.

``ADDRESS KEY``: leases every value it finds under the keys "0", "1", ..., begins to put KEY, writes
the first half of 1 MiB of 0x11, prints that, and waits for a line; then it writes the second half,
commits, and prints the outcome.
"""

import sys
import time

from kv_transfer.stores.shm_messages import Begin, Commit, Placed, PutEnded
from tests.kv_transfer.stores.shm_servers import VALUE_BYTES, connect, value


def main(address: str, key: bytes) -> None:
    """Do it."""
    store = connect(address)
    leases = store.get([str(number).encode() for number in range(100)])
    placed = store._ask(Begin(key, VALUE_BYTES), Placed, time.monotonic() + 5)
    half = VALUE_BYTES // 2
    where = store._slab[placed.offset : placed.offset + VALUE_BYTES]
    where[:half] = 0x11
    print(f"holding {len(leases)}", flush=True)
    sys.stdin.readline()
    where[half:] = 0x11
    ended = store._ask(Commit(placed.put_id), PutEnded, time.monotonic() + 5)
    print(ended.outcome, flush=True)


def start(address: str) -> None:
    """Start a server."""
    store = connect(address)
    print(store.put(b"a", value(1)), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(sys.argv[2])
    else:
        main(sys.argv[1], sys.argv[2].encode())

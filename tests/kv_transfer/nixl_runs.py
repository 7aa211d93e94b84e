"""Requests between two engines that may send payload over NIXL, real or a stand-in."""

import msgspec

from tests.kv_transfer.fakes import LAYOUT, QUICK
from tests.kv_transfer.sockets import assert_transfers, engines


def deliver(num_slots: int) -> str:
    """Move three requests and return the paths that they took."""
    row = LAYOUT.row_bytes
    slot_bytes = max(2048, QUICK.chunk_rows(row) * row)
    config = msgspec.structs.replace(QUICK, max_inflight_bytes=num_slots * slot_bytes)
    with engines(config=config, network="plain") as both:
        for number in range(3):
            assert_transfers(both, f"r{number}", endpoints=both[0].worker.endpoints[:1])
            both[1].io.cache[:] = 0
        return ",".join(sorted(both[1].stats.paths))

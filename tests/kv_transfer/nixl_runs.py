"""Requests between two engines that may send payload over NIXL, real or a stand-in."""

import msgspec
import numpy as np

from tests.kv_transfer.fakes import LAYOUT, QUICK, FakeIO, make_engine, make_ticket, run_until

SOURCE = tuple(range(9, 1, -1))
TARGET = tuple(range(1, 9))
NUM_TOKENS = 8 * 32 - 5
ROW = LAYOUT.row_bytes


def deliver(num_slots: int) -> str:
    """Move three requests and return the paths that they took."""
    slot_bytes = QUICK.chunk_rows(ROW) * ROW
    config = msgspec.structs.replace(QUICK, max_inflight_bytes=num_slots * max(2048, slot_bytes))
    producer = make_engine("P", FakeIO(10, seed=1), config=config, network="plain")
    consumer = make_engine("D", FakeIO(10, seed=2), config=config, network="plain")
    try:
        for number in range(3):
            request_id = f"r{number}"
            ticket = make_ticket(request_id, producer.worker.endpoints[:1], NUM_TOKENS)
            producer.add(ticket)
            consumer.load(ticket, TARGET)
            producer.save(request_id, SOURCE, NUM_TOKENS)
            run_until(
                lambda wanted=request_id: wanted in producer.ended & consumer.ended,
                [producer, consumer],
            )
            want = producer.io.tokens(0, SOURCE, 0, NUM_TOKENS)
            assert np.array_equal(consumer.io.tokens(0, TARGET, 0, NUM_TOKENS), want)
            consumer.io.cache[:] = 0
        assert not producer.failed
        assert not consumer.failed
        return ",".join(sorted(consumer.stats.paths))
    finally:
        producer.worker.close(2.0)
        consumer.worker.close(2.0)

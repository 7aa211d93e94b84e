"""A hanging core is distinguished from an idle one, and its engine falls silent."""

import time

import msgspec

from kv_transfer.errors import FailureReason
from kv_transfer.transports.core_watch import CoreWatch
from tests.kv_transfer.fakes import run_until
from tests.kv_transfer.sockets import (
    NUM_TOKENS,
    PATIENT,
    SOURCE,
    assert_same_rows,
    engines,
    start,
    stream,
)


def test_a_core_is_asked_once_until_it_answers() -> None:
    watch = CoreWatch(ask_s=2.0, silent_s=10.0)
    watch.answer(100.0)
    asked = [watch.must_ask(now_s) for now_s in (101.9, 102.0, 103.0, 110.0)]
    assert asked == [False, True, False, False]
    watch.answer(111.0)
    assert [watch.must_ask(now_s) for now_s in (112.0, 113.0)] == [False, True]


def test_only_a_core_that_was_asked_and_does_not_answer_hangs() -> None:
    watch = CoreWatch(ask_s=2.0, silent_s=10.0)
    watch.answer(100.0)
    assert not watch.is_silent(1000.0), "nobody has asked"
    assert watch.must_ask(1000.0)
    assert not watch.is_silent(1009.9)
    assert watch.is_silent(1010.0)
    watch.answer(1011.0)
    assert not watch.is_silent(1011.0)


def test_an_engine_whose_core_hangs_falls_silent_for_its_peers() -> None:
    config = msgspec.structs.replace(
        PATIENT, no_data_s=0.3, no_progress_s=0.5, lease_s=3.0, renew_s=0.2
    )
    with engines(config=config) as (producer, consumer):
        stream([producer, consumer])
        # The producer is not stepped any more, and no row is ready, so that all looks well.
        run_until(lambda: bool(consumer.ended), [consumer])
        assert consumer.reasons == {"r": FailureReason.STALLED}


def test_an_engine_that_waits_does_not_look_as_if_it_hung() -> None:
    config = msgspec.structs.replace(
        PATIENT, no_data_s=0.3, no_progress_s=0.6, lease_s=20.0, renew_s=0.2
    )
    with engines(config=config) as (producer, consumer):
        start([producer, consumer], num_ready=0)
        end_s = time.monotonic() + 1.2
        run_until(lambda: time.monotonic() > end_s, [producer, consumer])
        assert not producer.ended | consumer.ended
        producer.save("r", SOURCE, NUM_TOKENS)
        run_until(lambda: "r" in producer.ended & consumer.ended, [producer, consumer])
        assert "r" in producer.sent & consumer.received
        assert_same_rows([producer, consumer])

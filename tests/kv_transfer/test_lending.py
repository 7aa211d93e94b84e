"""KV of requests that run on while it is fetched: full blocks, until results say it is over."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kv_transfer.connector import SaveProgress, TransferRequest
from kv_transfer.errors import FailureReason, TransferError
from tests.kv_transfer.fakes import KEYS, LAYOUT
from tests.kv_transfer.pairs import Pair

FULL = 6 * 32
"""Tokens that the producer has in full blocks; its request writes to other blocks."""


def lend(pair: Pair, num_tokens: int = FULL, **names: str) -> None:
    ticket = pair.make_ticket("r", **names)
    request = TransferRequest("r", [0] * (FULL + 20), KEYS.seal(ticket))
    pair.producer.scheduler.lend(
        request, SaveProgress("r", 0, (pair.source,), num_tokens), pair.network.now_s
    )


@pytest.fixture
def pair(path: str) -> Iterator[Pair]:
    """Join two engines, of which one has begun to fetch KV that the other one decodes from."""
    made = Pair(path, num_tokens=FULL)
    made.consumer.load(made.ticket, made.target)
    yield made
    made.steps(12, 1.0)
    made.assert_nothing_is_held()


def test_lent_kv_arrives_while_the_request_keeps_running(pair: Pair) -> None:
    lend(pair)
    while not pair.consumer.ended:
        pair.producer.save("r", pair.source, FULL + 20)  # News of its own steps say nothing here.
        pair.steps(1, 0.1)
    pair.steps(2, 0.1)
    pair.assert_delivered()


def test_blocks_of_a_request_that_finishes_stay_until_they_are_fetched(pair: Pair) -> None:
    lend(pair)
    pair.producer.step()
    assert pair.producer.scheduler.request_finished("r", (pair.source,))
    pair.finish(step_s=0.1)
    pair.assert_delivered()


@pytest.mark.parametrize("first", [0, 96, 128, 192])
def test_kv_that_a_window_has_left_is_not_lent(path: str, first: int) -> None:
    """Of 192 tokens and a window of 70, rows from position 96 on are needed."""
    windowed = msgspec.structs.replace(LAYOUT, window=70)
    pair = Pair(path, num_tokens=FULL, layouts=(windowed, windowed))
    request = TransferRequest("r", [0] * FULL, KEYS.seal(pair.ticket))
    lent = SaveProgress("r", 0, (pair.source,), FULL, (first,))
    pair.producer.scheduler.lend(request, lent, pair.network.now_s)
    assert pair.producer.scheduler.first_position_read("r") == 96
    pair.steps(1)
    assert (pair.producer.reasons == {"r": FailureReason.CANCELLED}) == (first > 96)


@pytest.mark.parametrize("num_steps", range(4))
def test_a_request_that_loses_its_blocks_lends_no_more(pair: Pair, num_steps: int) -> None:
    lend(pair)
    pair.steps(num_steps, 0.1)
    pair.producer.scheduler.request_preempted("r")
    pair.producer.forward.append(lambda: pair.producer.io.cache.fill(7))
    want = pair.producer.io.tokens(0, pair.source, 0, FULL).copy()
    pair.finish(step_s=0.1)
    if pair.consumer.received:
        assert np.array_equal(pair.consumer.io.tokens(0, pair.target, 0, FULL), want)
    else:
        assert pair.consumer.reasons == {"r": FailureReason.CANCELLED}
        num_tokens = pair.consumer.failed["r"].num_tokens
        got = pair.consumer.io.tokens(0, pair.target, 0, num_tokens)
        assert np.array_equal(got, want[:num_tokens])


def test_a_ticket_for_more_than_there_is_ends_for_both(pair: Pair) -> None:
    lend(pair, num_tokens=FULL - 32)
    pair.finish(step_s=0.1)
    assert pair.producer.reasons == pair.consumer.reasons == {"r": FailureReason.CANCELLED}
    assert pair.consumer.failed["r"].num_tokens == 0


def test_only_the_producer_of_a_ticket_lends_by_it() -> None:
    pair = Pair(num_tokens=FULL)
    with pytest.raises(TransferError, match="makes this engine its consumer"):
        lend(pair, producer="D", consumer="P")
    lend(pair)
    with pytest.raises(TransferError, match="already has a transfer"):
        lend(pair)

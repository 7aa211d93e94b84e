"""Two engines on real sockets, one request between them, and peers made by hand.

Such peers hold the deployment's secret: what others send is not even read.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import numpy as np
import zmq

from kv_transfer.transport import WireCounters
from kv_transfer.transports.tcp import bind_tcp, connect_tcp
from tests.kv_transfer.fakes import (
    QUICK,
    FakeEngine,
    FakeIO,
    make_engine,
    make_settings,
    make_ticket,
    run_until,
)

# A transfer in a test machine under load may be slow; only the tests of silence need quick ones.
PATIENT = msgspec.structs.replace(QUICK, no_progress_s=10.0, lease_s=20.0, rendezvous_s=20.0)
SOURCE, TARGET = tuple(range(1, 9)), tuple(range(9, 1, -1))
NUM_TOKENS = 8 * 32 - 9


@contextmanager
def engines(
    *names: str,
    num_blocks: int = 10,
    shares: bool = False,
    each: Sequence[dict[str, Any]] = ({}, {}),
    **settings: Any,
) -> Iterator[list[FakeEngine]]:
    """Make engines, by default a producer "P" and a consumer "D"; ``each`` has their own settings.

    An address to bind may have a place for the engine's name.
    """
    with ExitStack() as stack:
        made = []
        for seed, (name, own) in enumerate(zip(names or "PD", each, strict=False)):
            told = {"config": PATIENT, **settings, **own}
            if "bind" in told:
                told["bind"] = told["bind"].format(name)
            made.append(make_engine(name, FakeIO(num_blocks, seed=seed, shares=shares), **told))
            stack.callback(made[-1].worker.close, 5.0)
        yield made


def start(
    both: Sequence[FakeEngine],
    request_id: str = "r",
    num_ready: int = NUM_TOKENS,
    endpoints: tuple[str, ...] = (),
) -> None:
    """Start a transfer of which the producer has computed some tokens."""
    producer, consumer = both
    ticket = make_ticket(request_id, endpoints or producer.worker.endpoints, NUM_TOKENS)
    producer.add(ticket)
    consumer.load(ticket, TARGET)
    if num_ready:
        producer.save(request_id, SOURCE, num_ready)


def stream(both: Sequence[FakeEngine]) -> None:
    """Start a transfer; return when the three blocks that are ready have arrived."""
    start(both, num_ready=100)
    run_until(lambda: len(both[1].io.changed()) == 3, both)


def assert_transfers(both: Sequence[FakeEngine], request_id: str = "r", **how: Any) -> None:
    """Move a request from the first engine to the second."""
    start(both, request_id, **how)
    run_until(lambda: request_id in both[0].ended & both[1].ended, both)
    assert request_id in both[0].sent & both[1].received
    assert_same_rows(both)


def assert_same_rows(both: Sequence[FakeEngine]) -> None:
    want = both[0].io.tokens(0, SOURCE, 0, NUM_TOKENS)
    assert np.array_equal(both[1].io.tokens(0, TARGET, 0, NUM_TOKENS), want)


def wait_until(predicate: Callable[[], object], what: str, deadline_s: float = 20.0) -> None:
    give_up_s = time.monotonic() + deadline_s
    while not predicate():
        assert time.monotonic() < give_up_s, what
        time.sleep(0.005)


@contextmanager
def zmq_socket(kind: int) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    made = context.socket(kind)
    made.linger = 0
    made.sndtimeo = 20_000
    try:
        yield made
    finally:
        made.close()
        context.term()


def dial(dealer: zmq.Socket[Any], endpoint: str, producer: str = "P") -> None:
    """Connect as a consumer does."""
    if endpoint.startswith("tcp://"):
        connect_tcp(dealer, endpoint, make_settings("D"), producer)
    else:
        dealer.connect(endpoint)


def listen(router: zmq.Socket[Any], name: str = "P") -> str:
    """Bind as a producer does; returns the endpoint to tell."""
    return bind_tcp(router, make_settings(name), WireCounters())

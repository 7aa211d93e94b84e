"""Peers made by hand that hold the deployment's secret, so that their bytes are read at all."""

from typing import Any

import zmq

from kv_transfer.transport import WireCounters
from kv_transfer.transports.far import bind_far, connect_far
from tests.kv_transfer.fakes import make_settings


def dial(dealer: zmq.Socket[Any], endpoint: str, producer: str = "P") -> None:
    """Connect as a consumer does."""
    if endpoint.startswith("tcp://"):
        connect_far(dealer, endpoint, make_settings("D"), producer)
    else:
        dealer.connect(endpoint)


def listen(router: zmq.Socket[Any], name: str = "P") -> str:
    """Bind as a producer does; returns the endpoint to tell."""
    return bind_far(router, make_settings(name), WireCounters())

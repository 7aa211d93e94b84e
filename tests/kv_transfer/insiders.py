"""Peers made by hand that hold the deployment's secret, so that their bytes are read at all."""

from typing import Any

import zmq

from kv_transfer.transport import WireCounters
from kv_transfer.transports.tcp import bind_tcp, connect_tcp
from tests.kv_transfer.fakes import make_settings


def dial(dealer: zmq.Socket[Any], endpoint: str, producer: str = "P") -> None:
    """Connect as a consumer does."""
    if endpoint.startswith("tcp://"):
        connect_tcp(dealer, endpoint, make_settings("D"), producer)
    else:
        dealer.connect(endpoint)


def listen(router: zmq.Socket[Any], name: str = "P") -> str:
    """Bind as a producer does; returns the endpoint to tell."""
    return bind_tcp(router, make_settings(name), WireCounters())

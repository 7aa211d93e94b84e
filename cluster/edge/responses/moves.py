"""What an ingress that ends hands over to another one. Pure.

Fields are only ever added at the end, with defaults: in a rolling update the two ingresses may be
of different versions.
"""

from __future__ import annotations

import msgspec

from cluster.edge.tenants import Tenant
from replicas.messages import EngineRequest


class MovedResponse(msgspec.Struct, frozen=True, array_like=True):
    """A finished response.

    Attributes:
        tenant: Its tenant.
        response_id: Its id.
        body: The response as JSON.
        turns: The conversation up to and with it, see `StoredResponse`.
        age_s: Seconds since it was stored.
        recording: Recording of its output, see `StoredResponse`.
    """

    tenant: str
    response_id: str
    body: bytes
    turns: tuple[bytes, ...]
    age_s: float
    recording: bytes = b""


class MovedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A response in the background that is not finished, to be continued.

    Attributes:
        tenant: Its tenant, with its limits.
        source: Address of its client.
        request_id: The client's id of its request.
        response_id: Its id.
        created: Unix time in s at which its request arrived.
        body: The request's body as JSON, with items in place of references to them.
        turns: The conversation that it continues.
        request: The engines' request.
        token_ids: Its output so far; empty if it has to be computed again.
        left_s: Seconds left of the request's longest time; None without a limit.
        recording: Recording of its output so far; empty if it has to be computed again.
    """

    tenant: Tenant
    source: str
    request_id: str
    response_id: str
    created: int
    body: bytes
    turns: tuple[bytes, ...]
    request: EngineRequest
    token_ids: list[int]
    left_s: float | None
    recording: bytes = b""


class HandOver(msgspec.Struct, frozen=True, array_like=True):
    """Responses for another ingress, which takes all of them or none."""

    responses: list[MovedResponse] = []
    requests: list[MovedRequest] = []


HAND_OVERS = msgspec.msgpack.Decoder(HandOver)

"""Another process that wants to harm an engine; run with what it knows as JSON on stdin.

It sends whatever it can think of, and prints how many frames the engine answered with.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from kv_transfer.curve import secure_client
from kv_transfer.keys import KeyRing
from replicas.codec import encode
from replicas.messages import (
    PROTOCOL_VERSION,
    Abort,
    Activate,
    AddRequest,
    EngineDescription,
    EngineRequest,
    Hello,
    LoadKV,
    Utility,
)
from replicas.sampling_params import SamplingParams

if TYPE_CHECKING:
    from replicas.messages import ClientMessage

ATTACK_S = 2.0


class Knowledge(msgspec.Struct):
    """What the attacker has got hold of.

    Attributes:
        description: The engine's.
        keys: Secrets: the deployment's, another one's, or none: then it speaks in plain.
        victims: Requests of others that run on the engine.
        knows_public_key: Whether it takes the engine's public key from the description.
    """

    description: EngineDescription
    keys: KeyRing
    victims: list[str]
    knows_public_key: bool = False


def attack(known: Knowledge) -> int:
    """Speak to both sockets; the number of frames that came back."""
    context = zmq.Context()
    description = known.description
    sockets = []
    for endpoint in (description.input_endpoint, description.output_endpoint):
        dealer = context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.SNDHWM, 0)
        dealer.set(zmq.ROUTING_ID, b"attacker")
        if known.knows_public_key:
            public, secret = zmq.curve_keypair()
            dealer.set(zmq.CURVE_SERVERKEY, description.public_key.encode())
            dealer.set(zmq.CURVE_PUBLICKEY, public)
            dealer.set(zmq.CURVE_SECRETKEY, secret)
        elif known.keys.secrets:
            secure_client(dealer, known.keys, description.incarnation, description.public_key)
        dealer.connect(endpoint)
        sockets.append(dealer)
    from_engine = sockets[1]
    num_frames = 0
    end_s = time.monotonic() + ATTACK_S
    while time.monotonic() < end_s:
        for raw in words(known):
            # Too long a message there would end its own connection.
            for dealer in sockets if len(raw) < 500 else sockets[:1]:
                # A socket that was turned away takes nothing any more.
                with contextlib.suppress(zmq.Again):
                    dealer.send(raw, zmq.NOBLOCK)
        # A busy engine tells its load at every step: waiting for silence would never end.
        from_engine.poll(50)
        with contextlib.suppress(zmq.Again):
            while from_engine.recv(zmq.NOBLOCK):
                num_frames += 1
    for dealer in sockets:
        dealer.close(linger=0)
    context.term()
    return num_frames


def words(known: Knowledge) -> list[bytes]:
    """What it says, all at once."""
    # As an engine took it, before only its parent could say so.
    drain = msgspec.msgpack.encode(["drain"])
    said: list[ClientMessage] = [
        Hello(PROTOCOL_VERSION),
        Utility(1, "reset_prefix_cache"),
        Utility(2, "no such"),
    ]
    own = EngineRequest(
        "the attacker's", [5, 9, 3], SamplingParams(max_tokens=8, temperature=0.0, seed=0)
    )
    said += [AddRequest(own, "decode"), Activate(own.request_id, [[5] * 100_000])]
    for victim in known.victims:
        said += [LoadKV(victim, b"no ticket", 7), Activate(victim, [[3]]), Abort([victim])]
    return [drain, *map(encode, said)]


if __name__ == "__main__":
    print(attack(msgspec.json.decode(sys.stdin.buffer.read(), type=Knowledge)), flush=True)

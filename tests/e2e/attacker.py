"""An attack on a whole server by another user of its host; run with an `Attack` as JSON on stdin.

The process gives up root first, prints how often each outcome occurred, and keeps the connections
that it still has until stdin ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import struct
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kv_transfer.curve import server_public_key
from kv_transfer.keys import KeyRing
from replicas.messages import EngineDescription
from tests.cluster.control_attacker import Knowledge
from tests.cluster.control_attacker import attack as speak
from tests.cluster.edge.http_server import answer, ask, connect, request_bytes
from tests.e2e import http_attacks

if TYPE_CHECKING:
    from collections.abc import Callable

NOBODY = 65534
OTHER = KeyRing((b"a secret of another deployment",))
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
NUM_SLOW, NUM_UNREAD, NUM_OVERSIZED = 300, 16, 16
HI = {"role": "user", "content": "hi"}


class Attack(msgspec.Struct):
    """An attack, and the attacker's knowledge of the server.

    Attributes:
        name: One of `ATTACKS`, or of `http_attacks.ATTACKS`.
        target: The server's endpoint.
        engine_ports: Every TCP port on which an engine listens.
        recorded: Port and bytes of each honest connection to an engine.
        folder: Of HAProxy's files.
    """

    name: str
    target: http_attacks.Target
    engine_ports: list[int] = []
    recorded: list[tuple[int, bytes]] = []
    folder: str = ""


# --- the engines' sockets ------------------------------------------------------------------------


def engine_sockets(known: Attack) -> Counter[str]:
    """Send words, garbage and recorded bytes to every port of every engine at the same time."""
    came: Counter[str] = Counter()
    with ThreadPoolExecutor(len(known.engine_ports)) as threads:
        for keys in (KeyRing(), OTHER):
            came["frames"] += sum(threads.map(partial(_speak, keys), known.engine_ports))
        came["garbage"] += sum(threads.map(_throw_garbage, known.engine_ports))
        came["replayed"] += sum(threads.map(_replay, known.recorded * 5))
    return came


def _speak(keys: KeyRing, port: int) -> int:
    endpoint = f"tcp://127.0.0.1:{port}"
    description = EngineDescription(
        incarnation="guessed", public_key=server_public_key(OTHER, "guessed"),
        input_endpoint=endpoint, output_endpoint=endpoint, kv_endpoints=None, kv_layout_hash=None,
        kv_groups=(), model="", max_model_len=1, vocab_size=1, eos_token_ids=[],
        dp_groups=1, slots_per_group=1, max_num_batched_tokens=1, pid=0,
    )  # fmt: skip
    return speak(Knowledge(description, keys, ["cmpl-1"]))


def _throw_garbage(port: int) -> int:
    dice = random.Random(port)
    for n in range(200):
        raw = dice.randbytes(dice.randrange(1, 400))
        if n % 2:
            raw = GREETING + b"\x06" + struct.pack(">Q", dice.randrange(1 << 62)) + raw
        with contextlib.suppress(ConnectionError), contextlib.closing(connect(port)) as client:
            client.sendall(raw)
    return 200


def _replay(recorded: tuple[int, bytes]) -> int:
    port, raw = recorded
    with contextlib.suppress(OSError), contextlib.closing(connect(port)) as client:
        client.settimeout(2.0)
        client.sendall(raw)
        while client.recv(65536):
            pass
    return 1


# --- HAProxy's files -----------------------------------------------------------------------------


def haproxy_files(known: Attack) -> Counter[str]:
    """Try every way in which another user could command HAProxy."""
    folder = Path(known.folder)
    config, admin = folder / "haproxy.cfg", folder / "admin.sock"

    def command() -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(admin))
            client.sendall(b"set maxconn global 1; shutdown sessions server x/y\n")

    acts = (
        command,
        lambda: os.listdir(folder),
        config.read_text,
        lambda: config.write_text(""),
        admin.unlink,
        lambda: (folder / "planted").symlink_to("/etc/passwd"),
        lambda: folder.rename(folder.with_name("moved")),
    )
    return Counter(_outcome(act) for act in acts)


def _outcome(act: Callable[[], object]) -> str:
    try:
        act()
    except OSError as error:
        return type(error).__name__
    return "done"


# --- clients that hold resources without use -----------------------------------------------------


def slow_clients(known: Attack) -> Counter[str]:
    """Send slow headers and bodies and endless bodies, and open streams without reading them."""
    unread = [connect(known.target.port, receive_bytes=4096) for _ in range(NUM_UNREAD)]
    body = {
        "model": known.target.model, "prompt": "hi", "max_tokens": 8000, "temperature": 0,
        "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    for client in unread:
        client.sendall(request_bytes(body))
    _HELD.extend(unread)
    slow = [connect(known.target.port) for _ in range(NUM_SLOW)]
    for n, client in enumerate(slow):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
        client.sendall(head if n % 3 == 0 else request_bytes(b"{", length=500))
    end_s = time.monotonic() + 5
    while time.monotonic() < end_s:
        for client in slow:
            with contextlib.suppress(ConnectionError):
                client.sendall(b"a")
        time.sleep(1)
    came = Counter(f"slow {answer(client)[0]}" for client in slow)
    with ThreadPoolExecutor(4) as threads:
        came += Counter(threads.map(lambda n: _oversized(known, n), range(NUM_OVERSIZED)))
    came["unread 200"] = sum(client.recv(12) == b"HTTP/1.1 200" for client in unread)
    return came


def _oversized(known: Attack, n: int) -> str:
    with contextlib.closing(connect(known.target.port)) as client:
        # HAProxy has the refusal before the body has been sent, and reads no more of it.
        client.settimeout(3.0)
        with contextlib.suppress(ConnectionError, TimeoutError):
            if n % 2:
                client.sendall(request_bytes(b" " * 2**16, length=2**30))
            else:
                client.sendall(request_bytes(b"", length=9 * 2**20))
                for _ in range(9):
                    client.sendall(b" " * 2**20)
        # HAProxy keeps the connection for a while, because the declared body is incomplete.
        with contextlib.suppress(ConnectionError, TimeoutError):
            if status := client.recv(12)[9:]:
                return f"oversized {status.decode()}"
    return "oversized, cut off"


# --- small bodies that cost much -----------------------------------------------------------------


def costly_bodies(known: Attack) -> Counter[str]:
    """Send each body ten times, from eight clients at a time, with bursts of scrapes in between."""
    completions, chat = "/v1/completions", "/v1/chat/completions"
    empty = {"role": "user", "content": ""}
    wide = {f"a{i}": i for i in range(300_000)}
    bodies: dict[str, tuple[str, bytes]] = {
        "stop-token-ids": (completions, _json(prompt="hi", stop_token_ids=[7] * 1_000_000)),
        "empty-messages": (chat, _json(messages=[empty] * 20_000)),
        "deep": (chat, b'{"messages": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
        "wide": (chat, _json(messages=[HI], chat_template_kwargs=wide)),
        "detokenize": ("/detokenize", _json(tokens=[7] * 200_000)),
    }

    def post(name: str) -> str:
        path, raw = bodies[name]
        return f"{name} {ask(known.target.port, raw, path=path)[0]}"

    with ThreadPoolExecutor(4) as storm, ThreadPoolExecutor(8) as threads:
        scrape = partial(_get, known.target.operations_port)
        scrapes = storm.map(scrape, ["/metrics", "/kv"] * 150)
        came = Counter(threads.map(post, [*bodies] * 10))
        came += Counter(scrapes)
    return came


def _get(port: int, path: str) -> str:
    with contextlib.closing(connect(port)) as client:
        client.sendall(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        return f"{path} {answer(client)[0]}"


def _json(**body: object) -> bytes:
    return json.dumps(body).encode()


ATTACKS = {
    attack.__name__: attack
    for attack in (engine_sockets, haproxy_files, slow_clients, costly_bodies)
}
_HELD: list[socket.socket] = []


def main() -> None:
    """Attack, print the outcomes, and keep connections open."""
    known = msgspec.json.decode(sys.stdin.readline(), type=Attack)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    http_attack = http_attacks.ATTACKS.get(known.name)
    came = (
        ATTACKS[known.name](known)
        if http_attack is None
        else asyncio.run(http_attack(known.target))
    )
    print(json.dumps(came), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

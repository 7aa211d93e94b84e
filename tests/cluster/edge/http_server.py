"""An ASGI app on a real socket in a thread, and raw clients that behave as they like."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def poll(predicate: Callable[[], Any], what: str = "", deadline_s: float = 120) -> Any:
    """Wait until a predicate is true; returns its value."""
    end_s = time.monotonic() + deadline_s
    while not (value := predicate()):
        assert time.monotonic() < end_s, f"never: {what}"
        time.sleep(0.005)
    return value


@contextlib.contextmanager
def serving(app: Any) -> Iterator[int]:
    """Serve an app; yields its port. Raises the limit of open files, for hundreds of clients."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            poll(lambda: server.started, "the server starts")
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(timeout=10)
            assert not thread.is_alive()


def connect(
    port: int, *, source: str = "127.0.0.1", receive_bytes: int | None = None
) -> socket.socket:
    """A connection, from an address of the loopback network."""
    client = socket.socket()
    client.settimeout(30)
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    try:
        client.bind((source, 0))
        client.connect(("127.0.0.1", port))
    except OSError:
        client.close()
        raise
    return client


def request_bytes(
    body: object,
    *,
    length: int | None = None,
    headers: Sequence[str] = (),
    path: str = "/v1/completions",
) -> bytes:
    """Return a POST request; `length` overrides its Content-Length."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close"]
    lines += ["Content-Type: application/json", *headers]
    head = [*lines, f"Content-Length: {len(raw) if length is None else length}", "", ""]
    return "\r\n".join(head).encode("latin-1") + raw


def answer(client: socket.socket) -> tuple[int, bytes]:
    """Read until the server closes; return status and body, status 0 if it is no HTTP answer."""
    raw = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := client.recv(65536):
            raw += chunk
    head, _, body = raw.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head.startswith(b"HTTP/") else 0), body


def ask(port: int, body: object, **options: Any) -> tuple[int, bytes]:
    """Send a whole request and read its answer."""
    with contextlib.closing(connect(port)) as client:
        client.sendall(request_bytes(body, **options))
        return answer(client)


OF_SERVE = [
    "X-Request-Timeout-Seconds: 0",
    "x-request-disconnect-disabled: ?1",
    "serve_multiplexed_model_id: a",
    "Serve-Multiplexed-Model_Id: \xff",
    "x-session-id: \xff",
    "X_Session_Id: b",
    "x-serve-router-target: c",
    "x-request-id: \xff",
]
"""Headers that Serve would obey, or fail on."""


class NamesOfHeaders:
    """An application that answers everything, and keeps which headers came."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.seen.extend(name for name, _ in scope["headers"])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

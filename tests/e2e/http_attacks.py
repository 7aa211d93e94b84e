"""Attacks on the HTTP endpoint of a server, each bounded in connections and in time.

An attack is a coroutine function of a `Target`. It returns how often each outcome occurred, under
names such as "public 404", and leaves no connection behind. All of them stay on loopback; they come
from an address of their own, so that limits by source address do not hit the honest clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import struct
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable

ANSWER_S = 30.0
IDLE_S = 40.0
"""Idle connections should be closed after 10 s; by Ray's default they are after 90."""
MIB = 2**20
PAD = 2
"""A special token of the demo model's tokenizer, which stands for no bytes."""
ONE_ID = "chosen-by-the-client"
NUM_METHODS = 3000
NUM_IDLE = 2070
"""More than half of HAProxy's 4,096 connections, the limit of one address."""
HTTP2_CONNECTIONS, HTTP2_STREAMS = 42, 100
BODIES = {8 * MIB - 1000: 31, MIB: 14, 200_000: 20, 80_000: 40}
"""Sizes, and how many bodies of each: together they fill the 256 MiB that large bodies share."""
DECLARED, NUM_DECLARED = 64 * MIB, 5
UNKNOWN_METHOD = re.compile(rb"M\d{6}X{8}")


class Target(msgspec.Struct, frozen=True):
    """The server under attack.

    Attributes:
        port: Public port.
        operations_port: Port of `/debug`, `/metrics` and the like.
        model: Name of the served model.
        max_model_len: Of that model.
        source: Loopback address that the attacker connects from.
        attack_s: Seconds for which attacks without a count of their own continue.
        num_routes: Requests that get one id; an ingress keeps the routes of 1,024.
    """

    port: int
    operations_port: int
    model: str
    max_model_len: int
    source: str = "127.0.0.2"
    attack_s: float = 3.0
    num_routes: int = 1024


class Answer(NamedTuple):
    """An HTTP answer.

    Attributes:
        status: Such as "200"; "closed" for a connection closed without one, or an error's name.
        head: Status line and headers.
        body: As received; chunked encoding is kept.
    """

    status: str
    head: bytes = b""
    body: bytes = b""


def request(
    method: str, path: str, body: bytes = b"", *headers: str, length: int | None = None
) -> bytes:
    """Return a request with a JSON body; `length` replaces its Content-Length."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    if not any(header.lower().startswith("content-type") for header in headers):
        lines.append("Content-Type: application/json")
    lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def body_of(**fields: object) -> bytes:
    """A JSON body."""
    return json.dumps(fields).encode()


@contextlib.asynccontextmanager
async def connected(
    target: Target, port: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection from the attacker's address."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, local_addr=(target.source, 0), limit=MIB
    )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def exchange(
    target: Target, raw: bytes, port: int | None = None, timeout_s: float = ANSWER_S
) -> Answer:
    """Send a request over a connection of its own and read the whole answer."""

    async def ask() -> Answer:
        async with connected(target, port or target.port) as (reader, writer):
            writer.write(raw)
            # A refusal may arrive while the body is still being sent.
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            return parse(await read_all(reader))

    try:
        return await asyncio.wait_for(ask(), timeout_s)
    except (OSError, asyncio.TimeoutError) as error:
        return Answer(type(error).__name__)


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Read up to the end of the connection, or up to its reset."""
    raw = bytearray()
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(2**18):
            raw += chunk
    return bytes(raw)


def parse(raw: bytes) -> Answer:
    """Split an answer into its status, headers and body."""
    head, _, body = raw.partition(b"\r\n\r\n")
    return (
        Answer(head[9:12].decode(), head, body) if raw.startswith(b"HTTP/1") else Answer("closed")
    )


async def many(
    target: Target, raws: Iterable[bytes], num_at_once: int, timeout_s: float = ANSWER_S
) -> Counter[str]:
    """Statuses of these requests, sent so many at a time."""
    came: Counter[str] = Counter()
    left = iter(raws)

    async def send() -> None:
        for raw in left:
            came[(await exchange(target, raw, timeout_s=timeout_s)).status] += 1

    await asyncio.gather(*(send() for _ in range(num_at_once)))
    return came


async def repeat(
    target: Target, raw: bytes, num_connections: int, port: int | None = None
) -> Counter[str]:
    """Statuses of a request that this many connections repeat for `target.attack_s`."""
    came: Counter[str] = Counter()
    end_s = time.monotonic() + target.attack_s

    async def send() -> None:
        while time.monotonic() < end_s:
            status = (await exchange(target, raw, port)).status
            came[status] += 1
            if status != "200":
                # Without a pause, refusals would only measure the attacker's own processor time.
                await asyncio.sleep(0.05)

    await asyncio.gather(*(send() for _ in range(num_connections)))
    return came


def named(prefix: str, came: Counter[str]) -> Counter[str]:
    """The same counts under longer names."""
    return Counter({f"{prefix} {name}": count for name, count in came.items()})


# --- answers and texts that cost much ------------------------------------------------------------


async def fill_routes(target: Target) -> Counter[str]:
    """Give many requests one id, for `debug_routes`."""
    body = body_of(prompt="hi", max_tokens=1)
    ask = request("POST", "/v1/completions", body, f"x-request-id: {ONE_ID}")
    return await many(target, [ask] * target.num_routes, 48)


async def debug_routes(target: Target) -> Counter[str]:
    """Query the routes of one id over 40 connections to either listener."""
    look = request("GET", f"/debug/routes/{ONE_ID}")
    public, operations = await asyncio.gather(
        repeat(target, look, 40), repeat(target, look, 40, target.operations_port)
    )
    ports = (target.operations_port, target.port)
    answers = [await exchange(target, look, port) for port in ports]
    largest = max(len(answer.body) for answer in answers)
    return (
        named("public", public)
        + named("operations", operations)
        + Counter({"bytes of an answer": largest})
    )


async def long_texts(target: Target) -> Counter[str]:
    """Texts of digits, of 8 MiB from 10 connections and of 180 kB from 60."""
    whole, lane = b"7" * (8 * MIB - 64), b"7" * 180_000
    texts = [
        ("8 MiB completion", "/v1/completions", b'{"max_tokens":1,"prompt":"%b"}' % whole, 5),
        ("8 MiB tokenize", "/tokenize", b'{"prompt":"%b"}' % whole, 5),
        ("180 kB tokenize", "/tokenize", b'{"prompt":"%b"}' % lane, 60),
    ]

    async def send(name: str, path: str, body: bytes, num_connections: int) -> Counter[str]:
        return named(name, await repeat(target, request("POST", path, body), num_connections))

    return sum(await asyncio.gather(*(send(*text) for text in texts)), Counter())


async def special_tokens(target: Target) -> Counter[str]:
    """Send the longest prompts of tokens without bytes; each client leaves once its own is read."""
    ids = [PAD] * (target.max_model_len - 1)
    raw = request("POST", "/v1/completions", body_of(prompt=ids, max_tokens=1))
    came: Counter[str] = Counter()
    end_s = time.monotonic() + target.attack_s

    async def send() -> None:
        while time.monotonic() < end_s:
            came[(await exchange(target, raw, timeout_s=0.2)).status] += 1

    await asyncio.gather(*(send() for _ in range(4)))
    return came


async def health_storm(target: Target) -> Counter[str]:
    """Request health probes over 1,100 connections, and over all that operations accepts."""
    raw = request("GET", "/health_generate")
    public, operations = await asyncio.gather(
        repeat(target, raw, 1100), repeat(target, raw, 100, target.operations_port)
    )
    return named("public", public) + named("operations", operations)


async def unknown_methods(target: Target) -> Counter[str]:
    """3,000 requests, each with a method of its own."""
    raws = (request(f"M{n:06}{'X' * 40}", "/v1/completions") for n in range(NUM_METHODS))
    return await many(target, raws, 30, 10.0)


# --- connections and bodies that are held --------------------------------------------------------


async def held_bodies(target: Target) -> Counter[str]:
    """105 bodies that stop short of their end, and five that declare more than is accepted."""
    came: Counter[str] = Counter()
    blob = b" " * (8 * MIB)

    async def hold(size: int, declared: int) -> None:
        try:
            async with connected(target, target.port) as (reader, writer):
                writer.write(request("POST", "/v1/completions", length=declared))
                writer.write(memoryview(blob)[:size])
                raw, is_open = await heard(reader, target.attack_s + 2)
                status = "held" if is_open and not raw else parse(raw).status
        except OSError as error:
            status = type(error).__name__
        came[f"{declared} {status}"] += 1

    sizes = [size for size, count in BODIES.items() for _ in range(count)]
    await asyncio.gather(
        *(hold(size - 300, size) for size in sizes),
        *(hold(len(blob), DECLARED) for _ in range(NUM_DECLARED)),
    )
    return came


async def idle_connections(target: Target) -> Counter[str]:
    """2,070 connections that stay open after one answered request."""
    came: Counter[str] = Counter()
    raw = request("GET", "/version").replace(b"Connection: close\r\n", b"")
    opening = asyncio.Semaphore(64)

    async def hold() -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with opening:
                    reader, writer = await stack.enter_async_context(connected(target, target.port))
                    writer.write(raw)
                    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), ANSWER_S)
                came[f"answered {parse(head).status}"] += 1
                await asyncio.wait_for(read_all(reader), max(target.attack_s, IDLE_S))
                came["closed by the server"] += 1
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
            came[type(error).__name__] += 1

    await asyncio.gather(*(hold() for _ in range(NUM_IDLE)))
    return came


async def http2(target: Target) -> Counter[str]:
    """42 connections of cleartext HTTP/2, each with 100 requests whose bodies do not end."""
    came: Counter[str] = Counter()

    async def hold() -> None:
        try:
            async with connected(target, target.port) as (reader, writer):
                writer.write(HTTP2_PREFACE)
                requests = map(http2_request, range(1, 2 * HTTP2_STREAMS, 2))
                writer.write(b"".join(requests))
                raw, _ = await heard(reader, target.attack_s)
                speaks = raw[3:4] == bytes([_SETTINGS])
                came["speaks HTTP/2" if speaks else parse(raw).status] += 1
        except OSError as error:
            came[type(error).__name__] += 1

    await asyncio.gather(*(hold() for _ in range(HTTP2_CONNECTIONS)))
    return came


async def heard(reader: asyncio.StreamReader, listen_s: float) -> tuple[bytes, bool]:
    """Return the server's bytes within a time, and whether the connection is still open."""
    raw = bytearray()

    async def listen() -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(2**16):
                raw.extend(chunk)

    try:
        await asyncio.wait_for(listen(), listen_s)
    except asyncio.TimeoutError:
        return bytes(raw), True
    return bytes(raw), False


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    """A header field without indexing: RFC 7541, 6.2.2."""
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


_DATA, _HEADERS, _SETTINGS, _END_HEADERS = 0, 1, 4, 4
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0)


def http2_request(stream: int) -> bytes:
    """The frames of a POST of 20 kB of which 17 are sent: more than HAProxy buffers."""
    fields = {
        ":method": "POST", ":scheme": "http", ":authority": "localhost", ":path": "/v1/completions",
        "content-type": "application/json", "content-length": "20000",
    }  # fmt: skip
    head = b"".join(_literal(name, value) for name, value in fields.items())
    data = [_frame(_DATA, 0, stream, b" " * size) for size in (16_384, 616)]
    return _frame(_HEADERS, _END_HEADERS, stream, head) + b"".join(data)


# --- leaks to clients, and requests from browsers ------------------------------------------------


async def resume_ids(target: Target) -> Counter[str]:
    """Resume streams at impossible positions."""
    stream = body_of(prompt="hi", max_tokens=8, temperature=0, ignore_eos=True, stream=True)

    def resume(event_id: str) -> bytes:
        return request("POST", "/v1/completions", stream, f"Last-Event-ID: {event_id}")

    first = await exchange(target, resume("0"))
    found = re.search(rb"^id: ([0-9a-f]+-[0-9a-f]+)-", first.body, re.MULTILINE)
    if found is None:
        return Counter({f"no id {first.status}": 1})
    request_id = found[1].decode()
    positions = {
        "wrong checksum of nothing": "0-deadbeef",
        "an end without tokens": "0-00000000.end",
        "beyond max_tokens": "999999999-00000000",
    }
    came: Counter[str] = Counter()
    for name, position in positions.items():
        answer = await exchange(target, resume(f"{request_id}-{position}"))
        came[f"{name} {answer.status}"] += 1
    return came


async def web_pages(target: Target) -> Counter[str]:
    """Requests that any page can make a browser send without asking the server first."""
    body = body_of(prompt="hi", max_tokens=1)
    kinds = {
        "text/plain": ["Content-Type: text/plain", "Origin: https://evil.example"],
        "form": ["Content-Type: application/x-www-form-urlencoded", "Origin: null"],
    }
    came: Counter[str] = Counter()
    for name, headers in kinds.items():
        answer = await exchange(target, request("POST", "/v1/completions", body, *headers))
        came[f"{name} {answer.status}"] += 1
    raw = request("POST", "/v1/completions", body)
    answer = await exchange(target, raw.replace(b"Host: localhost", b"Host: evil.example"))
    came[f"foreign host {answer.status}"] += 1
    return came


async def cache_oracle(target: Target) -> Counter[str]:
    """Guess a token of another client's prompt by signs of prefix cache hits in answers."""
    secret, pins = 137, range(100, 150)

    def ask(pin: int) -> bytes:
        # The guessed token is in the second block of 32.
        ids = [*range(300, 340), pin, *range(400, 460)]
        body = body_of(prompt=ids, max_tokens=1)
        return request("POST", "/v1/completions", body, "x-debug-route: 1")

    await exchange(target, ask(secret))
    told: dict[int, tuple[bytes, ...]] = {}
    for pin in pins:
        answer = await exchange(target, ask(pin))
        told[pin] = tuple(re.findall(rb"cached[-_]tokens\W+(\d+)", answer.head + answer.body))
    others = {told[pin] for pin in pins if pin != secret}
    return Counter(["found" if told[secret] not in others else "hidden"])


ATTACKS: dict[str, Callable[[Target], Coroutine[Any, Any, Counter[str]]]] = {
    attack.__name__: attack
    for attack in (
        fill_routes, debug_routes, long_texts, special_tokens, health_storm, unknown_methods,
        held_bodies, idle_connections, http2, resume_ids, web_pages, cache_oracle,
    )
}  # fmt: skip

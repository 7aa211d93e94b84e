"""Clients of engine processes, and the processes that such a test watches."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from replicas.async_client import AsyncMPClient
from replicas.errors import EngineDeadError
from replicas.messages import AddRequest, EngineRequest, TokenOutput

DEADLINE_S = 240.0
"""Timeout of every awaited event; nothing is measured by it."""

PARENT = """
import sys, msgspec
from replicas.config import EngineConfig
from replicas.launch import start_engine
handle = start_engine(msgspec.json.decode(sys.argv[1], type=EngineConfig))
print(handle.description.pid, flush=True)
handle.wait()
"""


@contextlib.asynccontextmanager
async def connected(handle, **callbacks):
    client = AsyncMPClient(handle.keys, **callbacks)
    try:
        await connect(client, handle)
        yield client
    finally:
        await client.close()


async def connect(client, handle):
    """Connect, as often as it takes: discovery does the same."""
    while handle.description.incarnation not in client.incarnations:
        with contextlib.suppress(EngineDeadError):
            await client.connect(handle.description)


def open_stream(client, handle, request_id, sampling, prompt):
    message = AddRequest(EngineRequest(request_id, prompt, sampling))
    return client.open_stream(handle.description.incarnation, request_id, message)


async def read(stream, into=None):
    """Every token until the end; `into` has those that came although the stream broke."""
    tokens = [] if into is None else into
    while True:
        event = await stream.get()
        if isinstance(event, TokenOutput):
            assert event.index == len(tokens)
            tokens += event.token_ids
            if event.finish_reason is not None:
                stream.close(abort=False)
                return tokens


async def until(predicate, what, deadline_s=20.0):
    """Poll until an asynchronous predicate is true."""
    end_s = time.monotonic() + deadline_s
    while not await predicate():
        assert time.monotonic() < end_s, f"not in {deadline_s} s: {what}"
        await asyncio.sleep(0.02)


async def is_idle(client, handle):
    """Return whether nothing waits, and every slot and block is free."""
    metrics = await client.metrics(handle.description.incarnation)
    return not metrics.num_waiting and all(
        (g.num_empty_slots, g.num_free_blocks) == (g.num_slots, g.num_blocks)
        for g in metrics.groups
    )


@contextlib.contextmanager
def python(code, *arguments):
    """A Python process of the test's own, and its first line; it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def parent_of_engine(config):
    """`python` with a process that starts an engine, and the engine's process id."""
    return python(PARENT, msgspec.json.encode(config).decode())


def status(pid):
    """(state letter, parent) of a process; () if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ()
    return fields[0], int(fields[1])


def wait_for(predicate, what):
    end_s = time.monotonic() + DEADLINE_S
    while not predicate():
        assert time.monotonic() < end_s, f"not in {DEADLINE_S} s: {what}"
        time.sleep(0.02)


def wait_gone(pids):
    wait_for(lambda: all(status(p)[:1] in {(), ("Z",)} for p in pids), f"{pids} have ended")

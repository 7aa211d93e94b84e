"""Two hosts, simulated by network namespaces, and the cable between them."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.kv_transfer.peer_process import NUM_BLOCKS
from tests.kv_transfer.test_peer_processes import CONFIG, SLACK_S, Peer, peer

pytestmark = pytest.mark.process

BLOCKS = tuple(range(1, 9))
NUM_TOKENS = 8 * 32 - 9
ADDRESSES = {"P": "192.0.2.1", "D": "192.0.2.2"}
"""Prefix of a network reserved for examples."""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


@contextmanager
def namespace() -> Iterator[str]:
    """Make a network namespace that lives as long as a process in it; yields that one's id."""
    with subprocess.Popen(
        ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            holder.stdin.write(b"here\n")
            holder.stdin.flush()
            if holder.stdout.readline() != b"here\n":
                pytest.skip("this process may not make network namespaces")
            yield str(holder.pid)
        finally:
            holder.stdin.close()
            holder.wait(10)


class Cable:
    """A pair of virtual interfaces, one in each namespace."""

    def __init__(self, ends: dict[str, str]) -> None:
        self.ends = ends
        one, other = ends
        self.ip(one, "link", "add", one, "type", "veth", "peer", "name", other,
                "netns", ends[other])  # fmt: skip
        for name, address in ADDRESSES.items():
            self.ip(name, "link", "set", "lo", "up")
            self.ip(name, "addr", "add", f"{address}/24", "dev", name)
        self.plug()

    def ip(self, where: str, *args: str) -> None:
        run("nsenter", "-t", self.ends[where], "-n", "ip", *args)

    def plug(self) -> None:
        for name in self.ends:
            self.ip(name, "link", "set", name, "up")

    def pull(self) -> None:
        self.ip("D", "link", "set", "D", "down")


@pytest.fixture
def cable() -> Iterator[Cable]:
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} on this host")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    with ExitStack() as stack:
        ends = {name: stack.enter_context(namespace()) for name in ADDRESSES}
        try:
            made = Cable(ends)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no virtual network here: {error.stderr.decode().strip()}")
        yield made


def start(producer: Peer, consumer: Peer, request_id: str, num_ready: int) -> None:
    producer.tell("offer", request_id, "D", NUM_TOKENS)
    consumer.tell("load", request_id, "P", producer.endpoints, NUM_TOKENS, BLOCKS)
    producer.tell("save", request_id, BLOCKS, num_ready)


def wait_for_end(end: Peer, request_id: str, deadline_s: float) -> str:
    """Return why a transfer failed, or "" when it did not."""
    give_up_s = time.monotonic() + deadline_s
    while True:
        report = end.tell("report")
        if request_id in report["failed"]:
            return report["failed"][request_id]
        if request_id in {*report["sent"], *report["received"]}:
            return ""
        assert time.monotonic() < give_up_s, report
        time.sleep(0.02)


def digest(end: Peer) -> object:
    return end.tell("digest", BLOCKS, NUM_TOKENS)


def test_a_pulled_cable_ends_transfers_on_both_sides_and_a_plugged_one_serves_again(
    cable: Cable,
) -> None:
    """The deadlines of the protocol detect it: the transport's heartbeats are too slow here."""
    with ExitStack() as stack:
        producer, consumer = (
            stack.enter_context(
                peer(
                    name,
                    "shared",
                    CONFIG,
                    f"tcp://{address}:*",
                    ("nsenter", "-t", cable.ends[name], "-n"),
                )
            )
            for name, address in ADDRESSES.items()
        )
        assert max(BLOCKS) < NUM_BLOCKS
        right = digest(producer)
        start(producer, consumer, "before", NUM_TOKENS)
        assert wait_for_end(consumer, "before", 10.0) == ""
        assert digest(consumer) == right
        start(producer, consumer, "cut", 100)
        give_up_s = time.monotonic() + 10.0
        while consumer.tell("written", "cut") != 3:
            assert time.monotonic() < give_up_s
            time.sleep(0.02)
        cable.pull()
        producer.tell("save", "cut", BLOCKS, NUM_TOKENS)
        assert wait_for_end(consumer, "cut", CONFIG.no_progress_s + SLACK_S) == "stalled"
        assert wait_for_end(producer, "cut", CONFIG.lease_s + SLACK_S) == "expired"
        cable.plug()
        # A connection that saw the gap repeats its segments more and more seldom, for a while.
        for attempt in range(20):
            start(producer, consumer, f"again {attempt}", NUM_TOKENS)
            if wait_for_end(consumer, f"again {attempt}", 20.0) == "":
                break
        assert f"again {attempt}" in consumer.tell("report")["received"]
        assert wait_for_end(producer, f"again {attempt}", 20.0) == ""
        assert digest(consumer) == right
        assert consumer.tell("paths") == ["inline"], "memory is not shared between hosts"

"""The benchmark of router's and ingress's latency: its engines' record, its client, its sums."""

import asyncio
import contextlib
import itertools
from types import SimpleNamespace

import pytest

from benchmarks import added_latency, online_vs_peers
from benchmarks.added_latency import STREAMS, Client, Level, added_s, by_client_id, mock, result
from benchmarks.timed_engine import FirstTokens, read_times
from cluster.lifecycle.supervisor import free_port
from replicas.messages import Accepted, EngineFrame, TokenColumns, TokenOutput


def output(request_id):
    return TokenOutput(request_id, 0, [5], None, None, 0)


@pytest.mark.parametrize(
    "first", [output("a"), TokenColumns([7], [5])], ids=["said in full", "as a row"]
)
def test_an_engine_writes_down_what_its_first_tokens_took_and_no_later_ones(tmp_path, first):
    firsts = FirstTokens(tmp_path / "1.times")
    firsts.came("a", 10.0)
    firsts.came("b", 10.5)
    firsts.sent(EngineFrame("e", [Accepted("a", 0, 0, 0, 7), Accepted("b", 0, 1, 0, 8)]), 11.0)
    assert read_times(tmp_path) == {}
    firsts.sent(EngineFrame("e", [first]), 12.0)
    firsts.sent(EngineFrame("e", [TokenColumns([7, 8], [5, 6])]), 13.0)
    assert read_times(tmp_path) == {"a": 2.0, "b": 2.5}


def test_what_engines_took_is_taken_off_each_request_by_the_clients_name_of_it():
    engine_s = by_client_id({"r-1-0123456789abcdef": 0.25, "r-2-0123456789abcdef": 0.5})
    assert added_s({"r-2": 0.75, "r-1": 1.25}, engine_s) == [0.25, 1.0]
    with pytest.raises(KeyError):
        added_s({"r-3": 1.0}, engine_s)


@contextlib.asynccontextmanager
async def answering(answer):
    """A server's port; `answer` gets the writer of each request."""

    replies = []

    async def reply(reader, writer):
        replies.append(asyncio.current_task())
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(
                    int(head.lower().partition(b"content-length: ")[2].split()[0])
                )
                await answer(writer)

    port = free_port()
    async with await asyncio.start_server(reply, added_latency.HOST, port):
        yield port
        await asyncio.gather(*replies)


async def test_the_client_times_first_events_and_not_whole_answers(monkeypatch):
    clock = itertools.count()
    looks = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr(added_latency, "time", looks)
    monkeypatch.setattr(online_vs_peers, "time", looks)

    async def answer(writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n")
        await asyncio.sleep(0.02)
        writer.write(b'data: {"finish_reason":"length"}\n\n\r\n0\r\n\r\n')

    async with answering(answer) as port:
        client = Client(port)
        await client.alone(3)
        result = client.first_s
    assert list(result.values()) == [1, 1, 1]


def test_a_server_that_ends_early_is_no_measurement():
    async def answer(writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: {}")
        writer.close()

    async def run():
        async with answering(answer) as port:
            await Client(port).alone(1)

    with pytest.raises(SystemExit, match="early"):
        asyncio.run(run())


async def test_the_mock_answers_every_level():
    port = free_port()
    serving = asyncio.create_task(mock(port))
    client = Client(port)
    try:
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                await client.at_once(1, 2)
                break
            await asyncio.sleep(0.01)
        await client.alone(2)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    result = client.first_s
    assert len(result) == STREAMS + 2


def test_the_line_says_what_routers_add_and_not_what_lies_behind_them():
    def row(p50):
        return {name: Level(p50, 2 * p50) for name in ("1", "32", "32 at once")}

    rows = {"ours, added": row(1.0), "ours without HAProxy, added": row(0.5)}
    rows["client and mock"] = row(0.25)
    line = result(rows, 900.4, 30.04)
    assert (line["added_32_ms"], line["added_32_p99_ms"]) == (1.0, 2.0)
    assert line["ingress_1_ms"] == 0.5
    assert line["vllm_router_1_ms"] is None
    assert (line["request_cpu_us"], line["token_cpu_us"]) == (900, 30.0)
    line = result({**rows, "vllm-router before it": row(1.0)}, 900.4, 30.0)
    assert line["vllm_router_32_at_once_ms"] == 0.75

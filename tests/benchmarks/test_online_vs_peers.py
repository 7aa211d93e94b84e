"""The online benchmark: its client, its counts, its ratios."""

import argparse
import asyncio
import contextlib
import sys

import pytest

from benchmarks.online_vs_peers import (
    HOST,
    OUTPUT_TOKENS,
    Measured,
    Server,
    level,
    measure,
    ratios,
    serve_at_once,
    servers,
    serving,
)
from cluster.lifecycle.supervisor import free_port


@contextlib.asynccontextmanager
async def at_once():
    port = free_port()
    task = asyncio.create_task(serve_at_once(port))
    try:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(HOST, port)
                writer.close()
                break
            await asyncio.sleep(0.01)
        yield port
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def level_of(reply, num_waves):
    """Measure a level of one stream against a server that answers each connection like this."""
    port = free_port()
    async with await asyncio.start_server(reply, HOST, port):
        await level(port, 1, num_waves)


async def test_every_stream_of_every_wave_is_measured():
    async with at_once() as port:
        found = await measure(port, {1: 2, 8: 2})
    assert list(found) == [1, 8]
    for row in found.values():
        assert 0 < row.ttft_ms <= row.ttft_p99_ms
        assert row.tpot_ms > 0 < row.tokens_per_s


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "early"),
        (b'data: {"usage":{"completion_tokens":3}}\n\n\r\n0\r\n\r\n', "not 64 tokens"),
    ],
)
def test_an_answer_that_is_not_whole_ends_the_benchmark(answer, said):
    async def reply(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    with pytest.raises(SystemExit, match=said):
        asyncio.run(level_of(reply, 1))
    assert OUTPUT_TOKENS == 64


async def test_a_connection_that_was_closed_while_it_waited_is_made_anew():
    asked = []

    async def reply(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
        )
        writer.write(f'data: {{"usage":{{"completion_tokens":{OUTPUT_TOKENS}}}}}\n\n'.encode())
        writer.write(b"\r\n0\r\n\r\n")
        writer.close()

    await level_of(reply, 3)
    assert len(set(asked)) == 3


def test_one_that_breaks_off_within_an_answer_ends_the_benchmark():
    async def reply(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'data: {"text":"a"}\n\n')
        await writer.drain()
        writer.transport.abort()

    with pytest.raises(SystemExit, match="early"):
        asyncio.run(level_of(reply, 2))


def test_a_server_that_ends_by_itself_ends_the_benchmark():
    dead = Server("dead", (sys.executable, "-c", "pass"), {})
    with pytest.raises(SystemExit, match="ended with 0"), serving(dead):
        pass


def test_ratios_are_to_the_better_variant_and_above_one_where_ours_is_better():
    def row(ttft, tpot, rate):
        return {n: Measured(ttft, 2 * ttft, tpot, rate) for n in (1, 8, 32, 128)}

    rows = {"ours": row(4, 1, 100), "vllm tuned": row(8, 3, 50), "vllm installed": row(6, 4, 80)}
    expected = {
        "ttft_1": 1.5, "tpot_1": 3.0, "tps_32": 1.25, "ttft_32": 1.5, "tps_128": 1.25,
        "ray_tps_32": None, "ray_ttft_32": None,
    }  # fmt: skip
    assert ratios(rows) == expected
    rows["ray.serve.llm"] = row(40, 9, 20)
    assert ratios(rows) == {**expected, "ray_tps_32": 5.0, "ray_ttft_32": 10.0}


def test_a_burst_is_no_stream():
    def rows(*vllm):
        return {
            "ours": {n: Measured(4, 8, 1, 100) for n in (1, 32, 128)},
            **{
                f"vllm {i}": {n: Measured(*row, 50) for n in (1, 32, 128)}
                for i, row in enumerate(vllm)
            },
        }

    assert ratios(rows((100, 200, 0.003), (8, 16, 2)))["tpot_1"] == 2.0
    assert ratios(rows((100, 200, 0.0), (120, 300, 0.01)))["tpot_1"] is None


def test_servers_without_a_python_are_left_out():
    asked = argparse.Namespace(
        config=None, peer_python="vllm-python", peer_cores="0-1", peer_preload="", ray_python=None
    )
    assert [server.name for server in servers(asked)] == [
        "client alone", "ours", "vllm tuned", "vllm joined", "vllm installed", "ours again",
    ]  # fmt: skip

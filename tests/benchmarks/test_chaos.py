"""The chaos benchmark: its counts, its faults of processes, and a short run."""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time

import aiohttp.web
import pytest

from benchmarks.breaking.clients import Clients, Tally, make_asks
from benchmarks.breaking.troubles import SERVES_AFTER_S, Trouble, Troublemaker
from benchmarks.chaos import Left, Outcome

KEYS = {
    "requests", "ok", "typed_errors", "wrong", "hung", "leaked_slots", "leaked_blocks",
    "leaked_leases",
}  # fmt: skip
RIGHT = [3, 1, 4]


def event(*token_ids):
    return b"data: %s\n\n" % json.dumps({"choices": [{"token_ids": token_ids}]}).encode()


DONE = b"data: [DONE]\n\n"
LOST = b'data: {"error": {"code": "replica_lost"}}\n\n'


async def endings(replies, *, is_excused=False, deadline_s=0.3):
    """Return how each of these stream bodies ends for a client; None never ends."""
    left = list(replies)

    async def answer(request):
        body = left.pop(0)
        if isinstance(body, int):
            return aiohttp.web.json_response({"error": {"code": "saturated"}}, status=body)
        reply = aiohttp.web.StreamResponse()
        await reply.prepare(request)
        await reply.write(body or event(*RIGHT))
        if body is None:
            await asyncio.sleep(60.0)
        return reply

    app = aiohttp.web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = aiohttp.web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = site._server.sockets[0].getsockname()[:2]
        clients = Clients(
            f"http://{host}:{port}", make_asks("m", 1, random.Random(0)), [RIGHT], deadline_s,
            lambda _began_s, _ended_s: is_excused, random.Random(0),
        )  # fmt: skip
        async with aiohttp.ClientSession() as http:
            return [await clients._judge(http, 0, True, None) for _ in replies]
    finally:
        await runner.cleanup()


def test_only_an_answer_that_is_whole_and_right_is_well():
    told = asyncio.run(
        endings([
            event(3, 1) + event(4) + DONE, event(3, 1) + DONE, event(3, 2, 4) + DONE,
            event(3, 1, 4, 1) + DONE, event(3) + LOST, event(9) + LOST, 429, event(3),
        ])
    )  # fmt: skip
    assert told == [
        "ok", "wrong", "wrong", "wrong", "typed_error", "wrong", "typed_error", "wrong",
    ]  # fmt: skip


def test_a_cut_is_excused_by_an_ingress_in_trouble_alone_and_its_tokens_never():
    assert asyncio.run(endings([event(3), event(9)], is_excused=True)) == ["cut", "wrong"]


def test_a_request_without_an_end_hangs():
    assert asyncio.run(endings([None])) == ["hung"]


def test_a_request_always_has_the_same_answer_and_half_of_them_are_drawn():
    asks = make_asks("m", 20, random.Random(5))
    assert asks == make_asks("m", 20, random.Random(5))
    assert {ask.body["temperature"] for ask in asks} == {0.0, 0.8}
    assert all(ask.body["seed"] is not None for ask in asks)


def test_the_last_line_has_the_promised_keys_and_leaks_are_bad():
    tally = Tally()
    tally.endings["ok"] = 3
    good = Outcome(tally, Left(0, 0, 0, is_whole=True), [Trouble("engine decode 1", "kill", 0, 0)])
    assert set(good.summary()) == KEYS
    assert good.summary()["requests"] == 3
    assert good.is_good
    assert "kill engine decode" in good.report()
    for left in (Left(1, 0, 0, True), Left(0, 1, 0, True), Left(0, 0, 1, True)):
        assert not Outcome(tally, left, []).is_good
    assert not Outcome(tally, Left(0, 0, 0, is_whole=False), []).is_good


def state(process):
    with open(f"/proc/{process.pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.mark.process
def test_troubles_hit_who_serves_and_nobody_stays_stopped():
    sleepers = {
        f"engine decode {i}": subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)
        for i in range(6)
    }
    haproxy = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)

    def processes():
        found = {name: p.pid for name, p in sleepers.items() if p.poll() is None}
        return {**found, "haproxy 1": haproxy.pid}

    async def run():
        maker = Troublemaker(processes, 0.02, random.Random(1), lambda: {"decode"})
        making = asyncio.create_task(maker.run())
        await asyncio.sleep(1.0)  # some fifty troubles
        making.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await making
        return maker.done

    try:
        done = asyncio.run(run())
        assert all(trouble.victim in sleepers for trouble in done)
        assert {trouble.kind for trouble in done} == {"kill", "stop"}
        killed = {trouble.victim for trouble in done if trouble.kind == "kill"}
        for name, process in sleepers.items():
            if name in killed:
                assert process.wait(30) == -9
            else:
                assert state(process) in "SR"
        assert state(haproxy) in "SR"
    finally:
        for process in (*sleepers.values(), haproxy):
            process.kill()
            process.communicate()


def test_a_process_that_has_just_come_is_left_alone():
    maker = Troublemaker(dict, 1.0, random.Random(1), set)
    maker._make({"ingress 1": 2**30}, {"ingress"})
    assert maker.done == []
    maker._seen_s[2**30] = time.monotonic() - SERVES_AFTER_S
    maker._rng.random = lambda: 0.0  # killed, not stopped; there is no such process
    maker._make({"ingress 1": 2**30}, {"decode"})  # the other one does not serve
    assert maker.done == []
    maker._make({"ingress 1": 2**30}, {"ingress"})
    assert [trouble.victim for trouble in maker.done] == ["ingress 1"]
    assert maker.ingress_was_in_trouble(0.0, time.monotonic())
    assert not maker.ingress_was_in_trouble(0.0, time.monotonic() - 60.0)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_wrong_hangs_or_leaks_in_a_short_run():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", "--quick", "--requests", "120"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == KEYS
    assert found["ok"] > 0
    assert found["requests"] == 120

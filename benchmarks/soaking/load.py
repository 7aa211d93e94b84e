"""Requests as users send them: both APIs, streamed and not, short and long, many aborted.

Greedy requests from a fixed list, each sent many times. The same request has the same answer on all
engines and in all batches, except where bfloat16 rounds a near tie differently.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

CLIENTS = 64
REQUESTS_PER_S = 10.0
ABORTED_SHARE = 0.2
_NUM_ASKS = 160
_NUM_SHARED = 8
_ABORT_WITHIN_S = 0.6
_TIMEOUT_S = 120.0
_MAX_NOTES = 5
WORDS = [
    "return", "the", "value", "of", "key", "in", "mapping", "for", "each", "item", "def", "self",
    "list", "dict", "if", "not", "None", "else", "count", "open", "file", "read", "line", "split",
    "join", "sorted", "index", "range", "len", "append", "error", "raise", "class", "name", "path",
]  # fmt: skip


class Ask(msgspec.Struct, frozen=True):
    """One request that is sent again and again.

    Attributes:
        path: Which API.
        body: Its body, but for whether it is streamed.
    """

    path: str
    body: dict[str, Any]


@dataclass
class Tally:
    """Counts of requests.

    Attributes:
        requests: All that began.
        ok: Complete answers.
        changed: Complete answers that differ from the request's first one.
        aborted: Requests that their client aborted.
        errors: All others that have ended.
        notes: Why, of the first few errors.
    """

    requests: int = 0
    ok: int = 0
    changed: int = 0
    aborted: int = 0
    errors: int = 0
    notes: list[str] = field(default_factory=list)

    def fail(self, why: str) -> None:
        """Count an error."""
        self.errors += 1
        if len(self.notes) < _MAX_NOTES:
            self.notes.append(why)


def make_asks(model: str, rng: random.Random) -> list[Ask]:
    """Requests of many lengths; half of them begin like others do."""

    def text(num_words: int) -> str:
        return " ".join(rng.choices(WORDS, k=num_words))

    shared = [text(rng.randint(40, 250)) for _ in range(_NUM_SHARED)]
    asks = []
    for number in range(_NUM_ASKS):
        prompt = text(int(rng.lognormvariate(3.5, 1.0)) % 400 + 3)
        if number % 2:
            prompt = f"{rng.choice(shared)} {prompt}"
        body: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "max_tokens": rng.randint(4, 96),
        }
        if rng.random() < 0.5:
            body["messages"] = [{"role": "user", "content": prompt}]
            asks.append(Ask("/v1/chat/completions", body))
        else:
            asks.append(Ask("/v1/completions", body | {"prompt": prompt, "ignore_eos": True}))
    return asks


class Load:
    """Clients that send requests for a given time; owner of the tally and the answers.

    Args:
        url: The endpoint, without a path.
        model: The served model's name.
        seed: Seed of all random draws.
    """

    def __init__(self, url: str, model: str, seed: int = 0) -> None:
        self._url = url
        self._rng = random.Random(seed)
        self._asks = make_asks(model, self._rng)
        self._answers: dict[int, str] = {}
        self.tally = Tally()

    async def run(self, duration_s: float) -> None:
        """Send for that long; returns when the last request has ended."""
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        ) as session:
            await asyncio.gather(*(self._client(session, duration_s) for _ in range(CLIENTS)))

    async def _client(self, session: aiohttp.ClientSession, duration_s: float) -> None:
        """Begin requests at random times, one after the other."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        due_s = begin_s
        while True:
            due_s += self._rng.expovariate(REQUESTS_PER_S / CLIENTS)
            if due_s >= begin_s + duration_s:
                return
            # Late, after a long request: the next one follows at once, so that the rate stays.
            await asyncio.sleep(max(due_s - loop.time(), 0.0))
            await self._request(session)

    async def _request(self, session: aiohttp.ClientSession) -> None:
        self.tally.requests += 1
        number = self._rng.randrange(len(self._asks))
        is_streamed = self._rng.random() < 0.5
        is_aborted = self._rng.random() < ABORTED_SHARE
        abort_s = self._rng.uniform(0.0, _ABORT_WITHIN_S) if is_aborted else None
        try:
            answer = await asyncio.wait_for(
                self._answer(session, self._asks[number], is_streamed), abort_s
            )
        except (TimeoutError, asyncio.TimeoutError):
            if is_aborted:
                self.tally.aborted += 1
            else:
                self.tally.fail(f"no answer within {_TIMEOUT_S:g} s")
        except (aiohttp.ClientError, ValueError, KeyError) as error:
            self.tally.fail(f"{type(error).__name__}: {error}")
        else:
            self._check(number, answer)

    def _check(self, number: int, answer: str) -> None:
        self.tally.ok += 1
        self.tally.changed += answer != self._answers.setdefault(number, answer)

    async def _answer(self, session: aiohttp.ClientSession, ask: Ask, is_streamed: bool) -> str:
        """The text of an answer.

        Raises:
            aiohttp.ClientError: The connection broke, or the status is no 200.
            ValueError: The body is not an answer, or not a whole one.
        """
        body = ask.body | {"stream": is_streamed}
        async with session.post(self._url + ask.path, json=body) as reply:
            if reply.status != 200:
                raise ValueError(f"status {reply.status}: {(await reply.text())[:200]}")
            if not is_streamed:
                return text_of((await reply.json())["choices"][0])
            return await _streamed(reply)


async def _streamed(reply: aiohttp.ClientResponse) -> str:
    text, is_whole = "", False
    async for line in reply.content:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            is_whole = True
        elif data:
            event = json.loads(data)
            if "error" in event:
                raise ValueError(f"the stream ended with {event['error']}")
            text += "".join(text_of(choice) for choice in event["choices"])
    if not is_whole:
        raise ValueError("the stream ended without [DONE]")
    return text


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice of either API, streamed or not."""
    if "text" in choice:
        return str(choice["text"] or "")
    return str((choice.get("delta") or choice.get("message") or {}).get("content") or "")
